"""`rank-collapse check`: a page about checkpoints, in the library alone."""

import csv
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY
from marks import slow_but

import rank_collapse as rc
from rank_collapse.command import checkpoint, main, parsed
from rank_collapse.command.checkpoint import READ, WHOLE, batch_of, measured, opened

GOLDEN = REPOSITORY / "tests" / "golden" / "bert"


@pytest.fixture
def folder(tmp_path, request):
    """A checkpoint, BERT's if no other is asked for, with a tokenizer whose words are letters."""
    made = tmp_path / "a <b>"
    shutil.copytree(GOLDEN.parent / getattr(request, "param", "bert"), made)
    known = json.loads((made / "config.json").read_text())["vocab_size"]
    letters = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    (made / "vocab.txt").write_text("\n".join(letters[:known]))
    return made


def of_folders(kept):
    return pytest.mark.parametrize(
        "folder", slow_but(["bert", "llama-grouped"], kept), indirect=True
    )


@of_folders("bert")
def test_one_page_about_one_checkpoint(folder, tmp_path, capsys):
    out, text = tmp_path / "page.html", tmp_path / "text.txt"
    text.write_text("a b c d e f\n\nb a a c\n")
    assert main([str(folder), "--text", str(text), "--max_tokens", "8", "--out", str(out)]) == 0
    written = [out, out.with_suffix(".csv"), out.with_suffix(".json")]
    said = f"Texts by {folder}.\nwritten to {written[0]}, {written[1]} and {written[2]}\n"
    assert capsys.readouterr().out == said
    page = out.read_text("utf-8")
    assert page.count("data:image/png;base64,") == 3 and "a &lt;b&gt;" in page
    assert "<b>" not in page
    assert "before the final norm</td>" in page and "after the final norm</td>" in page
    assert "http" not in page and "<script" not in page
    # Nothing is published of this model, and what it is compared with has one name.
    said = re.sub('base64,[^"]*', "", page)
    assert not re.search("Against the paper|published|SAN", said) and "attention alone" in said
    rows = list(csv.DictReader(written[1].read_text().splitlines()))
    depth = max(int(row["layer_or_length"]) for row in rows)
    of = {"network": "attention alone", "measure": "residual_ratio", "layer_or_length": str(depth)}
    ratios = [float(row["value"]) for row in rows if of.items() <= row.items()]
    numbers = json.loads(written[2].read_text())["numbers"]
    assert len(ratios) == 2 and numbers["layers, heads, width"].startswith(f"{depth}, ")
    assert numbers["residual ratio of attention alone, before the final norm"] == pytest.approx(
        np.mean(ratios), rel=1e-5
    )


@of_folders("llama-grouped")
def test_its_numbers_are_those_of_the_network(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f")
    source, batch = tokens_of(folder, "--text", str(text), "--max_tokens", "8")
    found = measured(source, batch)
    config, params = rc.pretrained.load(folder)
    trace = rc.apply(params, batch.ids[0], config)
    expected = rc.profile(trace.hidden)["residual_ratio"]
    np.testing.assert_allclose(found[WHOLE]["residual_ratio"][0], expected, rtol=1e-4)
    after = found[READ]["residual_ratio"][0, -1]
    np.testing.assert_allclose(after, rc.residual_ratio(trace.output), rtol=1e-4)
    p = np.asarray(trace.attention, np.float64)  # [l, h, n, n]
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1).mean(axis=(1, 2))
    np.testing.assert_allclose(found["attention"]["entropy"][0], entropy, rtol=1e-5)
    sinks = p[..., 0].mean(axis=(1, 2))
    np.testing.assert_allclose(found["attention"]["first_column"][0], sinks, rtol=1e-5)
    by_length = rc.path_contributions(params, batch.ids[0], config).by_length
    sizes = [rc.composite_norm(c) for c in by_length]
    np.testing.assert_allclose(found["sizes"][0], sizes, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("factor", [1, 1000])
def test_a_token_that_holds_the_residual_is_named(tmp_path, factor):
    """The page, the table and the headline numbers say so; where none does they say nothing."""
    transformers, torch = (pytest.importorskip(name) for name in ("transformers", "torch"))
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    with torch.no_grad():
        model.transformer.wte.weight[7] *= factor
    model.save_pretrained(tmp_path / "gpt2")
    out = tmp_path / "page.html"
    texts = ("--ids=5,8,13,7,21,34,55,2", "--ids=3,1,4,9,15,16,7,25", "--ids=3,1,4,9,15,16,25,8")
    assert main([str(tmp_path / "gpt2"), *texts, "--out", str(out)]) == 0
    numbers = json.loads(out.with_suffix(".json").read_text())["numbers"]
    said = {k: v for k, v in numbers.items() if "one token" in k}
    row = "Layers whose residual ratio is of one token, whole network"
    where = "0, 1, 2; largest entry at position 3, 6, in 2 of 3 texts"
    spiked = factor > 1
    assert said == ({row: where} if spiked else {})
    assert (f"{row}: {where}." in out.read_text("utf-8")) == spiked
    rows = list(csv.DictReader(out.with_suffix(".csv").read_text().splitlines()))
    flags = [r for r in rows if r["measure"] == "spiked" and float(r["value"])]
    named = {(r["network"], r["text"]) for r in flags if r["network"] != "attention alone"}
    assert named == ({(WHOLE, "0"), (WHOLE, "1")} if spiked else set())
    columns = re.findall("<th>([^<]*)</th>", out.read_text("utf-8"))
    assert {f"residual ratio, {WHOLE}", f"residual ratio, {READ}", "spike norm"} <= set(columns)


def tokens_of(folder, *arguments):
    given = parsed([str(folder), *arguments])
    source, place = opened(given.sources[0])
    return source, batch_of(given, source, place)[0]


def test_a_folder_without_tokenizer_files_is_measured_all_the_same(folder, tmp_path, capsys):
    """As `save_pretrained` writes it: given ids, another folder's tokenizer, or random ids."""
    given = tokens_of(GOLDEN, "--ids=5,8,13", "--ids", "7 6")[1]
    assert given.ids.tolist() == [[5, 8, 13], [7, 6, 0]] and given.lengths.tolist() == [3, 2]
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f")
    more = ("--text", str(text), "--max_tokens", "8")
    own = tokens_of(folder, *more)[1]
    others = tokens_of(GOLDEN, *more, "--tokenizer", str(folder))[1]
    np.testing.assert_array_equal(own.ids, others.ids)
    out = tmp_path / "page.html"
    assert main([str(GOLDEN), "--max_tokens=5", "--num_texts=3", "--out", str(out)]) == 0
    said = f"Random token ids, since {GOLDEN} has none of tokenizer.json, vocab.json with merges"
    assert said in out.read_text("utf-8") and capsys.readouterr().out.startswith(said)
    source, batch = tokens_of(GOLDEN, "--max_tokens=500", "--num_texts=100")
    known = source.config.embedding
    assert batch.ids.shape == (100, known.num_positions) and batch.ids.max() < known.vocab_size
    assert len(np.unique(batch.ids)) > 0.9 * known.vocab_size


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no/such/folder"], "no/such/folder"),
        ([str(GOLDEN.parent / "vit-wide")], "no model of texts"),
        ([str(GOLDEN), "--text", __file__], "bert has none of tokenizer.json, vocab.json with"),
        ([str(GOLDEN), "--tokenizer=no/such"], "no/such has none of tokenizer.json"),
        ([str(GOLDEN), "--ids=5,x"], "--ids does not hold token ids"),
        ([str(GOLDEN), "--ids=5,100000"], "token id 100000 of text 0"),
        ([str(GOLDEN), "--ids=5"], "text 0 has fewer than 2 tokens"),
        ([str(GOLDEN), "--ids=5,6", "--text=x"], "--ids excludes --text"),
        (["bert-base-cased", "--text", "no.txt"], "no.txt"),
        (["bert-base-cased", "--num_texts", "-1"], "--num_texts -1"),
        (["bert-base-cased", "--out", "no/folder/page.html"], "no/folder/page.html"),
        (["bert-base-cased", "--out", "."], "--out ."),
    ],
)
def test_what_cannot_be_read_is_one_line_and_exit_code_2(arguments, said, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1 and said in printed


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupted(given):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "opened", interrupted)
    assert main(["bert-base-cased"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([str(GOLDEN)]) == 2
    assert capsys.readouterr().err == (
        "error: the page needs matplotlib, which is not installed: pip install matplotlib scipy "
        "pillow (the extra 'report'); --json and --csv do without\n"
    )


@pytest.mark.parametrize("module", ["rank_collapse", "experiments.run_sort"])
def test_an_environment_that_stops_what_is_imported_is_one_line(module):
    """A backend that matplotlib has not, and less memory than JAX starts in."""
    more = str(GOLDEN) if module == "rank_collapse" else "--help"
    command = f"MPLBACKEND=nonsense {sys.executable} -m {module} {more}"
    assert one_line_of(command).startswith("error: MPLBACKEND: ")
    more = "bert-base-cased --out=x.html" if module == "rank_collapse" else "--output_dir=x"
    command = f"ulimit -v 1000000; exec {sys.executable} -m {module} {more}"
    assert one_line_of(command).startswith("error: ulimit -v is 1000000: JAX needs ")


def one_line_of(command):
    done = subprocess.run(command, shell=True, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr
