"""Windows by layer, capped scores, part rotation, parallel branches, experts: against plain numpy.

Their frozen passes are tested in tests/paths, the models that have these forms in
tests/pretrained/test_family_forms.py.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf, softmax

import rank_collapse as rc
from rank_collapse.network import layers, positions
from rank_collapse.network.inputs import make_context
from tests.oracles import draws
from tests.oracles.attention_forms import DEPTH, FORM, D, H, K, N
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals


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


def test_shared_units_have_a_gate_of_their_own(x64):
    experts = {"num_experts": 2, "experts_per_token": 1, "router": "all", "d_shared": 3, "d_ff": 7}
    routing = rc.TransformerConfig(**(FORM | experts)).routing
    rng = np.random.default_rng(0)
    x, router, shared = (rng.standard_normal(s) for s in ((4, 5), (5, 2), (5, 1)))
    params = layers.MLPParams(w_in=np.zeros((5, 7)), w_out=None, w_router=router, w_shared=shared)
    shares = np.asarray(jax.jit(lambda x: layers.unit_shares(params, x, routing))(x))
    p = softmax(x @ router, axis=-1)
    for i in range(4):
        best = int(p[i].argmax())
        expected = np.zeros(7)
        expected[2 * best : 2 * best + 2] = p[i, best]
        expected[4:] = 1 / (1 + np.exp(-(x[i] @ shared)))
        assert_close(shares[i], expected, atol=1e-12)


def test_rotary_frequencies():
    index = jnp.arange(7)
    plain = positions.rotary_angles(index, 6, 50.0)
    same = positions.rotary_angles(index, 6, 50.0, (4.0, 8.0))  # dynamic: 7 of 8 tokens
    np.testing.assert_array_equal(plain, same)
    dynamic_angles = positions.rotary_angles(index, 6, 50.0, (4.0, 5.0))
    base = 50.0 * (4 * 7 / 5 - 3) ** (6 / 4)
    np.testing.assert_allclose(dynamic_angles, positions.rotary_angles(index, 6, base), rtol=1e-5)
    tables = ((6, (3.0, 2.0, 1.0)), (7, (0.3, 0.2, 0.1)), (9, (0.0, 0.0, 0.0)))
    cos, _ = positions.rotary_angles(index, 6, tables=tables)
    np.testing.assert_allclose(cos[3, :3], np.cos([0.9, 0.6, 0.3]), rtol=1e-6)
    longer, _ = positions.rotary_angles(jnp.arange(12), 6, tables=tables)
    np.testing.assert_array_equal(longer, 1.0)
    for scaling in ((4.0,), (4.0, 5.0)):  # tables take their place
        both = positions.rotary_angles(index, 6, 50.0, scaling, tables)[0]
        np.testing.assert_array_equal(both, cos)
    slower, sines = positions.rotary_angles(2 * index, 6, 50.0, (2.0,))  # half the frequencies
    np.testing.assert_allclose(slower, plain[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sines[1], np.sin(np.tile(50.0 ** -(np.arange(3) / 3), 2)), rtol=1e-5)
    default = positions.rotary_angles(index, 4)[1][1]
    np.testing.assert_allclose(default, np.sin([1, 0.01, 1, 0.01]), rtol=1e-5)


def test_the_context_has_what_the_config_says():
    """Of 7 tokens and two heads: masks, biases, positions and the cap of scores, by loops."""
    n, config = 7, rc.TransformerConfig(depth=2, num_heads=2, d_model=8)
    i, j = np.indices((n, n))

    def context(params=None, inputs=(), **fields):
        return make_context(params, config.replace(**fields), n, **dict(inputs))

    plain = context()
    assert all(leaf is None for leaf in vars(plain).values())
    np.testing.assert_array_equal(context(mask="causal").mask, j <= i)
    np.testing.assert_array_equal(context(mask="local", window=3).mask, abs(i - j) <= 3)
    padding = jnp.arange(n) != 4
    masked = context(inputs={"mask": padding}, mask="causal").mask
    np.testing.assert_array_equal(masked, (j <= i) & (j != 4))
    capped = context(windows=(0, 1), score_cap=3.0)
    np.testing.assert_array_equal(capped.distance, abs(i - j))
    assert capped.cap == 3 and plain.cap is None

    index = jnp.array([0, 3, 4, 9, 2, 1, 8])
    rotary = {"position": "rotary", "rotary_theta": 9.0, "windows": (1, 0), "local_theta": 5.0}
    for extra, frequencies, factor in (
        ({}, 9.0 ** -np.array([0, 0.5]), 1),
        ({"rotary_width": 2, "rotary_factor": 1.5}, np.ones(1), 1.5),
        ({"rotary_scaling": (4.0,), "rotary_factor": 0.5}, 9.0 ** -np.array([0, 0.5]) / 4, 0.5),
        ({"rotary_tables": ((9, (0.3, 0.2)),)}, np.array([0.3, 0.2]), 1),
    ):
        both = context(inputs={"positions": index}, **(rotary | extra))
        width = extra.get("rotary_width", 4)
        for angles, rates, times in (
            (both.rotary, frequencies, factor),
            (both.local_rotary, 5.0 ** -(np.arange(0, width, 2) / width), 1),
        ):
            expected = np.outer(index, np.tile(rates, 2))
            assert_close(angles[0], times * np.cos(expected), atol=1e-5)
            assert_close(angles[1], times * np.sin(expected), atol=1e-5)
    assert context(**(rotary | {"windows": ()})).local_rotary is None
    assert context(**(rotary | {"local_theta": 0.0})).local_rotary is None
    first = context(position="rotary").rotary[1][:, 0]
    np.testing.assert_allclose(first, np.sin(np.arange(n)), rtol=1e-5)

    biased = {"position": "relative_bias", "num_buckets": 4, "max_distance": 3}
    table = SimpleNamespace(position_bias=jnp.arange(8.0).reshape(4, 2))
    for mask, buckets in (  # of keys before the query; after it, two more where it sees both
        ("none", np.where(j > i, 2, 0) + (abs(i - j) > 0)),
        ("causal", np.array([0, 1, 2, 3, 3, 3, 3])[np.maximum(i - j, 0)]),
    ):
        expected = np.asarray(table.position_bias)[buckets].transpose(2, 0, 1)
        np.testing.assert_array_equal(context(table, mask=mask, **biased).bias, expected)
        both = context(table, {"bias": jnp.full((1, n, n), 5.0)}, mask=mask, **biased)
        np.testing.assert_array_equal(both.bias, expected + 5)

    for clamp in (0, 2):
        keys = context(inputs={"segments": index}, position="relative_key", clamp_distance=clamp)
        distances = np.arange(n - 1, -n, -1)
        distances = np.clip(distances, -clamp, clamp) if clamp else distances
        angles = np.outer(distances, 10000.0 ** -(np.arange(4) / 4))
        expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        assert_close(keys.relative, expected, atol=1e-5)
        np.testing.assert_array_equal(keys.segments, index)


@parametrize_refusals(
    [
        ({"windows": (1, 2)}, r"windows=\(1, 2\) is not a tuple of depth=3 entries"),
        ({"windows": (1, -2, 0)}, "windows=-2 is not a whole number from 0 on"),
        ({"windows": (1.5, 0, 0)}, "windows=1.5 is not a whole number"),
        ({"windows": "111"}, "windows='?111'? is not a tuple"),
        ({"layer_map": 1}, "layer_map=1 is not a tuple"),
        ({"norm_eps": float("nan")}, "norm_eps=nan is not in"),
        ({"score_cap": -1.0}, "score_cap=-1.0 is not in"),
        ({"rotary_theta": "1e4"}, "rotary_theta='1e4' is not in"),
        ({"clamp_distance": 1.5}, "clamp_distance=1.5 is not a whole number"),
        ({"norm_placement": "post"}, "parallel=True does not support norm_placement='post'"),
        ({"rotary_width": 3}, "rotary_width=3 is not even and between 2 and 6"),
        ({"rotary_width": 8}, "rotary_width=8 is not even"),
        ({"rotary_tables": ((9, (1.0,)),)}, "rotary_tables has 1 frequencies for 2 pairs"),
        ({"num_experts": 5}, "num_experts=5 do not divide the 12 units of d_ff=12"),
        ({"d_shared": 3}, "num_experts=4 do not divide the 9 units"),
        ({"mlp": "none"}, "of mlp='none'"),
        ({"experts_per_token": 5}, "experts_per_token=5 is not a whole number from 1 to 4"),
        ({"router": "best"}, "router='best' is not one of"),
        ({"rotary_layers": (True,)}, r"rotary_layers=\(True,\) is not a tuple"),
    ]
)
def test_bad_forms_name_the_value(arguments, message):
    (fields,) = arguments
    is_refused(message, lambda: rc.TransformerConfig(**(FORM | fields)))
