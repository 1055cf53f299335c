"""`rank-collapse check`: a page about checkpoints, from the library without experiments."""

import csv
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rank_collapse as rc
from rank_collapse.command import check, checked, inputs, main, parse_flags
from rank_collapse.command.checked import WHOLE
from rank_collapse.command.checkpoint import measure_checkpoint, to_json
from rank_collapse.command.inputs import open_source, read_inputs
from tests.oracles.made_up_checks import make_check
from tests.support.folders import REPOSITORY
from tests.support.marks import full_but

GOLDEN = REPOSITORY / "tests" / "golden" / "bert"


@pytest.fixture
def folder(tmp_path, request):
    """Makes a checkpoint, by default BERT's, with a tokenizer whose words are letters."""
    path = tmp_path / "a <b>"
    shutil.copytree(GOLDEN.parent / getattr(request, "param", "bert"), path)
    vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
    letters = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    (path / "vocab.txt").write_text("\n".join(letters[:vocab_size]))
    return path


def parametrize_folder(quick):
    return pytest.mark.parametrize(
        "folder", full_but(["bert", "llama-grouped"], quick), indirect=True
    )


@pytest.mark.full
@parametrize_folder("bert")
def test_one_page_about_one_checkpoint(folder, tmp_path, capsys):
    out, text = tmp_path / "page.html", tmp_path / "text.txt"
    text.write_text("a b c d e f\n\nb a a c\n")
    assert main([str(folder), "--text", str(text), "--max_tokens", "8", "--out", str(out)]) == 0
    written = [out, out.with_suffix(".csv"), out.with_suffix(".json")]
    numbers = json.loads(written[2].read_text())
    verdict, *_, end = capsys.readouterr().out.splitlines()
    assert verdict == f"{folder}: {numbers['verdict']}"
    assert end == f"written to {out}, {out.with_suffix('.json')} and {out.with_suffix('.csv')}"
    page = out.read_text("utf-8")
    assert numbers["verdict"] in page.replace("&#x27;", "'")
    assert page.count("data:image/png;base64,") == 3 and "a &lt;b&gt;" in page
    assert "<b>" not in page
    assert "http" not in page and "<script" not in page
    rows = list(csv.DictReader(written[1].read_text().splitlines()))
    depth = max(int(row["layer_or_length"]) for row in rows)
    criteria = {
        "network": "attention alone",
        "measure": "residual_ratio",
        "layer_or_length": str(depth),
    }
    ratios = [float(row["value"]) for row in rows if criteria.items() <= row.items()]
    numbers = numbers["numbers"]
    assert len(ratios) == 2 and numbers["layers"] == depth
    last = numbers[checked.LAST_ALONE]
    assert last == pytest.approx(np.mean(ratios), rel=1e-5)
    assert "attention entropy, nats, mean" in numbers
    assert "with equal weights on all tokens, 0 with one token" in page


@pytest.mark.full
@parametrize_folder("llama-grouped")
def test_its_numbers_are_those_of_the_network(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f")
    tokens = read_tokens(folder, "--text", str(text), "--max_tokens", "8")
    measured = measure_checkpoint(open_source(str(folder)), tokens)
    report = measured.report
    config, params = rc.pretrained.load(folder)
    trace = rc.apply(params, tokens.x[0], config)
    expected = rc.profile(trace.hidden)["residual_ratio"]
    np.testing.assert_allclose(report.states["Transformer"]["residual_ratio"][0], expected, 1e-4)
    curve = check.residual_figure(measured).axes[0].get_lines()[0]
    np.testing.assert_allclose(curve.get_ydata(), expected, 1e-4)
    np.testing.assert_array_equal(curve.get_xdata(), np.arange(config.depth + 1))
    after = report.read["residual_ratio"][0, -1]
    np.testing.assert_allclose(after, rc.residual_ratio(trace.output), rtol=1e-4)
    p = np.asarray(trace.attention, np.float64)  # [l, h, n, n]
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1).mean(axis=(1, 2))
    np.testing.assert_allclose(measured.mean_attention("entropy")[0], entropy, rtol=1e-5)
    sinks = p[..., 0].mean(axis=(1, 2))
    np.testing.assert_allclose(measured.mean_attention("first_column")[0], sinks, rtol=1e-5)
    by_length = rc.path_contributions(params, tokens.x[0], config).by_length
    sizes = [rc.composite_norm(c) for c in by_length]
    np.testing.assert_allclose(report.path_size[0], sizes, rtol=1e-3, atol=1e-5)
    san = rc.surgery.ablate(config, params, "SAN")
    san_ratios = rc.profile(rc.apply(san[1], tokens.x[0], san[0]).hidden)["residual_ratio"]
    np.testing.assert_allclose(report.states["SAN"]["residual_ratio"][0], san_ratios, 1e-4, 1e-6)


def read_tokens(folder, *arguments):
    return read_inputs(parse_flags([str(folder), *arguments]), open_source(str(folder)))


@pytest.mark.full
def test_a_folder_without_tokenizer_files_is_measured_all_the_same(folder, tmp_path, capsys):
    """The folder is as `save_pretrained` writes it.

    Tokens are ids from the user, those of another folder's tokenizer, or random ids.
    """
    tokens = read_tokens(GOLDEN, "--ids=5,8,13", "--ids", "7 6")
    assert tokens.x.tolist() == [[5, 8, 13], [7, 6, 0]] and tokens.mask.sum() == 5
    (tmp_path / "ids.txt").write_text("5 8 13\n7, 6\n")
    file_tokens = read_tokens(GOLDEN, "--token_ids", str(tmp_path / "ids.txt"))
    assert file_tokens.x.tolist() == tokens.x.tolist() and file_tokens.kind == tokens.kind == "ids"
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f")
    flags = ("--text", str(text), "--max_tokens", "8")
    folder_tokens = read_tokens(folder, *flags)
    tokenizer_tokens = read_tokens(GOLDEN, *flags, "--tokenizer", str(folder))
    np.testing.assert_array_equal(folder_tokens.x, tokenizer_tokens.x)
    out = tmp_path / "page.html"
    assert main([str(GOLDEN), "--max_tokens=5", "--num_texts=3", "--out", str(out)]) == 0
    assert f"Random token ids, since {GOLDEN} has none of" in capsys.readouterr().out
    random_tokens = read_tokens(GOLDEN, "--max_tokens=500", "--num_texts=100")
    embedding = open_source(str(GOLDEN)).source.config.embedding
    assert (
        random_tokens.x.shape == (100, embedding.num_positions)
        and random_tokens.x.max() < embedding.vocab_size
    )
    assert (
        len(np.unique(random_tokens.x)) > 0.9 * embedding.vocab_size
        and random_tokens.kind == "random"
    )


def test_unknown_tokens_are_counted_and_warned_of(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    for content, share, warned in (("a b c d e f g ?", "10%", False), ("a ? ! %", "50%", True)):
        text.write_text(content)
        tokens = read_tokens(folder, "--text", str(text))  # framed by [CLS] and [SEP]
        assert share in tokens.description and f"“{content[:7]}" in tokens.description
        assert capsys.readouterr().err.startswith("warning: 50%") == warned


@pytest.mark.full
def test_ratios_that_are_rounding_are_bounds(folder):
    """Attention makes all tokens equal, up to rounding: the ratio is an upper bound."""
    done = measure_checkpoint(open_source(str(folder)), read_tokens(folder, "--ids=5,8,13,7"))
    assert not done.describe(["check"])["upper_bounds"]
    profile = done.report.states["SAN"]
    profile["residual_ratio"][:, -1] = 1e-7
    rounded = profile._replace(rounding=profile["residual_ratio"] <= 9.6e-7)
    done.report.states["SAN"] = rounded
    about = done.describe(["check"])
    assert about["upper_bounds"] == [checked.LAST_ALONE]
    assert about["numbers"][checked.LAST_ALONE] == pytest.approx(9.54e-7, rel=1e-3)
    assert "≤ 9.54e-07" in done.write_verdict() and not done.is_bound(WHOLE, -1)


def test_ids_that_are_given_are_not_cut_and_a_cut_is_said(tmp_path):
    (tmp_path / "ids.txt").write_text("\n".join(["5 8 13 7 6 1"] * 6))
    flags = ("--token_ids", str(tmp_path / "ids.txt"))
    uncut = read_tokens(GOLDEN, *flags)
    assert uncut.x.shape == (6, 6) and "cut" not in uncut.description
    cut = read_tokens(GOLDEN, *flags, "--max_tokens=4", "--num_texts=2")
    assert cut.x.tolist() == [[5, 8, 13, 7]] * 2
    assert "first 2 of 6 texts" in cut.description and "2 of 2 cut to 4 tokens" in cut.description
    longest = open_source(str(GOLDEN)).source.config.embedding.num_positions
    with pytest.raises(ValueError, match=f"{longest + 1} tokens"):
        read_tokens(GOLDEN, f"--ids={'5,' * longest}5")


RANDOM_WORDS = f"random:{GOLDEN}"


@pytest.mark.usefixtures("without_drawing")
def test_random_weights_are_said_in_sentence_page_table_and_json(tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main([RANDOM_WORDS, "--ids=5,8,13,7", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{RANDOM_WORDS}: random weights: tokens ")
    assert "random weights" in captured.err
    page, about = out.read_text("utf-8"), json.loads(out.with_suffix(".json").read_text())
    assert "this checkpoint, random weights" in page and "of trained models" not in page
    assert "published of random weights: BERT 0.3" in page
    assert about["weights"] == "random weights" and about["verdict"].startswith("random weights: ")
    rows = [*csv.DictReader(out.with_suffix(".csv").read_text().splitlines())]
    assert {row["weights"] for row in rows} == {"random weights"}
    assert main([str(GOLDEN), "--ids=5,8,13,7", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "random weights" not in captured.out + captured.err + out.read_text("utf-8")
    rows = [*csv.DictReader(out.with_suffix(".csv").read_text().splitlines())]
    assert {row["weights"] for row in rows} == {"of the checkpoint"}


ODD = "=HYPERLINK(1)\x1b]0;owned\x07\u202egnp"


@pytest.mark.full
def test_a_folder_with_an_odd_name_is_escaped_everywhere(tmp_path, monkeypatch, capsys):
    """No control character in the page, the table, the JSON or the terminal; no cell a formula."""
    monkeypatch.chdir(tmp_path)
    for folder in (ODD, "+A1"):
        shutil.copytree(GOLDEN, tmp_path / folder)
    assert main(["check", ODD, "+A1", "--ids=5,8,13,7", "--out=page.html"]) == 0
    captured = capsys.readouterr()
    first, second, tokens, written = captured.out.splitlines()  # what both read is said once
    assert first.startswith("=HYPERLINK(1)\\x1b]0;") and ": tokens stay apart: " in first
    assert second.startswith("+A1: tokens stay apart: ")
    assert tokens == "The ids of --ids."
    assert written == "written to page.html, page.json and page.csv"
    begun = [line.partition(": ")[2] for line in captured.err.splitlines()]
    assert begun == ["2 layers, 1 text of 4 tokens"] * 2
    texts = [captured.out, captured.err]
    texts += [(tmp_path / f"page.{end}").read_text("utf-8") for end in ("html", "csv", "json")]
    for text in texts:
        assert text and not set(text) & set("\x1b\x07\u202e")
    rows = [*csv.DictReader(texts[3].splitlines())]
    sources = {row["source"] for row in rows}
    assert len(sources) == 2 and all(source.startswith("'") for source in sources)
    assert main(["check", f"none{ODD}"]) == 2
    assert not set(capsys.readouterr().err) & set("\x1b\x07\u202e")


@pytest.mark.usefixtures("without_drawing")
def test_no_file_is_written_through_a_link(tmp_path, monkeypatch, capsys):
    """Inside of a folder that somebody else filled, as by `rank-collapse check .`."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder)
    (tmp_path / "mine").write_text("mine")
    for end in ("html", "csv", "json"):
        for name in (f".rank_collapse.{end}.tmp", f"rank_collapse.{end}"):
            (folder / name).symlink_to(tmp_path / "mine")
    monkeypatch.chdir(folder)
    assert main(["check", ".", "--ids=5,8,13,7"]) == 0
    capsys.readouterr()
    assert (tmp_path / "mine").read_text() == "mine"
    assert all((folder / f"rank_collapse.{end}").stat().st_size > 100 for end in ("csv", "json"))


@pytest.fixture
def without_drawing(monkeypatch):
    """Puts a few bytes in the place of each picture: drawing takes most of a second a page."""
    monkeypatch.setattr(check, "draw_files", lambda figure: {".png": b"a picture"})


@pytest.fixture
def made_up(monkeypatch, without_drawing):
    """Returns made-up checks by name, and the list of those that were measured."""
    checks, measured = {"a/model": make_check(), "b c": make_check("b c", seed=1)}, []
    checks["b c"] = checks["b c"]._replace(inputs=checks["b c"].inputs._replace(description="No."))

    def measure(opened, batch):
        measured.append(opened.name)
        assert batch is checks[opened.name].inputs
        return checks[opened.name]

    monkeypatch.setattr(inputs, "open_source", lambda name: checks[name].opened)
    monkeypatch.setattr(inputs, "read_inputs", lambda flags, opened: checks[opened.name].inputs)
    monkeypatch.setattr(check.checkpoint, "measure_checkpoint", measure)
    return checks, measured


@pytest.mark.full
def test_of_several_checkpoints_each_is_measured_once_and_has_its_own_numbers(
    made_up, tmp_path, capsys
):
    (checks, measured), out = made_up, tmp_path / "two.html"
    command = ["check", "a/model", "b c", "a/model", f"--out={out}"]
    assert main(command) == 0 and measured == ["a/model", "b c"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[:-1] == [
        *(f"{name}: {one.write_verdict()}" for name, one in checks.items()),
        *("What they are.", "No."),
    ]
    written = json.loads(out.with_suffix(".json").read_text())
    assert written == [to_json(one.describe(command)) for one in checks.values()]
    assert f"check a/model &#x27;b c&#x27; a/model --out={out}</pre>" in out.read_text("utf-8")
    assert main([*command, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for line, one in zip(lines, checks.values(), strict=True):
        layers = line.pop("layers")
        assert line == to_json(one.describe([*command, "--json"]))
        assert layers == to_json(one.layer_means())
    assert main(["check", "b c", f"--out={out}"]) == 0
    assert json.loads(out.with_suffix(".json").read_text())["source"] == "b c"


def test_checkpoints_that_cannot_be_compared_are_not_measured(made_up, capsys):
    checks, measured = made_up
    checks["b c"] = checks["b c"]._replace(inputs=checks["b c"].inputs._replace(kind="random"))
    assert main(["check", "a/model", "b c", "--json"]) == 2 and not measured
    assert "b c would be measured on random token ids" in capsys.readouterr().err


def test_weights_of_almost_nothing_are_measured_without_a_warning(tmp_path, capsys):
    """Products of them underflow, so that sums over paths are 0: no law, and valid JSON."""
    shutil.copytree(GOLDEN, tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    save_file({n: (1e-30 * a).astype(a.dtype) for n, a in load_file(path).items()}, path)
    out = tmp_path / "page.html"
    assert main([str(tmp_path / "a"), "--ids=5,8,13,7", "--out", str(out)]) == 0
    assert "warning" not in capsys.readouterr().err.lower()
    about = json.loads(out.with_suffix(".json").read_text(), parse_constant=pytest.fail)
    law = next(row for row in about["path_lengths"] if "norm" in row["paths weighted"])
    assert law["mean length"] is None and law["median"] is None


@pytest.mark.parametrize("kind", ["one", "two", "of the same length"])
def test_equal_tokens_beside_a_few_others_have_collapsed(kind, tmp_path, capsys):
    """Of 48 tokens with one embedding, some have a position of their own."""
    folder = tmp_path / "a"
    shutil.copytree(GOLDEN.parent / "gpt2-head", folder)
    tensors, path = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    words = next(name for name in tensors if name.endswith("wte.weight"))
    places = next(name for name in tensors if name.endswith("wpe.weight"))
    tensors[words][:] = tensors[words][3]
    tensors[places][:] = 0
    for name in tensors:
        if ".h." in name and name.endswith(".weight") and tensors[name].ndim == 2:
            tensors[name] *= 1e-3
    count = 2 if kind == "two" else 1
    tensors[places][:count] = 1000 if "same" not in kind else -2 * tensors[words][3]
    save_file(tensors, path)
    length = min(48, len(tensors[places]))
    ids = ",".join(str(1 + i % 20) for i in range(length))
    assert main([str(folder), f"--ids={ids}", "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert verdict.startswith("nearly all tokens collapse: residual ratio below 0.01 at layer 0 (")
    assert "without the few tokens that decide it" in verdict
