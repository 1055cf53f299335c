"""Every command on the pages would run: flags parse, files exist, tests are collected."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from experiments import reproduce
from experiments.lab import cli
from rank_collapse.command import COMMANDS, parse_flags
from tests.support.architecture_map import imports
from tests.support.folders import REPOSITORY
from tests.support.processes import python

DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / name for name in ("README.md", "BUILD.md", "CONTRIBUTING.md")]
PAGES += sorted(DOCS.rglob("*.md")) + sorted(DOCS.rglob("*.txt"))
FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
POSITIONAL = {"join": "folders"}  # flags whose values may stand alone
PROGRAMS = ("python", "python3", "pytest", "rank-collapse", *reproduce.EXPERIMENTS)
FOREIGN = {"cache-clear", "cov"}  # flags of pytest
TARGETS = {"target", "site", "no"}  # flags of pip and of trained_weights


def read_code(text):
    """Lists the lines of code of a page: those of its blocks, and what is marked inline."""
    blocks = "".join(FENCED.findall(text))
    lines = re.sub(r"\\\n\s*", "", blocks).splitlines()
    inline = re.findall(r"`([^`]+)`", FENCED.sub("", text))
    return lines + [" ".join(span.split()) for span in inline]


def read_commands(page):
    """Lists the commands of a page as words, without remarks after them."""
    text = page.read_text("utf-8")
    lines = text.splitlines() if page.suffix == ".txt" else read_code(text)
    for line in lines:
        line = re.sub(r"\s\s+(\(|#).*", "", line)
        line = re.sub(r"\$\(\(.*?\)\)|\$\w+", "0", line)  # what a shell computes
        if "…" in line or "..." in line:
            continue
        for command in re.split(r"&&|; (?=python)", line):
            words = command.strip().replace(".venv/bin/", "")
            program, _, arguments = re.sub(r"^(\w+=\S*\s+)*", "", words).partition(" ")
            if program in PROGRAMS and arguments:
                yield tuple(shlex.split(words, comments=True))


COLLECTED = {}


def check_pytest(arguments):
    """Collects the tests of a command, unless it names none, as the usual run and CI do."""
    if any((REPOSITORY / a.partition("::")[0]).exists() for a in arguments):
        if arguments not in COLLECTED:
            process = python("-m", "pytest", "--collect-only", "-n", "0", *arguments)
            COLLECTED[arguments] = process.returncode
        assert COLLECTED[arguments] == 0, f"pytest {shlex.join(arguments)} collects nothing"
    else:
        paths = [a for a in arguments if a.startswith("tests")]
        assert not paths, f"{paths} does not exist"


def check_experiment(name, arguments):
    """Parses the flags of an experiment or of another program of `experiments`."""
    module = importlib.import_module(f"experiments.{name}")
    cli.parse_flags(module.FLAGS, arguments, POSITIONAL.get(name))


def check_command(*words):
    """Refuses a command that its program would refuse before it does anything."""
    variables = {}
    while "=" in words[0]:
        name, _, variables[name] = words[0].partition("=")
        words = words[1:]
    program, *arguments = words
    if program == "rank-collapse":
        check_library_command(arguments)
    elif program == "pytest":
        check_pytest(tuple(arguments))
    elif program in reproduce.EXPERIMENTS:
        check_experiment(program, arguments)
    elif arguments[0] == "-m":
        check_module(*arguments[1:])
    elif arguments[0] != "-c":
        check_script(arguments[0], variables.get("PYTHONPATH", "").split(":"))


def check_library_command(arguments):
    """Parses the flags of `rank-collapse`; the name of a command alone is a mention of it."""
    if len(arguments) < 2:
        assert set(arguments) <= set(COMMANDS), arguments
    else:
        parse_flags(arguments)


def check_script(name, path):
    """Refuses a file that is no program, or that imports from folders that are not on the path."""
    script = REPOSITORY / name
    if not script.exists():  # a page may show the file itself
        assert any(f"# {name}\n" in page.read_text("utf-8") for page in PAGES), name
        return
    assert '__name__ == "__main__"' in script.read_text("utf-8"), f"{script} is no program"
    folders = [REPOSITORY / folder for folder in path if folder]
    for module in imports(name):
        module = module.partition(".")[0]
        is_ours = any(REPOSITORY.glob(f"{module}/*.py"))
        assert not is_ours or REPOSITORY in folders, f"{name} imports {module}: PYTHONPATH"


def check_module(module, *arguments):
    """Refuses `python -m module arguments` likewise."""
    package, _, name = module.partition(".")
    if package == "experiments":
        check_experiment(name, arguments)
    elif package == "rank_collapse":
        check_library_command(arguments)
    elif package == "pytest":
        check_pytest(arguments)
    elif package in ("tests", "tests_docs"):
        check_script(f"{module.replace('.', '/')}.py", ["."])


COMMANDS_OF = {page: list(dict.fromkeys(read_commands(page))) for page in PAGES}


@pytest.mark.parametrize(
    ("page", "command"),
    [(page, command) for page, commands in COMMANDS_OF.items() for command in commands],
    ids=lambda value: value.name if isinstance(value, Path) else shlex.join(value),
)
def test_a_command_of_a_page_runs(page, command):
    check_command(*command)


def test_commands_were_read_from_the_pages():
    count = sum(len(commands) for commands in COMMANDS_OF.values())
    assert count > 100
    line = "FLAG=1 .venv/bin/python -m experiments.run_sort \\\n  --depth=2 && pytest a   (b)\n"
    page = REPOSITORY / "README.md"
    assert ("rank-collapse", "check") in [command[:2] for command in COMMANDS_OF[page]]
    assert read_code(f"```\n{line}```\n`--x`") == [
        "FLAG=1 .venv/bin/python -m experiments.run_sort --depth=2 && pytest a   (b)",
        "--x",
    ]


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("python -m experiments.run_architectures --parts=residuals", Exception),
        ("run_sort --depth=two", Exception),
        ("rank-collapse series a b", ValueError),
        ("rank-collapse watch run --stop", SystemExit),
        ("python tests/measures/test_spikes.py", AssertionError),
        ("python -m tests.measures.absent", AssertionError),
        ("python -m tests.measures.test_residuals", AssertionError),
        ("python absent.py", AssertionError),
        ("pytest tests/theory/absent.py", AssertionError),
    ],
)
def test_a_command_that_would_fail_is_refused(command, error):
    with pytest.raises(error):
        check_command(*shlex.split(command))


def list_flags():
    """Lists the flags of every program of this repository."""
    paths = (REPOSITORY / "experiments").glob("*.py")
    answers = ("experiments", "rank_collapse")  # to who runs a file by its path
    programs = [path.stem for path in paths if path.stem not in answers]
    modules = [importlib.import_module(f"experiments.{name}") for name in programs]
    names = {name for module in modules for name in getattr(module, "FLAGS", ())}
    for path in (REPOSITORY / "rank_collapse" / "command").glob("*.py"):
        names |= set(re.findall(r'"--(\w+)"', path.read_text("utf-8")))
    return names | FOREIGN


def test_every_flag_on_a_page_exists():
    names = list_flags()
    spans = [
        (page.name, span)
        for page in PAGES
        for span in read_code(page.read_text("utf-8"))
        if span.startswith("--")
    ]
    used = [(page, flag) for page, span in spans for flag in re.findall(r"--([\w-]+)", span)]
    assert used and [place for place in used if place[1] not in names] == []


@pytest.mark.parametrize("name", reproduce.EXPERIMENTS)
def test_what_help_expects_is_what_the_page_says(name):
    """Numbers of the sentences of `--help` on what to expect stand on the page too; flags exist."""
    module = importlib.import_module(f"experiments.{name}")
    text = " ".join(module.__doc__.split())
    page = (DOCS / "experiments" / f"{name}.md").read_text("utf-8").replace("−", "-")
    for sentence in re.findall(r"Expect.*?\.(?:\s|$)", text):
        for number in re.findall(r"(?<![\w.])-?\d+\.\d+(?!\w)", sentence):
            assert number in page, f"{name}: {number}"
    for flag in re.findall(r"(?<![\w-])--(\w+)", text):
        flags = module.FLAGS if f"experiments.{name}" in text else reproduce.FLAGS
        assert flag in flags or flag.removeprefix("no") in flags or flag in TARGETS, flag
