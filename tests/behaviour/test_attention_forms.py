"""Windows by layer, capped scores, part rotation, parallel branches, experts: against plain numpy.

Their frozen passes are tested in tests/paths, the models that have these forms in
tests/pretrained/test_family_forms.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf, softmax

import rank_collapse as rc
from tests.oracles import draws
from tests.oracles.attention_forms import DEPTH, FORM, D, H, K, N
from tests.support.closeness import assert_close


def apply_rms_norm(norm, x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12) * norm.gain


def rotate(x, index, theta, factor):
    """Rotates the first four features of each token by its position `index`, times `factor`."""
    out = x.copy()
    for i, j in np.ndindex(len(x), 2):
        angle = index[i] * theta ** (-2 * j / 4)
        a, b = x[i, j], x[i, j + 2]
        out[i, j] = factor * (a * np.cos(angle) - b * np.sin(angle))
        out[i, j + 2] = factor * (b * np.cos(angle) + a * np.sin(angle))
    return out


def compute_weights(p, x, index, window, head, rotated):
    """Computes attention weights of one head, one pair of tokens at a time."""
    base_and_factor = (3.0, 1.0) if window else (50.0, 1.2)
    q, k = x @ p.w_q[head] + p.b_q[head], x @ p.w_k[head] + p.b_k[head]
    if rotated:
        q, k = rotate(q, index, *base_and_factor), rotate(k, index, *base_and_factor)
    scores = np.full((N, N), -np.inf)
    for i, j in np.ndindex(N, N):
        if j <= i and (not window or i - j <= window):
            scores[i, j] = 0.7 * np.tanh(q[i] @ k[j] / np.sqrt(K) / 0.7)
    return softmax(scores, axis=-1)


def apply_experts(m, x):
    """Adds up the two likeliest experts of each token, weighted by their shares of the two."""
    out = np.zeros_like(x)
    for i, token in enumerate(x):
        logits = token @ m.w_router
        best = np.argsort(-logits)[:2]
        for e, share in zip(best, softmax(logits[best]), strict=True):
            units = slice(3 * e, 3 * e + 3)
            z = token @ m.w_in[:, units] + m.b_in[units]
            out[i] += share * (0.5 * z * (1 + erf(z / np.sqrt(2)))) @ m.w_out[units]
    return out + m.b_out


@pytest.mark.parametrize(
    ("rotated", "index"),
    [((), None), ((True, False, True), [0, 1, 3, 4, 7, 9]), ((False, True, False), None)],
)
def test_the_forward_pass_is_its_formulas(rotated, index, x64):
    config = rc.TransformerConfig(**FORM, rotary_layers=rotated)
    params, x = draws.parameters(config), draws.tokens(N, D)
    trace = rc.apply(params, x, config, positions=index if index is None else jnp.array(index))
    params = jax.tree.map(np.asarray, params)
    x, index = np.asarray(x), index or range(N)
    for l in range(DEPTH):
        p = jax.tree.map(lambda a, l=l: a[l], params.layers)
        attention_input = apply_rms_norm(p.attention_norm, x) if l else x
        part = p.attention.b_o.copy()
        for h in range(H):
            has = not rotated or rotated[l]
            window = FORM["windows"][l]
            weights = compute_weights(p.attention, attention_input, index, window, h, has)
            assert_close(trace.attention[l, h], weights, atol=1e-12)
            values = attention_input @ p.attention.w_v[h] + p.attention.b_v[h]
            part = part + weights @ values @ p.attention.w_o[h]
        x = x + part + apply_experts(p.mlp, apply_rms_norm(p.mlp_norm, x))
        assert_close(trace.hidden[l + 1], x, atol=1e-12)
    assert_close(trace.output, apply_rms_norm(params.final_norm, x), atol=1e-12)
