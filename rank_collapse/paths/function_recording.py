"""Recordings of any JAX function with scopes, for `rank-collapse agree`.

Example:

    rc.record_function(model, x, "b.safetensors", branches={"attention": "att", "mlp": "mlp"})
"""

import os
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.agree.other_inputs import OtherInputs
from rank_collapse.agree.recording import write_recording
from rank_collapse.annotations import ArrayLike, Tree
from rank_collapse.checks import refuse
from rank_collapse.paths.traced.branches import Branches
from rank_collapse.paths.traced.layers import group_layers
from rank_collapse.paths.traced.programs import trace
from rank_collapse.paths.traced.replaying import Replacement
from rank_collapse.paths.traced.stream import StreamReader


def record_function(
    fn: Callable[[Tree], Tree],
    x: ArrayLike,
    path: str | os.PathLike,
    *,
    branches: str | Mapping[str, str],
    inputs: str | os.PathLike | None = None,
    noise: float = 0.0,
    seed: int = 0,
    **arrays: object,
) -> None:
    """Record the residual stream and the branches of a JAX function, without changing the function.

    The function is computed once, equation by equation and not fused, in its own dtypes. A branch
    is a value that leaves a scope (of `jax.named_scope`; Equinox and Flax Linen set one for each
    module) or that has a name (of `jax.ad_checkpoint.checkpoint_name`), and that is added to a
    state of its shape.

    Args:
        fn: Function of one array (embeddings, or token ids [n] or [b, n]) that returns arrays, the
            output first. Its states have the shape [n, d] or [b, n, d].
        x: The input.
        path: An .npz or .safetensors file; with inputs=, a .safetensors file.
        branches: See `function_contributions`. {"attention": …, "mlp": …} records both. A model
            with MLPs needs both, because the state after its last layer is the sum with the last
            branch.
        inputs: The recording of another run of the same tokens. Every branch takes in the stream of
            that run, so that its own error is measured without the errors before it. The function
            is computed twice, first on its own stream.
        noise: Relative size of the noise that is added to these inputs; it shows how much a branch
            amplifies errors.
        seed: Seed of the noise.
        arrays: mask=, token_ids= and logits=, which are also written.

    Raises:
        ValueError: A pattern without a match, with the nearest scopes; branches that are not added
            to one stream; arrays that do not fit; inputs of other tokens or layers.

    Example: docs/agree.md.
    """
    counted = Branches(branches)
    refuse(
        (not callable(fn), f"fn is {type(fn).__name__}, not a function of x"),
        (
            isinstance(x, jax.core.Tracer),
            "record_function writes a file, so it must be called outside of jit",
        ),
    )
    other_inputs = None if inputs is None else OtherInputs(inputs, noise, seed, out=path)
    program, _ = trace(fn, jnp.asarray(x))
    layers = _read_layers(program, x, counted)
    if other_inputs is not None:
        layers = _replay_layers(program, x, counted, layers, other_inputs)
        other_inputs.check_complete(
            len(layers.numbers), _read_mask(arrays.get("mask"), other_inputs)
        )
    collected = {"residual": layers.residual}
    collected |= {f"{counted.kinds[axis]}_branch": list_ for axis, list_ in layers.branches.items()}
    stacked = {name: np.stack([np.asarray(a) for a in list_]) for name, list_ in collected.items()}
    refuse(
        (
            stacked["residual"].ndim not in (3, 4),
            f"fn has states of the shape {list(stacked['residual'].shape[1:])}, but they must be "
            "[tokens, width] or [examples, tokens, width]",
        ),
    )
    stacked |= {name: np.asarray(array) for name, array in arrays.items() if array is not None}
    metadata = {"jax": jax.__version__, "branches": str(branches)}
    if other_inputs is not None:
        stacked.pop("logits", None)  # of a stream that is no run's
        metadata |= other_inputs.describe()
    write_recording(path, stacked, metadata)


def _read_layers(program, x, branches):
    """Return the layers of a function on its own stream."""
    reader = StreamReader(branches)
    outputs = reader.run(program.jaxpr, program.consts, [reader.start(jnp.asarray(x))])
    branches.check_matched(program.jaxpr)
    return group_layers(reader.sums, outputs[0].array)


def _replay_layers(program, x, branches, layers, other_inputs):
    """Return the layers of a function in which each layer took in the stream of the other run.

    Args:
        program: The traced program of the function.
        x: Input of the function.
        branches: Patterns of the branches.
        layers: Layers of the function on its own stream.
        other_inputs: Stream of the other run.
    """
    other_inputs.begin_call()
    states = {number: layer for layer, number in enumerate(layers.numbers)}
    names = [f"{kind}_branch" for kind in branches.kinds]
    replacement = Replacement(other_inputs, states, [(i, names[axis]) for i, axis in layers.places])
    reader = StreamReader(branches, replacement)
    outputs = reader.run(program.jaxpr, program.consts, [reader.start(jnp.asarray(x))])
    replayed = group_layers(reader.sums, outputs[0].array, layers.is_output)
    replacement.check_complete([(i, names[axis]) for i, axis in replayed.places])
    states_before = [replacement.replaced[layer] for layer in range(len(states))]
    return replayed._replace(residual=[*states_before, replayed.residual[-1]])


def _read_mask(mask, other_inputs):
    """Return a mask in the other run's form, or None."""
    return None if mask is None else np.asarray(mask).astype(bool).reshape(other_inputs.mask.shape)
