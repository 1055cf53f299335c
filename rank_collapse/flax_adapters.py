"""What the submodules of a Flax model put out, by name: Linen or NNX."""

import re
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx, traverse_util
from jaxtyping import Array


def linen_intermediates(
    module: Any, variables: Any, *inputs: Any, select: Callable | None = None, **options: Any
) -> dict[str, Array]:
    """Outputs of the submodules of a Linen model, by path, in natural order of the names.

    Args:
        module, variables: The model.
        *inputs, **options: As the model takes them.
        select: select(submodule, method name) -> bool; every `__call__` by default.
    """
    select = (lambda _, method: method == "__call__") if select is None else select
    _, state = module.apply(
        variables, *inputs, capture_intermediates=select, mutable=["intermediates"], **options
    )
    return named_arrays(state["intermediates"])


def nnx_intermediates(module: Any, *inputs: Any, **options: Any) -> dict[str, Array]:
    """Outputs of the submodules of an NNX model, by path, in natural order of the names."""
    capture = nnx.capture(module, nnx.Intermediate, method_outputs=nnx.Intermediate)
    _, state = capture(*inputs, **options)
    return named_arrays(nnx.to_pure_dict(state))


def named_arrays(tree: Any) -> dict[str, Array]:
    """The arrays of nested dictionaries and tuples by name, naturally sorted.

    "layers/2/__call__" for the one output of a submodule, "layers/2/__call__#1" for the second of
    several (or of its second call), "layers/2/__call__#0.1" where outputs are nested:
    (carry, (hidden, weights)) gives #0, #1.0 and #1.1.
    """
    found = {}
    for path, value in traverse_util.flatten_dict(dict(tree)).items():
        if isinstance(value, tuple | list) and len(value) == 1:
            value = value[0]
        for place, leaf in jax.tree_util.tree_leaves_with_path(value):
            if isinstance(leaf, jax.Array):
                inside = jax.tree_util.keystr(place, simple=True, separator=".")
                found["/".join(map(str, path)) + (f"#{inside}" if inside else "")] = leaf
    return dict(sorted(found.items(), key=lambda item: _natural(item[0])))


def _natural(name):
    """block_2 before block_10; numbers compare as numbers."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", name)]
