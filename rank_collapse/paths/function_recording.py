"""Recordings of any JAX function with scopes, for `rank-collapse agree`.

rc.record_function(model, x, "b.safetensors", branches={"attention": "att", "mlp": "mlp"})
"""

import os
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.agree.recording import write_recording
from rank_collapse.annotations import ArrayLike, Tree
from rank_collapse.paths.traced.branches import Branches
from rank_collapse.paths.traced.programs import trace
from rank_collapse.paths.traced.stream import StreamReader, Tagged, group_layers
from rank_collapse.struct import refuse


def record_function(
    fn: Callable[[Tree], Tree],
    x: ArrayLike,
    path: str | os.PathLike,
    *,
    branches: str | Mapping[str, str],
    **arrays: object,
) -> None:
    """Record the residual stream and the branches of a JAX function, which is not changed for it.

    The function is computed once, equation by equation and not fused, in its own dtypes. A branch
    is what leaves a scope (of `jax.named_scope`; Equinox and Flax Linen set one for each module) or
    what has a name (of `jax.ad_checkpoint.checkpoint_name`), and is added to a state of its shape.

    Args:
        fn: Of one array, embeddings or token ids [n] or [b, n], which returns arrays; the first is
            the output. Its states have the shape [n, d] or [b, n, d].
        x: The input.
        path: An .npz or .safetensors file.
        branches: See `function_contributions`. {"attention": …, "mlp": …} records both. A model
            with MLPs needs both: the state after its last layer is the sum with the last branch.
        arrays: mask=, token_ids=, logits= to be written beside.

    Raises:
        ValueError: A pattern without a match, with the nearest scopes; branches that are not added
            to one stream; arrays that do not fit.

    Example: docs/agree.md.
    """
    counted = Branches(branches)
    refuse(
        (not callable(fn), f"fn is {type(fn).__name__}, not a function of x"),
        (isinstance(x, jax.core.Tracer), "record_function writes a file: call it outside of jit"),
    )
    program, _ = trace(fn, jnp.asarray(x))
    reader = StreamReader(counted)
    outputs = reader.run(program.jaxpr, program.consts, [Tagged(jnp.asarray(x), True)])
    counted.check_matched()
    layers = group_layers(reader.sums, outputs[0].array)
    collected = {"residual": layers.residual}
    collected |= {f"{counted.kinds[axis]}_branch": list_ for axis, list_ in layers.branches.items()}
    stacked = {name: np.stack([np.asarray(a) for a in list_]) for name, list_ in collected.items()}
    refuse(
        (
            stacked["residual"].ndim not in (3, 4),
            f"the stream has shape {list(stacked['residual'].shape[1:])}, not [tokens, width] or "
            "[examples, tokens, width]",
        ),
    )
    stacked |= {name: np.asarray(array) for name, array in arrays.items() if array is not None}
    metadata = {"jax": jax.__version__, "branches": str(branches)}
    write_recording(path, stacked, metadata)
