"""What rounding may add to an attention, term by term."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.attention import attention_scores, repeat_groups
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.residual import layer_gains
from rank_collapse.theory import log_attention
from rank_collapse.theory.log_operations import LogState
from tests.oracles import draws
from tests.support.closeness import assert_close

H, N, M, V, D = 2, 5, 5, 3, 4


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sees", ["all keys", "the first key", "keys of their own"])
def test_rounding_is_a_unit_of_the_largest_value_times_the_heaviest_row(sees, dtype, x64):
    """Of the tokens that exist; a key that all rows see does not count once for every row."""
    rng = np.random.default_rng(0)
    rows = {
        "all keys": rng.normal(size=(H, N, M)),
        "the first key": np.eye(M)[0] * rng.normal(size=(H, N, 1)),
        "keys of their own": np.eye(M) * rng.normal(size=(H, N, 1)),
    }[sees]
    keep = np.array([True, True, False, True, False])
    rows[:, 2] = 1e3  # of a token that does not exist
    q, p, other = rng.random((3, H, N, M))
    large, noise = rng.random((H, N, 1)) > 0.5, 10.0 ** rng.normal(size=H)
    values, w_o = rng.normal(size=(H, M, V)), rng.normal(size=(H, V, D))
    top, other_top, log_scale = rng.normal(size=H), rng.normal(size=H), -1.7
    cast = lambda a: jnp.asarray(a, dtype)  # noqa: E731
    weights = types.SimpleNamespace(
        q=cast(q), p=cast(p), e=cast(rows), large=jnp.asarray(large), top=cast(top)
    )
    computed = log_attention.rounding_noise(
        types.SimpleNamespace(w_o=cast(w_o)),
        cast(values),
        types.SimpleNamespace(noise=cast(noise)),
        weights,
        [(cast(other), 1, cast(other_top))],
        cast(log_scale),
        jnp.asarray(keep),
    )
    largest = -np.inf
    for h in range(H):
        unit = np.finfo(dtype).eps * np.abs(values[h]).max() * np.abs(w_o[h]).max()
        for i in np.flatnonzero(keep):
            uncertain = noise[h] * (q[h, i] + p[h, i] * large[h, i])
            rounded_e = np.log(unit * sum(abs(rows[h, i]) + uncertain)) + 3 * log_scale + top[h]
            rounded_other = np.log(unit * sum(other[h, i])) + log_scale + other_top[h]
            largest = max(largest, rounded_e, rounded_other)
    assert computed.dtype == dtype
    assert_close(computed, largest, rtol=1e-5 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("mask", [None, "keys", "pairs"])
def test_mixed_weights_differ_by_rows_as_their_parts_do(mask, x64):
    """Of α I + β P + γ C, C uniform over allowed keys: one row where all see the same."""
    rng = np.random.default_rng(1)
    keep = np.array([False, True, True, True])
    masks = {None: None, "keys": keep[None, None], "pairs": (np.tri(4, dtype=bool) & keep)[None]}
    reference = rng.dirichlet(np.ones(4), H)
    q, p, e = rng.random((3, H, 4, 4))
    top, large = rng.normal(size=H), rng.random((H, 4, 1)) > 0.5
    weights = log_attention.Weights(reference, np.zeros(H, int), top, q, p, e, large)
    alpha, beta, gamma = np.array([[0.4, 0.1], [0.7, 1.2], [-0.2, 0.3]])
    mixing = rc.network.Mixing(alpha, beta, gamma)
    allowed = masks[mask] if mask is None else jnp.asarray(masks[mask])
    mixed, parts = log_attention.mix_weights(
        jax.tree.map(jnp.asarray, weights), mixing, allowed, jnp.asarray(keep)
    )
    exists = np.ones((4, 4), bool) if mask is None else np.broadcast_to(masks[mask][0], (4, 4))
    exists = np.where(exists.any(axis=1, keepdims=True), exists, True)
    uniform = exists / exists.sum(axis=1, keepdims=True)
    first = int(np.argmax(keep))
    for h in range(H):
        row = beta[h] * reference[h] + alpha[h] * np.eye(4)[first] + gamma[h] * uniform[first]
        assert_close(mixed.reference[h], row, rtol=1e-12)
        for name, values in (("q", q), ("p", p), ("e", e)):
            assert_close(getattr(mixed, name)[h], beta[h] * values[h], rtol=1e-12)
        assert_close(parts[0][h], alpha[h] * (np.eye(4) - np.eye(4)[first]), atol=1e-15)
        if mask == "pairs":
            assert_close(parts[1][h], gamma[h] * (uniform - uniform[first]), atol=1e-15)
    assert len(parts) == (2 if mask == "pairs" else 1)
    assert_close(np.ravel(mixed.row_sum), alpha + beta + gamma, rtol=1e-12)
    np.testing.assert_array_equal(mixed.top, top)


def test_weights_keep_their_digits_whatever_padded_rows_read():
    """Weights of e^−200 beside the heaviest, of rows that follow one that does not exist."""
    base = jnp.float32([[[0, 0, 0], [0, -200, -210], [0, -205, -200]]])
    keep, zeros = np.array([False, True, True]), jnp.zeros((1, 3, 3))
    split = jax.jit(log_attention.split_weights)
    for change in ([0, 0, 0], [-50, 50, 0]):  # of the padded row
        moved = zeros.at[:, 0].set(jnp.float32(change))
        scores = log_attention.Scores(base, moved, moved, jnp.zeros(1))
        weights = split(scores, None, jnp.float32(1), keep)
        assert weights.heaviest.tolist() == [0] and weights.large[0, 1:].tolist() == [[False]] * 2
        logs = np.log(np.asarray(weights.q)[0, 1:, 1:]) + float(weights.top[0])
        assert_close(logs, base[0, 1:, 1:], rtol=1e-5)
    # a row that reads one key has no other weight at all
    scores = log_attention.Scores(base, zeros, zeros, jnp.zeros(1))
    alone = split(scores, np.arange(3)[None, None] == 2, jnp.float32(1), keep)
    assert alone.heaviest.tolist() == [2] and np.isneginf(alone.top) and not np.any(alone.q)
    # a key that no row sees makes no change large: P − Q = σ(ε² 2) − ½ of the second key
    delta, eps = jnp.broadcast_to(jnp.float32([0, 2, 1e9]), (1, 3, 3)), jnp.float32(1e-3)
    scores = log_attention.Scores(zeros, delta, eps * (eps * delta), jnp.zeros(1))
    blind = split(scores, np.arange(3)[None, None] < 2, eps, keep)
    assert not np.any(blind.large)
    assert_close(np.asarray(blind.e)[0, :, 1] * np.exp(float(blind.top[0])), 0.5, rtol=1e-4)


def test_the_noise_is_of_all_parts_in_which_rows_differ(monkeypatch):
    """Of rows of their own, and of the identity and uniform rows of mixed weights."""
    passed = []

    def note_parts(params, values, scores, weights, other_parts, log_scale, keep):
        passed.append([(rows.shape, power) for rows, power, _ in other_parts])
        return log_scale

    monkeypatch.setattr(log_attention, "rounding_noise", note_parts)
    mixing = rc.network.Mixing(0.3, 0.8, -0.5)
    for fields, count in (
        ({}, 0),
        ({"mask": "causal"}, 1),
        ({"mask": "causal", "mixing": mixing}, 3),
    ):
        config = rc.TransformerConfig(1, H, D, **fields)
        params, prepared = prepare_inputs(draws.parameters(config), draws.tokens(3, D), config)
        gains = layer_gains(config, prepared.x.dtype, params)
        row, gains = jax.tree.map(lambda a: a[0], (params.layers.attention, gains))
        state = LogState(prepared.x[0], prepared.x, jnp.float32(-1))
        jax.eval_shape(
            lambda row=row, state=state, config=config, prepared=prepared, gains=gains: (
                log_attention.attention_parts(
                    row, state, config, prepared.context, gains, np.ones(3, bool)
                )
            )
        )
        assert passed.pop() == [((H, 3, 3), 1)] * count


def test_the_mean_and_the_values_of_rows_of_any_sum(x64):
    """Tokens are 1x̄ᵀ + ε R; mixed weights of the two heads sum to 1.5 and 0.4."""
    rng = np.random.default_rng(2)
    w_v, w_o = rng.normal(size=(H, D, V)), rng.normal(size=(H, V, D))
    b_v, b_o = rng.normal(size=(H, V)), rng.normal(size=D)
    mean, residual, eps = rng.normal(size=D), rng.normal(size=(M, D)), 0.3
    reference = rng.dirichlet(np.ones(M), H) * [[1.5], [0.4]]
    weights = types.SimpleNamespace(
        reference=reference, heaviest=np.array([3, 1]), row_sum=reference.sum(axis=1, keepdims=True)
    )
    computed, values = log_attention.compute_values(
        types.SimpleNamespace(w_v=w_v, w_o=w_o, b_v=b_v, b_o=b_o),
        LogState(mean, jnp.asarray(residual), np.log(eps)),
        eps,
        weights,
    )
    expected = b_o
    for h, key in enumerate((3, 1)):
        expected = expected + reference[h] @ ((mean + eps * residual) @ w_v[h] + b_v[h]) @ w_o[h]
        assert_close(values[h], (residual - residual[key]) @ w_v[h], atol=1e-12)
    assert_close(computed, expected, rtol=1e-12)


FORMS = {
    "qk-norm of heads, rotary": {"qk_norm": "head", "position": "rotary"},
    "qk-norm of all heads, relative keys": {"qk_norm": "width", "position": "relative_key"},
    "grouped keys, unscaled": {"num_kv_heads": 2, "scale_scores": False},
}


@pytest.mark.parametrize("form", FORMS)
def test_scores_of_split_tokens_are_those_of_the_tokens(form, x64):
    """Up to a constant along each row: base + ε² δ of 1x̄ᵀ + ε R, and ε² δ by itself."""
    fields = {"num_heads": 4, "d_model": 8, "depth": 1, "temperature": 1.7} | FORMS[form]
    config = rc.TransformerConfig(**fields)
    params = draws.parameters(config)
    residual, mean, scale = draws.tokens(5, 8), draws.normal(8), jnp.asarray(0.7)
    x = mean[None] + scale * residual
    params, prepared = prepare_inputs(params, x, config)
    row = repeat_groups(jax.tree.map(lambda a: a[0], params.layers.attention))
    state = LogState(mean, residual, jnp.log(scale))
    split = log_attention.compute_scores(
        row, state, scale, config, prepared.context, 1.7, jnp.arange(5) > 0
    )
    want = attention_scores(
        row,
        x,
        x,
        scale=config.scale_scores,
        norm_eps=config.norm_eps,
        temperature=1.7,
        context=prepared.context,
    )
    for change in (split.change, scale**2 * split.delta):
        differences = [a - a[..., :1] for a in map(np.asarray, (split.base + change, want))]
        assert_close(*differences, atol=1e-13)
    first = np.asarray(split.delta)[:, 1]  # of the first token that exists
    assert np.all(first == 0) and np.abs(split.delta).max() > 0.1
    if config.qk_norm == "none":  # a rounding of the largest δ, before a row is taken from all
        query, key = (np.einsum("nd,hdk->hnk", residual, w) for w in (row.w_q, row.w_k))
        largest = abs(query @ key.transpose(0, 2, 1) / 1.7).max(axis=(1, 2))
        assert_close(split.noise, np.finfo(float).eps * largest, rtol=1e-12)
