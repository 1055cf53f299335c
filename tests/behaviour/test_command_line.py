"""The JSON of `rank-collapse`, its mistakes, several checkpoints, and the command on depth."""

import importlib
import json
import os
import shutil
import sys

import pytest
from safetensors.numpy import load_file, save_file

from rank_collapse.command import COMMANDS, checkpoint, main, parse_flags
from rank_collapse.runs import metrics
from tests.support.commands import run_command
from tests.support.folders import REPOSITORY
from tests.support.refusals import is_refused

GOLDEN = REPOSITORY / "tests" / "golden" / "bert"
IDS = ("--ids=5,8,13,7", "--ids=7,6,1")

NUMBER = {"type": ["number", "null"]}
LAYERS = {"type": "object", "additionalProperties": {"type": "array", "items": NUMBER}}
ROWS = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
ABOUT = {
    "source": {"type": "string"},
    "weights": {"type": "string"},
    "command": {"type": "string"},
    "tokens": {"type": "string"},
    "rank_collapse": {"type": "string"},
    "inputs": {"type": "string"},
    "numbers": {"type": "object", "additionalProperties": NUMBER},
    "upper_bounds": {"type": "array", "items": {"type": "string"}},
    "one_token": {"type": "object", "additionalProperties": {"type": "string"}},
    "path_lengths": {"type": "array", "items": ROWS},
    "spikes": {"type": "array", "items": ROWS},
}
CHECK = {"type": "object", "properties": ABOUT | {"verdict": ABOUT["source"], "layers": LAYERS}}
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
TYPES |= {"number": int | float, "integer": int}


def check_schema(value, schema):
    """Checks a value by the few words of JSON Schema used here; every property is required."""
    kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    assert any(isinstance(value, TYPES[kind]) for kind in kinds), (value, kinds)
    properties, additional = schema.get("properties", {}), schema.get("additionalProperties")
    if isinstance(value, dict):
        assert (
            properties.keys() == value.keys()
            if additional is None
            else properties.keys() <= value.keys()
        )
        for name, part in value.items():
            check_schema(part, properties.get(name, additional))
    for part in value if isinstance(value, list) else ():
        check_schema(part, schema["items"])


@pytest.fixture
def run(tmp_path):
    """Makes checkpoints at three steps; the first two are equal."""
    for step in (0, 10, 200):
        shutil.copytree(GOLDEN, tmp_path / "run" / f"checkpoint-{step}")
    file = tmp_path / "run" / "checkpoint-200" / "model.safetensors"
    save_file({name: 1.5 * a for name, a in load_file(file).items()}, file)
    return tmp_path / "run"


def test_json_and_csv_of_every_command_agree(run, capsys):
    folders = [str(run / f"checkpoint-{step}") for step in (0, 10, 200)]
    lines = run_command(capsys, "check", *folders[::2], *IDS, "--json").splitlines()
    first, last = map(json.loads, lines)
    check_schema(first, CHECK), check_schema(last, CHECK)
    assert first["one_token"] == last["one_token"] == {}
    assert [first["source"], last["source"]] == folders[::2]
    ratio, entropy = "residual ratio, full model", "attention entropy, nats"
    assert first["layers"][entropy][0] is None and None not in first["layers"][ratio]

    rows = run_command(capsys, "check", *folders[::2], *IDS, "--csv").splitlines()
    assert rows[0] == "source,weights,network,measure,text,layer_or_length,value"
    assert {row.split(",")[0] for row in rows[1:]} == set(folders[::2])


@pytest.mark.full
def test_files_of_several(run, tmp_path, capsys, monkeypatch):
    """One page of two checkpoints; one measurement for both."""
    monkeypatch.chdir(tmp_path)
    measured = {}

    def once(one, inputs):
        if not measured:
            measured[0] = original(one, inputs)
        return measured[0]._replace(opened=one)

    original = checkpoint.measure_checkpoint
    monkeypatch.setattr(checkpoint, "measure_checkpoint", once)
    folders = [str(run / f"checkpoint-{step}") for step in (0, 10, 200)]
    run_command(capsys, "check", *folders[::2], *IDS, "--out=two.html")
    page = (tmp_path / "two.html").read_text("utf-8")
    assert page.count("data:image/png;base64,") == 6 and page.count("<table") >= 2
    about = json.loads((tmp_path / "two.json").read_text())
    assert [one["source"] for one in about] == folders[::2]
    head, *rows = (tmp_path / "two.csv").read_text().splitlines()
    assert head == "source,weights,network,measure,text,layer_or_length,value"
    assert {row.split(",")[0] for row in rows} == set(folders[::2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check"], "required: FOLDER_OR_NAME"),
        (["watch"], "required: FILE_OR_FOLDER"),
        (["check", "a", "--json", "--csv"], "not allowed with argument --json"),
        ([str(GOLDEN), "--num_texts=many"], "invalid int value: 'many'"),
    ],
)
def test_mistakes_in_flags_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    name = arguments[0] if arguments[0] in COMMANDS else "check"
    assert err.endswith(f"; rank-collapse {name} --help says more\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", str(GOLDEN), "no/such"], "no/such"),
        (["check", str(GOLDEN), "--out=x.svg"], "x.svg"),
        (["check", "hf:no/such@main", "--json"], "hf download no/such --revision main"),
    ],
)
def test_what_cannot_be_read_is_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True, raising=False)
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_a_model_of_the_hub(run, capsys, monkeypatch):
    requests = []

    def snapshot(name, revision, allow_patterns):
        requests.append((name, revision))
        return str(run / f"checkpoint-{revision.removeprefix('step')}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    names = ("hf:who/what@step0", "hf:who/what@step200")
    lines = run_command(capsys, "check", *names, *IDS, "--json").splitlines()
    assert [json.loads(line)["source"] for line in lines] == [*names]
    assert requests == [("who/what", "step0"), ("who/what", "step200")]


def test_a_reader_that_leaves_ends_it_silently(tmp_path, monkeypatch, capsys):
    metrics.append(tmp_path / metrics.NAME, 1, {"residual_ratio": 1e-6})
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert main(["watch", str(tmp_path)]) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_help_lists_the_commands_and_what_they_do(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    words = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and words.startswith("usage: rank-collapse ")
    for name, text in COMMANDS.items():
        assert f" {name} {text}" in words


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_its_examples_line_by_line(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    printed, module = (
        capsys.readouterr().out,
        importlib.import_module(f"rank_collapse.command.{name}"),
    )
    assert end.value.code == 0 and printed.startswith(f"usage: rank-collapse {name} ")
    assert module.__doc__.strip() in printed and f"\n    rank-collapse {name} " in printed


def test_a_folder_needs_no_command_and_may_have_the_name_of_a_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    flags = parse_flags(["model", "--json"])
    assert (flags.command, flags.sources, flags.json) == ("check", ["model"], True)
    is_refused(r"^modell is neither a command \(check, depth", parse_flags, ["modell"])
