"""Branches that contain their own skip are refused; networks without skips are not."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import rank_collapse as rc
from tests.oracles.function_paths import contributions, ranks_of_others as ranks_of_others
from tests.oracles.jax_models import (
    LinenList,
    LinenScan,
    NNXBlock,
    draw,
    equinox_blocks,
    layer_norm,
    nnx,
    tokens,
)
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused

DEPTH, D, N = 3, 8, 5
Q, V, W, U = (draw(40 + i, D, D) for i in range(4))
GAIN = 1 + draw(45, D)
KEEP = np.asarray(np.random.default_rng(0).random((N, D)) < 0.8)


def weights(h):
    return jax.nn.softmax(h @ Q @ h.T)


def attend(h):
    with jax.named_scope("attn"):
        return weights(h) @ h @ V


def norm(x):
    return layer_norm(x, GAIN, 0.0)


def repeat(layer):
    def fn(x):
        for _ in range(DEPTH):
            x = layer(x)
        return x

    return fn


def in_scope(layer, name="layer"):
    return jax.named_scope(name)(layer)


def drop(a):
    return jnp.where(KEEP, a / 0.8, 0)


# Refused


def pre_norm(x):
    return x + attend(norm(x))


def two_sublayers(x):
    x = pre_norm(x)
    return x + jax.nn.gelu(norm(x) @ W) @ U


def residual_entered(x):
    h = norm(x)
    with jax.named_scope("layer"):
        return attend(h) + x


def gated(x):
    gate = jax.nn.sigmoid(x @ W)
    return (1 - gate) * x + gate * attend(x)


def halves(x):
    first, second = jnp.split(x, 2, axis=-1)
    first = first + attend(x)[:, : D // 2]
    return jnp.concatenate([first, second + jnp.tanh(first @ W[: D // 2, : D // 2])], axis=-1)


def reshaped(x):
    flat = x.reshape(-1)
    return (flat + attend(x).reshape(-1)).reshape(x.shape).astype(x.dtype)


def in_condition(x):
    return jax.lax.cond(jnp.sum(W) > 0, lambda x: x + 2 * attend(x), lambda x: x + attend(x), x)


def only_first_tokens(x):
    return x.at[:2].add(attend(x)[:2])


def scanned(body):
    return lambda x: jax.lax.scan(lambda x, _: (body(x), None), x, None, length=DEPTH)[0]


@jax.custom_jvp
def with_own_rule(x):
    return pre_norm(x)


with_own_rule.defjvp(lambda primals, tangents: jax.jvp(pre_norm, primals, tangents))


def layer_and_mlp(x):
    """An attention that contains its skip, and an MLP with a skip around it."""
    x = in_scope(pre_norm)(x)
    return x + jax.nn.gelu(x @ W) @ U


REFUSED = {
    "plain": repeat(in_scope(pre_norm)),
    "norm after the sum": repeat(in_scope(lambda x: norm(x + attend(x)))),
    "relu after the sum": repeat(in_scope(lambda x: jax.nn.relu(x + attend(x)))),
    "a whole layer": repeat(in_scope(two_sublayers)),
    "the residual is an argument": repeat(residual_entered),
    "a scaled skip": repeat(in_scope(lambda x: 0.5 * x + attend(x))),
    "a vector of scales": repeat(in_scope(lambda x: jnp.einsum("nd,d->nd", x, GAIN) - attend(x))),
    "a normed skip": repeat(in_scope(lambda x: norm(x) + attend(norm(x)))),
    "a skip through a dropout mask": repeat(in_scope(lambda x: drop(x) + attend(x))),
    "a dropout mask of the sum": repeat(in_scope(lambda x: drop(x + drop(attend(x))))),
    "a gated skip": repeat(in_scope(gated)),
    "a choice by a mask": repeat(in_scope(lambda x: jnp.where(KEEP, x, attend(x)))),
    "two halves": repeat(in_scope(halves)),
    "reshaped": repeat(in_scope(reshaped)),
    "the sum of a stack": repeat(in_scope(lambda x: jnp.stack([x, attend(x)]).sum(0))),
    "some tokens": repeat(in_scope(only_first_tokens)),
    "jit inside": repeat(in_scope(jax.jit(pre_norm))),
    "jit outside": jax.jit(repeat(jax.jit(in_scope(pre_norm)))),
    "remat": repeat(jax.checkpoint(in_scope(two_sublayers))),
    "scan": scanned(in_scope(pre_norm)),
    "scan of remat": scanned(jax.checkpoint(in_scope(pre_norm))),
    "a scan inside": in_scope(scanned(pre_norm)),
    "vmap": lambda x: jax.vmap(repeat(in_scope(pre_norm)))(x[None])[0],
    "custom_jvp": repeat(in_scope(with_own_rule)),
    "cond inside": repeat(in_scope(in_condition)),
    "cond outside": repeat(
        lambda x: jax.lax.cond(jnp.sum(W) > 0, in_scope(pre_norm), lambda x: x @ V, x)
    ),
    "nested scopes": in_scope(repeat(in_scope(pre_norm, "block"))),
    "beside a right branch": repeat(layer_and_mlp),
    "a name": repeat(lambda x: checkpoint_name(pre_norm(x), "layer")),
    "a name of a whole layer": repeat(lambda x: checkpoint_name(two_sublayers(x), "layer")),
}


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_a_branch_that_contains_its_skip_is_refused(x64, name, freeze):
    kind = "the value named" if "name" in name.split() else "the scope"
    message = rf"branches: {kind} 'layer' contains its own skip, .* at .*\.py:\d+.*'attn'"
    run = functools.partial(rc.function_contributions, branches="layer", freeze=freeze)
    is_refused(message, run, REFUSED[name], tokens())


def test_the_kind_of_the_branch_is_named(x64):
    both = {"attention": "layer", "mlp": "mlp"}
    fn = repeat(in_scope(pre_norm))
    fn_both = lambda x: fn(x) + in_scope(lambda x: x @ W, "mlp")(fn(x))  # noqa: E731
    message = r"branches\['attention'\]: the scope 'layer' contains its own skip"
    is_refused(message, rc.function_contributions, fn_both, tokens(), branches=both)


def equinox_model(x):
    for block in equinox_blocks():
        with jax.named_scope("block"):
            h = jax.vmap(block.norm1)(x)
            x = x + block.attention(h, h, h)
    return x


def linen_model(model):
    params = model.init(jax.random.key(1), tokens())
    return functools.partial(model.apply, params)


def nnx_model(x):
    for l in range(DEPTH):
        with jax.named_scope("block"):
            x = NNXBlock(nnx.Rngs(l))(x)
    return x


@pytest.mark.parametrize(
    ("make", "branches", "inside"),
    [
        (lambda: equinox_model, "block", "eqx.nn.MultiheadAttention"),
        (lambda: linen_model(LinenList()), r"block_\d", "attention"),
        (lambda: linen_model(LinenScan()), "block", "attention"),
        (lambda: nnx_model, "block", "attention"),
        (lambda: linen_model(LinenList()), "LinenList", "attention"),
    ],
)
def test_modules_of_libraries_that_contain_their_skip_are_refused(x64, make, branches, inside):
    message = f"contains its own skip.*such as '{inside}'"
    is_refused(message, rc.function_contributions, make(), tokens(), branches=branches)


def test_transport_refuses_it_as_well(x64):
    def fn(ids):
        x = checkpoint_name(tokens()[ids], "residual")
        for _ in range(DEPTH):
            x = checkpoint_name(in_scope(pre_norm)(x), "residual")
        return x

    scan = lambda ids: scanned(  # noqa: E731
        lambda x: checkpoint_name(in_scope(pre_norm)(x), "residual")
    )(tokens()[ids])
    for model in (fn, scan):
        is_refused(
            "the scope 'layer' contains its own skip.*'attn'",
            functools.partial(rc.paths.transport, layer=1, branches="layer", skip=0),
            model,
            jnp.arange(N),
            GAIN,
        )


# Not refused: each layer is skip(h) + branch(h), both linear once they are frozen at a state x.


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def frozen_attention(x):
    p = softmax(x @ Q @ x.T)
    return lambda h: p @ h @ V


def frozen_norm(x):
    centred = x - x.mean(-1, keepdims=True)
    scale = GAIN / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    return lambda h: (h - h.mean(-1, keepdims=True)) * scale


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def nothing(h):
    return np.zeros_like(h)


def same(h):
    return h


def shift(h, xp=np):
    return xp.concatenate([xp.zeros_like(h[:1]), h[:-1]])


def turn(h, xp=np):
    a, b = xp.split(h, 2, axis=-1)
    angle = np.arange(N)[:, None] * 0.3
    return xp.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1
    )


def pool(h, xp=np):
    return (h + xp.roll(h, 1, axis=0)) / 2


def chain(*maps):
    return lambda h: functools.reduce(lambda h, f: f(h), maps, h)


def branch(f):
    return in_scope(f)


def parallel(x):
    h = norm(x)
    return x + branch(attend)(h) + jax.nn.silu(h @ W) @ U


def frozen_parallel(x):
    n = frozen_norm(x)
    gate = sigmoid(n(x) @ W)
    return lambda h: h + (gate * (n(h) @ W)) @ U, chain(n, frozen_attention(n(x)))


def sandwich(x):
    return x + norm(branch(attend)(norm(x)))


def frozen_sandwich(x):
    n = frozen_norm(x)
    a = frozen_attention(n(x))
    return same, chain(n, a, frozen_norm(a(n(x))))


def value_mixing(h):
    v = h @ V
    return (0.3 * v + 0.7 * weights(h) @ v) @ W


def state_space(h):
    """A linear recurrence with the usual D u, of a projection of the input."""
    u = h @ W
    step = lambda s, u: (0.5 * s + u, 0.5 * s + u)  # noqa: E731
    return jax.lax.scan(step, jnp.zeros(D), u)[1] + GAIN * u


def frozen_state_space(h):
    u, s, out = h @ W, np.zeros(D), []
    for row in u:
        s = 0.5 * s + row
        out.append(s + GAIN * row)
    return np.stack(out)


def highway(x):
    t = jax.nn.sigmoid(x @ W)
    return (1 - t) * x + t * branch(attend)(x)


def frozen_highway(x):
    t, a = sigmoid(x @ W), frozen_attention(x)
    return lambda h: (1 - t) * h, lambda h: t * a(h)


def pooling(x):
    h = norm(x)
    return x + branch(lambda h: pool(h, jnp) - h)(h)


def alone(f):
    """No skip, the branch frozen at x."""
    return lambda x: (nothing, f(x))


ALLOWED = {
    "attention alone": (branch(attend), alone(frozen_attention)),
    "identity weights": (branch(lambda h: jnp.eye(N) @ h), alone(lambda x: same)),
    "identity mixed into the weights": (
        branch(lambda h: (0.4 * jnp.eye(N) + 0.6 * weights(h)) @ h),
        alone(lambda x: lambda h: 0.4 * h + 0.6 * softmax(x @ Q @ x.T) @ h),
    ),
    "values mixed with the average": (
        branch(value_mixing),
        alone(lambda x: lambda h: (0.3 * h @ V + 0.7 * frozen_attention(x)(h)) @ W),
    ),
    "two maps": (
        branch(lambda h: attend(h) + h @ W),
        alone(lambda x: lambda h: frozen_attention(x)(h) + h @ W),
    ),
    "a gate": (branch(jax.nn.silu), alone(lambda x: lambda h: sigmoid(x) * h)),
    "a gate by hand and a map": (
        branch(lambda h: h * jax.nn.sigmoid(h) + h @ W),
        alone(lambda x: lambda h: sigmoid(x) * h + h @ W),
    ),
    "a leaky gate and a map": (
        branch(lambda h: jnp.where(h > 0, h, 0.1 * h) + h @ W),
        alone(lambda x: lambda h: np.where(x > 0, 1, 0.1) * h + h @ W),
    ),
    "a norm": (branch(norm), alone(frozen_norm)),
    "a norm inside": (
        branch(lambda h: attend(norm(h))),
        alone(lambda x: chain(frozen_norm(x), frozen_attention(frozen_norm(x)(x)))),
    ),
    "token shift": (
        branch(lambda h: 0.3 * h + 0.7 * shift(h, jnp)),
        alone(lambda x: lambda h: 0.3 * h + 0.7 * shift(h)),
    ),
    "rotary": (branch(lambda h: turn(h, jnp)), alone(lambda x: turn)),
    "a recurrence": (branch(state_space), alone(lambda x: frozen_state_space)),
    "parallel layers": (parallel, frozen_parallel),
    "sandwich norms": (sandwich, frozen_sandwich),
    "a gain of the branch": (
        lambda x: x + GAIN * 0.1 * branch(attend)(x),
        lambda x: (same, lambda h: 0.1 * GAIN * frozen_attention(x)(h)),
    ),
    "dropout": (
        lambda x: x + drop(branch(attend)(x)),
        lambda x: (same, lambda h: KEEP / 0.8 * frozen_attention(x)(h)),
    ),
    "a gated skip outside": (highway, frozen_highway),
    "the input subtracted": (
        pooling,
        lambda x: (same, chain(frozen_norm(x), lambda h: pool(h) - h)),
    ),
    "a skip inside and outside": (
        lambda x: x + branch(lambda h: h + attend(h))(x),
        lambda x: (same, lambda h: h + frozen_attention(x)(h)),
    ),
    "norm after the sum": (
        lambda x: norm(x + branch(attend)(x)),
        lambda x: (
            frozen_norm(x + frozen_attention(x)(x)),
            chain(frozen_attention(x), frozen_norm(x + frozen_attention(x)(x))),
        ),
    ),
    "a name of values before their projection": (
        lambda x: checkpoint_name((lambda v: 0.3 * v + 0.7 * weights(x) @ v)(x @ V), "layer") @ W,
        alone(lambda x: lambda h: (0.3 * h @ V + 0.7 * frozen_attention(x)(h)) @ W),
    ),
}


def enumerate_paths(x, freeze):
    """Sums of all 2^L paths by length."""
    x = np.asarray(x)
    states, maps = [x], []
    for _ in range(DEPTH):
        maps.append(freeze(states[-1]))
        states.append(sum(f(states[-1]) for f in maps[-1]))
    sums = np.zeros((DEPTH + 1, *x.shape))
    for path in itertools.product((0, 1), repeat=DEPTH):
        sums[sum(path)] += chain(*(pair[taken] for pair, taken in zip(maps, path, strict=True)))(x)
    return sums


@pytest.mark.parametrize("spelling", ["loop", "scan"])
@pytest.mark.parametrize("name", ALLOWED)
def test_a_branch_without_its_skip_has_the_sums_of_all_paths(x64, name, spelling):
    layer, freeze = ALLOWED[name]
    x, fn = tokens(), {"loop": repeat, "scan": scanned}[spelling](layer)
    result = contributions(fn, x, "layer")
    assert_close(result.by_length, enumerate_paths(x, freeze), atol=1e-11)


def test_values_of_the_first_layer_may_be_added_inside(x64):
    """Value residuals: v + v₁ with v₁ = x₀ U, computed before all branches."""
    x = tokens()

    def fn(x):
        first, state = x @ U, x
        for _ in range(DEPTH):
            with jax.named_scope("layer"):
                state = weights(state) @ (state @ V + first)
        return state

    state, sums = np.asarray(x), [np.asarray(x), *np.zeros((DEPTH, N, D))]
    for _ in range(DEPTH):
        p = softmax(state @ Q @ state.T)
        sums = [np.zeros((N, D)), *(p @ s @ V for s in sums[:-1])]
        sums[1] = sums[1] + p @ x @ U
        state = p @ (state @ V + x @ U)
    assert_close(contributions(fn, x, "layer").by_length, sums, atol=1e-11)
