"""How much the attention of a trained layer can stretch a change of its input, by the number of
tokens.

The constant is the largest singular value of the Jacobian of one layer's self-attention, with all
heads and the output matrix, without the skip and the norm, at the layer's input for a text: the
local Lipschitz constant of Castin et al. 2024 (2312.14820).

Axis letters: b texts, l layers, n tokens, d width.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from rank_collapse import pretrained
from rank_collapse.network.passes import LayerMeasure
from rank_collapse.network.transformer import LayerValues, TokenAlgebra
from rank_collapse.network.walk import Layer
from rank_collapse.pretrained.streaming import Group

STEPS = 24  # of the power iteration


def largest_singular_value(
    fn: Callable[[Array], Array], x: Float[Array, "n d"], steps: int = STEPS
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Computes the largest singular value of the Jacobian J of a function, by power iteration.

    Each step multiplies by J and by Jᵀ. The value never exceeds the exact one.

    Args:
        fn: Function that takes x and returns an array.
        x: Point at which J is taken.
        steps: Number of iterations.

    Returns:
        The value after the last step, and its relative change by the last step.
    """
    _, push = jax.linearize(fn, x)
    pull = jax.linear_transpose(push, x)

    def step(direction, _):
        pushed = push(direction / jnp.linalg.norm(direction))
        return pull(pushed)[0], jnp.linalg.norm(pushed)

    start = jax.random.normal(jax.random.key(0), x.shape, x.dtype)
    _, sizes = jax.lax.scan(step, start, None, length=steps)
    return sizes[-1], 1 - sizes[-2] / sizes[-1]


def measure_attention(layer: Layer, x: Array, layer_values: LayerValues) -> dict[str, Array]:
    """Measures the local Lipschitz constant of a layer's attention.

    Args:
        layer: The layer.
        x: Unused: its input.
        layer_values: Values of the layer; its attention reads the input after the norm, if any.
    """

    def attend(branch_input):
        return TokenAlgebra().apply_attention(layer, branch_input)[0]

    largest, change = largest_singular_value(
        attend, layer_values.sublayers["attention"].branch_input
    )
    return {"largest": largest, "change": change}


def measure_texts(
    source: pretrained.OpenCheckpoint,
    inputs: Mapping[str, np.ndarray],
    num_tokens: int,
    chunk: int = 4,
) -> dict[str, np.ndarray]:
    """Measures the first tokens of each text; NaN for a text that has fewer.

    Args:
        source: The open checkpoint.
        inputs: x and mask [b, n]; spectrograms have no mask, and two frames of them are a token.
        num_tokens: Number of tokens in each text.
        chunk: Texts at once.

    Returns:
        "largest" and "change" [b, l].
    """
    x, mask = inputs["x"], inputs["mask"]
    if mask is None:  # spectrograms
        counts, width = np.full(len(x), x.shape[1] // 2), 2 * num_tokens
    else:
        counts, width = np.asarray(mask).sum(axis=1), num_tokens
    is_long = counts >= num_tokens
    shape = len(x), source.config.depth
    results = {name: np.full(shape, np.nan, np.float32) for name in ("largest", "change")}
    if is_long.any():
        cut = {"x": x[is_long, :width], "mask": None if mask is None else mask[is_long, :width]}
        group = {"": Group((("", LayerMeasure(measure_attention)),))}
        for name, values in pretrained.stream(source, cut, group, chunk=chunk)[""][""].items():
            results[name][is_long] = values
    return results


def fit_powers(largest: Float[np.ndarray, "n ..."], tokens: ArrayLike) -> Float[np.ndarray, "..."]:
    """Fits the power of the number of tokens by which a constant grows, by least squares.

    Args:
        largest: Constants by number of tokens; NaN where a text has fewer.
        tokens: The numbers.

    Returns:
        The slope of ln largest over ln tokens; NaN for fewer than three numbers.
    """
    values = np.log(largest)
    x = np.log(np.asarray(tokens, float)).reshape(-1, *[1] * (values.ndim - 1))
    x = np.where(np.isnan(values), np.nan, np.broadcast_to(x, values.shape))
    count = np.isfinite(values).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_x, mean = np.nansum(x, axis=0) / count, np.nansum(values, axis=0) / count
        covariance = np.nansum((x - mean_x) * (values - mean), axis=0)
        slope = covariance / np.nansum((x - mean_x) ** 2, axis=0)
    return np.where(count >= 3, slope, np.nan)
