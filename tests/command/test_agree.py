"""`rank-collapse agree`: exit codes, what is printed, the files."""

import csv
import html
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from rank_collapse import __version__
from rank_collapse.agree.recording import open_recording, record
from rank_collapse.command import agree, main, parse_flags
from rank_collapse.command.agree import COLUMNS
from rank_collapse.report.agreement import agreement_figure
from tests.oracles.rounded_transformer import Fault, draw_model, run


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
    sentence, written = capsys.readouterr().out.splitlines()
    assert sentence.startswith("agree to bfloat16 rounding")
    assert written == "written to agree.html, agree.csv, agree.json"


def test_runs_that_differ(recordings, capsys):
    assert main(["agree", "a.npz", "faulty.npz", "--out", "b c.html"]) == 1
    sentence = capsys.readouterr().out.splitlines()[0]
    assert sentence.startswith("layer 2's attention adds") and "rotary form" in sentence
    about = json.loads((recordings / "b c.json").read_text())
    assert about["first"] == {"layer": 2, "part": "attention"} and about["agree"] is False
    assert (about["first_source"], about["second_source"]) == ("a.npz", "faulty.npz")
    assert about["first_settings"] == about["second_settings"] == ""
    assert about["command"] == "rank-collapse agree a.npz faulty.npz --out 'b c.html'"
    assert about["rank_collapse"] == __version__ and about["sentence"] == sentence
    page = (recordings / "b c.html").read_text()
    assert f"<pre>{html.escape(about['command'])}</pre>" in page
    assert '<h2 id="agree">Sublayers</h2>' in page
    assert "Relative errors by layer, medians over tokens without spikes." in page
    assert f"rank_collapse {__version__}</p>" in page
    assert "rotary form" in page and "data:image/png" in page
    rows = list(csv.DictReader((recordings / "b c.csv").read_text().splitlines()))
    assert len(rows) == len(about["sublayers"])
    assert [r["part"] for r in rows[:3]] == ["attention", "mlp", "layer"]
    for row, sublayer in zip(rows, about["sublayers"], strict=True):
        assert row.keys() == COLUMNS.keys() and row["part"] == sublayer["part"]
        for name in row.keys() - {"part", "worst_token", "spikes_added"}:
            assert float(row[name]) == sublayer[name]
        assert row["worst_token"] == " ".join(map(str, sublayer["worst_token"]))


@pytest.mark.full
def test_the_picture_of_the_page_marks_the_fault(recordings, monkeypatch, capsys):
    """The layer and the part that the sentence names; nothing if the runs agree."""
    marked = []

    def draw(columns, fault=None):
        marked.append(fault)
        return agreement_figure(columns, fault)

    monkeypatch.setattr(agree, "agreement_figure", draw)
    main(["agree", "a.npz", "faulty.npz"])
    main(["agree", "a.npz", "rounded.npz"])
    assert marked == [(2, "attention"), None]


def test_what_is_said_of_outputs_and_of_other_arrays(recordings, capsys):
    """A remark is a sentence of its own; the outputs follow."""
    arrays = dict(np.load("a.npz"))
    n = arrays["residual"].shape[1]
    arrays["logits"] = np.random.default_rng(0).normal(size=(n, 7)).astype("float32")
    changed = arrays | {"logits": arrays["logits"] * np.float32(1.5)}
    np.savez("c.npz", **arrays, other=np.ones(3))
    np.savez("d.npz", **changed)
    assert main(["agree", "c.npz", "d.npz"]) == 0
    sentence, remark, outputs, _ = capsys.readouterr().out.splitlines()
    assert sentence == "the same numbers in all layers."
    assert remark == "Other arrays of c.npz are not read: other."
    logits = (arrays["logits"].astype(float), changed["logits"].astype(float))
    log_p = [a - np.log(np.exp(a).sum(axis=-1, keepdims=True)) for a in logits]
    tokens = arrays["logits"].argmax(axis=-1)
    change = abs(log_p[1] - log_p[0])[np.arange(n), tokens]
    assert outputs == (
        f"Of the outputs: share of next tokens that differ: 0; mean change of their "
        f"log-probability: {change.mean():.3g}; largest change of their log-probability: "
        f"{change.max():.3g}."
    )
    page = (recordings / "agree.html").read_text()
    assert f"{sentence} {remark} {outputs}</p>" in page


def test_every_remark_is_a_sentence():
    output_errors = {"share": 0.25, "change": 1e-9}
    agreement = SimpleNamespace(remarks=("one is so", "two is 3"), outputs=output_errors)
    assert agree.describe(agreement) == [
        "One is so.", "Two is 3.", "Of the outputs: share: 0.25; change: 1e-09.",
    ]  # fmt: skip
    agreement.outputs = {}
    assert agree.describe(agreement) == ["One is so.", "Two is 3."]


def test_a_page_without_sublayers_has_the_sentence_alone(recordings, capsys):
    """As of states that are off by one layer, of which no sublayer is compared."""
    states = np.load("a.npz")["residual"]
    np.savez("early.npz", residual=states[:-1])
    np.savez("late.npz", residual=states[1:])
    assert main(["agree", "early.npz", "late.npz"]) == 1
    sentence = capsys.readouterr().out.splitlines()[0]
    assert sentence.startswith("the states of late.npz are off by one layer")
    page = (recordings / "agree.html").read_text()
    assert html.escape(sentence, quote=False) in page
    assert "data:image" not in page and "<table" not in page
    assert (recordings / "agree.csv").read_text() == f"{','.join(COLUMNS)}\n"


@pytest.mark.parametrize(
    ("flags", "first", "second"),
    [
        (
            ["--dtype=float32,bfloat16", "--attention=eager,sdpa"],
            "float32, eager",
            "bfloat16, sdpa",
        ),
        (["--with=torch,jax", "--dtype=float32"], "torch", "jax"),
        (["--dtype=bfloat16"], "", ""),
    ],
)
def test_settings_of_two_folders_are_named_where_they_differ(flags, first, second):
    parsed = parse_flags(["agree", "a", "b", *flags])
    assert [agree._name_settings(parsed, i) for i in (0, 1)] == [first, second]


def test_one_value_is_for_both_runs():
    assert agree._split(None, "dtype", agree.DTYPES, "float32") == ["float32", "float32"]
    assert agree._split("float16", "dtype", agree.DTYPES, "float32") == ["float16"] * 2
    split = agree._split("float16,float64", "dtype", agree.DTYPES, "float32")
    assert split == ["float16", "float64"]


def test_json_writes_no_file(recordings, capsys):
    assert main(["agree", "a.npz", "faulty.npz", "--json"]) == 1
    about = json.loads(capsys.readouterr().out)
    assert {"agree", "first", "kind"} <= about.keys()
    assert not (recordings / "agree.html").exists()


def test_without_matplotlib_the_numbers_are_printed_alone(recordings, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["agree", "a.npz", "rounded.npz"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --out agree.html needs matplotlib")
    assert "--json does without" in err and err.count("\n") == 1
    assert not (recordings / "agree.csv").exists()
    assert main(["agree", "a.npz", "rounded.npz", "--json"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.npz", "none.npz"], "none.npz does not exist"),
        (["a.npz", "text.txt"], "neither a recording"),
        (["a.npz", "a.npz", "--out", "x.txt"], "is not an .html file"),
        (["a.npz", "a.npz", "--out", "no/x.html"], "--out no/x.html is not an .html file in"),
        (["a.npz", "a.npz", "--out", "page.html"], "--out page.html is not an .html file in"),
        (["a.npz", "folder", "--dtype=int8"], "--dtype=int8 is not one of float32"),
        (["a.npz", "folder", "--dtype=float32,float32,float32"], "more than two"),
        (["a.npz", "folder", "--attention=fast"], "--attention=fast is not one of"),
        (["a.npz", "a.npz", "--dtype=float32,bfloat16"], "--dtype is for checkpoint folders"),
        (["a.npz", "a.npz", "--with=torch,jax"], "--with is for checkpoint folders"),
        (["a.npz", "a.npz", "--ids=1,2"], "--ids is for checkpoint folders"),
        (["a.npz", "folder", "--with=tf"], "--with=tf is not one of torch, jax"),
    ],
)
def test_mistakes_are_one_line(recordings, capsys, words, message):
    (recordings / "text.txt").write_text("x")
    (recordings / "folder").mkdir()
    (recordings / "page.html").mkdir()
    assert main(["agree", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(("name", "place"), [("a", 0), ("b", 1), ("replay", 1), ("0", 1)])
def test_a_message_about_a_temporary_recording_names_the_folder(name, place):
    message = agree._name_folders(f"/tmp/x/{name}.safetensors: a NaN", "/tmp/x", ["A", "B"], 1)
    assert message == f"{'AB'[place]}: a NaN"


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
    page = tmp_path / "page.html"
    pair = [str(folder), str(folder), *flags[:2], "--with=torch,jax", f"--out={page}"]
    assert main(["agree", *pair]) == 0
    title = f"Do {folder} (torch) and {folder} (jax) agree?"
    assert title in page.read_text("utf-8")


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


def test_the_table_of_the_page_has_the_heads_in_words(recordings, capsys):
    """And the numbers of the JSON file, a row for each sublayer; the command and the sources."""
    assert main(["agree", "a.npz", "rounded.npz", "--out", "b.html"]) == 0
    page = (recordings / "b.html").read_text()
    assert re.findall("<th[^>]*>(.*?)</th>", page) == [
        "layer",
        "part",
        "error that comes in",
        "error that is added",
        "rounding explains",
        "added / explained",
        "the same, 95 % of tokens",
        "the same, worst token",
        "worst token (example, position)",
        "best factor, less 1",
        "spikes",
        "error added to spikes",
    ]
    sublayers = json.loads((recordings / "b.json").read_text())["sublayers"]
    cells = re.findall("<td[^>]*>(.*?)</td>", page)
    table = [cells[start : start + 12] for start in range(0, len(cells), 12)]
    assert [row[:2] for row in table] == [[str(s["layer"]), s["part"]] for s in sublayers]
    for row, sublayer in zip(table, sublayers, strict=True):
        assert float(row[3]) == pytest.approx(sublayer["added"], rel=0.01)
        assert row[8] == " ".join(map(str, sublayer["worst_token"]))
    assert "Do a.npz and rounded.npz agree?" in page
    assert "rank-collapse agree a.npz rounded.npz" in page


@pytest.mark.parametrize("first_is_folder", [True, False])
def test_each_folder_is_recorded_in_its_own_form(first_is_folder, tmp_path, monkeypatch, capsys):
    """A recording beside a folder has no form; its place among both stays."""
    from rank_collapse.command import recorded

    folder, other, file = tmp_path / "one", tmp_path / "two", tmp_path / "file.npz"
    folder.mkdir()
    other.mkdir()
    calls = []
    monkeypatch.setattr(recorded, "read_tokens", lambda flags, source: ("tokens", source))
    monkeypatch.setattr(recorded, "record_folder", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(recorded, "record_replay", lambda *arguments: arguments)
    words = ["agree", "a", "b", "--dtype=bfloat16,float32", "--with=torch,jax"]
    flags = parse_flags(words)
    sources = [folder, file] if first_is_folder else [file, folder]
    paths, replay = agree._record_folders(flags, sources, tmp_path)
    place = 0 if first_is_folder else 1
    form = [("bfloat16", "eager", "torch"), ("float32", "eager", "jax")][place]
    recording = tmp_path / ("a.safetensors" if first_is_folder else "b.safetensors")
    assert calls == [(folder, recording, ("tokens", folder), form)]
    assert paths[place] == recording and paths[1 - place] == file
    forms = [form, None] if first_is_folder else [None, form]
    assert replay == (sources, paths, ("tokens", folder), forms)
    assert capsys.readouterr().err == f"{folder}: {', '.join(form)}\n"
    calls.clear()
    paths, (_, _, tokens, forms) = agree._record_folders(flags, [other, folder], tmp_path)
    assert [call[0] for call in calls] == [other, folder] and tokens == ("tokens", other)
    assert paths == [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    assert forms == [("bfloat16", "eager", "torch"), ("float32", "eager", "jax")]
