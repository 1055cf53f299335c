"""The mean Jacobians of a causal language model as a file of the Jacobian lens (jlens).

The lens reads a state after layer l by J_l h, and the model's head: J_l is the mean over texts and
over source positions of the derivative of the last state, summed over the source and all later
positions, by the state after layer l. The first 16 positions and the last one are left out. The
file is what `torch.save` writes of a dictionary: J {layer: [d, d]}, source_layers, n_prompts,
d_model; a row of J is an entry of the last state.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import rank_collapse as rc
from rank_collapse.runs.files import open_replacement

FIRST = 16  # positions before it are those of attention sinks
ROWS = 16  # entries of the last state at once


def check_possible(max_tokens: int) -> None:
    """Check that a lens can be made.

    Raises:
        ValueError: Texts are too short, or PyTorch, whose file format is used, is not installed.
    """
    if max_tokens < FIRST + 2:
        raise ValueError(f"--lens_folder needs --max_tokens={FIRST + 2} or more, not {max_tokens}")
    if importlib.util.find_spec("torch") is None:
        raise ValueError("--lens_folder needs PyTorch, because the files are in its format")


def sum_jacobians(
    params: rc.network.TransformerParams,
    config: rc.TransformerConfig,
    ids: Int[np.ndarray, "n"],
    is_valid: Bool[np.ndarray, "n"],
) -> Float[Array, "l d d"]:
    """Compute the mean Jacobian J_l of one text from the state after each layer l to the last
    state.

    A state at one position moves the last state at all valid positions; these effects are added up,
    and averaged over the positions of the state.

    Args:
        params, config: The network.
        ids: The text.
        is_valid: The positions that count as sources and as targets.

    Returns:
        [layer, entry of the last state, entry of the state].
    """
    mask = jnp.asarray(is_valid)[:, None]

    def last_state(changes):
        def add(state, layer):
            return state + changes[layer]

        return rc.apply(params, ids, config, edit={"residual": add}).hidden[-1]

    shape = (config.depth, len(ids), config.d_model)
    _, pull = jax.vjp(last_state, jnp.zeros(shape, jnp.float32))

    def compute_row(entry):
        cotangent = jnp.zeros(shape[1:], jnp.float32).at[:, entry].set(1) * mask
        (gradients,) = pull(cotangent)
        return jnp.sum(gradients * mask[None], axis=1) / jnp.sum(mask)

    rows = jax.lax.map(compute_row, jnp.arange(config.d_model), batch_size=ROWS)
    return jnp.moveaxis(rows, 1, 0)


def mean_jacobians(
    params: rc.network.TransformerParams,
    config: rc.TransformerConfig,
    inputs: Mapping[str, np.ndarray],
) -> tuple[np.ndarray, int]:
    """Compute the mean over texts of `sum_jacobians`.

    Args:
        params, config: The network.
        inputs: x and mask [b, n].

    Returns:
        (the mean, the number of texts that are long enough, over which it is taken).

    Raises:
        ValueError: All texts are too short.
    """
    compute = jax.jit(lambda params, ids, valid: sum_jacobians(params, config, ids, valid))
    total, count = 0.0, 0
    for ids, mask in zip(inputs["x"], inputs["mask"], strict=True):
        places = np.arange(len(ids))
        is_valid = (places >= FIRST) & (places < mask.sum() - 1)
        if is_valid.any():
            total, count = total + np.asarray(compute(params, ids, is_valid), np.float64), count + 1
    if not count:
        raise ValueError(f"no text has {FIRST + 2} tokens, which a lens needs")
    return total / count, count


def write_lens(path: Path, jacobians: np.ndarray, num_texts: int) -> None:
    """Write the file, in half precision, without the last layer, whose J is the identity.

    Args:
        path: The file.
        jacobians: [l, d, d], from `mean_jacobians`.
        num_texts: Number of texts in the mean.
    """
    import torch  # here: an optional package

    layers = range(len(jacobians) - 1)
    content = {
        "J": {layer: torch.tensor(jacobians[layer], dtype=torch.float16) for layer in layers},
        "n_prompts": num_texts,
        "source_layers": [*layers],
        "d_model": jacobians.shape[-1],
    }
    with open_replacement(path) as file:
        torch.save(content, file)
