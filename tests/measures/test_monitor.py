"""The scalars for training loops: closed forms, the full measures, and every transformation."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import rank_collapse as rc
from rank_collapse.network.measured.monitored import MonitorPass
from rank_collapse.watch.names import PARTS
from tests.oracles import draws
from tests.support.closeness import assert_close, near
from tests.support.refusals import each_is_refused, is_refused, parametrize_refusals

N, D, H = 6, 10, 3


def draw_normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def draw_weights(*leading, seed=1):
    return np.asarray(jax.nn.softmax(2 * draw_normal(*leading, H, N, N, seed=seed), axis=-1))


def test_agrees_with_the_measures_of_the_table():
    x, p = draw_normal(N, D), draw_weights()
    scalars = rc.monitor(x, p)
    assert scalars.pop("spiked") == 0
    entropies = rc.attention_entropy(p)
    assert scalars.pop("attention_entropy_least") == entropies.min()
    assert scalars.pop("attention_entropy_largest") == entropies.max()
    for name, value in scalars.items():
        array = x if rc.MEASURES[name].needs == "tokens" else p
        want = np.mean(rc.MEASURES[name](array))
        assert float(value) == pytest.approx(float(want), rel=1e-5), name
    assert scalars["sink_rate"] < rc.monitor(x, p, sink=1e-3)["sink_rate"] == 1


def test_the_bound_of_the_stable_rank_is_that_of_twenty_power_steps():
    """It is that of float64 by hand, and the true rank where σ_2 is far below σ_1."""
    x = draw_normal(N, D)
    v = np.random.default_rng(0).standard_normal(N)
    gram = x.astype(np.float64) @ x.T.astype(np.float64)
    for _ in range(20):
        v = gram @ v / np.linalg.norm(gram @ v)
    bound = float(rc.monitor(x)["stable_rank_bound"])
    assert bound == pytest.approx(np.trace(gram) / (v @ gram @ v), rel=1e-5)
    assert bound > float(rc.stable_rank(x))  # σ_1 is approached from below
    gap = x + 3 * draw_normal(1, D, seed=4)
    assert np.divide(*np.linalg.svd(gap, compute_uv=False)[:2]) > 2  # 4^-20 is left of the second
    bound = float(rc.monitor(gap)["stable_rank_bound"])
    assert bound == pytest.approx(float(rc.stable_rank(gap)), 1e-5)
    assert float(rc.measures.stable_rank_bound(np.zeros((N, D)))) == 0


def test_a_mask_is_as_if_tokens_were_not_there():
    keep = np.array([0, 1, 1, 0, 1, 1], bool)
    x, p = draw_normal(N, D), draw_weights() * keep
    p = p / p.sum(-1, keepdims=True)
    x[~keep] = 1e9
    masked = rc.monitor(x, p, mask=keep)
    removed = rc.monitor(x[keep], p[:, keep][:, :, keep])
    near(masked, removed, rtol=1e-4)


def test_batches_are_means_of_examples_under_any_transformation():
    x, p = draw_normal(2, 4, N, D), draw_weights(2, 4)
    mask = np.arange(N) < np.array([3, 6, 5, 4, 6, 2, 6, 6]).reshape(2, 4, 1)
    scalars = rc.monitor(x, p, mask=mask)
    singles = [rc.monitor(x[i, j], p[i, j], mask=mask[i, j]) for i in range(2) for j in range(4)]
    by_example = jax.vmap(lambda x, p, m: rc.monitor(x, p, mask=m))(x[0], p[0], mask[0])

    @jax.jit
    def scan_layers(x):
        body = jax.checkpoint(lambda carry, x: (carry, rc.monitor(x)))
        return jax.lax.scan(body, 0.0, x)[1]

    layers = scan_layers(x[1])
    of_heads = [
        [rc.attention_entropy(x, mask=m) for x, m in zip(*batch, strict=True)]
        for batch in zip(p, mask, strict=True)
    ]
    of_heads = np.mean(of_heads, axis=(0, 1))
    assert scalars.pop("attention_entropy_least") == pytest.approx(of_heads.min(), rel=1e-5)
    assert scalars.pop("attention_entropy_largest") == pytest.approx(of_heads.max(), rel=1e-5)
    pooled = np.where(mask[..., None], x, 0).sum(axis=-2) / mask.sum(axis=-1, keepdims=True)
    pooled = pooled.reshape(-1, D)
    for name in ("residual_ratio", "effective_rank"):
        want = getattr(rc, name)(pooled)
        np.testing.assert_allclose(scalars.pop(f"batch_{name}"), want, rtol=1e-5)
    for name, value in scalars.items():
        np.testing.assert_allclose(value, np.mean([s[name] for s in singles]), rtol=1e-5)
        np.testing.assert_allclose(by_example[name], [s[name] for s in singles[:4]], rtol=1e-5)
    np.testing.assert_allclose(layers["token_cosine"][2], rc.token_cosine(x[1, 2]), rtol=1e-5)


def test_low_precision_is_measured_in_float32_and_what_is_not_finite_is_nan():
    low = jnp.asarray(draw_normal(N, D), jnp.bfloat16)
    for name, value in rc.monitor(low).items():
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, rc.monitor(low.astype(jnp.float32))[name], rtol=1e-6)
    assert np.isnan(float(rc.monitor(low.at[0, 0].set(jnp.nan))["token_cosine"]))
    assert all(np.isfinite(float(v)) for v in rc.monitor(jnp.zeros((N, D))).values())


@pytest.mark.parametrize("keep", [None, np.arange(N) < 4])
def test_inside_the_layers_as_on_a_trace(keep):
    config = rc.transformer(3, 2, D, norm_placement="pre", final_norm=True, mlp="gelu")
    params, x = draws.parameters(config), draw_normal(N, D)
    trace = rc.apply(params, x, config, mask=keep)
    output, scalars = rc.monitored(params, x, config, mask=keep)
    np.testing.assert_allclose(output, trace.output, rtol=1e-6, atol=1e-6)
    by_layer = [
        rc.monitor(*layer, mask=keep)
        for layer in zip(trace.hidden[1:], trace.attention, strict=True)
    ]
    near(scalars, jax.tree.map(lambda *a: np.stack(a), *by_layer), rtol=1e-5)
    states = rc.monitored(params, x, config, attention=False, mask=keep)[1]
    assert states.keys() == rc.monitor(x).keys()


def test_what_is_monitored_of_a_layer_has_no_gradient():
    layer = SimpleNamespace(inputs=SimpleNamespace(token_mask=None))

    def measure(x, p):
        values = SimpleNamespace(trace=SimpleNamespace(hidden=x, attention=p))
        return MonitorPass().measure_layer(layer, None, values, ())[1]

    point = jnp.asarray(draw_normal(N, D)), jnp.asarray(draw_weights())
    values, slopes = jax.jvp(measure, point, jax.tree.map(jnp.cos, point))
    assert not any(map(np.any, slopes.values())) and values["token_cosine"] != 0


@pytest.mark.full
def test_what_is_monitored_does_not_change_the_gradient():
    config = rc.transformer(2, 2, D, mlp="relu")
    params, x = draws.parameters(config), draw_normal(N, D)
    square = lambda output: jnp.sum(jnp.square(output))  # noqa: E731

    def loss(params):
        output, scalars = rc.monitored(params, x, config)
        return square(output) + sum(jnp.sum(v) for v in scalars.values()), scalars

    gradient, scalars = jax.grad(loss, has_aux=True)(params)
    plain = jax.grad(lambda p: square(rc.apply(p, x, config).output))(params)
    near(gradient, plain, rtol=1e-5, atol=1e-6)
    assert {v.shape for v in scalars.values()} == {(2,)}


@parametrize_refusals(
    [
        ((np.ones(3),), {}, r"x of shape \(3,\)"),
        ((np.ones((1, 3)),), {}, "two tokens or more"),
        ((np.ones((2, 4, 3)),), {"mask": np.ones(3, bool)}, r"mask of shape \(3,\)"),
        ((np.ones((2, 4, 3)), np.ones((4, 4))), {}, r"attention of shape \(4, 4\)"),
        ((np.ones((4, 3)), np.ones((1, 5, 4))), {}, "has not 4 queries"),
        ((np.ones((4, 3)),), {"sink": np.nan}, "sink=nan"),
    ]
)
def test_shapes_that_do_not_fit_are_refused(arguments, message):
    arrays, options = arguments
    is_refused(message, lambda: rc.monitor(*arrays, **options))


def test_gradients_of_boxed_and_plain_trees_are_the_same():
    """A box's path ends in ".value", which is no value projection."""
    attention = {
        name: {"kernel": draw_normal(4, 2, 3, seed=i), "bias": draw_normal(2, 3, seed=9 + i)}
        for i, name in enumerate(("query", "key", "value", "out"))
    }
    want = {
        f"{name}_gradient": np.sqrt(sum((a**2).sum() for a in attention[name].values()))
        for name in ("query", "key", "value")
    }
    nnx_state = nnx.State(jax.tree.map(nnx.Param, attention))
    boxed = jax.tree.map(lambda a: nn.Partitioned(a, ("x",) * a.ndim), attention)
    for tree in (attention, nnx_state, boxed):
        norms = rc.monitor_gradients(tree)
        assert norms.keys() == want.keys()
        near(norms, want, rtol=1e-6)


def test_gradients_of_modules_are_by_layer():
    """In natural order of the paths; NaN where a layer has no such part."""
    trees = [{"attention": {n: draw_normal(4, 4, seed=i) for n in "qkv"}} for i in range(11)]
    del trees[2]["attention"]["k"]
    norms = rc.monitor_gradients({"layers": trees, "head": np.ones(3)}, by_layer=True)
    for name, part in (("q", "query"), ("k", "key"), ("v", "value")):
        want = [np.linalg.norm(tree["attention"].get(name, np.nan)) for tree in trees]
        np.testing.assert_allclose(norms[f"{part}_gradient"], want, rtol=1e-6)
    flat = {f"block_{i}.q_proj.kernel": np.full(4, float(i)) for i in range(12)}
    flat |= {"block_3.q_proj.bias": np.full(4, 3.0)}
    norms = rc.monitor_gradients(flat, by_layer=True)["query_gradient"]
    want = [2 * i * (2**0.5 if i == 3 else 1) for i in range(12)]
    np.testing.assert_allclose(norms, want, rtol=1e-6)
    is_refused("layer_axis=", lambda: rc.monitor_gradients(flat, by_layer=True, layer_axis=0))


@pytest.mark.parametrize("layers", [(), (3,)])
def test_gradients_of_fused_matrices_are_split_as_the_caller_says(layers):
    q, kv = draw_normal(*layers, 7, 8), draw_normal(*layers, 7, 8, seed=1)
    k, v = np.split(kv, 2, axis=-1)
    tree = {"h.attn.c_attn.weight": np.concatenate([q, kv], axis=-1), "h.mlp.weight": q}
    options = {"layer_axis": 0 if layers else None}
    for shares, axis in (
        ({"query": 8, "key": 4, "value": 4}, {}),
        ({"query": 2, "key": 1, "value": 1}, {"axis": -1}),
        ({"query": 2, "key": 1, "value": 1}, {"axis": 1 + len(layers)}),
    ):
        norms = rc.monitor_gradients(tree, parts={"c_attn": shares}, **options, **axis)
        for part, gradient in (("query", q), ("key", k), ("value", v)):
            want = np.sqrt((gradient**2).sum(axis=(-2, -1)))
            np.testing.assert_allclose(norms[f"{part}_gradient"], want, rtol=1e-6)
    bias = {"in_proj_bias": np.concatenate([q[..., 0, :]] * 3, axis=-1)}
    norms = rc.monitor_gradients(bias, parts={"in_proj_bias": tuple(PARTS)}, **options)
    assert_close(norms["key_gradient"], norms["query_gradient"])
    for wrong in (("query", "keys"), ("query", "key", "value"), {"query": 5, "key": 2}, "keys"):
        call = partial(rc.monitor_gradients, tree, parts={"c_attn": wrong}, axis=-1, **options)
        is_refused(r"c_attn.weight of shape .* does not hold", call)
    each_is_refused(
        (
            lambda: rc.monitor_gradients(tree, parts={"c_attn": {"query": 2, "key": 2}}, **options),
            r"does not hold .* side by side, one axis alone, which",
        ),
        (lambda: rc.monitor_gradients(tree), r"no leaf is named after.*parts= may name them"),
    )


SHARED = {"parts": {"c_attn": tuple(PARTS)}}
TWO_AXES = r"c_attn of shape .* one axis alone, which axis= may"
UNEVEN = {"a": {"q_proj": np.ones((2, 4))}, "q_proj": np.ones((3, 4))}


@parametrize_refusals(
    [
        ({"c_attn": np.ones((48, 24))}, SHARED, TWO_AXES),
        ({"c_attn": np.ones((36, 4, 12))}, SHARED, TWO_AXES),
        ({"c_attn": np.ones((6, 6))}, SHARED, TWO_AXES),
        (UNEVEN, {"layer_axis": 2}, r"q_proj of shape \(2, 4\) has no axis layer_axis=2"),
        (UNEVEN, {"layer_axis": 0}, r"q_proj of shape \(3, 4\) does not have 2 layers"),
    ]
)
def test_axes_that_are_not_there_or_not_known_are_refused(arguments, message):
    tree, options = arguments
    is_refused(message, lambda: rc.monitor_gradients(tree, **options))
