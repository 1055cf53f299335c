"""Rows of the table, by loops over tokens; sublayers at fault, each reason at its limit."""

import numpy as np
import pytest

from rank_collapse.agree.differences import Difference, Rounding
from rank_collapse.agree.verdict import Row, find_faults, summarize

ROUNDING = Rounding(2.0**-8, 2.0**-8, "bfloat16")
RNG = np.random.default_rng(0)


def make_row(**changed):
    """Makes the row of a sublayer of 40 distinct tokens, whose error is what rounding explains."""
    fields = {
        "layer": 0, "part": "mlp", "error_in": 0.01, "added": 0.01, "added_most": 0.02,
        "predicted": 0.01, "excess": 1.0, "excess_most": 1.5, "excess_few": 2.0,
        "excess_worst": 3.0, "worst_token": (0, 1), "scale": 0.0, "coherence": 0.1, "tokens": 40,
        "distinct_tokens": 40.0, "width": 16, "spikes": 0, "spikes_added": float("nan"),
        "judged": True,
    }  # fmt: skip
    return Row(**fields | changed)


def test_a_row_is_of_the_tokens_that_exist_and_are_no_spikes():
    """Of two examples of six tokens one lacks two, and one token is a spike."""
    mask = np.ones((2, 6), bool)
    mask[1, 4:] = False
    absent = np.where(mask, 0, np.nan)
    error_in, added, predicted = (RNG.uniform(0.01, 0.2, (2, 6)) + absent for _ in range(3))
    spikes = np.zeros((2, 6), bool)
    spikes[0, 3] = True
    added[0, 3], added[1, 2] = 9.0, 5.0
    branches, states = RNG.normal(size=(2, 2, 6, 7)), RNG.normal(size=(2, 2, 6, 7))
    difference = Difference(
        3, "attention", error_in, added, predicted, spikes, 0.25, 0.5, 4.5, *branches, tuple(states)
    )
    row = summarize(difference)
    usual = [k for k in np.ndindex(2, 6) if mask[k] and not spikes[k]]
    excess = sorted(added[k] / predicted[k] for k in usual)
    assert (row.layer, row.part, row.tokens, row.width, row.spikes) == (3, "attention", 9, 7, 1)
    assert (row.scale, row.coherence, row.distinct_tokens) == (0.25, 0.5, 4.5)
    for name, values in (("error_in", error_in), ("added", added), ("predicted", predicted)):
        assert getattr(row, name) == pytest.approx(sorted(values[k] for k in usual)[4])
    assert row.excess == pytest.approx(excess[4])
    numbers = sorted(added[k] for k in usual)
    assert row.added_most == pytest.approx(numbers[7] + 0.6 * (numbers[8] - numbers[7]))
    assert row.excess_most == pytest.approx(excess[7] + 0.6 * (excess[8] - excess[7]))
    assert row.excess_few == row.excess_worst == pytest.approx(excess[8])
    assert row.worst_token == max(usual, key=lambda k: added[k] / predicted[k])
    assert row.spikes_added == 9.0 and row.judged
    far = summarize(difference._replace(error_in=error_in + 0.3))
    assert not far.judged
    none = summarize(difference._replace(spikes=np.zeros_like(spikes)))
    assert none.tokens == 10 and np.isnan(none.spikes_added) and none.worst_token[0] in (0, 1)
    alone = summarize(difference._replace(spikes=mask))  # nothing but spikes
    assert alone.tokens == 10 and alone.spikes == 10


def reasons(*rows, rounding=ROUNDING):
    return [(fault.index, fault.reason) for fault in find_faults(rows, rounding)]


@pytest.mark.parametrize(("part", "limit"), [("attention", 2.6), ("mlp", 2.6), ("layer", 2.0)])
def test_the_median_of_all_tokens_has_a_limit_that_few_tokens_raise(part, limit):
    for tokens, factor in ((40, 1), (3, 1), (1, 1.6), (2, 1.6 / np.sqrt(2))):
        at, above = (
            make_row(part=part, tokens=tokens, excess=limit * factor * (1 + 1e-6 * sign))
            for sign in (-1, 1)
        )
        assert reasons(at) == [] and reasons(make_row(), above) == [(1, "all tokens")]


def test_a_few_tokens_far_above_are_a_fault():
    for name, limit in (("excess_most", 6.0), ("excess_few", 12.0)):
        assert reasons(make_row(**{name: limit})) == []
        assert reasons(make_row(**{name: limit + 0.01})) == [(0, "some tokens")]


def test_what_is_not_judged_is_no_fault_and_no_measure_of_others():
    assert reasons(make_row(excess=9.0, judged=False)) == []
    others = [make_row(layer=i) for i in range(8)]
    far = [make_row(layer=i, excess=2.5, judged=False) for i in range(9)]
    assert reasons(*others, *far, make_row(excess=2.5)) == [(17, "unlike other layers")]


def test_a_layer_unlike_the_others_of_its_part():
    """Of fewer than four layers nothing is usual; the spread of few layers is rough."""
    for count in (4, 8, 20):
        rows = [make_row(layer=i, excess=0.8) for i in range(count - 1)]
        limit = 0.8 * np.exp(5 * 0.11 * (1 + 4 / count))
        assert reasons(*rows, make_row(excess=0.99 * limit)) == []
        assert reasons(*rows, make_row(excess=1.01 * limit)) == [(count - 1, "unlike other layers")]
        assert reasons(*rows[:2], make_row(excess=2.5)) == []
    low = [make_row(excess=0.1) for _ in range(9)]
    assert reasons(*low, make_row(excess=1.25)) == []  # an excess of 1 is rounding
    assert reasons(*low, make_row(excess=1.26)) == [(9, "unlike other layers")]
    attention = make_row(part="attention", excess=1.3)
    assert reasons(*low, attention) == []  # the only one of its part
    wide = [make_row(excess=e) for e in (0.2, 0.4, 0.8, 1.6, 0.5, 0.6)]
    assert reasons(*wide, make_row(excess=2.5)) == []


def test_one_factor_is_parallel_and_larger_than_rounding():
    fault = [(0, "one factor")]
    usual = {"scale": 0.02, "coherence": 0.8}
    assert reasons(make_row(**usual)) == reasons(make_row(scale=-0.02, coherence=0.8)) == fault
    # chance makes the error of few distinct tokens as parallel
    for distinct, least in ((40, 0.5), (3, 1 / np.sqrt(3)), (1.5, 0.7)):
        for coherence in (least * 0.999, least * 1.001):
            row = make_row(scale=0.5, coherence=coherence, distinct_tokens=distinct)
            assert reasons(row) == (fault if coherence > least else [])
    # at least half of what rounding explains, or more for few distinct tokens
    for count, least in ((40, 0.5), (1, 2.5), (2, 0.625)):
        for factor in (0.999, 1.001):
            scale = factor * least * 0.05
            row = make_row(scale=scale, coherence=0.99, predicted=0.05, distinct_tokens=count)
            assert reasons(row) == (fault if factor > 1 else [])
    # and at least twice the unit of rounding
    for tokens, units in ((40, 2), (1, 3.2)):
        for factor in (0.999, 1.001):
            row = make_row(scale=factor * units * 2.0**-8, coherence=0.9, tokens=tokens)
            row = row._replace(predicted=1e-6)
            assert reasons(row) == (fault if factor > 1 else [])
    fine = Rounding(2.0**-24, 2.0**-24, "float32")
    for factor in (0.999, 1.001):  # sums of products are rounded, too: 1 + √16/4
        row = make_row(scale=factor * 4 * 2.0**-24, coherence=0.9, predicted=1e-12)
        assert reasons(row, rounding=fine) == (fault if factor > 1 else [])


def test_a_factor_unlike_those_of_other_layers_may_be_less_parallel():
    """Few tokens are distinct: a coherence of .6 is chance unless the factor stands out."""
    row = make_row(scale=0.05, coherence=0.6, distinct_tokens=2.0)
    small = [make_row(layer=i, scale=1e-3) for i in range(8)]
    assert reasons(*small, row) == [(8, "one factor")]
    assert reasons(*small[:2], row) == []  # of three layers nothing is usual
    alike = [make_row(layer=i, scale=4e-3) for i in range(8)]
    assert reasons(*alike, row) == []


def test_the_first_reason_that_holds_is_named():
    everything = {"excess": 9.0, "excess_most": 9.0, "scale": 0.5, "coherence": 0.9}
    assert reasons(make_row(**everything)) == [(0, "all tokens")]
    assert reasons(make_row(**everything | {"excess": 1.0})) == [(0, "some tokens")]
