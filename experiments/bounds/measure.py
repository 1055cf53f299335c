"""What check_bounds measures: random networks, their bounds, and by how much the lemma fails."""

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from rank_collapse.network import attention
from rank_collapse.theory import bounds

SHAPES = ((8, 16, 1), (8, 16, 4), (16, 8, 2), (3, 4, 2))  # tokens, width, heads


def draw_shape(
    seed: int, index: int, num_draws: int, shapes: tuple[tuple[int, int, int], ...]
) -> dict[str, np.ndarray]:
    """`single_draw` of the index-th shape, [draws, ...], in float64."""
    with jax.enable_x64(True):
        key = jax.random.split(jax.random.key(seed), len(shapes))[index]
        batch = jax.jit(jax.vmap(lambda k: single_draw(k, *shapes[index])))
        return jax.device_get(batch(jax.random.split(key, num_draws)))


def single_draw(key, num_tokens, width, num_heads):
    """One network of two layers, its bounds, and by how much the lemma fails in its first layer."""
    config = rc.san(2, num_heads, width)
    key_params, key_weights, key_size, key_tokens, key_mean = jax.random.split(key, 5)

    def size(key, low, high):
        return 10 ** jax.random.uniform(key, (), minval=low, maxval=high)

    params = rc.init(key_params, config, size(key_weights, -1, 0.4), 0.3)
    x = size(key_size, -1.2, 0.3) * jax.random.normal(key_tokens, (num_tokens, width))
    x = x + jax.random.normal(key_mean, (1, width))
    report = rc.bound_report(params, x, config)
    excess = lemma_excess(rc.layer_params(params, config, 0).attention, x)
    nothing = jnp.full_like(excess, -1)
    return {
        "head_ok": report.admissible,
        "layer_ok": report.admissible.all(1),
        "stack_ok": report.stack_admissible[None],
        "lemma_excess": jnp.stack([excess, nothing]),
        "head_tightness": report.head.tightness,
        "layer_tightness": report.layer.tightness,
        "stack_tightness": report.stack.tightness[None],
        "gamma": report.gamma,
    }


def lemma_excess(params, x):
    """The largest of (I − D)P̃ − P and P − (I + 2D)P̃, per head, less a margin for rounding."""
    rest = x - jnp.mean(x, axis=0, keepdims=True)
    w_qk, _ = bounds.head_weights(params)
    deviation = jnp.einsum("nd,hde,me->hnm", rest, w_qk, rest) / np.sqrt(params.w_q.shape[-1])
    spread = jnp.max(deviation, axis=-1) - jnp.min(deviation, axis=-1)
    scores = attention.attention_scores(params, x, x)
    weights = jax.nn.softmax(scores, axis=-1)
    common = jax.nn.softmax(scores - deviation, axis=-1)  # P̃: all its rows are equal
    low = (1 - spread[:, :, None]) * common - weights
    high = weights - (1 + 2 * spread[:, :, None]) * common
    return jnp.max(jnp.maximum(low, high), axis=(1, 2)) - 1e-13
