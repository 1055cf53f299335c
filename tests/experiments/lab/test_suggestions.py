"""A flag in another notation, and a script run by its path, are answered with what to type."""

import importlib.util
import signal
import subprocess
import sys

import pytest

from experiments.lab import cli, list_points
from experiments.lab.shared_flags import VOCABULARY
from experiments.lab.suggestions import SYNONYMS, list_values
from tests.support.folders import REPOSITORY

FLAGS = cli.make_flags("example", num_seeds=4, shows="value")
FLAGS.define("integer", "depth", 3, "Layers.", lower_bound=1)
FLAGS.define("float", "skip_gain", 1.0, "Gain.")


@pytest.mark.parametrize(
    ("arguments", "ending"),
    [
        (["--depth=2..4"], "several values are written with commas: --depth=2,3,4"),
        (["--depth", "2-4"], "--depth=2,3,4"),
        (["--depth=[2,3]"], "--depth=2,3"),
        (["--depth=[2..4]"], "--depth=2,3,4"),
        (["--depth=[2]"], "--depth=2"),
        (["--depth=2,[3"], "--depth=2,3"),
        (["--depth={2;3}"], "--depth=2,3"),
        (["--skip_gain=(0, .5)"], "--skip_gain=0,.5"),
        (["--skip_gain=[0.5 1e-3]"], "--skip_gain=0.5,1e-3"),
        (["--depth=1..1000"], "--depth=1,…,1000"),
        (["--depth=1..12"], "--depth=1,2,3,4,5,6,7,8,9,10,11,12"),
        (["--depth=1..13"], "--depth=1,…,13"),
        (["--depth=5..2"], "--depth=5,…,2"),
        (["--depth=2:4"], "--depth=2,3,4"),
        (["--depth=2 to 4"], "--depth=2,3,4"),
        (["--depth=2–4"], "--depth=2,3,4"),
        (["--skip_gain=[0.5..1]"], "--skip_gain=0.5,1"),
        (["--depth=two"], "'two'"),
        (["--num_seeds=1..3"], "'1..3'"),  # which is no axis
        (["--layers=2"], "here it is --depth"),
        (["--lr=1"], "elsewhere it is --learning_rate, which this command does not have"),
        (["--nonsense"], "--help lists the flags"),
        (["--dept=2"], "Did you mean: depth ?"),
    ],
)
def test_a_flag_in_another_notation_is_answered_with_ours(arguments, ending, capsys):
    assert cli.execute(list_points, FLAGS, arguments) == 2
    err = capsys.readouterr().err
    assert err.endswith(f"{ending}\n") or (ending in err and "commas" not in err)
    assert err.count("\n") == 1 and err.startswith("error: ")


def test_the_last_value_of_an_axis_too(capsys):
    assert cli.execute(list_points, FLAGS, ["--depth=2,3..5"]) == 2
    assert "'3..5'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["2", "2,3", "", "a..b", "[]", "two", "2..", "-3"])
def test_what_is_no_list_of_another_notation_has_no_suggestion(text):
    assert list_values(text) in ("", text)


def test_synonyms_lead_to_flags_that_there_are():
    others = {"models", "checkpoints"}  # of run_architectures
    assert set(SYNONYMS.values()) <= {*VOCABULARY, *others}
    assert not {*SYNONYMS} & {*VOCABULARY}


@pytest.mark.parametrize("script", ["run_sort.py", "run_architectures.py", "join.py"])
def test_a_script_that_is_run_by_its_path_is_answered_with_the_command(script):
    """Within the folder, and from outside; the path of the library is not set."""
    for folder, path in (
        (REPOSITORY / "experiments", script),
        (REPOSITORY, f"experiments/{script}"),
    ):
        command = [sys.executable, path, "--depth=2", "--run_name=a\nb"]
        process = subprocess.run(command, cwd=folder, env={}, capture_output=True, text=True)
        assert process.returncode == 2 and process.stdout == ""
        module = f"experiments.{script.removesuffix('.py')}"
        expected = (
            f"in the folder {REPOSITORY} type: python -m {module} --depth=2 '--run_name=a\\nb'\n"
        )
        assert process.stderr.endswith(expected) and process.stderr.count("\n") == 1


def import_anew():
    """Runs the code of the package `experiments` once more."""
    path = REPOSITORY / "experiments" / "__init__.py"
    exec(compile(path.read_text("utf-8"), str(path), "exec"), {})


@pytest.mark.parametrize("absent", [(), ("flax",), ("absl", "tqdm")])
def test_a_command_names_the_packages_that_it_lacks(absent, monkeypatch, capsys):
    """Before anything is imported; as a library the package says nothing."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else find(name)
    )
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    import_anew()
    monkeypatch.setattr(sys, "argv", ["-m"])
    if absent:
        with pytest.raises(SystemExit) as ended:
            import_anew()
        assert ended.value.code == 2
    else:
        import_anew()
    message = "error: the experiments need `pip install -r requirements.txt`; not installed: "
    assert capsys.readouterr().err == (f"{message}{', '.join(absent)}\n" if absent else "")


@pytest.mark.parametrize("is_usual", [True, False])
def test_a_signal_during_imports_ends_a_command_as_nohup_or_the_caller_has_it(
    is_usual, monkeypatch
):
    """Python's handler gives way to the system's; one that ignores signals stays."""
    handler, changed = signal.default_int_handler if is_usual else signal.SIG_IGN, []
    monkeypatch.setattr(signal, "getsignal", lambda number: handler)
    monkeypatch.setattr(signal, "signal", lambda *arguments: changed.append(arguments))
    import_anew()
    assert changed == []
    monkeypatch.setattr(sys, "argv", ["-m"])
    import_anew()
    assert changed == ([(signal.SIGINT, signal.SIG_DFL)] if is_usual else [])
