"""Paths through small functions: lengths, derivatives, dtypes, and single operations of JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import rank_collapse as rc
from tests.oracles.function_paths import (
    W8,
    attn,
    contributions,
    ranks_of_others as ranks_of_others,
)
from tests.oracles.jax_layers import D, N, draw, draw_layers, plain_attention, tokens
from tests.oracles.path_examples import relative
from tests.support.closeness import assert_close


def small():
    layers = draw_layers(1)

    def fn(x, layers=layers):
        for w in layers:
            with jax.named_scope("attn"):
                a = plain_attention(w, x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6))
            x = x + a
            with jax.named_scope("mlp"):
                m = jax.nn.gelu(x @ w["in"]) @ w["out"]
            x = x + m
        return x

    return fn, layers


@pytest.mark.full
def test_the_exact_parts_are_those_of_finite_differences_and_sum_to_the_derivative(x64):
    """The part of length k is the coefficient of t^k in the derivative of branches times t."""
    fn, layers = small()
    x, v = tokens(), tokens(1)

    def scaled(t, x):
        for w in layers:
            h = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
            a = plain_attention(w, h)
            # t of the derivative, and none of the value
            x = x + t * a + jax.lax.stop_gradient((1 - t) * a)
            x = x + jax.nn.gelu(x @ w["in"]) @ w["out"]
        return x

    times = np.asarray([-1.0, 0.0, 1.0, 2.0])
    slope = jax.jit(lambda t: jax.jvp(functools.partial(scaled, t), (x,), (v,))[1])
    slopes = [slope(t) for t in times]
    powers = np.vander(times, increasing=True)
    want = np.einsum("kt,tnd->knd", np.linalg.inv(powers), np.asarray(slopes))
    result = contributions(fn, x, "attn", direction=v, freeze=False)
    assert_close(result.by_length, want, atol=1e-10)
    step, total, fn = 1e-6, np.asarray(result.by_length).sum(0), jax.jit(fn)
    ends = [np.asarray(fn(np.asarray(x) + a * step * v)) for a in (1, -1)]
    assert_close(total, (ends[0] - ends[1]) / (2 * step), atol=1e-6)
    jacobian = np.asarray(jax.jit(jax.jacfwd(fn))(x))
    assert_close(total, np.einsum("ndme,me->nd", jacobian, v), atol=1e-10)


@pytest.mark.full
def test_two_kinds_of_branches_and_limits_of_both(x64):
    fn, _ = small()
    x = tokens()
    whole = contributions(fn, x, {"attention": "attn", "mlp": "mlp"})
    assert whole.by_length.shape == (4, 4, N, D) and whole.count_mlps
    one = contributions(fn, x, "attn")
    assert_close(whole.by_attention_length, one.by_length, atol=1e-12)
    for longest, (num_attentions, num_mlps) in (
        ({"attention": 1, "mlp": 2}, (2, 3)),
        ({"mlp": 1}, (4, 2)),
        (1, (2, 2)),
    ):
        cut = contributions(fn, x, {"mlp": "mlp", "attention": "attn"}, longest=longest)
        kept = whole.by_length[:num_attentions, :num_mlps]
        assert_close(cut.by_length, kept, atol=1e-12)
        assert_close(cut.offset, whole.offset, atol=1e-12)
        longer = whole.by_length.sum((0, 1)) - kept.sum((0, 1))
        assert_close(cut.longer, longer, atol=1e-12)
        assert_close(cut.total, fn(x), atol=1e-12)


def test_lengths_beyond_all_branches_are_zero_and_lengths_beyond_the_limit_are_said(x64):
    fn, _ = small()
    x = tokens()
    whole = contributions(fn, x, "attn")
    long = contributions(fn, x, "attn", longest=6)
    assert_close(long.by_length[:4], whole.by_length, atol=1e-12)
    assert np.all(long.by_length[4:] == 0) and long.longer is None
    short = contributions(fn, x, "attn", longest=1)
    assert_close(short.by_length, whole.by_length[:2], atol=1e-12)
    assert_close(short.longer, whole.by_length[2:].sum(0), atol=1e-12)
    assert_close(short.offset, whole.offset, atol=1e-12)


@pytest.mark.full
def test_it_runs_under_vmap_and_grad_and_leaves_the_function_alone(x64):
    fn, layers = small()
    x = jnp.stack([tokens(), tokens(1)])
    batch = jax.jit(jax.vmap(lambda x: rc.function_contributions(fn, x, branches="attn")))(x)
    for i in (0, 1):
        one = contributions(fn, x[i], "attn")
        assert_close(batch.by_length[i], one.by_length, atol=1e-12)
        assert_close(batch.total[i], fn(x[i]), atol=1e-12)

    @jax.jit
    def loss(scale):
        scaled = [w | {"v": scale * w["v"]} for w in layers]
        sums, _ = rc.function_contributions(
            functools.partial(fn, layers=scaled), x[0], branches="attn"
        )
        return jnp.sum(sums[1] ** 2)

    step = 1e-5
    slope = (loss(1 + step) - loss(1 - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(loss)(1.0), slope, rtol=1e-6)


def test_a_sum_over_one_entry_leaves_a_gate_a_weight(x64):
    """`jnp.einsum` sums the axis x of its first argument before the product."""
    x, w = tokens(), draw(32, D, 1)

    def fn(x):
        weight = jnp.tanh(x[None] @ w)
        return x + checkpoint_name(jnp.einsum("snx,snd->nd", weight, x[None]), "attn")

    want = [x, np.tanh(x @ w) * x]
    assert_close(contributions(fn, x, "attn").by_length, want, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.1)])
def test_numbers_of_less_precision(dtype, tolerance):
    fn, layers = small()
    layers = jax.tree.map(lambda a: jnp.asarray(a, dtype), layers)
    x = tokens().astype(dtype)
    result = contributions(functools.partial(fn, layers=layers), x, "attn")
    assert result.by_length.dtype == result.offset.dtype == dtype
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), layers)
    want = contributions(functools.partial(fn, layers=wide), x.astype(jnp.float32), "attn")
    assert relative(result.by_length.astype(jnp.float32), want.by_length) < tolerance


def test_the_offset_and_what_is_longer_are_differences_of_sums_that_are_not_rounded():
    x, w = tokens().astype(jnp.bfloat16), jnp.asarray(W8, jnp.bfloat16)

    def fn(x):
        for _ in range(2):
            x = x + checkpoint_name(x @ w, "attn")
        return x

    for longest in (None, 1):  # not under jit, where XLA leaves roundings out
        result = rc.function_contributions(fn, x, branches="attn", longest=longest)
        rounded = [result.offset] if longest is None else [result.offset, result.longer]
        assert {a.dtype for a in rounded} == {jnp.dtype(jnp.bfloat16)}
        parts, rounded, output = (
            np.asarray(a, float) for a in (result.by_length, jnp.stack(rounded), fn(x))
        )
        error = parts.sum(0) + rounded.sum(0) - output
        assert np.all(np.abs(error) <= 2.0**-8 * np.abs(rounded).sum(0) + 1e-6)


def test_a_result_without_tokens_has_the_dtype_of_the_start(x64):
    x, direction = tokens().astype(jnp.float32), tokens(1)
    result = contributions(lambda x: (x + attn(x))[0], x, "attn", direction=direction)
    parts = np.stack([direction[0], direction[0] @ W8])
    assert result.by_length.dtype == jnp.float32 and result.num_state_axes == 1
    assert_close(result.by_length, parts, rtol=1e-5, atol=1e-6)
    assert_close(result.total, (x + x @ W8)[0], rtol=1e-5, atol=1e-6)
    want = np.cumsum(parts, axis=0) + result.offset
    assert_close(result.up_to(), want, rtol=1e-5, atol=1e-5)


@jax.custom_jvp
def double(x):
    return 2 * x


@double.defjvp
def move_five_times(primals, tangents):
    return double(*primals), 5 * tangents[0]


@jax.custom_jvp
def double_in_a_branch(x):
    return checkpoint_name(2 * x, "attn")


@double_in_a_branch.defjvp
def move_seven_times(primals, tangents):
    return double_in_a_branch(*primals), 7 * tangents[0]


def test_an_exact_derivative_keeps_a_rule_without_branches(x64):
    """Frozen paths, and branches inside, pass what the function computes."""
    x, v = tokens(), tokens(1)

    def fn(x):
        return x + checkpoint_name(double(x @ W8), "attn") + double_in_a_branch(x)

    for freeze, factor in ((True, 2), (False, 5)):
        result = contributions(fn, x, "attn", direction=v, freeze=freeze)
        assert_close(result.by_length, [v, factor * v @ W8 + 2 * v], atol=1e-12)


def test_memory_that_is_constant_belongs_to_the_offset(x64):
    """Queries alone depend on the input: their weights are frozen, the values constant."""
    memory, layers = draw(77, 6, D), draw_layers(2)

    def weights_by(softmax):
        def fn(x):
            q = jnp.einsum("nd,dhe->hne", x, layers[0]["q"])
            k, v = (jnp.einsum("nd,dhe->hne", memory, layers[0][a]) for a in "kv")
            p = softmax(jnp.einsum("hne,hme->hnm", q, k))
            return x + checkpoint_name(jnp.einsum("hnm,hme,hed->nd", p, v, layers[0]["o"]), "cross")

        return fn

    def by_hand(s):
        return jnp.exp(s) / jnp.exp(s).sum(-1, keepdims=True)

    for softmax in (jax.nn.softmax, by_hand, lambda s: jnp.exp(jax.nn.log_softmax(s))):
        fn = weights_by(softmax)
        both = lambda x, fn=fn: fn(x) + checkpoint_name(x @ W8, "cross")  # noqa: E731
        result = contributions(both, tokens(), "cross")
        assert_close(result.by_length[0], tokens(), atol=1e-12)
        assert_close(result.by_length[1], tokens() @ W8, atol=1e-12)


@pytest.mark.full
def test_dropout_with_a_key_is_the_network_of_that_draw(x64):
    x, keep = tokens(), jax.random.bernoulli(jax.random.key(0), 0.8, (N, D))

    def fn(x):
        keep = jax.random.bernoulli(jax.random.key(0), 0.8, (N, D))
        return x + checkpoint_name(jnp.where(keep, x @ W8 / 0.8, 0), "attn")

    result = rc.function_contributions(fn, x, branches="attn")
    assert_close(result.by_length[1], keep * (x @ W8) / 0.8, atol=1e-12)
    # numbers that are drawn in another way at their place
    with jax.threefry_partitionable(False):
        other = jax.random.bernoulli(jax.random.key(0), 0.8, (N, D))
    assert np.any(other != keep)

    def draw_otherwise(x):
        with jax.threefry_partitionable(False):
            return fn(x)

    result = rc.function_contributions(draw_otherwise, x, branches="attn")
    assert_close(result.by_length[1], other * (x @ W8) / 0.8, atol=1e-12)


@pytest.mark.parametrize("freeze", [True, False])
def test_a_print_is_no_operation_of_paths(x64, freeze):
    x, seen = tokens(), []

    def fn(x):
        jax.debug.callback(seen.append, x.sum())
        return x + attn(x)

    result = contributions(fn, x, "attn", freeze=freeze)
    assert_close(result.by_length, [x, x @ W8], atol=1e-12)
    jax.effects_barrier()
    assert_close(seen[0], x.sum())


def test_a_sum_over_examples_passes_their_paths(x64):
    """By collective sums."""
    x = np.stack([tokens(), tokens(1)])

    def fn(x):
        mapped, whole = jax.lax.psum((x @ W8, x), "examples")
        return x + checkpoint_name(mapped, "attn") + 2 * whole

    run = jax.vmap(lambda x: contributions(fn, x, "attn"), axis_name="examples")
    want = np.stack([x + 2 * x.sum(0), np.tile((x @ W8).sum(0), (2, 1, 1))], axis=1)
    assert_close(run(x).by_length, want, atol=1e-12)
