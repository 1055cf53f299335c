"""What the theory says of one example: every value against the formulas written out in numpy."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.theory.reports import effects_of

L, H, D, K = 2, 3, 6, 4
TEMPERATURE = 1.7


def composite(a):
    """‖A‖_{1,∞} = √(largest column sum · largest row sum) of absolute values."""
    return math.sqrt(np.abs(a).sum(0).max() * np.abs(a).sum(1).max())


def written_out(params, x):
    """The values of `effects_of` for the tokens x alone, layer by layer and head by head."""
    found = {name: [] for name in ("beta", "gamma", "log10_spread", "head_tightness")}
    found |= {name: [] for name in ("log10_input", "layer_log10_lhs", "layer_log10_rhs")}
    found |= {"head_rhs": []}
    start = math.log10(composite(x - x.mean(0)))
    for l in range(L):
        p = jax.tree.map(lambda a, l=l: np.asarray(a[l], np.float64), params.layers.attention)
        r = x - x.mean(0)
        size = math.log10(composite(r))
        heads = {name: [] for name in ("beta", "gamma", "log10_spread", "head_tightness")}
        heads["head_rhs"] = []
        out = columns = rows = 0
        for h in range(H):
            w_qk, w = p.w_q[h] @ p.w_k[h].T / TEMPERATURE, p.w_v[h] @ p.w_o[h]
            e = r @ w_qk @ r.T / math.sqrt(K)
            spread = np.array([max(a - b for a, b in itertools.product(row, row)) for row in e])
            one = np.abs(w_qk).sum(0).max()
            beta = one * composite(w)
            gamma = math.sqrt(K * spread.sum() * spread.max()) / (2 * one * composite(r) ** 2)
            q, k = x @ p.w_q[h] + p.b_q[h], x @ p.w_k[h] + p.b_k[h]
            weights = np.exp(q @ k.T / math.sqrt(K) / TEMPERATURE)
            branch = weights / weights.sum(1, keepdims=True) @ x @ w
            right = math.log10(4 * gamma * beta / math.sqrt(K)) + 3 * size
            left = math.log10(composite(branch - branch.mean(0)))
            heads["beta"].append(beta)
            heads["gamma"].append(gamma)
            heads["log10_spread"].append(math.log10(spread.max()))
            heads["head_tightness"].append(right - left)
            heads["head_rhs"].append(right)
            columns += spread.sum() * np.abs(w).sum(0).max()
            rows += spread.max() * np.abs(w).sum(1).max()
            out = out + branch
        for name, values in heads.items():
            found[name].append(values)
        found["log10_input"].append(size)
        found["layer_log10_lhs"].append(math.log10(composite(out - out.mean(0))))
        found["layer_log10_rhs"].append(math.log10(2 * math.sqrt(columns * rows)) + size)
        x = out + (p.b_v[:, None, :] @ p.w_o).sum((0, 1)) + p.b_o
    found = {name: np.array(values) for name, values in found.items()}
    c = np.max(found["layer_log10_rhs"] - 3 * found["log10_input"])
    # theorem 2.3 has one γ and one β: each is the largest, of whichever head
    gamma, beta = found["gamma"].max(), found["beta"].max()
    published = 4 * H / math.sqrt(K) * found["gamma"].max(1) * found["beta"].max(1)
    return found | {
        "published": np.log10(published) + 3 * found["log10_input"],
        "published_stack": (3**L - 1) / 2 * math.log10(4 * H / math.sqrt(K) * gamma * beta)
        + 3**L * start,
        "admissible": found["log10_spread"] <= math.log10(1.2564312086261697),
        "layer_tightness": found["layer_log10_rhs"] - found["layer_log10_lhs"],
        "stack_log10_lhs": math.log10(composite(x - x.mean(0))),
        "stack_log10_rhs": (3**L - 1) / 2 * c + 3**L * start,
    }


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_bound_effects_are_the_formulas_of_layers_with_unequal_heads(padded, x64):
    config = rc.san(L, H, D, d_qk=K, d_v=2, temperature=TEMPERATURE)
    mask = jnp.array([True, True, False, True, True]) if padded else None

    def draw(key):
        params = rc.init(key, config, 1.1, 0.5)
        heads = params.layers.attention
        scaled = heads.replace(w_v=heads.w_v * jnp.array([1, 0.2, 3])[None, :, None, None])
        params = params.replace(layers=params.layers.replace(attention=scaled))
        return params, jax.random.normal(jax.random.fold_in(key, 1), (5, D)) + 1

    drawn = jax.vmap(draw)(jax.random.split(jax.random.key(0), 6))
    reports = jax.jit(jax.vmap(lambda p, x: rc.bound_report(p, x, config, mask=mask)))(*drawn)
    # The condition holds here and not there, and γ* is the largest of a head whose β is not.
    assert len(np.unique(reports.admissible)) == 2
    assert len(np.unique(reports.gamma.argmax(2) == reports.beta.argmax(2))) == 2
    for i in range(6):
        params, x, report = jax.tree.map(lambda a, i=i: a[i], (*drawn, reports))
        sides = {
            "published": report.published_layer.log10_rhs,
            "head_rhs": report.head.log10_rhs,
            "published_stack": report.published_stack.log10_rhs,
        }
        found = effects_of(report) | sides
        expected = written_out(params, np.asarray(x)[np.asarray(mask) if padded else slice(None)])
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-8, err_msg=name)
        first = report.head.log10_rhs - report.head.log10_rhs_first  # γ enters linearly
        np.testing.assert_allclose(first, np.log10(expected["gamma"]), rtol=1e-8)
