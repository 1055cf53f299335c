"""Branches without their skip are not refused, and their sums are those of all paths.

Each layer is skip(h) + branch(h), both linear once they are frozen at a state x.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import rank_collapse as rc
from tests.oracles.frozen_paths import FrozenNorm, softmax
from tests.oracles.function_paths import contributions, ranks_of_others as ranks_of_others
from tests.oracles.jax_layers import tokens
from tests.oracles.skip_layers import (
    DEPTH,
    GAIN,
    KEEP,
    D,
    N,
    Q,
    U,
    V,
    W,
    attend,
    drop,
    in_scope,
    norm,
    repeat,
    scanned,
    weights,
)
from tests.support.closeness import assert_close
from tests.support.marks import full_but


def frozen_attention(x):
    p = softmax(x @ Q @ x.T)
    return lambda h: p @ h @ V


def frozen_norm(x):
    return FrozenNorm(x, (GAIN, 0.0), "layer", 1e-6).carry


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
    "a condition that keeps the state in one case": (
        in_scope(lambda h: attend(h) + jax.lax.cond(W[0, 0] > 9, lambda h: h, lambda h: h @ V, h)),
        alone(lambda x: lambda h: frozen_attention(x)(h) + h @ V),
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
    "a function of each entry that is moved and moved back, and the state": (
        in_scope(lambda h: jnp.flip(jnp.flip(jnp.tanh(h), 0), 0) + 0.5 * h),
        alone(lambda x: lambda h: (np.tanh(x) / x + 0.5) * h),
    ),
    "a sum over tokens of a rectified state": (
        in_scope(lambda h: jax.nn.relu(h).sum(0, keepdims=True) + attend(jax.nn.relu(h))),
        alone(
            lambda x: (
                lambda h: (
                    ((x > 0) * h).sum(0, keepdims=True)
                    + frozen_attention(np.maximum(x, 0))((x > 0) * h)
                )
            )
        ),
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
    "a branch where the state is positive": (
        lambda x: x + in_scope(lambda h: jnp.where(h > 0, attend(h), 0))(x),
        lambda x: (same, lambda h: (x > 0) * frozen_attention(x)(h)),
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


QUICK_ALLOWED = (
    "a gate by hand and a map",
    "a condition that keeps the state in one case",
    "a branch where the state is positive",
    "the input subtracted",
    "a recurrence",
)


@pytest.mark.parametrize("spelling", ["loop", pytest.param("scan", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", full_but(ALLOWED, *QUICK_ALLOWED))
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


@pytest.mark.parametrize("name", ALLOWED)
def test_a_branch_without_its_skip_is_not_refused(x64, name):
    for spelling in (repeat, scanned):
        fn = spelling(ALLOWED[name][0])
        run = functools.partial(rc.function_contributions, fn, branches="layer")
        assert jax.eval_shape(run, tokens()).by_length.shape == (DEPTH + 1, N, D)


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
