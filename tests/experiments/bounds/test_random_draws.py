"""The two-head construction, against its dense network and in closed form."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import rank_collapse as rc
from experiments.bounds import random_draws
from experiments.bounds.random_draws import FREE, SPREAD, Case, two_heads
from tests.support.closeness import assert_close


@pytest.mark.full
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


@pytest.mark.parametrize(
    ("case", "reasons"),
    [
        (Case(5, 4, 2), []),
        (Case(5, 4, 2, mask="padding"), ["rows of the mask"]),
        (Case(5, 4, 2, mask="causal"), ["a norm", "rows of the mask"]),
        (Case(5, 4, 2, mlp="gelu", skip=True), ["skips"]),
    ],
)
def test_bounds_are_claimed_where_their_theorems_hold(monkeypatch, case, reasons):
    """Rows of different masks have no bound of a head or layer; no network outside of the theorems
    has a bound of the stack. Padding is left out of the lemma."""
    draw, asked = np.random.default_rng(0), []
    layer, head = jnp.asarray(draw.normal(size=2)), jnp.asarray(draw.normal(size=(2, 2)))
    bounds = {
        name: SimpleNamespace(tightness=values, tightness_cubic=values - 1)
        for name, values in {
            "layer": layer,
            "stack": jnp.asarray(0.25),
            "mean_head": head + 1,
            "mean_layer": layer + 1,
            "diameter_layer": layer + 2,
            "diameter": jnp.arange(3.0),
            "head": head,
            "published_layer": layer + 3,
            "published_stack": jnp.asarray(0.75),
        }.items()
    }
    admissible = jnp.array([[True, True], [True, False]])
    report = SimpleNamespace(
        not_covered=reasons,
        admissible=admissible,
        stack_admissible=jnp.asarray(True),
        gamma=head + 5,
        **bounds,
    )

    def bound_report(params, x, config, *, mask):
        asked.append((params, x, config, mask))
        return report

    def lemma_excess(attention, tokens):
        asked.append((attention, tokens))
        return jnp.array([0.5, 0.25])

    monkeypatch.setattr(random_draws.rc, "bound_report", bound_report)
    monkeypatch.setattr(random_draws.bounds, "lemma_excess", lemma_excess)
    drawn = random_draws.single_draw(jax.random.key(0), case)
    (params, x, config, mask), (attention, tokens) = asked
    sizes = config.depth, config.num_heads, config.d_model, config.mlp, config.attention_skip
    assert sizes == (2, 2, 4, case.mlp, case.skip) and x.shape == (5, 4)
    is_padded = case.mask == "padding"
    assert config.mask == ("none" if is_padded else case.mask)
    assert (mask.tolist() if is_padded else mask) == (
        [True] * 3 + [False] * 2 if is_padded else None
    )
    np.testing.assert_array_equal(tokens, x[:3] if is_padded else x)
    np.testing.assert_array_equal(attention.w_q, params.layers.attention.w_q[0])

    rows_alike = not any("rows" in reason for reason in reasons)
    nan = np.nan
    expected = {
        "layer_tightness": layer if rows_alike else layer * nan,
        "stack_tightness": [0.25 if not reasons else nan],
        "mean_head_tightness": head + 1,
        "mean_layer_tightness": layer + 1,
        "diameter_layer_tightness": layer + 2,
        "cubic_diameter_layer_tightness": layer + 1,
        "diameter_tightness": [1.0, 2.0],
        "head_ok": admissible if rows_alike else np.zeros((2, 2), bool),
        "published_layer_ok": [rows_alike, False],
        "published_stack_ok": [not reasons],
        "head_tightness": head,
        "published_layer_tightness": layer + 3,
        "published_stack_tightness": [0.75],
        "gamma": head + 5,
        "lemma_excess": [[0.5, 0.25], [-1, -1]],
    }
    assert drawn.keys() == expected.keys() and {f"{name}_tightness" for name in FREE} < {*drawn}
    for name, values in expected.items():
        assert_close(drawn[name], values, atol=1e-6, err_msg=name)


def test_the_name_of_a_case_has_its_further_parts():
    case = Case(8, 16, 4, mask="causal", mlp="gelu", skip=True)
    assert case.name == "8x16x4-causal-gelu-skip" and Case(3, 4, 2).name == "3x4x2"
