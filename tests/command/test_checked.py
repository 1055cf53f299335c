"""Rows of `rank-collapse check` of made-up profiles: over texts or over layers."""

import csv
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from rank_collapse import __version__, pretrained
from rank_collapse.command import check, checked, main
from rank_collapse.command.checked import ALONE, READ, WHOLE, Checked
from rank_collapse.report.page import render_inline
from rank_collapse.report.style import STYLE
from tests.oracles.made_up_checks import DEPTH, HEADS, MASK, SPIKES, TEXTS, make_check
from tests.support.closeness import assert_close


def test_layers_of_one_token_are_counted_over_layers_and_over_texts():
    """Flags are [texts, layers]: three layers in two of three texts."""
    flags = np.array([[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]], bool)
    position = np.array([[9, 5, 5, 9], [9, 9, 2, 2], [9, 9, 9, 9]])

    class Profile(dict):
        spiked = flags

    none = Profile(spike_token=position)
    none.spiked = np.zeros_like(flags)
    checked = SimpleNamespace(networks={WHOLE: Profile(spike_token=position), READ: none})
    (text,) = Checked.find_one_token_layers(checked).values()
    assert text == "1, 2, 3; largest entry at position 2, 5, in 2 of 3 texts"


@pytest.mark.full
def test_a_token_that_holds_the_residual_is_named(tmp_path):
    """The page, the table and the headline numbers say so."""
    transformers, torch = (pytest.importorskip(name) for name in ("transformers", "torch"))
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    with torch.no_grad():
        model.transformer.wte.weight[7] *= 1000
    model.save_pretrained(tmp_path / "gpt2")
    out = tmp_path / "page.html"
    texts = ("--ids=5,8,13,7,21,34,55,2", "--ids=3,1,4,9,15,16,7,25", "--ids=3,1,4,9,15,16,25,8")
    assert main([str(tmp_path / "gpt2"), *texts, "--out", str(out)]) == 0
    one_token = json.loads(out.with_suffix(".json").read_text())["one_token"]
    row = "Layers whose residual ratio is of one token, full model"
    where = "0, 1, 2; largest entry at position 3, 6, in 2 of 3 texts"
    assert one_token == {row: where} and f"{row}: {where}." in out.read_text("utf-8")
    rows = list(csv.DictReader(out.with_suffix(".csv").read_text().splitlines()))
    flags = [r for r in rows if r["measure"] == "spiked" and float(r["value"])]
    named = {(r["network"], r["text"]) for r in flags if r["network"] != "attention alone"}
    assert named == {(WHOLE, "0"), (WHOLE, "1")}


@pytest.mark.parametrize("causal", [False, True])
def test_equal_weights_are_what_entropies_are_compared_with(causal):
    """Equal weights are the softmax of zeros, here for texts of 3 and 5 tokens."""
    entropies, columns = [], []
    for n in (3, 5):
        weights = np.tri(n) if causal else np.ones((n, n))
        weights /= weights.sum(axis=1, keepdims=True)
        logs = np.log(np.where(weights > 0, weights, 1))
        entropies.append(-(weights * logs).sum(axis=1).mean())
        columns.append(weights[:, 0].mean())
    uniform = checked.uniform_attention(np.array([3, 5]), causal)
    assert_close(uniform, (np.mean(entropies), np.mean(columns)))


def test_means_are_over_texts_by_layer_and_of_attention_over_heads():
    """Of attention layer 0 has none."""
    one = make_check()
    means, report = one.layer_means(), one.report
    profiles = {WHOLE: report.states["Transformer"], READ: report.read, ALONE: report.states["SAN"]}
    expected = {
        f"residual ratio, {name}": profile["residual_ratio"] for name, profile in profiles.items()
    }
    expected |= {m.replace("_", " "): profiles[WHOLE][m] for m in checked.STATE_MEASURES}
    for name, label in checked.ATTENTION_LABELS.items():
        expected[label] = np.concatenate(
            [np.full((TEXTS, 1), np.nan), report.attention[name].sum(axis=2) / HEADS], axis=1
        )
    assert list(means) == list(expected)
    for name, values in expected.items():
        assert_close(means[name], values.sum(axis=0) / TEXTS)


def test_headline_numbers_are_means_over_texts_at_the_last_layer():
    one = make_check()
    report, numbers = one.report, one.headline_numbers()
    sizes = report.path_size / report.path_size.sum(axis=1, keepdims=True)
    lengths = [sum(k * share for k, share in enumerate(row)) for row in sizes]
    expected = {
        "layers": DEPTH,
        "heads": HEADS,
        "width": 16,
        checked.LAST: np.mean(report.states["Transformer"]["residual_ratio"][:, DEPTH]),
        checked.FINAL: np.mean(report.read["residual_ratio"][:, DEPTH]),
        checked.LAST_ALONE: np.mean(report.states["SAN"]["residual_ratio"][:, DEPTH]),
        "mean path length, by size": np.mean(lengths),
        "attention entropy, nats, mean": np.mean(report.attention["entropy"]),
        "attention on the first token, mean": np.mean(report.attention["first_column"]),
        "attention on the token with most, mean": np.mean(report.attention["largest_column"]),
    }
    assert numbers.pop(checked.FIRST_LAYER) is None
    assert list(numbers) == list(expected) and numbers == pytest.approx(expected)
    low = np.full((TEXTS, DEPTH + 1), 0.5)
    low[:, 2:] = 0.009
    alone = make_check(states={"SAN": {"residual_ratio": low, "bulk_ratio": low}})
    assert alone.headline_numbers()[checked.FIRST_LAYER] == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_ratio_that_rounding_decides_in_all_texts_is_a_bound(dtype):
    import ml_dtypes

    limit = {"float32": 2.0**-20, "bfloat16": 2.0**-7}[dtype]
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    rounding = np.zeros((TEXTS, DEPTH + 1), bool)
    rounding[:, DEPTH], rounding[0, 1] = True, True
    one = make_check(states={"read": {"rounding": rounding}}, dtype=kind)
    assert one.upper_bounds() == {checked.FINAL}
    assert one.mean_ratio(READ, -1) == limit
    assert one.format_ratio(READ, -1) == f"≤ {one.mean_ratio(READ, -1):.3g}"
    first = one.report.read["residual_ratio"][:, 1].mean()  # rounding decides one text alone
    assert one.mean_ratio(READ, 1) == pytest.approx(first)
    assert one.format_ratio(READ, 1) == f"{first:.3g}"
    rows = {row["quantity"]: row["this checkpoint"] for row in check.headline_rows(one)}
    assert rows[checked.FINAL] == one.format_ratio(READ, -1)
    assert "≤" not in rows[checked.LAST] and rows[checked.FIRST_LAYER] == "none"
    cells = [row[f"residual ratio, {READ}"] for row in check.layer_rows(one)]
    assert cells == [one.format_ratio(READ, layer) for layer in range(DEPTH + 1)]


@pytest.mark.parametrize("is_random", [False, True])
def test_numbers_are_compared_with_published_ones_of_their_kind(is_random):
    one = make_check(is_random=is_random)
    kind = "init" if is_random else "pretrained"
    words = "published of random weights: " if is_random else "published of trained models: "
    ratios, alone, layers = [], [], []
    for model in ("bert-base-cased", "albert-base-v2", "xlnet-base-cased"):
        name = {"b": "BERT", "a": "ALBERT", "x": "XLNet"}[model[0]]
        curves = pretrained.published_curves(pretrained.PUBLISHED[model], 12)[kind]
        ratios.append(f"{name} {curves['Transformer'][12]:.2g}")
        alone.append(f"{name} {curves['SAN'][12]:.2g}")
        first = next(layer for layer, ratio in enumerate(curves["SAN"]) if ratio < 0.01)
        layers.append(f"{name} {first}")
    references = one.find_references()
    uniform, first = checked.uniform_attention(MASK.sum(axis=1), True)
    assert references == {
        checked.LAST: f"0 where all tokens are equal; {words}{', '.join(ratios)}",
        checked.LAST_ALONE: f"the same weights without skips and MLPs; {words}{', '.join(alone)}",
        checked.FIRST_LAYER: f"{words}{', '.join(layers)}",
        "mean path length, by size": f"{DEPTH * HEADS / (HEADS + 1):.3g}, by number of paths",
        "attention entropy, nats, mean": f"{uniform:.3g} with equal weights on all tokens, 0 with "
        "one token",
        "attention on the first token, mean": f"{first:.3g} with equal weights on all tokens",
    }
    rows = check.headline_rows(one)
    heading = "this checkpoint, random weights" if is_random else "this checkpoint"
    assert all(list(row) == ["quantity", heading, "to compare with"] for row in rows)
    assert [row["quantity"] for row in rows] == list(one.headline_numbers())
    assert {r["quantity"]: r["to compare with"] for r in rows if r["to compare with"]} == references
    arrays = make_check(x=np.zeros((TEXTS, 5, 2)))  # of images, whose embedding may add tokens
    assert not any("attention" in name and "mean" in name for name in arrays.find_references())
    both = make_check(mask=None).find_references()
    assert both != references and "mean path length, by size" in both


APART = "tokens stay apart: residual ratio"
LOW = np.array([0.5, 0.3, 0.009, 0.004, 0.02]) * np.ones((TEXTS, 1))
FEW = LOW.copy()
FEW[1] = 0.9  # of one text a few tokens decide it
BULKS = np.where(FEW == 0.9, 0.001, FEW)


@pytest.mark.parametrize(
    ("states", "begins"),
    [
        ({}, f"{APART} {{last:.3g}} after 4 layers; attention alone (without skips and MLPs) stays "
         "at {alone:.3g}; "),
        (
            {"Transformer": {"residual_ratio": LOW, "bulk_ratio": LOW}},
            "tokens collapse: residual ratio below 0.01 at layer 2, 0.02 after 4; attention",
        ),
        (
            {"Transformer": {"residual_ratio": FEW, "bulk_ratio": BULKS}},
            "nearly all tokens collapse: residual ratio below 0.01 at layer 2 (0.00633 without the "
            "few tokens that decide it in 1 of 3 texts), 0.313 after 4; attention",
        ),
        (
            {"SAN": {"residual_ratio": LOW, "bulk_ratio": LOW}},
            f"{APART} {{last:.3g}} after 4 layers; attention alone (without skips and MLPs) falls "
            "below 0.01 at layer 2 (0.02 at the end); ",
        ),
        (
            {"SAN": {"residual_ratio": 0 * LOW + 0.9, "bulk_ratio": LOW + 0.2}},
            f"{APART} {{last:.3g}} after 4 layers; attention alone (without skips and MLPs) stays "
            "at 0.9 (0.22 without the few tokens that decide it); ",
        ),
        (
            {"Transformer": {"spike_share": [[0.2, 0.9, 0.6, 0.1, 0.1]] * TEXTS}},
            f"{APART} {{last:.3g}} after 4 layers; attention alone (without skips and MLPs) stays "
            "at {alone:.3g}; one token holds 0.9 of ‖X‖² at layer 1; the entropy",
        ),
    ],
    ids=["apart", "collapsed", "of the bulk", "alone", "alone, of the bulk", "one token"],
)  # fmt: skip
def test_the_verdict_says_what_the_numbers_are(states, begins):
    one = make_check(states=states)
    last, alone = one.mean_ratio(WHOLE, -1), one.mean_ratio(ALONE, -1)
    assert one.write_verdict().startswith(begins.format(last=last, alone=alone))
    entropy = one.report.attention["entropy"].mean(axis=(0, 2))
    end = f"the entropy of attention is at least {min(entropy):.3g} nats (layer "
    assert one.write_verdict().endswith(f"{end}{1 + int(np.argmin(entropy))}).")


def test_the_verdict_names_random_weights_a_half_and_an_entropy_that_collapsed():
    entropy = np.full((TEXTS, DEPTH, HEADS), 0.4)
    entropy[:, 2] = 0.02, 0.06
    one = make_check(attention={"entropy": entropy}, is_random=True, part="encoder")
    verdict = one.write_verdict()
    assert verdict.startswith("random weights: its encoder: tokens stay apart")
    assert verdict.endswith("; the entropy of attention collapses to 0.04 nats (layer 3).")
    edge = make_check(attention={"entropy": np.full((TEXTS, DEPTH, HEADS), 0.05)})
    assert edge.write_verdict().endswith("is at least 0.05 nats (layer 1).")


def test_spikes_are_one_row_for_each_text_token_and_feature():
    rows = make_check(spikes=SPIKES).spike_rows()
    keys = ("text", "token", "feature", "layers", "value", "times the median")
    assert [tuple(row[key] for key in keys) for row in rows[:3]] == [
        (0, 1, 3, "1 to 2", -50.0, 900.0),
        (2, 1, 3, "1 to 1", 8.0, 800.0),
        (2, 2, 10, "0 to 0", 1.0, 100.0),
    ]
    assert len(rows) == checked.MAX_SPIKES == 8
    assert [row["feature"] for row in rows[2:]] == [10, 11, 12, 13, 14, 15]
    assert make_check().spike_rows() == []


def test_a_table_has_every_number_once():
    """Of two checkpoints each row begins with the name; a layer's attention begins at layer 1."""
    first, second = make_check(), make_check("b", seed=1, is_random=True)
    names, *rows = check.yield_rows([first])
    assert names == ("weights", "network", "measure", "text", "layer_or_length", "value")
    numbers = {row[1:5]: row[5] for row in rows}
    assert len(numbers) == len(rows) and {row[0] for row in rows} == {"of the checkpoint"}
    expected, report = {}, first.report
    for network, profile in first.networks.items():
        for name, array in {**profile.measures, **profile.notes}.items():
            for text, layer in np.ndindex(array.shape):
                expected[network, name, text, layer] = float(array[text, layer])
    for name in checked.ATTENTION_LABELS:
        for text, layer in np.ndindex(TEXTS, DEPTH):
            mean = report.attention[name][text, layer].mean()
            expected[WHOLE, f"attention_{name}", text, layer + 1] = mean
    for text, length in np.ndindex(report.path_size.shape):
        expected[WHOLE, "path_size", text, length] = report.path_size[text, length]
    assert numbers == pytest.approx(expected)
    head, *both = check.yield_rows([first, second])
    assert head[:2] == ("source", "weights") and head[1:] == names
    assert both[: len(rows)] == [("a/model", *row) for row in rows]
    assert {row[:2] for row in both[len(rows) :]} == {("b", "random weights")}
    assert len(both) == 2 * len(rows)


def test_a_page_has_a_row_for_each_layer_and_a_section_for_each_checkpoint(monkeypatch, golden):
    monkeypatch.setattr(check, "draw_files", lambda figure: {".png": b"a picture"})
    spiked = np.zeros((TEXTS, DEPTH + 1), bool)
    spiked[1, 2] = True
    first = make_check(
        spikes=SPIKES,
        states={
            "Transformer": {"spiked": spiked, "spike_token": 1 + 0 * LOW},
            "read": {"spiked": spiked, "spike_token": 3 + 0 * LOW},
        },
    )
    second = make_check("b/other-0.5B", seed=1)
    rows, means = check.layer_rows(first), first.layer_means()
    assert [row.pop("layer") for row in rows] == [*"01234"]
    for layer, row in enumerate(rows):
        assert row == {
            name: "—" if np.isnan(values[layer]) else f"{values[layer]:.3g}"
            for name, values in means.items()
        }
    page = check.render_page([first, second], "the command")
    assert "<h1>Rank collapse in model, other-0.5B</h1>" in page
    one_token = (
        "Layers whose residual ratio is of one token, full model: 2; largest entry at position 1, "
        "in 1 of 3 texts. Layers whose residual ratio is of one token, what attention reads: 2; "
        "largest entry at position 3, in 1 of 3 texts."
    )
    texts = "3 texts of 3 to 5 tokens: What they are."
    introduction = f"a/model: {first.write_verdict()} {texts} {one_token} b/other-0.5B: "
    assert introduction + f"{second.write_verdict()} {texts}</p>" in page
    assert '<h2 id="checkpoint">a/model</h2>' in page and '<h2 id="checkpoint-1">b/other' in page
    assert page.count("Massive activations") == 1  # the other has none
    assert page.count("How long are the paths?</summary>") == page.count("Measures</summary>") == 2
    assert page.count("<pre>the command</pre>") == 2
    for name in means:
        assert page.count(render_inline(check.MEANING[name])) >= 2
    page = page.replace(STYLE, "")
    golden("pages/check.html", re.sub(r"><(?!/?t[dh]\b|/tr)", ">\n<", page))  # a line for each row


@pytest.mark.parametrize(
    ("states", "number"),
    [("Transformer", checked.LAST), ("read", checked.FINAL), ("SAN", checked.LAST_ALONE)],
)
def test_rounding_of_a_network_bounds_its_own_ratio(states, number):
    one = make_check(states={states: {"rounding": np.ones((TEXTS, DEPTH + 1), bool)}})
    assert one.upper_bounds() == {number}


def test_tokens_that_stay_apart_are_also_described_without_a_few():
    ratios = np.full((TEXTS, DEPTH + 1), 1.3)
    one = make_check(
        states={"Transformer": {"residual_ratio": ratios, "bulk_ratio": 0 * ratios + 0.5}}
    )
    text = f"residual ratio 1.3 after {DEPTH} layers (0.5 without the few tokens that decide it);"
    assert f"tokens stay apart: {text}" in one.write_verdict()


def test_the_share_of_one_token_is_a_mean_over_texts():
    shares = np.full((TEXTS, DEPTH + 1), 0.25)
    shares[:, 2], shares[0, 2], shares[0, 3] = 0.5, 1, 1
    verdict = make_check(states={"Transformer": {"spike_share": shares}}).write_verdict()
    assert f"; one token holds {0.5 + 0.5 / TEXTS:.3g} of ‖X‖² at layer 2; " in verdict


def test_curves_are_those_of_the_networks():
    """What attention reads has a curve where it differs from the states; grey is rounding."""
    one = make_check()
    ratios, shares = check.residual_figure(one).axes
    curves = {line.get_label(): line for line in ratios.get_lines()}
    assert list(curves) == [WHOLE, READ, ALONE] and not ratios.patches
    assert ratios.get_yscale() == "log" and ratios.get_title() == "residual ratio"
    assert shares.get_ylim() == (0, 1.05) and shares.get_title() == "largest token's share"
    assert ratios.get_ylabel() == "‖res(X)‖₁,∞ / ‖X‖₁,∞"
    colors = [line.get_color() for ax in (ratios, shares) for line in ax.get_lines()]
    assert len(set(colors)) == 6 and list(shares.get_lines()[2].get_xdata()) == [0, 1]
    for name, profile in one.networks.items():
        assert_close(curves[name].get_ydata(), np.exp(np.log(profile["residual_ratio"]).mean(0)))
    whole = one.networks[WHOLE]
    expected = (whole["spike_share"], whole["residual_spike"])
    for line, values in zip(shares.get_lines(), expected, strict=False):
        assert_close(line.get_ydata(), values.mean(axis=0))
    assert [line.get_label() for line in shares.get_lines()][:2] == ["of ‖X‖²", "of ‖res(X)‖²"]
    assert list(shares.get_lines()[2].get_ydata()) == [0.5, 0.5]
    assert shares.get_xlabel() == ratios.get_xlabel() == "layer"

    same = {"residual_ratio": 1.0001 * whole["residual_ratio"]}
    zeros = {"residual_ratio": 0 * LOW, "rounding": np.ones(LOW.shape, bool)}
    one = make_check(states={"read": same, "SAN": zeros})
    ratios = check.residual_figure(one).axes[0]
    limit = 2.0**-20
    assert [line.get_label() for line in ratios.get_lines()] == [f"{WHOLE}, and {READ}", ALONE]
    assert_close(ratios.get_lines()[1].get_ydata(), np.full(DEPTH + 1, limit / 100))
    (span,) = ratios.patches
    assert_close([span.get_y(), span.get_y() + span.get_height()], [limit / 100, limit])

    entropies, columns = check.attention_figure(one).axes
    attention = {name: a.mean(axis=(0, 2)) for name, a in one.report.attention.items()}
    lines = [*entropies.get_lines(), *columns.get_lines()]
    assert [line.get_label() for line in lines] == list(checked.ATTENTION_LABELS.values())
    for line, name in zip(lines, checked.ATTENTION_LABELS, strict=True):
        assert_close(line.get_ydata(), attention[name])
        assert list(line.get_xdata()) == [1, 2, 3, 4]
    assert len({line.get_color() for line in lines}) == 3
    assert entropies.get_xlabel() == columns.get_xlabel() == "layer"
    largest = one.report.attention["entropy"].mean(axis=2).max()
    assert_close(entropies.get_ylim(), (0, 1.2 * largest))
    assert_close(columns.get_ylim(), (0, 1.05))


def test_what_is_written_about_a_measurement():
    one = make_check(spikes=SPIKES, is_random=True)
    about = one.describe(["check", "a b", "--ids=5,8"])
    assert about["command"] == "python -m rank_collapse check 'a b' --ids=5,8"
    assert (about["source"], about["weights"]) == ("a/model", "random weights")
    assert (about["tokens"], about["inputs"]) == ("What they are.", "3 texts of 3 to 5 tokens")
    assert about["rank_collapse"] == __version__ and about["verdict"] == one.write_verdict()
    assert about["numbers"] == one.headline_numbers() and about["spikes"] == one.spike_rows()
    assert about["upper_bounds"] == [] and about["one_token"] == {}
    names = [row["paths weighted"] for row in about["path_lengths"]]
    assert names == ["counted", "rollout", "exact sums by norm"]
