"""The one network: `apply`, which returns a Trace, and the pieces it is made of.

Every function takes one example [n, d]; vmap adds batch and seed axes. Axis letters as in
`rank_collapse`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.network import attention as attn
from rank_collapse.network import edits, layers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.dropout import dropout, dropout_branches
from rank_collapse.network.edits import STATE_NAMES
from rank_collapse.network.entry import Entry, enter
from rank_collapse.network.gains import LayerGains, layer_gains
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.network.sublayer import sites_of, sublayer


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
    heads: Any = None  # [h, n, d]  P_h (x W_v + b_v) W_o, with keep_heads
    keys_values: Any = None  # in a pass with a past: those of all tokens so far
    unedited: Any = None  # inside a pass with an edit: its states by name before the edit


@struct.dataclass
class Trace:
    """Everything a forward pass computed.

    Attributes:
        hidden: [L + 1, n, d], X^0 (the input) to X^L.
        layers: LayerTrace with a leading layer axis.
        output: [n, d], X^L after the final norm where there is one.
        context: Masks, biases and positions of all layers; of one by `AttentionContext.of_layer`.
    """

    hidden: Any
    layers: Any
    output: Any
    context: Any

    def __repr__(self) -> str:
        shapes = {"hidden": self.hidden, "attention": self.attention, "output": self.output}
        shown = ", ".join(f"{name} {list(jnp.shape(a))}" for name, a in shapes.items())
        return f"Trace({shown}; layers: attention_branch, after_attention, mlp_branch, ...)"

    @property
    def cross_attention(self) -> Any:
        """Weights of the attention to the memory [L, h, n, m], or None."""
        return self.layers.cross_attention

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


def block(
    params: BlockParams,
    x: Float[Array, "n d"],
    config: TransformerConfig,
    gains: LayerGains,
    entry: Entry,
    *,
    dropout_key: Any = None,
    dropout_rate: Any = 0.0,
    layer: Any = None,
    keep_heads: bool = False,
) -> LayerTrace:
    """One layer: attention, cross-attention and MLP sublayers; see `TransformerConfig`.

    Args:
        params: Parameters of the layer.
        x: Its input.
        config: The network.
        gains: Of the layer, from `layer_gains`.
        entry: Masks, positions and memory, from `enter`.
        dropout_key, dropout_rate: For dropout on attention weights and branches; None for none.
        layer: Its index, for the entry's edit.
        keep_heads: Whether to keep the heads' outputs.
    """
    drop_branch = drop_weights = [None] * 3
    if dropout_key is not None:
        places = dropout_branches(dropout_key, 6)
        drop_branch, drop_weights = places[:3], places[3:]
    sites = sites_of(params, config, gains)
    score = {"score": config.score, "scale": config.scale_scores, "norm_eps": config.norm_eps}
    score["temperature"] = gains.temperature
    unedited, start = {}, x
    context = entry.context.of_layer(gains.window)

    def edited(name, value):
        if entry.edit is not None and name in STATE_NAMES:
            unedited[name] = value
        return edits.edited(entry.edit, layer, name, value)

    def kept(part, place):
        key = drop_branch[place]
        return part if key is None else dropout(key, part, dropout_rate)

    def attention(p, context, place, name, memory=None):
        weights_of = {"attention": "attention", "cross": "cross_attention"}
        names = {"scores": f"{name}_scores", "weights": weights_of[name]}

        def branch(seen):
            keys = seen if memory is None else memory
            if memory is None and entry.past is not None:
                keys = entry.past.extended(p, seen, context, config.norm_eps)
            part, weights = attn.multi_head_attention(
                p, seen, keys, context=context, **score,
                dropout_key=drop_weights[place], dropout_rate=dropout_rate,
                edit=lambda which, value: edited(names[which], value),
            )  # fmt: skip
            part = edited(f"{name}_branch", part)
            return kept(part, place), (weights, part, keys)

        return branch

    def mlp(seen):
        part = edited("mlp_branch", layers.mlp(params.mlp, seen, config.mlp, config.routing))
        return kept(part, 2), part

    fields = {}
    branch = attention(params.attention, context, 0, "attention")
    x, (weights, part, keys) = sublayer(sites.attention, x, branch)
    x = edited("after_attention", x)
    fields.update(attention=weights, attention_branch=part, after_attention=x)
    if keep_heads:
        used = weights
        if dropout_key is not None:
            used = dropout(drop_weights[0], weights, dropout_rate)
        fields["heads"] = attn.head_outputs(params.attention, used, keys)
    if entry.past is not None:
        fields["keys_values"] = keys
    if config.cross_attention:
        branch = attention(params.cross, entry.memory_context, 1, "cross", entry.memory)
        x, (weights, part, _) = sublayer(sites.cross, x, branch)
        x = edited("after_cross", x)
        fields.update(cross_attention=weights, cross_branch=part, after_cross=x)
    if config.mlp != "none":
        x, fields["mlp_branch"] = sublayer(sites.mlp, x, mlp, start=start)
    x = edited("hidden", x)
    return LayerTrace(hidden=x, unedited=unedited or None, **fields)


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
    keep_heads: bool = False,
    edit: Any = None,
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
        keep_heads: Whether `trace.layers.heads` [L, h, n, d] holds each head's output; static.
        edit: edit(layer, name, value) -> value, a pure function that may change, in every layer,
            "attention_scores" [h, n, n] (before the mask), "attention", "attention_branch",
            "after_attention", "mlp_branch", "hidden" (as in `LayerTrace`, which holds the edited
            values) and "cross_scores", "cross_attention", "cross_branch", "after_cross". `layer`
            is traced: choose with jnp.where(layer == 3, changed, value); return `value` for other
            names. Another function compiles anew; arrays of a `jax.tree_util.Partial(fn, *first)`,
            called as fn(*first, layer, name, value), are traced.

    Returns:
        A `Trace`.

    Raises:
        ValueError: Inputs of the wrong shape or kind, a memory that is missing or of no use, or a
            dropout rate without a key, or an edit that changes a shape.
    """
    if dropout_key is None and not isinstance(dropout_rate, jax.core.Tracer) and dropout_rate:
        raise ValueError(f"dropout_rate={dropout_rate} without a dropout_key drops nothing")
    params, entry = enter(
        params, x, config, mask=mask, bias=bias, memory=memory, memory_mask=memory_mask,
        segments=segments, positions=positions, edit=edit,
    )  # fmt: skip
    return _forward(params, entry, config, dropout_key, dropout_rate, keep_heads)


@functools.partial(jax.jit, static_argnames="keep_heads")
def _forward(params, entry, config, dropout_key, dropout_rate, keep_heads) -> Trace:
    # Compiled here, so that a call outside jit compiles once for a shape and not every time.
    keys = None
    if dropout_key is not None:
        keys = dropout_branches(dropout_key, config.depth)

    def body(x, step):
        layer, (index, gains, key) = step
        out = block(
            layer, x, config, gains, entry, dropout_key=key, dropout_rate=dropout_rate,
            layer=index, keep_heads=keep_heads,
        )  # fmt: skip
        return out.hidden, out.replace(unedited=None)

    swept = (jnp.arange(config.depth), layer_gains(config, entry.x.dtype, params), keys)
    last, trace = scan_layers(body, entry.x, params, config, swept)
    output = last
    if config.final_norm:
        output = layers.norm(params.final_norm, last, config.norm, config.norm_eps)
    hidden = jnp.concatenate([entry.x[None], trace.hidden])
    return Trace(hidden=hidden, layers=trace, output=output, context=entry.context)
