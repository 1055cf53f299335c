"""`rank-collapse` as a whole, its JSON, and its commands on several checkpoints."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY
from safetensors.numpy import load_file, save_file

from rank_collapse.command import checkpoint, main, several
from rank_collapse.runs import metrics

GOLDEN = REPOSITORY / "tests" / "golden" / "bert"
IDS = ("--ids=5,8,13,7", "--ids=7,6,1")
RANDOM = np.random.default_rng(0)

NUMBER = {"type": ["number", "null"]}
LAYERS = {"type": "object", "additionalProperties": {"type": "array", "items": NUMBER}}
ABOUT = {
    "source": {"type": "string"},
    "command": {"type": "string"},
    "tokens": {"type": "string"},
    "rank_collapse": {"type": "string"},
    "numbers": {"type": "object", "additionalProperties": {"type": ["number", "null", "string"]}},
}
CHECK = {"type": "object", "properties": ABOUT | {"layers": LAYERS}}
COMPARE = {
    "type": "object",
    "properties": {
        "a": {"type": "object", "properties": ABOUT},
        "b": {"type": "object", "properties": ABOUT},
        "equal_weights": {"type": "boolean"},
        "layers": {"type": "object", "additionalProperties": LAYERS},
    },
}
SERIES = {"type": "object", "properties": {"step": {"type": "integer"}}}
SERIES["additionalProperties"] = {"type": "array", "items": NUMBER}
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
TYPES |= {"number": int | float, "integer": int}


def valid(value, schema):
    """What JSON Schema says of these few words; every property is required."""
    kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    assert any(isinstance(value, TYPES[kind]) for kind in kinds), (value, kinds)
    own, more = schema.get("properties", {}), schema.get("additionalProperties")
    if isinstance(value, dict):
        assert own.keys() == value.keys() if more is None else own.keys() <= value.keys()
        for name, part in value.items():
            valid(part, own.get(name, more))
    for part in value if isinstance(value, list) else ():
        valid(part, schema["items"])


@pytest.fixture
def run(tmp_path):
    """Checkpoints at three steps, of which the first two are equal."""
    for step in (0, 10, 200):
        shutil.copytree(GOLDEN, tmp_path / "run" / f"checkpoint-{step}")
    file = tmp_path / "run" / "checkpoint-200" / "model.safetensors"
    save_file({name: 1.5 * a for name, a in load_file(file).items()}, file)
    return tmp_path / "run"


def printed(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_json_and_csv_of_every_command_agree(run, capsys):
    folders = [str(run / f"checkpoint-{step}") for step in (0, 10, 200)]
    lines = printed(capsys, "check", *folders[::2], *IDS, "--json").splitlines()
    first, last = map(json.loads, lines)
    valid(first, CHECK), valid(last, CHECK)
    assert [first["source"], last["source"]] == folders[::2]
    ratio, entropy = "residual ratio, whole network", "attention entropy, nats"
    depth = len(first["layers"][ratio])
    assert first["layers"][entropy][0] is None and None not in first["layers"][ratio]

    found = json.loads(printed(capsys, "compare", *folders[::2], *IDS, "--json"))
    valid(found, COMPARE)
    assert not found["equal_weights"]
    for name, both in found["layers"].items():
        assert both["a"] == first["layers"][name] and both["b"] == last["layers"][name]
        a, b, difference = (np.array(both[key], float) for key in ("a", "b", "difference"))
        np.testing.assert_allclose(difference, a - b, rtol=1e-4, atol=1e-6)
    rows = printed(capsys, "compare", *folders[::2], *IDS, "--csv").splitlines()
    assert rows[0] == "measure,layer,a,b,difference"
    values = [row.split(",") for row in rows if row.startswith("token cosine,")]
    assert [row[1] for row in values] == [str(layer) for layer in range(depth)]
    own = [float(row[2]) for row in values]
    np.testing.assert_allclose(own, first["layers"]["token cosine"], rtol=1e-6)

    assert main(["series", *folders, *IDS, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "steps 0 and 10 have equal weight files\n"
    steps = [json.loads(line) for line in out.splitlines()]
    for row in steps:
        valid(row, SERIES)
    assert [row.pop("step") for row in steps] == [0, 10, 200]
    assert steps == [first["layers"], first["layers"], last["layers"]]
    (run / metrics.NAME).write_text(out)  # which `watch` reads
    assert metrics.read(run / metrics.NAME)[2]["token cosine"].shape == (depth,)


def test_figures_of_several(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "measured", drawn_anew)
    folders = [str(run / f"checkpoint-{step}") for step in (0, 200)]
    out = printed(capsys, "compare", *folders, *IDS)
    assert out.endswith("where most\nwritten to compare.png and compare.csv\n")
    assert out.startswith("residual ratio, whole network: ") and "at layer" in out
    assert printed(capsys, "series", *folders, *IDS).startswith("2 steps\nwritten to series.png")
    for name in ("compare", "series"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert len((tmp_path / f"{name}.csv").read_text().splitlines()) > 20
    printed(capsys, "check", *folders, *IDS, "--out=two.html")
    page = (tmp_path / "two.html").read_text("utf-8")
    assert page.count("data:image/png;base64,") == 6 and page.count("<table") >= 2
    about = json.loads((tmp_path / "two.json").read_text())
    assert [one["source"] for one in about] == folders
    head, *rows = (tmp_path / "two.csv").read_text().splitlines()
    assert head == "source,network,measure,text,layer_or_length,value"
    assert {row.split(",")[0] for row in rows} == set(folders)
    out = printed(capsys, "compare", folders[0], str(run / "checkpoint-10"), *IDS)
    assert out.startswith("the weight files are equal\n")


def drawn_anew(source, batch):
    """In place of `checkpoint.measured`: numbers of the same shapes."""
    drawn, texts, depth = RANDOM, len(batch.ids), source.config.depth
    names = (*checkpoint.MEASURES, *checkpoint.SPIKES, "spike_token", "spike_feature")
    states = {
        name: {m: drawn.random((texts, depth + 1)) for m in names} for name in checkpoint.NETWORKS
    }
    for own in states.values():
        own["spiked"] = own["residual_spike"] > 0.5
    attention = {name: drawn.random((texts, depth)) for name in checkpoint.OF_ATTENTION}
    return states | {"attention": attention, "sizes": drawn.random((texts, depth + 1))}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["check"], "required: FOLDER_OR_NAME"),
        (["compare", "a"], "required: B"),
        (["watch"], "required: FILE_OR_FOLDER"),
        (["check", "a", "--json", "--csv"], "not allowed with argument --json"),
        (["x", "--num_texts=many"], "invalid int value: 'many'"),
    ],
)
def test_mistakes_in_flags_are_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["series", "run/final", "--json"], "run/final has no step in its name, such as step1000"),
        (["series", "a/step5", "b/checkpoint-5"], "a/step5 and b/checkpoint-5 are both of step 5"),
        (["series", "no/step5"], "no/step5"),
        (["compare", str(GOLDEN), "no/such"], "no/such"),
        (["compare", str(GOLDEN), str(GOLDEN.parent / "gpt2-head")], "[2, 3] layers: layers are"),
        (["check", "hf:no/such@main", "--json"], "hf download no/such --revision main"),
    ],
)
def test_what_cannot_be_read_is_one_line(arguments, said, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True, raising=False)
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err


def test_a_model_of_the_hub(run, capsys, monkeypatch):
    asked = []

    def snapshot(name, revision, allow_patterns):
        asked.append((name, revision))
        return str(run / f"checkpoint-{revision.removeprefix('step')}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr(checkpoint, "measured", drawn_anew)
    names = ("hf:who/what@step0", "hf:who/what@step200")
    found = printed(capsys, "series", *names, *IDS, "--json").splitlines()
    assert [json.loads(line)["step"] for line in found] == [0, 200]
    assert asked == [("who/what", "step0"), ("who/what", "step200")]


def test_steps_and_equal_weights(run, tmp_path):
    names = ["hf:EleutherAI/pythia-70m@step1000", "a/checkpoint-20", "b/step5-seed"]
    assert list(several.steps_of(names)) == [5, 20, 1000]
    first, second, last = (run / f"checkpoint-{step}" for step in (0, 10, 200))
    assert several.same_weights(first, second) and not several.same_weights(first, last)
    assert not several.same_weights(first, None) and not several.same_weights(tmp_path, tmp_path)
    os.rename(second / "model.safetensors", second / "model-00001-of-00001.safetensors")
    assert not several.same_weights(first, second)


def test_a_reader_that_leaves_ends_it_silently(tmp_path):
    for seed in range(2000):  # more lines of alarms than a pipe holds
        metrics.append(tmp_path / metrics.NAME, 1, {"residual_ratio": 1e-6}, seed=seed)
    command = [sys.executable, "-m", "rank_collapse", "watch", str(tmp_path), "--once"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=REPOSITORY, **pipes) as process:
        assert process.stdout.read(10) == b"step 1: re"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
