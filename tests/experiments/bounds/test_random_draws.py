"""The two-head construction, against its dense network and in closed form."""

import jax
import mpmath
import numpy as np
import pytest

import rank_collapse as rc
from experiments.bounds.random_draws import SPREAD, two_heads
from tests.support.closeness import assert_close


@pytest.mark.parametrize("width", [2, pytest.param(200, marks=pytest.mark.full)])
def test_the_construction_is_that_of_its_dense_network(width, x64):
    """`two_heads` has one feature in place of matrices [d, d]. The residual is no smaller around
    the certified center of least ‖.‖_{1,∞}."""
    x, w_q, w_o = np.zeros((2, width)), np.zeros((2, width, 1)), np.ones((2, 1, width))
    x[:, 0] = 1, -1
    w_q[:, 0] = 1
    w_o[0] = np.sqrt(width) * np.eye(1, width)
    heads = rc.network.AttentionParams(w_q=w_q, w_k=SPREAD / 2 * w_q, w_v=w_q, w_o=w_o)
    params = rc.network.TransformerParams(
        layers=rc.network.BlockParams(attention=jax.tree.map(lambda a: a[None], heads))
    )
    config = rc.san(1, 2, width, d_qk=1, d_v=1)
    report = jax.jit(rc.bound_report)(params, x, config)
    assert_close(10**report.log10_spread, SPREAD, rtol=1e-12)
    published, sums = report.published_layer, report.layer
    ratios = two_heads(width)
    for name, lhs, rhs in (
        ("over_published", published.log10_lhs, published.log10_rhs),
        ("over_first", published.log10_lhs, published.log10_rhs_first),
        ("over_sums", sums.log10_lhs, sums.log10_rhs),
    ):
        assert_close(ratios[name], 10 ** (lhs[0] - rhs[0]), rtol=1e-11)


@pytest.mark.parametrize("width", [4096, 16384, 40000, 200000])
def test_the_construction_in_closed_form(width):
    ratios, d = two_heads(width), mpmath.mpf(width)
    with mpmath.workdps(30):
        moved = mpmath.tanh(mpmath.mpf(SPREAD) / 2) / (mpmath.mpf(SPREAD) / 2)
        closed = moved * (d**0.25 + d**-0.25)
        over = {"over_published": closed / (8 * mpmath.sqrt(2)), "over_first": closed / 16}
    assert {n: ratios[n] > 1 for n in over} == {
        "over_published": width > 15928,
        "over_first": width > 64731,
    }
    for name, value in over.items():
        assert_close(ratios[name], float(value), rtol=1e-13)
