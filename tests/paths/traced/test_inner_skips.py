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


def mlp(x):
    return jax.nn.gelu(norm(x) @ W) @ U


def drop(a):
    return jnp.where(KEEP, a / 0.8, 0)


def repeat(layer):
    return lambda x: functools.reduce(lambda x, _: layer(x), range(DEPTH), x)


def scanned(layer):
    return lambda x: jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=DEPTH)[0]


def in_scope(layer, name="layer"):
    return jax.named_scope(name)(layer)


# Refused


def pre_norm(x):
    return x + attend(norm(x))


def two_sublayers(x):
    x = pre_norm(x)
    return x + mlp(x)


def residual_enters(x):
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


def in_bfloat16(x):
    half = x.astype(jnp.bfloat16)
    return (half + attend(norm(half)).astype(jnp.bfloat16)).astype(x.dtype)


@jax.custom_jvp
def with_own_rule(x):
    return pre_norm(x)


with_own_rule.defjvp(lambda primals, tangents: jax.jvp(pre_norm, primals, tangents))


def behind_good_layers(layer):
    return lambda x: layer(x + in_scope(attend)(x)) + in_scope(attend)(norm(x))


def value_residuals(x):
    """A whole layer in a scope, whose values are mixed with those of the first."""
    first, state = x @ V, x
    for _ in range(DEPTH):
        with jax.named_scope("layer"):
            p = weights(norm(state))
            with jax.named_scope("attn"):
                a = p @ (norm(state) @ V + first) @ U
            state = state + a
            state = state + mlp(state)
    return state


def among_good_layers(x):
    x = x + in_scope(attend)(norm(x))
    x = in_scope(pre_norm)(x)
    return x + in_scope(attend)(norm(x))


REFUSED = {
    "plain": repeat(in_scope(pre_norm)),
    "norm after the sum": repeat(in_scope(lambda x: norm(x + attend(x)))),
    "norm outside, after the sum": repeat(lambda x: norm(in_scope(pre_norm)(x))),
    "relu after the sum": repeat(in_scope(lambda x: jax.nn.relu(x + attend(x)))),
    "relu outside, after the sum": repeat(lambda x: jax.nn.relu(in_scope(pre_norm)(x))),
    "a whole layer": repeat(in_scope(two_sublayers)),
    "parallel layers": repeat(in_scope(lambda x: x + attend(norm(x)) + mlp(x))),
    "the residual is an argument": repeat(residual_enters),
    "the addition alone": repeat(lambda x: in_scope(jnp.add)(x, attend(norm(x)))),
    "behind an embedding": lambda x: repeat(residual_enters)(x @ U),
    "a scaled skip": repeat(in_scope(lambda x: 0.9 * x + attend(x))),
    "a vector of scales": repeat(in_scope(lambda x: jnp.einsum("nd,d->nd", x, GAIN) - attend(x))),
    "a normed skip": repeat(in_scope(lambda x: norm(x) + attend(norm(x)))),
    "a dropout mask": repeat(in_scope(lambda x: drop(drop(x) + drop(attend(x))))),
    "a gated skip": repeat(in_scope(gated)),
    "a choice by a mask": repeat(in_scope(lambda x: jnp.where(KEEP, x, attend(x)))),
    "two halves": repeat(in_scope(halves)),
    "reshaped": repeat(
        in_scope(lambda x: (x.T.reshape(-1) + attend(x).T.reshape(-1)).reshape(D, N).T)
    ),
    "bfloat16": repeat(in_scope(in_bfloat16)),
    "the sum of a stack": repeat(in_scope(lambda x: jnp.stack([x, attend(x)]).sum(0))),
    "some tokens": repeat(in_scope(lambda x: x.at[:2].add(attend(x)[:2]))),
    "jit inside": repeat(in_scope(jax.jit(pre_norm))),
    "jit outside": jax.jit(repeat(jax.jit(in_scope(pre_norm)))),
    "remat": repeat(jax.checkpoint(in_scope(two_sublayers))),
    "scan": scanned(in_scope(pre_norm)),
    "scan of remat": scanned(jax.checkpoint(in_scope(pre_norm))),
    "scan, the residual is an argument": scanned(residual_enters),
    "a scan inside": in_scope(scanned(pre_norm)),
    "vmap": lambda x: jax.vmap(repeat(in_scope(pre_norm)))(x[None])[0],
    "custom_jvp": repeat(in_scope(with_own_rule)),
    "cond inside": repeat(
        in_scope(lambda x: jax.lax.cond(W[0, 0] > 0, pre_norm, lambda x: x + 2 * attend(x), x))
    ),
    "cond outside": repeat(
        lambda x: jax.lax.cond(W[0, 0] > 9, in_scope(pre_norm), lambda x: x @ V, x)
    ),
    "nested scopes": in_scope(repeat(in_scope(pre_norm, "block"))),
    "beside an MLP with a skip around it": repeat(lambda x: two_sublayers(in_scope(pre_norm)(x))),
    "among good layers": among_good_layers,
    "two towers": lambda x: repeat(in_scope(pre_norm))(x) + repeat(in_scope(pre_norm))(x),
    "value residuals": value_residuals,
    "a name": repeat(lambda x: checkpoint_name(pre_norm(x), "layer")),
    "a name of a whole layer": repeat(lambda x: checkpoint_name(two_sublayers(x), "layer")),
    "a name in a scan": scanned(lambda x: checkpoint_name(norm(x + attend(x)), "layer")),
}
QUICK = ("plain", "a gated skip", "scan of remat", "cond outside", "a name")


@pytest.mark.parametrize("freeze", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in REFUSED]
)
def test_a_branch_that_contains_its_skip_is_refused(x64, name, freeze):
    kind = "name" if "name" in name.split() else "scope"
    message = rf"branches: the {kind} 'layer' contains its own skip at .*\.py:\d+.*, so every path"
    if name != "the addition alone":
        message += ".*such as 'attn'"
    run = functools.partial(rc.function_contributions, branches="layer", freeze=freeze)
    is_refused(message, run, REFUSED[name], tokens())


def test_the_kind_of_the_branch_is_named(x64):
    def fn(x):
        for _ in range(DEPTH):
            x = in_scope(pre_norm)(x)
            x = x + in_scope(mlp, "mlp")(x)
        return x

    both = {"attention": "layer", "mlp": "mlp"}
    message = r"branches\['attention'\]: the scope 'layer' contains its own skip"
    is_refused(message, rc.function_contributions, fn, tokens(), branches=both)


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
        pytest.param(
            lambda: linen_model(LinenList()), r"block_\d", "attention", marks=pytest.mark.full
        ),
        (lambda: linen_model(LinenScan()), "block", "attention"),
        (lambda: nnx_model, "block", "attention"),
        pytest.param(
            lambda: linen_model(LinenList()), "LinenList", "attention", marks=pytest.mark.full
        ),
    ],
)
def test_modules_of_libraries_that_contain_their_skip_are_refused(x64, make, branches, inside):
    message = f"contains its own skip.*such as '{inside}'"
    is_refused(message, rc.function_contributions, make(), tokens(), branches=branches)


def test_transport_refuses_it_as_well(x64):
    def named(x):
        return checkpoint_name(in_scope(pre_norm)(x), "residual")

    def fn(ids):
        return repeat(named)(checkpoint_name(tokens()[ids], "residual"))

    def scan(ids):
        return scanned(named)(tokens()[ids])

    run = functools.partial(rc.paths.transport, layer=1, branches="layer", skip=0)
    for model in (fn, scan):
        message = "the scope 'layer' contains its own skip.*'attn'"
        is_refused(message, run, model, jnp.arange(N), GAIN)


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


def frozen_parallel(x):
    n = frozen_norm(x)
    gate = sigmoid(n(x) @ W)
    return lambda h: h + (gate * (n(h) @ W)) @ U, chain(n, frozen_attention(n(x)))


def frozen_sandwich(x):
    n = frozen_norm(x)
    a = frozen_attention(n(x))
    return same, chain(n, a, frozen_norm(a(n(x))))


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
    return (1 - t) * x + t * in_scope(attend)(x)


def frozen_highway(x):
    t, a = sigmoid(x @ W), frozen_attention(x)
    return lambda h: (1 - t) * h, lambda h: t * a(h)


def beside(branch):
    """A skip around the branch of a normed state."""
    return lambda x: x + in_scope(branch)(norm(x))


def post_norm(x):
    return norm(x + in_scope(attend)(x))


def frozen_post_norm(x):
    n = frozen_norm(x + frozen_attention(x)(x))
    return n, chain(frozen_attention(x), n)


def named_values(x):
    v = x @ V
    return checkpoint_name(0.3 * v + 0.7 * weights(x) @ v, "layer") @ W


def alone(f):
    """No skip, the branch frozen at x."""
    return lambda x: (nothing, f(x))


NEAR_IDENTITY = jnp.eye(D) + 1e-9 * W
ALLOWED = {
    "attention alone": (in_scope(attend), alone(frozen_attention)),
    "a matrix near the identity": (
        in_scope(lambda h: h @ NEAR_IDENTITY),
        alone(lambda x: lambda h: h @ NEAR_IDENTITY),
    ),
    "identity mixed into the weights": (
        in_scope(lambda h: (0.4 * jnp.eye(N) + 0.6 * weights(h)) @ h),
        alone(lambda x: lambda h: 0.4 * h + 0.6 * softmax(x @ Q @ x.T) @ h),
    ),
    "values mixed with the average": (
        in_scope(lambda h: 0.3 * h @ V + 0.7 * weights(h) @ h @ V),
        alone(lambda x: lambda h: 0.3 * h @ V + 0.7 * frozen_attention(x)(h)),
    ),
    "two maps": (
        in_scope(lambda h: attend(h) + h @ W),
        alone(lambda x: lambda h: frozen_attention(x)(h) + h @ W),
    ),
    "a gate of the state": (in_scope(jax.nn.silu), alone(lambda x: lambda h: sigmoid(x) * h)),
    "a gate of a map": (
        in_scope(lambda h: h * jax.nn.sigmoid(h @ W)),
        alone(lambda x: lambda h: sigmoid(x @ W) * h),
    ),
    "a gate by hand and a map": (
        in_scope(lambda h: h * jax.nn.sigmoid(h) + h @ W),
        alone(lambda x: lambda h: sigmoid(x) * h + h @ W),
    ),
    "two functions of each entry": (
        in_scope(lambda h: jnp.tanh(h) + h * jax.nn.sigmoid(h)),
        alone(lambda x: lambda h: (np.tanh(x) / x + sigmoid(x)) * h),
    ),
    "a function of each entry, and the state": (
        in_scope(lambda h: jnp.tanh(h) + 0.5 * h),
        alone(lambda x: lambda h: (np.tanh(x) / x + 0.5) * h),
    ),
    "a norm": (in_scope(norm), alone(frozen_norm)),
    "token shift": (
        in_scope(lambda h: 0.3 * h + 0.7 * shift(h, jnp)),
        alone(lambda x: lambda h: 0.3 * h + 0.7 * shift(h)),
    ),
    "rotary": (in_scope(lambda h: turn(h, jnp)), alone(lambda x: turn)),
    "a recurrence": (in_scope(state_space), alone(lambda x: frozen_state_space)),
    "parallel layers": (
        lambda x: x + in_scope(attend)(norm(x)) + jax.nn.silu(norm(x) @ W) @ U,
        frozen_parallel,
    ),
    "sandwich norms": (lambda x: x + norm(in_scope(attend)(norm(x))), frozen_sandwich),
    "a gain of the branch": (
        lambda x: x + GAIN * 0.1 * in_scope(attend)(x),
        lambda x: (same, lambda h: 0.1 * GAIN * frozen_attention(x)(h)),
    ),
    "dropout": (
        lambda x: x + drop(in_scope(attend)(x)),
        lambda x: (same, lambda h: KEEP / 0.8 * frozen_attention(x)(h)),
    ),
    "a gated skip outside": (highway, frozen_highway),
    "the input subtracted": (
        beside(lambda h: pool(h, jnp) - h),
        lambda x: (same, chain(frozen_norm(x), lambda h: pool(h) - h)),
    ),
    "a skip inside and outside": (
        lambda x: x + in_scope(lambda h: h + attend(h))(x),
        lambda x: (same, lambda h: h + frozen_attention(x)(h)),
    ),
    "a skip inside, and outside after it": (
        lambda x: in_scope(lambda h: h + attend(h))(x) + x,
        lambda x: (same, lambda h: h + frozen_attention(x)(h)),
    ),
    "norm after the sum": (post_norm, frozen_post_norm),
    "a name of values before their projection": (
        named_values,
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


QUICK_ALLOWED = ("a gate by hand and a map", "the input subtracted", "a recurrence")


@pytest.mark.parametrize("spelling", ["loop", pytest.param("scan", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name",
    [n if n in QUICK_ALLOWED else pytest.param(n, marks=pytest.mark.full) for n in ALLOWED],
)
def test_a_branch_without_its_skip_has_the_sums_of_all_paths(x64, name, spelling):
    layer, freeze = ALLOWED[name]
    x, fn = tokens(), {"loop": repeat, "scan": scanned}[spelling](layer)
    result = contributions(fn, x, "layer")
    assert_close(result.by_length, enumerate_paths(x, freeze), atol=1e-11)
    exact = contributions(fn, x, "layer", freeze=False)
    assert_close(exact.by_length.sum(0), jax.jvp(fn, (x,), (x,))[1], atol=1e-9)


def add_first(state, first):
    """A branch that adds a state of before all branches to a map of its input."""
    with jax.named_scope("layer"):
        return state @ V + first


@pytest.mark.parametrize("entry", ["the input", "a map of it"])
def test_a_state_of_before_all_branches_may_be_added_inside(x64, entry):
    x = tokens()
    m = np.eye(D) if entry == "the input" else np.asarray(U, float)

    def fn(x):
        first = x if entry == "the input" else x @ U
        return functools.reduce(lambda state, _: add_first(state, first), range(DEPTH), x)

    v, state, sums = np.asarray(V, float), np.asarray(x), np.zeros((DEPTH + 1, N, D))
    for k in range(DEPTH):
        sums[k + 1] += x @ m @ np.linalg.matrix_power(v, k)
    sums[DEPTH] += state @ np.linalg.matrix_power(v, DEPTH)
    assert_close(contributions(fn, x, "layer").by_length, sums, atol=1e-11)


def test_a_first_layer_without_a_skip_moves_all_paths(x64):
    x = tokens()

    def fn(x):
        return repeat(lambda x: x + in_scope(attend)(x))(in_scope(attend)(x))

    first = np.asarray(attend(x))
    sums = enumerate_paths(first, lambda x: (same, frozen_attention(x)))
    want = np.concatenate([np.zeros((1, N, D)), sums])
    assert_close(contributions(fn, x, "layer").by_length, want, atol=1e-11)
