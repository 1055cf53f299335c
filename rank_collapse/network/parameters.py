"""Parameters of the one network, and their initialisation.

Every function is for one seed; vmap over keys adds a seed axis.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rank_collapse import struct
from rank_collapse.network import layers
from rank_collapse.network.attention import AttentionParams, repeat_groups
from rank_collapse.network.config import SWEPT, TransformerConfig
from rank_collapse.network.embedding import init_embedding
from rank_collapse.network.positions import RelativeParams
from rank_collapse.network.residual import init_gains
from rank_collapse.network.streams import ConnectionParams, init_connections


class BlockParams(struct.Struct):
    """Parameters of one layer, or of a stack with a leading layer axis; None for absent parts."""

    attention: Any  # AttentionParams
    attention_norm: Any = None  # NormParams, before the branch or after the sum
    attention_branch_norm: Any = None  # NormParams, of the branch's output
    attention_gains: Any = None  # LearnedGains
    attention_connection: Any = None  # ConnectionParams, of several residual streams
    cross: Any = None  # AttentionParams
    cross_norm: Any = None
    cross_branch_norm: Any = None
    cross_gains: Any = None
    cross_connection: Any = None
    mlp: Any = None  # MLPParams
    mlp_norm: Any = None
    mlp_branch_norm: Any = None
    mlp_gains: Any = None
    mlp_connection: Any = None


class TransformerParams(struct.Struct):
    """All parameters of a network."""

    layers: Any  # BlockParams with a leading axis of `config.num_rows`
    final_norm: Any = None  # NormParams
    embedding: Any = None  # EmbeddingParams
    position_bias: Any = None  # [buckets, h], position "relative_bias"
    final_connection: Any = None  # ConnectionParams, what is read after connection "attention"


def init(
    key: Any, config: TransformerConfig, weight_scale: Any = 1.0, bias_scale: Any = 0.0
) -> TransformerParams:
    """Random parameters of a network, by the rule `config.init`.

    Layer l draws from fold_in(key, l): a deeper network begins with the same layers.

    Args:
        weight_scale: Multiplies every weight matrix; may be traced.
        bias_scale: Standard deviation of the biases (0: none, as in the paper); may be traced.
    """
    key_layers, key_embedding, key_position = jax.random.split(key, 3)
    keys = jax.vmap(lambda l: jax.random.fold_in(key_layers, l))(jnp.arange(config.num_rows))
    stack = jax.vmap(lambda k: init_block(k, config, weight_scale, bias_scale))(keys)
    stack = stack.replace(**init_gains(config), **init_connections(config))
    norm = _init_norm(config) if config.final_norm else None
    embedding = position_bias = connection = None
    if config.connection == "attention":
        connection = ConnectionParams(read=jnp.zeros(config.d_model))
    if config.embedding is not None:
        embedding = init_embedding(key_embedding, config.embedding, config.d_model)
    if config.position == "relative_bias":
        shape = (config.num_buckets, config.num_heads)
        position_bias = jax.random.normal(key_position, shape) / jnp.sqrt(config.d_model)
    return TransformerParams(
        layers=stack,
        final_norm=norm,
        embedding=embedding,
        position_bias=position_bias,
        final_connection=connection,
    )


def init_block(
    key: Any, config: TransformerConfig, weight_scale: Any = 1.0, bias_scale: Any = 0.0
) -> BlockParams:
    """Parameters of one layer but for learned gains and connections; see `init`."""
    key_attention, key_cross, key_mlp = _split(key)[:3]
    fields = {"attention": _init_attention(key_attention, config, weight_scale, bias_scale)}
    if config.cross_attention:
        fields["cross"] = _init_attention(key_cross, config, weight_scale, bias_scale)
    if config.mlp != "none":
        fields["mlp"] = _init_mlp(key_mlp, config, weight_scale, bias_scale)
    norms = {}
    for kind in fields:
        if config.norm_placement in ("pre", "post", "sandwich", "both"):
            norms[f"{kind}_norm"] = _init_norm(config)
        if config.norm_placement in ("sandwich", "branch", "both"):
            norms[f"{kind}_branch_norm"] = _init_norm(config)
    return BlockParams(**fields, **norms)


def _split(key):
    """Keys of one layer's parts: the first of them do not depend on how many there are."""
    return jax.random.split(key, 13)


def _init_norm(config):
    bias = jnp.zeros(config.d_model) if config.norm == "layer" else None
    return layers.NormParams(gain=jnp.ones(config.d_model), bias=bias)


def _weights(key, shape, fans, config, scale, uniform=False):
    # Drawn as vectors, which have the same values: one program serves all shapes of one size.
    (fan_in, fan_out), count = fans, math.prod(shape)
    if config.init == "reference" and uniform:
        w = jax.random.uniform(key, (count,), minval=-1.0, maxval=1.0) / jnp.sqrt(fan_in)
    else:
        stds = {"lecun": 1 / jnp.sqrt(fan_in), "xavier": jnp.sqrt(2 / (fan_in + fan_out))}
        w = stds.get(config.init, 0.02) * jax.random.normal(key, (count,))
    return (scale * w).reshape(shape)


def _biases(key, shape, scale):
    # Without biases nothing is drawn: random bits are most of what compiling `init` costs.
    if isinstance(scale, (int, float)) and scale == 0:
        return jnp.zeros(shape)
    return scale * jax.random.normal(key, shape)


def _init_attention(key, config, scale, bias_scale):
    h, d, k, v = config.num_heads, config.d_model, config.qk_width, config.v_width
    keys, gain, g = _split(key), config.init_gain, config.num_kv_heads or h

    def bias(key, *shape):
        return _biases(key, shape, bias_scale)

    v_score = relative = q_norm = k_norm = None
    if config.qk_norm != "none":
        q_norm, k_norm = (jnp.ones((a, k) if config.qk_norm == "width" else k) for a in (h, g))
    if config.score == "additive":
        v_score = _weights(keys[8], (h, k), (k, 1), config, 1.0)
    if config.position == "relative_key":
        relative = RelativeParams(
            w_r=_weights(keys[9], (h, d, k), (d, h * k), config, scale),
            b_r=bias(keys[10], h, k),
            b_s=bias(keys[11], h, k),
            segment=_weights(keys[12], (2, h, k), (k, k), config, scale),
        )
    return AttentionParams(
        w_q=_weights(keys[0], (h, d, k), (d, h * k), config, scale),
        b_q=bias(keys[1], h, k),
        w_k=_weights(keys[2], (g, d, k), (d, g * k), config, scale),
        b_k=bias(keys[3], g, k),
        w_v=_weights(keys[4], (g, d, v), (d, g * v), config, scale * gain, uniform=True),
        b_v=bias(keys[5], g, v),
        w_o=_weights(keys[6], (h, v, d), (h * v, d), config, scale * gain, uniform=True),
        b_o=bias(keys[7], d),
        v_score=v_score,
        relative=relative,
        q_norm=q_norm,
        k_norm=k_norm,
    )


def _init_mlp(key, config, scale, bias_scale):
    d, f, scale = config.d_model, config.ff_width, scale * config.init_gain
    keys = _split(key)
    gate = {}
    if config.mlp in layers.GATED:
        gate["w_gate"] = _weights(keys[4], (d, f), (d, f), config, scale)
        gate["b_gate"] = _biases(keys[5], (f,), bias_scale)
    if config.num_experts:  # keys of their own: those of other networks stay what they are
        shapes = {"w_router": (d, config.num_experts)}
        shapes |= {"w_shared": (d, 1)} if config.d_shared else {}
        for i, (name, shape) in enumerate(shapes.items()):
            gate[name] = _weights(jax.random.fold_in(key, i), shape, shape, config, scale)
    return layers.MLPParams(
        w_in=_weights(keys[0], (d, f), (d, f), config, scale),
        b_in=_biases(keys[1], (f,), bias_scale),
        w_out=_weights(keys[2], (f, d), (f, d), config, scale),
        b_out=_biases(keys[3], (d,), bias_scale),
        **gate,
    )


def layer_params(params: TransformerParams, config: TransformerConfig, layer: Any) -> BlockParams:
    """Parameters of one layer, through `config.layer_map`; the index may be traced.

    Raises:
        ValueError: A layer that is not there, where its index is known.
    """
    known = not isinstance(layer, jax.core.Tracer)
    struct.refuse_if(
        known and not -config.depth <= layer < config.depth,
        f"layer={layer} of a network of depth={config.depth}",
    )
    row = jnp.asarray(config.layer_map)[layer] if config.layer_map else layer
    return jax.tree.map(lambda a: a[row], params.layers)


_OPTIONAL = ("b_q", "b_k", "b_v", "b_o", "b_in", "b_out", "b_gate", "bias")


def check_params(params: TransformerParams, config: TransformerConfig) -> None:
    """Refuses parameters that contradict the config, by their shapes alone.

    Parts that the config does not use (an MLP under mlp="none", norms under
    norm_placement="none") may be there, but no learned gains that it does not know; biases may be
    None, keys and values grouped.

    Raises:
        ValueError: A parameter that is missing, of another shape, or of another kind of MLP.
    """
    wanted = _shapes(_expected(_hashable(config)))
    found = _shapes(params)
    for part in ("layers.attention", "layers.cross"):
        wanted |= _grouped(wanted, found, part, config.num_heads)
    sizes = (
        f"depth={config.depth}, num_heads={config.num_heads}, d_model={config.d_model}, "
        f"d_qk={config.qk_width}, d_v={config.v_width}, d_ff={config.ff_width}, mlp={config.mlp!r}"
    )
    for name, shape in wanted.items():
        if name not in found and name.rsplit(".", 1)[-1] in _OPTIONAL:
            continue
        if found.get(name) != shape:
            there = f"of shape {found[name]}" if name in found else "missing"
            raise ValueError(f"params.{name} is {there}; the config implies {shape} ({sizes})")
    used = {name.split(".")[1] for name in wanted if name.startswith("layers.")}
    for name, shape in found.items():
        part = name.split(".")[1] if name.startswith("layers.") else ""
        part = part.removesuffix("_gains").removesuffix("_connection")
        if name in wanted or part not in used or name.endswith(".bias"):
            continue
        raise ValueError(f"params.{name} of shape {shape} is not in the config ({sizes})")


def _grouped(wanted, found, part, num_heads):
    """What the config implies where all keys and values of a part are in as many groups."""
    names = [f"{part}.{name}" for name in ("w_k", "b_k", "w_v", "b_v")]
    if len(wanted.get(f"{part}.k_norm", ())) == 3:
        names.append(f"{part}.k_norm")
    groups = {found[name][1] for name in names if len(found.get(name, ())) > 1}
    if f"{part}.w_k" not in wanted or len(groups) != 1 or num_heads % (g := groups.pop() or 1):
        return {}
    return {name: (wanted[name][0], g, *wanted[name][2:]) for name in names}


def complete_params(params: TransformerParams, config: TransformerConfig) -> TransformerParams:
    """The parameters, checked, with zeros for biases that are None and each head's own keys.

    Raises:
        ValueError: As `check_params`.
    """
    check_params(params, config)
    wanted = _expected(_hashable(config)).layers
    layers = params.layers

    def filled(part, like):
        if part is None or like is None:
            return part
        dtype = jax.tree.leaves(part)[0].dtype
        missing = {
            name: jnp.zeros(getattr(like, name).shape, dtype)
            for name in _OPTIONAL
            if getattr(part, name, 0) is None and getattr(like, name, None) is not None
        }
        part = part.replace(**missing)
        return repeat_groups(part) if isinstance(part, AttentionParams) else part

    names = ("attention", "cross", "mlp")
    parts = {name: filled(getattr(layers, name), getattr(wanted, name)) for name in names}
    return params.replace(layers=layers.replace(**parts))


def stack_layers(layers: Sequence[BlockParams]) -> BlockParams:
    """Layers of equal shapes as one `BlockParams` with a leading layer axis, as `apply` takes them.

    Args:
        layers: Parameters of each layer, first to last.

    Raises:
        ValueError: No layer, or layers whose parts or shapes differ.
    """
    struct.refuse_if(not layers, "there are no layers to stack")
    first = _shapes(layers[0])
    for l, layer in enumerate(layers):
        other = _shapes(layer)
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"layer {l} has {name} of shape {other.get(name)}, layer 0 of {first.get(name)}"
                )
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(a) for a in leaves]), *layers)


def _hashable(config):
    """The config with 1 for all that may be swept, of which shapes do not depend; None stays."""
    return config.replace(**{n: 1.0 for n in SWEPT if getattr(config, n) is not None})


@functools.lru_cache(maxsize=256)
def _expected(config):
    return jax.eval_shape(lambda: init(jax.random.key(0), config))


def _shapes(params):
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(p, simple=True, separator="."): jnp.shape(a) for p, a in leaves}
