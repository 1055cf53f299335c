"""The numbers of networks, of arrays that are made up: by formulas, and what follows from them."""

import numpy as np
import pytest

from experiments.trained import trained_results
from tests.oracles.trained_arrays import DEPTH, HEADS, LENGTHS, TEXTS, make_arrays, make_network
from tests.support.closeness import assert_close


def test_rate_is_that_of_a_cubic_fall_whatever_the_unit():
    fall = -0.3 * 3.0 ** np.arange(6)[None]
    assert_close(trained_results.final_rate(fall), 3.0)
    assert_close(trained_results.final_rate(fall + 2.0), 3.0)
    assert_close(trained_results.final_rate(np.log10(0.5) * np.arange(6)[None]), 1.0)


def rate_of(logs):
    return (logs[:, -1] - logs[:, -2]) / (logs[:, -2] - logs[:, -3])


def test_every_number_of_a_text_is_of_its_arrays():
    config, arrays = make_network("a", "none").source.config, make_arrays(0)
    numbers = trained_results.text_measures(arrays, config)
    ratios = {
        "attention alone": "alone",
        "attention and MLPs": "mlps",
        "attention and skips": "skips",
        "full model": "whole",
    }
    entry, token = arrays["spikes/spike_entry"], arrays["spikes/spike_token"]
    expected = {
        f"log10 residual ratio, {words}, last layer over input": change[:, -1] - change[:, 0]
        for words, name in ratios.items()
        for change in [arrays[f"log10_ratio/{name}"]]
    }
    medians = [[np.median(row) for row in text] for text in arrays["chains/residual"]]
    layers = np.arange(DEPTH) - (DEPTH - 1) / 2
    expected |= {
        "rate of attention alone": rate_of(arrays["log10_residual/alone"]),
        "rate with MLPs": rate_of(arrays["log10_residual/mlps"]),
        "slope of chains, decades a length": np.log10(medians) @ layers / (layers @ layers),
        "largest entry": [max(row) for row in arrays["spikes/largest"]],
        "largest entry over the median": [max(row) for row in entry],
        "layer of the largest ratio of entry to median": entry.argmax(axis=1),
        "token of the largest ratio of entry to median": [
            row[values.argmax()] for row, values in zip(token, entry, strict=True)
        ],
        "path length that the loss needs": trained_results.needed_lengths(arrays),
        "length of most paths": [3.0] * TEXTS,  # 1, 8, 24, 32, 16 paths of 0 .. 4 heads
        "length of the largest residual": arrays["paths/log10_residual"].argmax(axis=1),
    }
    for text, name in (("first token", "first_column"), ("anywhere", "largest_column")):
        where = f"at the {text}" if name == "first_column" else text
        above = arrays[f"sinks/{name}"].reshape(TEXTS, -1) > 0.3
        expected[f"share of heads with a sink {where}"] = above.sum(axis=1) / (DEPTH * HEADS)
    for name, text in {"loss": "loss, nats", "right": "share of right tokens"}.items():
        expected[f"{text}, full model"] = arrays[f"paths/{name}"]
        for kind in ("frozen", "recomputed"):
            for place, k in enumerate(LENGTHS):
                values = arrays[f"paths/{name}_{kind}"][:, place]
                expected[f"{text}, up to {k} heads, {kind}"] = values
    laws = trained_results.length_laws(arrays, config)
    for name, law in laws.items():
        expected[f"mean path length, {name}"] = [
            sum(k * share for k, share in enumerate(row)) for row in law
        ]
    assert numbers.keys() == expected.keys()
    for name, values in expected.items():
        assert_close(numbers[name], values, rtol=1e-5, err_msg=name)
    weights = arrays["paths/path_size"]
    exact = weights / weights.sum(axis=1, keepdims=True)
    assert any(np.allclose(law, exact) for law in laws.values())


@pytest.mark.parametrize(
    ("above", "needed"),
    [
        ([1.0, 0.04, 0.01, 0.0], 1),  # from one head on within 0.05 nats
        ([1.0, 0.04, -0.06, 0.0], 4),  # two heads are too good: as far away
        ([0.01, 0.02, 0.03, 0.04], 0),
        ([1.0, 1.0, 1.0, 0.05], np.nan),  # the bound itself is not within
        ([0.0, 0.0, 0.0, -0.2], np.nan),
    ],
)
def test_the_needed_length_is_the_first_from_which_all_have_the_loss(above, needed):
    arrays = {
        "paths/lengths": np.array([LENGTHS] * 2),
        "paths/loss": np.array([0.0, 0.0]),
        "paths/loss_frozen": np.array([above, [0.0, 0.0, 0.0, 0.0]]),
        "paths/loss_recomputed": np.ones((2, 4)),
    }
    np.testing.assert_array_equal(trained_results.needed_lengths(arrays), [needed, 0])


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("is_albert", [False, True])
def test_each_claim_has_the_draws_of_its_arrays(mask, is_albert, monkeypatch):
    """Draws are texts; the bounds count heads of both networks where the condition holds."""
    rows = []
    monkeypatch.setattr(trained_results, "make_row", lambda *row: rows.append(row))
    monkeypatch.setattr(trained_results, "cases_row", lambda *row: rows.append(row))
    network, causal = make_network("a", mask), mask == "causal"
    arrays = make_arrays(1, has_bounds=not causal, is_albert=is_albert)
    trained_results.judge_claims({"a": arrays}, [network])
    change = {
        name.removeprefix("log10_ratio/"): a[:, -1] - a[:, 0]
        for name, a in arrays.items()
        if name.startswith("log10_ratio/")
    }
    readings = {"": "a"}
    if is_albert:
        readings = {"": "a, as the text says", ", as published": "a, as published"}
    expected = {}
    for reading, setting in readings.items():
        alone, skips = change["alone" + reading], change["skips" + reading]
        expected["trained skips", setting] = skips - alone
        expected["trained skips stop", setting] = 10**skips
        expected["trained collapse", setting] = 1 - 10**alone
        if not causal:
            rate = rate_of(arrays[f"log10_residual/alone{reading}"])
            expected["trained rate", setting] = rate
    medians = np.log10(np.median(arrays["chains/residual"], axis=2))
    expected["trained chains", "a"] = [np.polyfit(range(DEPTH), row, 1)[0] for row in medians]
    name, unit = ("loss", 0.05) if causal else ("right", -0.02)
    excess = arrays[f"paths/{name}_recomputed"][:, LENGTHS.index(1)] - arrays[f"paths/{name}"]
    expected["trained short suffice", "a"] = excess / unit
    expected["trained short at first", "a"] = arrays["paths/log10_residual"].argmax(axis=1) - 3
    if causal:
        sizes = arrays["spikes/largest"] / 100, arrays["spikes/spike_entry"] / 1000
        expected["trained spikes", "a"] = np.minimum(*sizes).max(axis=1)
        expected["trained sinks", "a"] = (arrays["sinks/first_column"] > 0.3).mean(axis=(1, 2))
    else:
        expected["trained mlp rate", "a"] = rate_of(arrays["log10_residual/mlps"])
        for key, measure, sign in (("trained lemma", "lemma", 1), ("trained bounds", "head", -1)):
            count, total = 0, 0
            for kind in ("whole", "alone"):
                holds = arrays[f"bounds/{kind}/admissible"]
                count += (sign * arrays[f"bounds/{kind}/{measure}"][holds] > 0).sum()
                total += holds.sum()
            expected[key, "a"] = [count, total, TEXTS]
    row_values = {(key, setting): values for key, setting, *values in rows}
    assert row_values.keys() == expected.keys() and len(rows) == len(row_values)
    for place, values in expected.items():
        assert_close(np.ravel(row_values[place]), values, rtol=1e-5, err_msg=str(place))


def test_the_finding_is_of_encoders_and_of_networks_that_predict_tokens():
    """Median rates of two encoders; of three networks two have the whole loss, in the mean."""
    networks = [make_network("a", "none"), make_network("b", "causal"), make_network("c", "none")]
    results = {network.label: make_arrays(i) for i, network in enumerate(networks)}
    ends = {"a": [0.01, 0.0, 0.02], "b": [0.0, 0.14, 0.0], "c": [0.06, 0.06, 0.06]}
    for label, excess in ends.items():
        arrays = results[label]
        arrays["paths/loss_recomputed"][:, -1] = arrays["paths/loss"] + excess
    results["c"]["paths/lengths"][:, -1] = 3
    rates = sorted(np.median(rate_of(results[label]["log10_residual/alone"])) for label in "ac")
    figure, text = trained_results.make_finding(results, networks)
    assert figure == "trained"
    assert text == (
        "In 2 trained networks without a causal mask the logarithm of the residual of attention "
        f"alone grows {rates[0]:.2f} to {rates[1]:.2f} times in the last layer (median text). "
        "Paths through at most 4 heads have the whole loss within 0.05 nats in 2 of 3 networks "
        "that predict tokens."
    )
    assert trained_results.make_finding(results, networks[1:2]) is None


def test_rows_are_of_the_texts_that_have_a_number():
    """One text needs more heads than were measured; a share's interval stays in [0, 1]."""
    network, arrays = make_network("a", "none"), make_arrays(3)
    arrays["paths/loss_frozen"] = arrays["paths/loss"][:, None] + [[0.0] * 4, [0, 1, 0, 0], [1] * 4]
    arrays["sinks/largest_column"][1:] = 1.0
    arrays["random/log10_ratio/skips"] = arrays["log10_ratio/skips"] + 1
    rows = list(trained_results.make_rows({"a": arrays}, [network]))
    by_place = {(row["measure"], row["layer"]): row for row in rows}
    assert len(by_place) == len(rows) and {row["network"] for row in rows} == {"a"}
    needed = by_place["path length that the loss needs", ""]
    assert (needed["mean"], needed["texts"]) == (1.0, 2)
    share = by_place["share of heads with a sink anywhere", ""]
    assert share["texts"] == TEXTS and share["low"] < share["mean"] < share["high"] <= 1
    for name in ("log10_ratio/skips", "random/log10_ratio/skips", "spikes/largest"):
        for layer, column in enumerate(arrays[name].T):
            row = by_place[name, layer]
            assert row["texts"] == TEXTS and row["low"] < row["mean"] < row["high"]
            assert_close(row["mean"], column.mean(), rtol=1e-6)
    shown = list(trained_results.compare_results({"a": arrays}, [network]))
    assert len(shown) == sum(row["layer"] == "" for row in rows)
    notes = {c.quantity: c.note for c in shown}
    assert notes["a: length of most paths"] == "all equal, 3 texts"
    ends = "{low:.4g} to {high:.4g}, 3 texts".format(**share)
    assert notes["a: share of heads with a sink anywhere"] == ends


def leave_out(arrays, *prefixes):
    return {name: a for name, a in arrays.items() if not name.startswith(prefixes)}


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("reads_tokens", [True, False])
def test_a_network_that_predicts_no_tokens_has_what_was_measured(mask, reads_tokens):
    """One that reads tokens has chains, sinks and spikes; one of spectrograms has residuals."""
    network, whole = make_network("a", mask), make_arrays(5)
    lost = ("paths/",) if reads_tokens else ("paths/", "chains/", "sinks/", "spikes/")
    arrays = leave_out(whole, *lost)
    numbers = trained_results.text_measures(arrays, network.source.config)
    whole_measures = trained_results.text_measures(whole, network.source.config)
    kept = [name for name in whole_measures if "log10 residual" in name or name.startswith("rate")]
    if reads_tokens:
        kept += [name for name in whole_measures if "sink" in name or name.startswith("slope")]
        kept += [name for name in whole_measures if "entry" in name]
    assert {*numbers} == {*kept} and len(kept) == (13 if reads_tokens else 6)
    for name in kept:
        np.testing.assert_array_equal(numbers[name], whole_measures[name])
    keys = {row.key for row in trained_results.judge_claims({"a": arrays}, [network])}
    expected = {"trained skips", "trained skips stop", "trained collapse"}
    expected |= {"trained mlp rate", "trained rate"} if mask == "none" else set()
    expected |= {"trained chains"} if reads_tokens else set()
    expected |= {"trained sinks", "trained spikes"} if reads_tokens and mask == "causal" else set()
    assert keys == expected
    assert trained_results.make_finding({"a": arrays}, [network]) is None
    predicting = make_network("b", "causal")
    if mask == "none":
        both = {"a": arrays, "b": whole}
        text = trained_results.make_finding(both, [network, predicting]).sentence
        assert text.startswith("In 1 trained networks") and " of 1 networks that" in text


def test_a_number_that_no_text_has_is_left_empty():
    network, arrays = make_network("a", "none"), make_arrays(3)
    arrays["paths/loss_frozen"] = arrays["paths/loss"][:, None] + np.ones(4)
    (row,) = (
        row
        for row in trained_results.make_rows({"a": arrays}, [network])
        if row["measure"] == "path length that the loss needs"
    )
    assert (row["mean"], row["low"], row["high"], row["texts"]) == ("", "", "", 0)


def test_chains_that_vanish_have_the_least_number_of_float32():
    residual = np.ones((2, 3, 5), np.float32)
    residual[0, 2], residual[1, 1] = 0.0, 1e-3
    least = np.log10(np.finfo(np.float32).tiny)
    slopes = trained_results.chain_slope({"chains/residual": residual})
    assert_close(slopes, [least / 2, 0.0], atol=1e-5)
