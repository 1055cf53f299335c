"""The one network: `apply`, which returns a Trace, and the pieces it is made of.

Every function takes one example [n, d]; vmap adds batch and seed axes. Axis letters as in
`rank_collapse`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from rank_collapse.network import attention as attn
from rank_collapse.network import layers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import embed, sinusoidal_positions
from rank_collapse.network.parameters import BlockParams, TransformerParams


@struct.dataclass
class LayerTrace:
    """What one layer computed; in a Trace, with a leading layer axis.

    The sums before a post-norm are λ·input·[skip] + γ·branch and are not stored.
    """

    attention: Any  # [h, n, n]  P_h
    attention_branch: Any  # [n, d]  SA(x), before γ
    after_attention: Any  # [n, d]  output of the attention sublayer
    hidden: Any  # [n, d]  output of the layer
    cross_attention: Any = None  # [h, n, m]
    cross_branch: Any = None  # [n, d]
    after_cross: Any = None  # [n, d]
    mlp_branch: Any = None  # [n, d]


@struct.dataclass
class Trace:
    """Everything a forward pass computed.

    Attributes:
        hidden: [L + 1, n, d], X^0 (the input) to X^L.
        layers: LayerTrace with a leading layer axis.
        output: [n, d], X^L after the final norm where there is one.
        context: The masks, biases and positions that all layers shared.
    """

    hidden: Any
    layers: Any
    output: Any
    context: Any

    @property
    def attention(self) -> Any:
        """Attention weights [L, h, n, n]."""
        return self.layers.attention

    @property
    def attention_branch(self) -> Any:
        """Attention outputs [L, n, d] before skip and norm."""
        return self.layers.attention_branch

    @property
    def mlp_branch(self) -> Any:
        """MLP outputs [L, n, d] before skip and norm, or None."""
        return self.layers.mlp_branch


def per_layer(config: TransformerConfig, dtype: Any) -> dict[str, Array]:
    """The swept floats, one value per layer: skip_gain, branch_gain, temperature, each [L]."""
    names = ("skip_gain", "branch_gain", "temperature")
    return {
        n: jnp.broadcast_to(jnp.asarray(getattr(config, n), dtype), config.depth) for n in names
    }


def make_context(
    params: TransformerParams,
    config: TransformerConfig,
    num_tokens: int,
    *,
    mask: Any = None,
    bias: Any = None,
    segments: Any = None,
    positions: Any = None,
) -> attn.AttentionContext:
    """Masks, biases and positions of self-attention, the same for every layer.

    Args:
        params: Parameters (for a learned position bias).
        config: The network.
        num_tokens: n.
        mask: Bool [n] (which tokens exist), [n, n] or [h, n, n], joined to `config.mask`.
        bias: Float [h, n, n] added to the scores.
        segments: Int [n], for the segment term of "relative_key".
        positions: Int [n], for rotary positions; 0..n-1 by default.

    Raises:
        ValueError: A mask that does not fit the tokens.
    """
    n = num_tokens
    if mask is not None and mask.shape[-1] != n:
        raise ValueError(f"mask of shape {mask.shape} does not fit {n} tokens")
    own = {"none": lambda: None, "causal": lambda: attn.causal_mask(n)}
    own["local"] = lambda: attn.local_mask(n, config.window)
    rotary = relative = None
    if config.position == "rotary":
        index = jnp.arange(n) if positions is None else positions
        rotary = attn.rotary_angles(
            index, config.qk_width, config.rotary_theta, config.rotary_scaling
        )
    elif config.position == "relative_bias":
        args = (n, n, config.num_buckets, config.max_distance, config.mask != "causal")
        learned = params.position_bias[attn.relative_buckets(*args)].transpose(2, 0, 1)
        bias = learned if bias is None else learned + bias
    elif config.position == "relative_key":
        distances = jnp.arange(n - 1.0, -n, -1.0)
        if config.clamp_distance:
            distances = jnp.clip(distances, -config.clamp_distance, config.clamp_distance)
        relative = sinusoidal_positions(distances, config.d_model)
    return attn.AttentionContext(
        mask=attn.combine_masks(own[config.mask](), mask),
        bias=bias,
        rotary=rotary,
        relative=relative,
        segments=segments,
    )


def sublayer_input(
    norm_params: Any, x: Float[Array, "n d"], config: TransformerConfig
) -> Float[Array, "n d"]:
    """What a sublayer's branch looks at: N(x) for pre-norm, else x."""
    if config.norm_placement != "pre":
        return x
    return layers.norm(norm_params, x, config.norm, config.norm_eps)


def sublayer_sum(
    x: Float[Array, "n d"],
    branch: Float[Array, "n d"],
    skip: bool,
    skip_gain: Any = 1.0,
    branch_gain: Any = 1.0,
) -> Float[Array, "n d"]:
    """λ x·[skip] + γ branch, before a post-norm."""
    total = jnp.asarray(branch_gain, x.dtype) * branch
    return total + jnp.asarray(skip_gain, x.dtype) * x if skip else total


def sublayer_output(
    norm_params: Any, total: Float[Array, "n d"], config: TransformerConfig
) -> Float[Array, "n d"]:
    """What a sublayer passes on: N(sum) for post-norm, else the sum."""
    if config.norm_placement != "post":
        return total
    return layers.norm(norm_params, total, config.norm, config.norm_eps)


def block(
    params: BlockParams,
    x: Float[Array, "n d"],
    config: TransformerConfig,
    context: attn.AttentionContext,
    gains: dict[str, Any],
    *,
    memory: Any = None,
    memory_context: attn.AttentionContext | None = None,
    dropout_key: Any = None,
    dropout_rate: Any = 0.0,
) -> LayerTrace:
    """One layer: attention, cross-attention and MLP sublayers; see `TransformerConfig`."""
    drop_branch = drop_weights = [None] * 3
    if dropout_key is not None:
        places = layers.dropout_branches(dropout_key, 6)
        drop_branch, drop_weights = places[:3], places[3:]
    score = {"score": config.score, "scale": config.scale_scores}
    score["temperature"] = gains["temperature"]

    def close(norm_params, x, branch, skip, key):
        kept = branch if key is None else layers.dropout(key, branch, dropout_rate)
        total = sublayer_sum(x, kept, skip, gains["skip_gain"], gains["branch_gain"])
        return sublayer_output(norm_params, total, config)

    def attend(p, norm_params, x, y, context, skip, site):
        h = sublayer_input(norm_params, x, config)
        branch, weights = attn.multi_head_attention(
            p, h, h if y is None else y, context=context, **score,
            dropout_key=drop_weights[site], dropout_rate=dropout_rate,
        )  # fmt: skip
        return weights, branch, close(norm_params, x, branch, skip, drop_branch[site])

    fields = {}
    weights, branch, x = attend(
        params.attention, params.attention_norm, x, None, context, config.attention_skip, 0
    )
    fields.update(attention=weights, attention_branch=branch, after_attention=x)
    if config.cross_attention:
        weights, branch, x = attend(
            params.cross, params.cross_norm, x, memory, memory_context, config.cross_skip, 1
        )
        fields.update(cross_attention=weights, cross_branch=branch, after_cross=x)
    if config.mlp != "none":
        branch = layers.mlp(params.mlp, sublayer_input(params.mlp_norm, x, config), config.mlp)
        x = close(params.mlp_norm, x, branch, config.mlp_skip, drop_branch[2])
        fields["mlp_branch"] = branch
    return LayerTrace(hidden=x, **fields)


def scan_layers(
    body: Any, carry: Any, params: TransformerParams, config: TransformerConfig, xs: Any
):
    """lax.scan of body(carry, (layer parameters, xs of the layer)) over the depth.

    With `config.layer_map` the parameters of each layer are gathered, never copied as a stack.
    """
    if not config.layer_map:
        return jax.lax.scan(body, carry, (params.layers, xs), unroll=config.unroll)

    def gathered(carry, step):
        row, x = step
        return body(carry, (jax.tree.map(lambda a: a[row], params.layers), x))

    return jax.lax.scan(gathered, carry, (jnp.asarray(config.layer_map), xs), unroll=config.unroll)


def apply(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    *,
    mask: Any = None,
    bias: Any = None,
    memory: Any = None,
    memory_mask: Any = None,
    segments: Any = None,
    positions: Any = None,
    dropout_key: Any = None,
    dropout_rate: Any = 0.0,
) -> Trace:
    """The network on one example.

    Args:
        params: From `init` or `rank_collapse.pretrained.load`.
        x: Hidden states Float [n, d]; or token ids Int [n] where the config has an embedding.
        config: The network.
        mask: Bool [n] (which tokens exist), [n, n] or [h, n, n]; True may be looked at.
        bias: Float [h, n, n] added to the attention scores.
        memory: Float [m, d], the encoder's output, with `config.cross_attention`.
        memory_mask: Bool [m], [n, m] or [h, n, m].
        segments: Int [n], segments of tokens (embedding or relative attention).
        positions: Int [n], positions of tokens; 0..n-1 by default.
        dropout_key: Key for dropout on attention weights and branches; None for none.
        dropout_rate: Its rate; may be traced.

    Returns:
        A `Trace`.

    Raises:
        ValueError: Inputs of the wrong shape, or a memory missing.
    """
    x = input_states(params, x, config, segments=segments, positions=positions)
    if config.cross_attention and memory is None:
        raise ValueError("cross_attention=True needs a memory [m, d]")
    context = make_context(
        params, config, x.shape[0], mask=mask, bias=bias, segments=segments, positions=positions
    )
    memory_context = attn.AttentionContext(mask=attn.combine_masks(memory_mask))
    keys = None
    if dropout_key is not None:
        keys = layers.dropout_branches(dropout_key, config.depth)

    def body(x, step):
        layer, (gains, key) = step
        out = block(
            layer, x, config, context, gains, memory=memory, memory_context=memory_context,
            dropout_key=key, dropout_rate=dropout_rate,
        )  # fmt: skip
        return out.hidden, out

    last, trace = scan_layers(body, x, params, config, (per_layer(config, x.dtype), keys))
    output = last
    if config.final_norm:
        output = layers.norm(params.final_norm, last, config.norm, config.norm_eps)
    hidden = jnp.concatenate([x[None], trace.hidden])
    return Trace(hidden=hidden, layers=trace, output=output, context=context)


def input_states(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    *,
    segments: Any = None,
    positions: Any = None,
) -> Float[Array, "n d"]:
    """X^0: the embedding of what fits the embedding (ids, vectors [n, d_input]), else x [n, d].

    Where d_input = d, as in ViT-B/16, vectors are embedded; `config.replace(embedding=None)`
    takes hidden states.

    Raises:
        ValueError: A shape that is neither.
    """
    x = jnp.asarray(x)
    is_ids = jnp.issubdtype(x.dtype, jnp.integer)
    if config.embedding is not None and (
        is_ids or x.shape[-1] != config.d_model or config.embedding.d_input == config.d_model
    ):
        return embed(params.embedding, x, config.embedding, segments=segments, positions=positions)
    if is_ids or x.ndim != 2 or x.shape[1] != config.d_model:
        raise ValueError(
            f"x of shape {x.shape} and dtype {x.dtype} is not [n, d_model={config.d_model}]"
            + ("" if config.embedding is not None else " (the config has no embedding)")
        )
    return x
