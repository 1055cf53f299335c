"""Flax models, Linen or NNX: their attention parameters as ours, what their submodules put out.

The measures of the package take any [n, d] array; no adapter is needed for plain arrays.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jaxtyping import Array

from rank_collapse.annotations import Tree
from rank_collapse.network.attention import AttentionParams, repeat_groups
from rank_collapse.printed import split_numbers

_OURS = {"query": ("w_q", "b_q"), "key": ("w_k", "b_k"), "value": ("w_v", "b_v")}
_OURS["out"] = ("w_o", "b_o")


def attention_from_linen(
    params: Mapping[str, object], *, layer_axis: int | None = None
) -> AttentionParams:
    """Convert parameters of `flax.linen.MultiHeadDotProductAttention` to ours.

    Their layouts agree: kernels [d, h, k] become [h, d, k], the output's [h, v, d] stays.

    Args:
        params: The module's own dictionary (query, key, value, out), or {"params": that
            dictionary}.
        layer_axis: Axis of the layers, as in `nn.scan` (its `variable_axes`); None for one layer.

    Returns:
        Parameters for `network.multi_head_attention`, with zero biases where the module has none.
        Several layers have the layer axis first, as in `BlockParams.attention`.

    Raises:
        ValueError: A dictionary from another module, or from one with normalised queries.
    """
    params = params.get("params", params)
    missing = [name for name in _OURS if name not in params]
    if missing or "kernel" not in params["query"]:
        raise ValueError(f"params with keys {sorted(params)} are not those of multi-head attention")
    if "query_ln" in params or "key_ln" in params:
        raise ValueError("attention with normalize_qk=True has no counterpart here")
    if layer_axis is not None:
        stack = jax.tree.map(lambda a: jnp.moveaxis(jnp.asarray(a), layer_axis, 0), dict(params))
        return jax.vmap(attention_from_linen)(stack)
    fields = {}
    for theirs, (weight, bias) in _OURS.items():
        kernel = jnp.asarray(params[theirs]["kernel"])
        fields[weight] = kernel if theirs == "out" else kernel.transpose(1, 0, 2)
        shape = kernel.shape[2:] if theirs == "out" else kernel.shape[1:]
        fields[bias] = jnp.asarray(params[theirs].get("bias", jnp.zeros(shape, kernel.dtype)))
    return AttentionParams(**fields)


def attention_to_linen(params: AttentionParams, use_bias: bool = True) -> dict[str, dict[str, Any]]:
    """Convert our parameters to the module's own dictionary, see `attention_from_linen`.

    Args:
        params: Dot-product attention of one layer, with d_qk = d_v as the module wants.
        use_bias: The argument of the module; without it the biases must be zero.

    Raises:
        ValueError: Parameters the module cannot hold.
    """
    if params.v_score is not None or params.relative is not None:
        raise ValueError("additive or relative attention has no counterpart in Flax's module")
    if params.q_norm is not None or params.k_norm is not None:
        raise ValueError("the RMSNorm of queries and keys has no counterpart in Flax's module")
    if params.w_q.shape[-1] != params.w_v.shape[-1]:
        raise ValueError(
            f"d_qk={params.w_q.shape[-1]} must equal d_v={params.w_v.shape[-1]} in the module"
        )
    params, theirs = repeat_groups(params), {}
    for name, (weight, bias) in _OURS.items():
        w, b = getattr(params, weight), getattr(params, bias)
        theirs[name] = {"kernel": w if name == "out" else w.transpose(1, 0, 2)}
        if use_bias:
            shape = w.shape[2:] if name == "out" else (w.shape[0], w.shape[2])
            theirs[name]["bias"] = jnp.zeros(shape, w.dtype) if b is None else b
        elif b is not None and jnp.any(b != 0):
            raise ValueError(f"use_bias=False, but {bias} is not zero")
    return theirs


def attention_from_nnx(module: object, *, layer_axis: int | None = None) -> AttentionParams:
    """Convert an `nnx.MultiHeadAttention`, or several made by `nnx.vmap`, to our parameters.

    Args:
        module: The attention.
        layer_axis: See `attention_from_linen`.
    """
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    return attention_from_linen(params, layer_axis=layer_axis)


def attention_to_nnx(params: AttentionParams, module: object) -> None:
    """Write our parameters into an `nnx.MultiHeadAttention` of the same shape.

    Args:
        params: See `attention_to_linen`.
        module: The attention.

    Raises:
        ValueError: Parameters of another shape.
    """
    state = nnx.state(module, nnx.Param)
    old = nnx.to_pure_dict(state)
    new = attention_to_linen(params, use_bias="bias" in old["query"])
    if jax.tree.map(jnp.shape, old) != jax.tree.map(jnp.shape, new):
        shapes = jax.tree.map(jnp.shape, old)
        raise ValueError(f"the module holds {shapes}, but the parameters have other shapes")
    nnx.replace_by_pure_dict(state, new)
    nnx.update(module, state)


def linen_intermediates(
    module: object,
    variables: object,
    *inputs: object,
    select: Callable | None = None,
    **options: object,
) -> dict[str, Array]:
    """Return the outputs of a Linen model's submodules, by path, in natural order.

    Args:
        module, variables: The model.
        *inputs, **options: Arguments of the call of the model.
        select: select(submodule, method name) -> bool; every `__call__` by default.
    """
    select = (lambda _, method: method == "__call__") if select is None else select
    _, state = module.apply(
        variables, *inputs, capture_intermediates=select, mutable=["intermediates"], **options
    )
    return named_arrays(state["intermediates"])


def nnx_intermediates(module: object, *inputs: object, **options: object) -> dict[str, Array]:
    """Return the outputs of an NNX model's submodules, by path, in natural order."""
    capture = nnx.capture(module, nnx.Intermediate, method_outputs=nnx.Intermediate)
    _, state = capture(*inputs, **options)
    return named_arrays(nnx.to_pure_dict(state))


def named_arrays(tree: Tree) -> dict[str, Array]:
    """Name the arrays of nested dictionaries and tuples, naturally sorted.

    "layers/2/__call__" for the one output of a submodule, "layers/2/__call__#1" for the second of
    several (or of its second call), "layers/2/__call__#0.1" where outputs are nested:
    (carry, (hidden, weights)) gives #0, #1.0 and #1.1.

    Args:
        tree: Nested dictionaries and tuples.
    """
    arrays = {}
    for path, value in traverse_util.flatten_dict(dict(tree)).items():
        if isinstance(value, tuple | list) and len(value) == 1:
            value = value[0]
        for place, leaf in jax.tree_util.tree_leaves_with_path(value):
            if isinstance(leaf, jax.Array):
                inside = jax.tree_util.keystr(place, simple=True, separator=".")
                arrays["/".join(map(str, path)) + (f"#{inside}" if inside else "")] = leaf
    return dict(sorted(arrays.items(), key=lambda item: split_numbers(item[0])))
