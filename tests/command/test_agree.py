"""`rank-collapse agree`: exit codes, what is printed, the files."""

import csv
import json

import numpy as np
import pytest
from rounded_transformer import Fault, draw_model, run

from rank_collapse.agree.recording import open_recording, record
from rank_collapse.command import main


@pytest.fixture
def recordings(tmp_path, monkeypatch):
    """Writes a.npz, rounded.npz and faulty.npz in the current folder."""
    monkeypatch.chdir(tmp_path)
    model, _ = draw_model(3, causal=True, post_norm=False)
    record(run(model), "a.npz")
    record(run(model, "bfloat16"), "rounded.npz")
    record(run(model, "bfloat16", None, Fault("rotary pairs", 2)), "faulty.npz")
    return tmp_path


def test_runs_that_agree(recordings, capsys):
    assert main(["agree", "a.npz", "rounded.npz"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("agree to bfloat16 rounding") and "agree.html" in printed


def test_runs_that_differ(recordings, capsys):
    assert main(["agree", "a.npz", "faulty.npz", "--out", "b.html"]) == 1
    sentence = capsys.readouterr().out.splitlines()[0]
    assert sentence.startswith("layer 2's attention adds") and "rotary form" in sentence
    about = json.loads((recordings / "b.json").read_text())
    assert about["first"] == {"layer": 2, "part": "attention"} and about["agree"] is False
    html = (recordings / "b.html").read_text()
    assert "rotary form" in html and "data:image/png" in html
    rows = list(csv.DictReader((recordings / "b.csv").read_text().splitlines()))
    assert len(rows) == len(about["sublayers"])
    assert [r["part"] for r in rows[:3]] == ["attention", "mlp", "layer"]
    assert float(rows[6]["added"]) == about["sublayers"][6]["added"]


def test_json_writes_no_file(recordings, capsys):
    assert main(["agree", "a.npz", "faulty.npz", "--json"]) == 1
    about = json.loads(capsys.readouterr().out)
    assert {"agree", "first", "kind"} <= about.keys()
    assert not (recordings / "agree.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.npz", "none.npz"], "none.npz does not exist"),
        (["a.npz", "text.txt"], "neither a recording"),
        (["a.npz", "a.npz", "--out", "x.txt"], "is not an .html file"),
        (["a.npz", "folder", "--dtype=int8"], "--dtype=int8 is not one of float32"),
        (["a.npz", "folder", "--dtype=float32,float32,float32"], "more than two"),
        (["a.npz", "folder", "--attention=fast"], "--attention=fast is not one of"),
        (["a.npz", "folder", "--with=tf"], "--with=tf is not one of torch, jax"),
    ],
)
def test_mistakes_are_one_line(recordings, capsys, words, message):
    (recordings / "text.txt").write_text("x")
    (recordings / "folder").mkdir()
    assert main(["agree", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_nothing_can_be_said_of_states_that_have_nothing_in_common(recordings, capsys):
    """The first layer is at fault; of the others nothing is said."""
    states = np.load("a.npz")["residual"]
    other = np.random.default_rng(0).normal(size=states.shape).astype("float32")
    other[0] = states[0]
    record({"residual": other}, "other.npz")
    assert main(["agree", "a.npz", "other.npz", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first"] == {"layer": 0, "part": "layer"}


@pytest.mark.full
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_checkpoint_takes_in_the_stream_of_the_other_implementation(tmp_path, capsys, backend):
    """torch against JAX of one checkpoint, each way: what each sublayer adds is measured alone."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from rank_collapse.command.recorded import Form, Tokens, record_folder

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 50}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2
    )
    folder, other = tmp_path / "model", tmp_path / "b.safetensors"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    ids = np.array([[5, 8, 13, 21, 34, 7]])
    tokens = Tokens(ids, np.ones(ids.shape, bool))
    form = Form("float32", "eager", "jax" if backend == "torch" else "torch")
    record_folder(folder, other, tokens, form)
    flags = ["--ids", ",".join(map(str, ids[0])), f"--with={backend}", "--json"]
    assert main(["agree", str(folder), str(other), *flags]) == 0
    about = json.loads(capsys.readouterr().out)
    attention = [row for row in about["sublayers"] if row["part"] == "attention"]
    # Without a replay the error that comes in is a part of what is predicted.
    assert all(0 < row["added"] < 1e-5 for row in attention)
    with np.load(to_npz(other, factor=0.99)) as arrays:
        assert arrays["residual"].shape == (4, 1, 6, 32)
    faulty = str(tmp_path / "b.npz")
    assert main(["agree", str(folder), faulty, *flags]) == 1
    about = json.loads(capsys.readouterr().out)
    assert about["first"] == {"layer": 1, "part": "mlp"} and "multiplied by" in about["kind"]


def to_npz(path, factor):
    """Write a recording whose MLP of layer 1 is multiplied, in what it adds and in later states."""
    layers = list(open_recording(path).read_layers())
    branches = {n: np.stack([layer.branches[n] for layer in layers]) for n in layers[0].branches}
    change = (factor - 1) * branches["mlp_branch"][1]
    branches["mlp_branch"][1] += change
    states = np.stack([layers[0].before, *(layer.after for layer in layers)])
    states[2:] += change
    arrays = {name: a.astype("float32") for name, a in branches.items()}
    record({"residual": states.astype("float32"), **arrays}, path.with_suffix(".npz"))
    return path.with_suffix(".npz")
