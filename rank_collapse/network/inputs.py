"""The inputs of a network: hidden states, masks, biases and positions of one example.

Every pass over a network (`apply`, sums of paths, residuals in logarithms, single paths) begins
with `prepare_inputs`.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.annotations import ArrayLike, Leaf
from rank_collapse.network.attention_weights import AttentionContext
from rank_collapse.network.config import TransformerConfig, check_config
from rank_collapse.network.covers import Covers
from rank_collapse.network.edits import trace_edits
from rank_collapse.network.embedding import check_per_token, embed, sinusoidal_positions
from rank_collapse.network.input_checks import (
    as_numbers,
    check_bias,
    check_indices,
    check_inputs_used,
    check_mask,
    is_embedded,
)
from rank_collapse.network.parameters import TransformerParams, complete_params
from rank_collapse.network.positions import (
    causal_mask,
    combine_masks,
    local_mask,
    relative_buckets,
    rotary_angles,
)


class PreparedInputs(struct.Struct):
    """The inputs of a network for one example."""

    x: Leaf  # X^0 [n, d]
    context: AttentionContext  # of all layers; `for_layer` gives that of one
    memory: Leaf | None = None  # [m, d] of cross-attention
    memory_context: AttentionContext = AttentionContext()  # its mask
    token_mask: Leaf | None = None  # Bool [n], which tokens exist; None for all
    edit: Mapping[str, object] | None = None  # {name: `edits.Edit`}

    @property
    def existing_tokens(self) -> Leaf:
        """Bool [n], True for tokens that exist: `token_mask`, or all True where it is None."""
        return jnp.ones(self.x.shape[:-1], bool) if self.token_mask is None else self.token_mask


def at_least_float32(
    params: TransformerParams, prepared: PreparedInputs
) -> tuple[TransformerParams, PreparedInputs]:
    """Convert parameters and inputs to the dtype they share, at least float32.

    Args:
        params, prepared: Parameters and inputs from `prepare_inputs`.
    """
    dtype = jnp.promote_types(prepared.x.dtype, jnp.float32)
    params = jax.tree.map(lambda a: a.astype(dtype), params)
    return params, prepared.replace(x=prepared.x.astype(dtype))


def prepare_inputs(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    *,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    memory: ArrayLike | None = None,
    memory_mask: ArrayLike | None = None,
    segments: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    edit: Mapping[str, object] | None = None,
    covers: Covers | None = None,
) -> tuple[TransformerParams, PreparedInputs]:
    """Check and embed one example: (complete parameters, `PreparedInputs`).

    The parameters are checked against the config; biases that are None become zeros, and grouped
    keys and values are repeated for every head. x is promoted to the dtype that it and the
    parameters share.

    Args:
        params, x, config: See `rank_collapse.apply`, also for the keyword arguments.
        covers: Networks that the calling pass covers; None to check nothing.

    Raises:
        ValueError: A network or an edit that the calling pass does not cover; parameters that
            contradict the config; inputs of the wrong shape or kind; a memory that is missing or
            unused.
    """
    check_config(config)
    if covers is not None:
        covers.check(config)
    if config.cross_attention and memory is None:
        raise ValueError("cross_attention=True needs a memory [m, d]")
    if not config.cross_attention and (memory is not None or memory_mask is not None):
        raise ValueError("a memory is given, but the network has cross_attention=False")
    params = complete_params(params, config)
    # Arrays of numpy as JAX's: constants of an outer jit would keep another precision than it.
    x = as_numbers(x, "x")
    bias, segments, positions = (
        None if a is None else as_numbers(a, name)
        for name, a in (("bias", bias), ("segments", segments), ("positions", positions))
    )
    check_inputs_used(x, config, segments, positions)
    x = input_states(params, x, config, segments=segments, positions=positions)
    x = x.astype(jnp.result_type(x, *jax.tree.leaves(params.layers)))
    n, h = x.shape[0], config.num_heads
    mask = check_mask(mask, (h, n, n), "mask")
    bias = check_bias(bias, (h, n, n))
    memory_context = AttentionContext()
    if memory is not None:
        memory = jnp.asarray(memory)
        if memory.shape[1:] != (config.d_model,) or not len(memory):
            raise ValueError(
                f"memory of shape {memory.shape} is not [m, d_model={config.d_model}] with a "
                "token or more; use jax.vmap for a batch"
            )
        memory_mask = check_mask(memory_mask, (h, n, len(memory)), "memory_mask")
        memory_context = AttentionContext(mask=combine_masks(memory_mask))
    num_keys = 1 if memory is None else memory.shape[0]
    edit = trace_edits(edit, config, n, num_keys, x.dtype)
    if covers is not None:
        covers.check(config, edit)
    return params, PreparedInputs(
        x=x,
        context=make_context(
            params, config, n, mask=mask, bias=bias, segments=segments, positions=positions
        ),
        memory=memory,
        memory_context=memory_context,
        token_mask=mask if mask is not None and mask.ndim == 1 else None,
        edit=edit,
    )


def as_batch(inputs: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Convert inputs to arrays [b, ...] by argument name of `apply`, without those that are None.

    Lists of examples of different lengths are padded with zeros; if there is no mask, one is added
    that marks the existing tokens of x.

    Args:
        inputs: Inputs with x; None for an absent one.

    Raises:
        ValueError: Arrays of different lengths, of length 0, or without x.
    """
    inputs = {name: values for name, values in inputs.items() if values is not None}
    if _is_ragged(inputs.get("x")) and "mask" not in inputs:
        inputs["mask"] = [np.ones(len(text), bool) for text in inputs["x"]]
    arrays = {
        name: _pad_examples(values) if _is_ragged(values) else np.asarray(values)
        for name, values in inputs.items()
    }
    batch_size(arrays)
    return arrays


def _is_ragged(values):
    """Return whether values are a list of examples of different lengths."""
    return isinstance(values, list | tuple) and len({np.shape(a)[:1] for a in values}) > 1


def _pad_examples(examples):
    """Stack examples of different lengths, padded with zeros at their ends."""
    arrays = [np.asarray(a) for a in examples]
    longest = max(map(len, arrays))
    return np.stack([np.pad(a, [(0, longest - len(a))] + [(0, 0)] * (a.ndim - 1)) for a in arrays])


def batch_size(arrays: Mapping[str, object]) -> int:
    """Count the examples b of arrays [b, ...] by argument name, x among them.

    Raises:
        ValueError: Arrays of different lengths, of length 0, or without x.
    """
    lengths = {k: len(v) if np.ndim(v) else None for k, v in arrays.items()}
    if len(set(lengths.values())) != 1 or not lengths.get("x"):
        raise ValueError(f"inputs have different lengths, or there are none: {lengths}")
    return lengths["x"]


def input_states(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    *,
    segments: ArrayLike | None = None,
    positions: ArrayLike | None = None,
) -> Float[Array, "n d"]:
    """Compute X^0: embed x if it fits the embedding (ids, vectors [n, d_input]), else take x
    itself.

    Where d_input = d, as in ViT-B/16, vectors are embedded; `config.replace(embedding=None)`
    takes hidden states.

    Args:
        params: Parameters of the network.
        x: Token ids [n], vectors [n, d_input], or hidden states [n, d].
        config: The network.
        segments, positions: Int [n], of tokens that are embedded; None for the defaults.

    Raises:
        ValueError: Another shape, or ids that are not integers or not in their tables.
    """
    x = jnp.asarray(x)
    is_ids = jnp.issubdtype(x.dtype, jnp.integer)
    if is_embedded(x, config):
        if x.ndim > (1 if is_ids else 2):
            raise ValueError(
                f"x of shape {x.shape} is more than one example; "
                "rc.network.apply_batch takes a batch"
            )
        ids = x if config.embedding.vocab_size and x.ndim == 1 else None
        for name, index in (("token ids", ids), ("segments", segments), ("positions", positions)):
            if index is not None and not jnp.issubdtype(index.dtype, jnp.integer):
                raise ValueError(f"{name} of dtype {index.dtype} are not integers")
        check_indices({"x": x, "segments": segments, "positions": positions}, config)
        return embed(params.embedding, x, config.embedding, segments=segments, positions=positions)
    is_real = not jnp.issubdtype(x.dtype, jnp.complexfloating)
    if is_ids or not is_real or x.ndim != 2 or x.shape[1] != config.d_model:
        raise ValueError(
            f"x of shape {x.shape} and dtype {x.dtype} is not [n, d_model={config.d_model}]"
            + ("" if config.embedding is not None else " (the config has no embedding)")
            + ("; use jax.vmap for a batch" if x.ndim == 3 or (is_ids and x.ndim == 2) else "")
        )
    return x


def make_context(
    params: TransformerParams | None,
    config: TransformerConfig,
    num_tokens: int,
    *,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    segments: ArrayLike | None = None,
    positions: ArrayLike | None = None,
) -> AttentionContext:
    """Make the masks, biases and positions of self-attention that all layers share.

    Args:
        params: Parameters, for a learned position bias; None without one.
        config: The network.
        num_tokens: n.
        mask: Bool [n] (which tokens exist), [n, n] or [h, n, n], joined to `config.mask`.
        bias: Float [h, n, n] added to the scores.
        segments: Int [n], for the segment term of "relative_key".
        positions: Int [n], for rotary positions; 0..n-1 by default.
    """
    n = num_tokens
    config_mask = None
    if config.mask == "causal":
        config_mask = causal_mask(n)
    elif config.mask == "local":
        config_mask = local_mask(n, config.window)
    rotary = local_rotary = relative = None
    if config.position == "rotary":
        check_per_token("positions", positions, n)
        index = jnp.arange(n) if positions is None else positions
        width = config.rotated_width
        rotary = rotary_angles(
            index, width, config.rotary_theta, config.rotary_scaling, config.rotary_tables
        )
        if config.rotary_factor != 1.0:
            rotary = tuple(config.rotary_factor * a for a in rotary)
        if config.local_theta and config.windows:
            local_rotary = rotary_angles(index, width, config.local_theta)
    elif config.position == "relative_bias":
        is_bidirectional = config.mask != "causal"
        buckets = relative_buckets(n, n, config.num_buckets, config.max_distance, is_bidirectional)
        # A traced index, as under jit, reads no table of NumPy.
        learned = jnp.asarray(params.position_bias)[buckets].transpose(2, 0, 1)
        bias = learned if bias is None else learned + bias
    elif config.position == "relative_key":
        check_per_token("segments", segments, n)
        distances = jnp.arange(n - 1.0, -n, -1.0)
        if config.clamp_distance:
            distances = jnp.clip(distances, -config.clamp_distance, config.clamp_distance)
        relative = sinusoidal_positions(distances, config.d_model)
    distance = None
    if config.windows:
        distance = jnp.abs(jnp.arange(n)[:, None] - jnp.arange(n)[None, :])
    return AttentionContext(
        mask=combine_masks(config_mask, mask),
        bias=bias,
        rotary=rotary,
        relative=relative,
        segments=segments,
        cap=config.score_cap or None,
        distance=distance,
        local_rotary=local_rotary,
    )
