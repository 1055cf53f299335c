"""Gradient ascent on weights and tokens towards a violation of the bounds of a layer and a stack.

Attention and its bounds are written out here in plain arithmetic, apart from the library's.

Axis letters: n tokens, m keys, d width, h heads, k per-head width, r restarts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rank_collapse.runs.seeds import QUICK

BOUNDS = ("layer", "mean_layer", "stack")
SHAPES = ((2, 3, 2), (5, 7, 3))  # n, d, H
RESTARTS, RATE, KEY_WIDTH = 4, 0.03, 3


def climb(seed: int, num_steps: int) -> dict[str, np.ndarray]:
    """{bound: its least tightness over all steps of each shape and restart [s, r]}, in float64.

    Adam on log10 residual − log10 bound of one of `BOUNDS` at a time, from `RESTARTS` draws of
    Gaussian weights of two layers and tokens of each of `SHAPES`.

    Args:
        seed: Of the restarts.
        num_steps: Steps of each; 0 for where it starts.
    """
    optimiser = optax.adam(optax.linear_schedule(RATE, RATE / 30, max(num_steps, 1)))

    def restart(start, which):
        def step(carry, _):
            variables, state = carry
            value, slope = jax.value_and_grad(lambda v: tightness(v)[which])(variables)
            change, state = optimiser.update(slope, state)
            return (optax.apply_updates(variables, change), state), value

        start = start, optimiser.init(start)
        return jnp.min(jax.lax.scan(step, start, None, length=num_steps + 1)[1])

    @jax.jit(compiler_options=QUICK)
    def all_bounds(drawn):
        every = jnp.arange(len(BOUNDS))
        return jax.vmap(lambda w: jax.vmap(lambda start: restart(start, w))(drawn))(every)

    with jax.enable_x64(True):
        random = np.random.default_rng(seed)
        found = [all_bounds(_draw(random, *shape)) for shape in SHAPES]
        return dict(zip(BOUNDS, np.stack(jax.device_get(found), axis=1), strict=True))


def _draw(random, num_tokens, width, num_heads):
    inner = {"q": KEY_WIDTH, "k": KEY_WIDTH, "v": width}
    weights = {n: random.standard_normal((RESTARTS, 2, num_heads, width, k)) / np.sqrt(width)
               for n, k in inner.items()}  # fmt: skip
    return weights | {"x": random.standard_normal((RESTARTS, num_tokens, width))}


def tightness(variables: dict[str, jax.Array]) -> jax.Array:
    """log10 bound − log10 residual around the mean token of each of `BOUNDS`, W_V W_O one matrix.

    Args:
        variables: "q" and "k" [2, h, d, k], "v" [2, h, d, d], "x" [n, d].
    """
    x = variables["x"]
    log10_c, sizes, found = [], [], []
    for layer in range(2):
        w_q, w_k, w = (variables[name][layer] for name in "qkv")
        rest = x - jnp.mean(x, axis=0, keepdims=True)
        query, common = (jnp.einsum("nd,hdk->hnk", a, w_q) for a in (rest, x - rest))
        keys = jnp.einsum("md,hdk->hmk", rest, w_k) / np.sqrt(KEY_WIDTH)
        scores = jnp.einsum("hnk,hmk->hnm", query, keys)
        spread = jnp.max(scores, axis=2) - jnp.min(scores, axis=2)
        weights = jax.nn.softmax(scores + jnp.einsum("hnk,hmk->hnm", common, keys), axis=2)
        x = jnp.einsum("hnm,md,hde->ne", weights, x, w)
        one, inf = (jnp.max(jnp.sum(jnp.abs(w), axis=a), axis=1) for a in (1, 2))
        columns = jnp.sum(jnp.sum(spread, axis=1) * one)
        rows = jnp.sum(jnp.max(spread, axis=1) * inf)
        around = jnp.sum((jnp.max(spread, axis=1) + jnp.mean(spread, axis=1)) * inf)
        before, after = _log10_norm(rest), _log10_norm(x - jnp.mean(x, axis=0, keepdims=True))
        by_lemma = np.log10(2) + jnp.log10(columns * rows) / 2
        log10_c.append(by_lemma - 2 * before)
        sizes.append(before)
        found += [by_lemma + before - after, jnp.log10(columns * around / 4) / 2 + before - after]
    stack = 4 * jnp.maximum(*log10_c) + 9 * sizes[0] - after
    return jnp.stack([*found[:2], stack])


def _log10_norm(x):
    size = jnp.abs(x)
    return jnp.log10(jnp.max(jnp.sum(size, axis=0)) * jnp.max(jnp.sum(size, axis=1))) / 2
