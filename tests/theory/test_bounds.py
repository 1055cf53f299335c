"""Lemma, theorems, γ* and reports: on random draws in float64 and on formulas written out."""

import math

import jax
import numpy as np
import pytest

from rank_collapse.theory import bounds
from tests.oracles import draws
from tests.oracles.bound_reports import GAIN, make_report
from tests.support.closeness import assert_close


def test_the_lemmas_excess_is_written_out(head_cases, x64):
    params, x, *_ = head_cases[3]
    layer = jax.tree.map(lambda a: np.asarray(a[0]), params.layers.attention)
    x = np.asarray(x)
    tokens_apart, expected = x - x.mean(axis=0), []
    for w_q, b_q, w_k, b_k in zip(layer.w_q, layer.b_q, layer.w_k, layer.b_k, strict=True):
        scores = (x @ w_q + b_q) @ (x @ w_k + b_k).T / 2  # √d_qk
        deviation = tokens_apart @ w_q @ w_k.T @ tokens_apart.T / 2
        p, common = (
            np.exp(s) / np.exp(s).sum(1, keepdims=True) for s in (scores, scores - deviation)
        )
        assert_close(common, common[:1].repeat(len(x), axis=0), rtol=1e-9)
        spread = np.ptp(deviation, axis=1)[:, None]
        below, above = (1 - spread) * common - p, p - (1 + 2 * spread) * common
        expected.append(max(below.max(), above.max()))
    excess = jax.jit(bounds.lemma_excess)(layer, x)
    assert_close(excess, expected, rtol=1e-9)
    assert np.all(excess < 0)  # as the lemma says of nearly equal tokens


def test_of_one_head_both_forms_are_the_heads_bound_and_of_several_2_sqrt_2_above_the_means(
    head_cases, x64
):
    for heads, (*_, report) in head_cases.items():
        if heads == 1:
            for sides in (report.layer, report.published_layer):
                assert_close(sides.log10_rhs, report.head.log10_rhs[:, 0], rtol=1e-9)
            # the stack's bound is that of the largest c, a layer's that of its own without the gain
            c = report.layer.log10_rhs - 3 * report.log10_input + math.log10(GAIN)
            assert_close(report.log10_c, c, rtol=1e-9)
        gain = report.layer.log10_rhs - report.mean_layer.log10_rhs
        assert np.all(gain >= math.log10(2 * math.sqrt(2)) - 1e-12)


def test_every_tightness_is_the_difference_of_its_sides(head_cases, x64):
    *_, report = head_cases[3]
    names = ("head", "layer", "stack", "published_layer", "published_stack")
    for name in (*names, "mean_head", "mean_layer", "diameter_layer", "diameter"):
        sides = getattr(report, name)
        for kind in ("", "_cubic") if "diameter" in name else ("",):
            difference = getattr(sides, f"log10_rhs{kind}") - sides.log10_lhs
            tightness = getattr(sides, f"tightness{kind}")
            assert_close(tightness, difference, atol=1e-9, err_msg=name)
    for layer in (report.layer, report.published_layer):
        assert_close(layer.log10_lhs, report.mean_layer.log10_lhs, rtol=1e-12)
    for stack in (report.stack, report.published_stack):
        assert_close(stack.log10_lhs, report.log10_residual[-1], rtol=1e-12)


def test_the_conditions_of_the_lemma_and_of_a_bound_that_falls(head_cases, x64):
    """√c ‖res(X)‖ < 1, not c ‖res(X)‖ < 1, and max_i D_ii at most the root of e^x − 1 = 2x."""
    params, x, config, _ = head_cases[1]
    conditions = []
    for scale in (1, 2, 5):
        report = make_report(params, scale * x, config)
        shrinks = np.max(report.log10_c) / 2 + report.log10_residual[0] < 0
        largest = np.max(10**report.log10_spread, axis=-1)
        np.testing.assert_array_equal(report.admissible, largest <= bounds.LEMMA_THRESHOLD)
        assert bool(report.shrinks) == shrinks
        assert bool(report.stack_admissible) == np.all(report.admissible)
        conditions.append((bool(shrinks), bool(report.admissible[0, 0])))
    assert conditions == [(True, True), (False, True), (False, False)]
    assert np.any(report.admissible)  # of a later layer


@pytest.mark.full
def test_scores_that_are_not_divided_are_those_of_smaller_queries_and_padding_is_left_out(
    head_cases, x64
):
    """W_Q/√k without 1/√k is the same network, with the same bounds; only γ has another scale.
    Tokens that a mask leaves out, the first among them, have no part in any of them."""
    params, x, config, expected = head_cases[3]
    smaller = {name: getattr(params.layers.attention, name) / 2 for name in ("w_q", "b_q")}
    undivided, mask = config.replace(scale_scores=False), np.array([0, 1, 1, 0, 1, 1, 1], bool)
    padded = np.full((7, 6), 9.0)
    padded[mask] = x
    report = make_report(draws.changed(params, attention=smaller), padded, undivided, mask=mask)
    assert_close(report.log10_spread[..., mask], expected.log10_spread, rtol=1e-9)
    assert np.isneginf(report.log10_spread[..., ~mask]).all()
    assert report.not_covered == expected.not_covered == ()
    same = {"log10_spread": None, "gamma": None, "beta": None, "stack_gamma": None}
    report, expected = (r.replace(**same, stack_beta=None) for r in (report, expected))
    jax.tree.map(lambda a, b: assert_close(a, b, rtol=1e-8), report, expected)
