"""What every pass refuses at once, with the value and what would fit; precision of measures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.inputs import (
    as_batch,
    at_least_float32,
    batch_size,
    make_context,
    prepare_inputs,
)
from rank_collapse.network.parameters import TransformerParams
from tests.oracles import draws
from tests.oracles.passes import PASSES, D, N, group_heads, san
from tests.support.closeness import assert_close, near
from tests.support.marks import full_but
from tests.support.refusals import each_is_refused, is_refused, parametrize_refusals

X = draws.normal(N, D)


@pytest.mark.parametrize(
    "name", full_but(PASSES, "apply", "log_residual_profile", "path_set_states")
)
def test_grouped_keys_and_values_are_read_as_they_are_stored(name):
    config, params = san()
    stored, full = group_heads(params, 2)
    grouped_result, expected = (PASSES[name](p, X, config) for p in (stored, full))
    near(grouped_result, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["apply", "path_contributions", "log_residual_profile"])
def test_additive_masks_are_refused_and_other_forms_agree(name):
    config, params = san()
    causal = np.tri(N, dtype=bool)
    each_is_refused(
        (
            lambda: PASSES[name](params, X, config, mask=np.where(causal, 0.0, -1e9)),
            "pass an additive mask as bias=",
        ),
        (
            lambda: PASSES[name](params, X, config, mask=causal.astype(int) * 3),
            "values other than 0 and 1",
        ),
        (
            lambda: PASSES[name](params, X, config, mask=causal[:, :4]),
            r"mask of shape \(5, 4\) does not fit 5 tokens",
        ),
    )
    expected = PASSES[name](params, X, config, mask=jnp.asarray(causal))
    for form in (causal, causal.astype(int), causal.astype(int).tolist(), causal.tolist()):
        result = PASSES[name](params, X, config, mask=form)
        jax.tree.map(np.testing.assert_array_equal, result, expected)


TABLES = rc.EmbeddingConfig(
    vocab_size=11, d_embed=D, positions="learned", num_positions=9, num_segments=2
)


@parametrize_refusals(
    [
        (lambda: rc.apply(san()[1], san()[0], X), "config is a .*rray"),
        (lambda: rc.surgery.ablate(*san()[::-1], "SAN"), "config is a TransformerParams"),
        (lambda: rc.design(san()[1], "pre"), "config is a TransformerParams"),
        (lambda: rc.variant(san()[1], "sinks"), "config is a TransformerParams"),
    ]
)
def test_arguments_in_another_order_are_named(arguments, message):
    is_refused(message, *arguments)


@pytest.mark.full
def test_a_bias_of_all_heads_is_that_of_each():
    config, params = san()
    bias = draws.normal(N, N)
    for name in ("apply", "path_state"):
        one, each = (
            PASSES[name](params, X, config, bias=b) for b in (bias, bias[None].repeat(4, 0))
        )
        one, each = (getattr(result, "output", result) for result in (one, each))
        np.testing.assert_allclose(one, each, 1e-5, 1e-6)


def test_calls_outside_jit_compile_once(monkeypatch):
    config, params = san()
    traces, forward = [], rc.network.transformer.compute_layer
    monkeypatch.setattr(
        "rank_collapse.network.transformer.compute_layer",
        lambda *arguments, **options: traces.append(1) or forward(*arguments, **options),
    )
    for gain in (1.0, 0.5, 0.25):
        rc.apply(params, 2.0 * X[:, :], config.replace(skip_gain=gain, d_ff=77))
    assert len(traces) == 1


def test_parameters_of_numpy_in_float64_are_computed_in_float32():
    """There is no warning. Missing biases are zeros in the precision of the other parameters."""
    config = rc.transformer(2, 2, 4)
    params, x = rc.init(jax.random.key(0), config), draws.normal(3, 4)
    attention = params.layers.attention.replace(b_q=None, b_k=None, b_v=None, b_o=None)
    params = params.replace(layers=params.layers.replace(attention=attention))
    doubled = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    np.testing.assert_array_equal(
        rc.apply(doubled, x, config).output, rc.apply(params, x, config).output
    )


def test_lists_of_examples_are_padded_with_zeros_and_a_mask_says_which_tokens_exist():
    ids = [np.array([3, 4, 5]), np.array([6])]
    batch = as_batch({"x": ids, "segments": [[1, 1, 1], [1]], "memory": None})
    assert {name: a.tolist() for name, a in batch.items()} == {
        "x": [[3, 4, 5], [6, 0, 0]],
        "segments": [[1, 1, 1], [1, 0, 0]],
        "mask": [[True] * 3, [True, False, False]],
    }
    assert as_batch({"x": tuple(ids)})["mask"].tolist() == batch["mask"].tolist()
    masked = as_batch({"x": ids, "mask": [[True, False, True], [True]]})
    assert masked["mask"].tolist() == [[True, False, True], [True, False, False]]
    states = as_batch({"x": [np.ones((2, 3)), np.ones((1, 3))]})["x"]
    assert states.shape == (2, 2, 3) and states[1, 1].tolist() == [0, 0, 0]
    assert as_batch({"x": [[1, 2], [3, 4]]}).keys() == {"x"} and batch_size({"x": X}) == N


@parametrize_refusals(
    [
        (
            {"x": [[1, 2]], "mask": np.ones((2, 2))},
            "different lengths, or there are none: .*'mask': 2",
        ),
        ({"segments": np.ones((2, 2))}, "or there are none: {'segments': 2}"),
        ({"x": np.ones((0, 2))}, "or there are none: {'x': 0}"),
        ({"x": 3}, "or there are none: {'x': None}"),
    ]
)
def test_batches_that_are_none_are_refused(arguments, message):
    is_refused(message, as_batch, *arguments)


def test_what_is_given_of_tokens_reaches_the_embedding_and_the_attention():
    config = rc.san(2, 2, D, embedding=TABLES, position="relative_key")
    params, ids = draws.parameters(config, 1), np.array([3, 1, 4, 1, 5])
    inputs = {
        "segments": np.array([0, 1, 1, 0, 1]),
        "positions": np.array([4, 2, 8, 0, 1]),
        "mask": np.arange(N) != 1,
        "bias": np.asarray(draws.normal(2, N, N)),
    }
    prepared = prepare_inputs(params, ids, config, **inputs)[1]
    p = jax.device_get(params.embedding)
    x = p.tokens[ids] + p.positions[inputs["positions"]] + p.segments[inputs["segments"]]
    x = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True) * p.norm.gain + p.norm.bias
    np.testing.assert_allclose(prepared.x, x, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(prepared.context.segments, inputs["segments"])
    np.testing.assert_array_equal(prepared.context.bias, inputs["bias"])
    np.testing.assert_array_equal(prepared.context.mask, inputs["mask"][None])
    np.testing.assert_array_equal(prepared.token_mask, inputs["mask"])


def test_measures_are_in_float32_at_least_and_a_mask_of_pairs_leaves_all_tokens():
    config, params = san()
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    exists = np.arange(N) != 2
    for mask, tokens in ((None, None), (exists, exists), (np.tri(N, dtype=bool), None)):
        inputs = prepare_inputs(half, X.astype(jnp.bfloat16), config, mask=mask)
        assert list_dtypes(inputs[0], inputs[1].x) == {jnp.bfloat16}
        full = at_least_float32(*inputs)
        assert list_dtypes(full[0], full[1].x) == {jnp.float32}
        expected = np.ones(N, bool) if tokens is None else tokens
        np.testing.assert_array_equal(inputs[1].existing_tokens, expected)
        assert (inputs[1].token_mask is None) == (tokens is None)


def test_states_have_the_wider_dtype_of_their_own_and_the_weights(x64):
    config, params = san()
    for states, weights, wider in (
        (jnp.float32, jnp.float64, "float64"),
        (jnp.float64, jnp.float32, "float64"),
        (jnp.bfloat16, jnp.float32, "float32"),
        (jnp.float32, jnp.bfloat16, "float32"),
        (jnp.float16, jnp.float16, "float16"),
    ):
        cast = jax.tree.map(lambda a, dtype=weights: a.astype(dtype), params)
        _, prepared = prepare_inputs(cast, jnp.asarray(X, states), config)
        assert prepared.x.dtype == wider


def list_dtypes(*trees):
    return {a.dtype.type for a in jax.tree.leaves(trees)}


def test_missing_biases_are_zeros_of_the_shape_and_precision_of_their_part():
    config = rc.transformer(2, 4, D, d_ff=6, mlp="swiglu", cross_attention=True)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), draws.parameters(config))
    shapes = {
        "attention": {"b_q": (2, 4, 2), "b_k": (2, 4, 2), "b_v": (2, 4, 2), "b_o": (2, D)},
        "cross": {"b_q": (2, 4, 2), "b_o": (2, D)},
        "mlp": {"b_in": (2, 6), "b_gate": (2, 6), "b_out": (2, D)},
    }
    missing = draws.changed(
        params, **{part: dict.fromkeys(names) for part, names in shapes.items()}
    )
    x = X.astype(jnp.bfloat16)
    layers = prepare_inputs(missing, x, config, memory=x)[0].layers
    assert list_dtypes(layers) == {jnp.bfloat16}
    for part, biases in shapes.items():
        for name, shape in biases.items():
            bias = getattr(getattr(layers, part), name)
            assert bias.shape == shape and not bias.any()
    np.testing.assert_array_equal(layers.cross.b_k, params.layers.cross.b_k)


def test_grouped_keys_and_values_of_a_memory_are_those_of_each_head():
    config = rc.transformer(2, 4, D, d_ff=6, cross_attention=True)
    params = draws.parameters(config)
    few = {name: getattr(params.layers.cross, name)[:, ::2] for name in ("w_k", "b_k", "w_v")}
    grouped = draws.changed(params, cross=few | {"b_v": None})
    cross = prepare_inputs(grouped, X, config, memory=X)[0].layers.cross
    for name, array in few.items():
        np.testing.assert_array_equal(getattr(cross, name), np.repeat(array, 2, axis=1))
    assert cross.b_v.shape == (2, 4, 2) and not cross.b_v.any()


@pytest.mark.full
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
    table = TransformerParams(layers=None, position_bias=jnp.arange(8.0).reshape(4, 2))
    both_sides = np.where(j > i, 2, 0) + (abs(i - j) > 0)
    for mask, buckets in (  # of keys before the query; after it, two more where it sees both
        ("none", both_sides),
        ("local", both_sides),
        ("causal", np.array([0, 1, 2, 3, 3, 3, 3])[np.maximum(i - j, 0)]),
    ):
        expected = np.asarray(table.position_bias)[buckets].transpose(2, 0, 1)
        np.testing.assert_array_equal(context(table, mask=mask, window=1, **biased).bias, expected)
        both = context(table, {"bias": jnp.full((1, n, n), 5.0)}, mask=mask, window=1, **biased)
        np.testing.assert_array_equal(both.bias, expected + 5)

    for clamp in (0, 2):
        keys = context(inputs={"segments": index}, position="relative_key", clamp_distance=clamp)
        distances = np.arange(n - 1, -n, -1)
        distances = np.clip(distances, -clamp, clamp) if clamp else distances
        angles = np.outer(distances, 10000.0 ** -(np.arange(4) / 4))
        expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        assert_close(keys.relative, expected, atol=1e-5)
        np.testing.assert_array_equal(keys.segments, index)
