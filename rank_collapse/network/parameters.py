"""Parameters of the one network, and their initialisation.

Every function handles one seed; vmap over keys adds a seed axis.
"""

import functools
import math

import jax
import jax.numpy as jnp

from rank_collapse import checks, struct
from rank_collapse.annotations import Key, Leaf, Number, Tree
from rank_collapse.network import layers
from rank_collapse.network.attention import AttentionParams, repeat_groups
from rank_collapse.network.config import SWEPT, TransformerConfig
from rank_collapse.network.embedding import EmbeddingParams, init_embedding
from rank_collapse.network.layers import MLPParams, NormParams
from rank_collapse.network.positions import RelativeParams
from rank_collapse.network.residual import LearnedGains, init_gains


class BlockParams(struct.Struct):
    """Parameters of one layer, or of a stack with a leading layer axis; None for absent parts.

    Attributes:
        attention, cross, mlp: Parameters of the sublayers.
        attention_norm, cross_norm, mlp_norm: Parameters of the norm before the branch, or after the
            sum.
        attention_branch_norm, cross_branch_norm, mlp_branch_norm: Parameters of the norm of the
            branch's output.
        attention_gains, cross_gains, mlp_gains: Learned gains of the skip and of the branch.
    """

    attention: AttentionParams | None
    attention_norm: NormParams | None = None
    attention_branch_norm: NormParams | None = None
    attention_gains: LearnedGains | None = None
    cross: AttentionParams | None = None
    cross_norm: NormParams | None = None
    cross_branch_norm: NormParams | None = None
    cross_gains: LearnedGains | None = None
    mlp: MLPParams | None = None
    mlp_norm: NormParams | None = None
    mlp_branch_norm: NormParams | None = None
    mlp_gains: LearnedGains | None = None


class TransformerParams(struct.Struct):
    """All parameters of a network.

    Attributes:
        layers: `BlockParams` with a leading axis of `config.num_rows`.
        final_norm: Parameters of the norm after the last layer; None without it.
        embedding: Parameters of the embedding; None without it.
        position_bias: [buckets, h], of position="relative_bias"; None for other positions.
    """

    layers: Tree
    final_norm: NormParams | None = None
    embedding: EmbeddingParams | None = None
    position_bias: Leaf | None = None


def init(
    key: Key, config: TransformerConfig, weight_scale: Number = 1.0, bias_scale: Number = 0.0
) -> TransformerParams:
    """Draw the parameters of a network, by the rule `config.init`.

    Layer l draws from fold_in(key, l), so a deeper network begins with the same layers.

    Args:
        key: Random key.
        config: The network.
        weight_scale: Multiplies every weight matrix; may be traced.
        bias_scale: Standard deviation of the biases (0: none, as in the paper); may be traced.
    """
    checks.check_numbers("[-inf, inf]", weight_scale=weight_scale, bias_scale=bias_scale)
    key_layers, key_embedding, key_position = jax.random.split(key, 3)
    keys = jax.vmap(lambda l: jax.random.fold_in(key_layers, l))(jnp.arange(config.num_rows))
    stack = jax.vmap(lambda k: init_block(k, config, weight_scale, bias_scale))(keys)
    stack = stack.replace(**init_gains(config))
    norm = _init_norm(config) if config.final_norm else None
    embedding = position_bias = None
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
    )


def init_block(
    key: Key, config: TransformerConfig, weight_scale: Number = 1.0, bias_scale: Number = 0.0
) -> BlockParams:
    """Draw the parameters of one layer, except for learned gains; see `init`.

    Args:
        key: Random key of the layer.
        config, weight_scale, bias_scale: See `init`.
    """
    key_attention, key_cross, key_mlp = _split_key(key)[:3]
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


def _split_key(key):
    """Split a layer's key into 13; the first ones do not depend on the number."""
    return jax.random.split(key, 13)


def _init_norm(config):
    """Make a norm of gain 1; only LayerNorm has a bias."""
    bias = jnp.zeros(config.d_model) if config.norm == "layer" else None
    return layers.NormParams(gain=jnp.ones(config.d_model), bias=bias)


def _draw_weights(key, shape, fans, config, scale, uniform=False):
    """Draw one weight matrix by the rule `config.init`.

    Args:
        key: Random key.
        shape: Shape of the matrix, heads included.
        fans: (inputs, outputs) of the linear map.
        config: The network.
        scale: Multiplies the values.
        uniform: Whether init="reference" draws it uniformly.
    """
    # Drawn as vectors, which have the same values: one program serves all shapes of one size.
    (fan_in, fan_out), count = fans, math.prod(shape)
    if config.init == "reference" and uniform:
        w = jax.random.uniform(key, (count,), minval=-1.0, maxval=1.0) / jnp.sqrt(fan_in)
    else:
        stds = {"lecun": 1 / jnp.sqrt(fan_in), "xavier": jnp.sqrt(2 / (fan_in + fan_out))}
        w = stds.get(config.init, 0.02) * jax.random.normal(key, (count,))
    return (scale * w).reshape(shape)


def _draw_biases(key, shape, scale):
    """Draw biases; without a scale nothing is drawn, because random bits take most of the
    compilation time.

    Args:
        key: Random key.
        shape: Shape of the biases.
        scale: Standard deviation of the biases.
    """
    if isinstance(scale, (int, float)) and scale == 0:
        return jnp.zeros(shape)
    return scale * jax.random.normal(key, shape)


def _init_attention(key, config, scale, bias_scale):
    """Draw the parameters of one attention.

    Args:
        key: Random key.
        config: The network.
        scale: Multiplies the weights.
        bias_scale: Standard deviation of the biases.
    """
    h, d, k, v = config.num_heads, config.d_model, config.qk_width, config.v_width
    keys, gain, g = _split_key(key), config.init_gain, config.num_kv_heads or h

    def bias(key, *shape):
        return _draw_biases(key, shape, bias_scale)

    v_score = relative = q_norm = k_norm = None
    if config.qk_norm == "head":
        q_norm, k_norm = jnp.ones(k), jnp.ones(k)
    elif config.qk_norm == "width":
        q_norm, k_norm = jnp.ones((h, k)), jnp.ones((g, k))
    if config.score == "additive":
        v_score = _draw_weights(keys[8], (h, k), (k, 1), config, 1.0)
    if config.position == "relative_key":
        relative = RelativeParams(
            w_r=_draw_weights(keys[9], (h, d, k), (d, h * k), config, scale),
            b_r=bias(keys[10], h, k),
            b_s=bias(keys[11], h, k),
            segment=_draw_weights(keys[12], (2, h, k), (k, k), config, scale),
        )
    return AttentionParams(
        w_q=_draw_weights(keys[0], (h, d, k), (d, h * k), config, scale),
        b_q=bias(keys[1], h, k),
        w_k=_draw_weights(keys[2], (g, d, k), (d, g * k), config, scale),
        b_k=bias(keys[3], g, k),
        w_v=_draw_weights(keys[4], (g, d, v), (d, g * v), config, scale * gain, uniform=True),
        b_v=bias(keys[5], g, v),
        w_o=_draw_weights(keys[6], (h, v, d), (h * v, d), config, scale * gain, uniform=True),
        b_o=bias(keys[7], d),
        v_score=v_score,
        relative=relative,
        q_norm=q_norm,
        k_norm=k_norm,
    )


def _init_mlp(key, config, scale, bias_scale):
    """Draw the parameters of one MLP.

    Args:
        key: Random key of the layer's MLP.
        config: The network.
        scale: Multiplies the weights, in addition to `config.init_gain`.
        bias_scale: Standard deviation of the biases.
    """
    d, f, scale = config.d_model, config.ff_width, scale * config.init_gain
    keys = _split_key(key)
    gate = {}
    if config.mlp in layers.GATED:
        gate["w_gate"] = _draw_weights(keys[4], (d, f), (d, f), config, scale)
        gate["b_gate"] = _draw_biases(keys[5], (f,), bias_scale)
    if config.num_experts:  # `fold_in(key, i)` would be keys[i], which others draw from
        shape = d, config.num_experts
        gate["w_router"] = _draw_weights(keys[6], shape, shape, config, scale)
        if config.d_shared:
            gate["w_shared"] = _draw_weights(keys[7], (d, 1), (d, 1), config, scale)
    return layers.MLPParams(
        w_in=_draw_weights(keys[0], (d, f), (d, f), config, scale),
        b_in=_draw_biases(keys[1], (f,), bias_scale),
        w_out=_draw_weights(keys[2], (f, d), (f, d), config, scale),
        b_out=_draw_biases(keys[3], (d,), bias_scale),
        **gate,
    )


def layer_params(
    params: TransformerParams, config: TransformerConfig, layer: Number
) -> BlockParams:
    """Return the parameters of one layer, through `config.layer_map`; the index may be traced.

    Args:
        params, config: The network.
        layer: Index of the layer.

    Raises:
        ValueError: An index outside of the layers, if it is not traced.
    """
    if isinstance(layer, jax.core.Tracer):
        row = jnp.asarray(config.layer_map)[layer] if config.layer_map else layer
        return jax.tree.map(lambda a: jnp.asarray(a)[row], params.layers)  # also of NumPy's arrays
    if not -config.depth <= layer < config.depth:
        raise ValueError(f"layer={layer} does not exist in a network of depth={config.depth}")
    row = config.layer_map[layer] if config.layer_map else layer
    return jax.tree.map(lambda a: a[row], params.layers)


_OPTIONAL = ("b_q", "b_k", "b_v", "b_o", "b_in", "b_out", "b_gate", "bias")


def check_params(params: TransformerParams, config: TransformerConfig) -> None:
    """Check parameters against the config, by their shapes alone.

    Parts that the config does not use (an MLP under mlp="none", norms under norm_placement="none")
    may exist, except for learned gains. Biases may be None, keys and values grouped.

    Args:
        params, config: The network.

    Raises:
        ValueError: A parameter that is missing, of another shape, or of another kind of MLP.
    """
    expected = _shapes_by_name(_expected_params(_hashable(config)))
    shapes = _shapes_by_name(params)
    for part in ("layers.attention", "layers.cross"):
        expected |= _grouped_shapes(expected, shapes, part, config.num_heads)
    sizes = (
        f"depth={config.depth}, num_heads={config.num_heads}, d_model={config.d_model}, "
        f"d_qk={config.qk_width}, d_v={config.v_width}, d_ff={config.ff_width}, mlp={config.mlp!r}"
    )
    for name, shape in expected.items():
        if name not in shapes and name.rsplit(".", 1)[-1] in _OPTIONAL:
            continue
        if shapes.get(name) != shape:
            state = f"of shape {shapes[name]}" if name in shapes else "missing"
            raise ValueError(f"params.{name} is {state}; the config implies {shape} ({sizes})")
    used_parts = {name.split(".")[1] for name in expected if name.startswith("layers.")}
    for name, shape in shapes.items():
        part = name.split(".")[1] if name.startswith("layers.") else ""
        part = part.removesuffix("_gains")
        if name not in expected and part in used_parts and not name.endswith(".bias"):
            raise ValueError(f"params.{name} of shape {shape} has no place in the config ({sizes})")


def _grouped_shapes(expected, shapes, part, num_heads):
    """List the shapes that replace the expected ones where a part has grouped keys and values.

    Args:
        expected, shapes: {name: shape} that the config implies, and those of the parameters.
        part: "layers.attention" or "layers.cross".
        num_heads: H, which the number of groups has to divide.
    """
    names = [f"{part}.{name}" for name in ("w_k", "b_k", "w_v", "b_v")]
    if len(expected.get(f"{part}.k_norm", ())) == 3:
        names.append(f"{part}.k_norm")
    group_counts = {shapes[name][1] for name in names if len(shapes.get(name, ())) > 1}
    if f"{part}.w_k" not in expected or len(group_counts) != 1:
        return {}
    num_groups = group_counts.pop() or 1
    if num_heads % num_groups:
        return {}
    return {name: (expected[name][0], num_groups, *expected[name][2:]) for name in names}


def complete_params(params: TransformerParams, config: TransformerConfig) -> TransformerParams:
    """Check parameters, replace biases that are None by zeros, and repeat grouped keys and values.

    Args:
        params, config: The network.

    Raises:
        ValueError: In the same cases as `check_params`.
    """
    check_params(params, config)
    expected = _expected_params(_hashable(config)).layers
    parts = {}
    for name in ("attention", "cross", "mlp"):
        part, expected_part = getattr(params.layers, name), getattr(expected, name)
        if part is None or expected_part is None:
            continue
        dtype = jax.dtypes.canonicalize_dtype(jax.tree.leaves(part)[0].dtype)
        for bias in _OPTIONAL:
            expected_bias = getattr(expected_part, bias, None)
            if expected_bias is not None and getattr(part, bias) is None:
                part = part.replace(**{bias: jnp.zeros(expected_bias.shape, dtype)})
        parts[name] = repeat_groups(part) if isinstance(part, AttentionParams) else part
    return params.replace(layers=params.layers.replace(**parts))


def _hashable(config):
    """Set all values that may be swept to 1, because no shape depends on them; None stays."""
    return config.replace(**{n: 1.0 for n in SWEPT if getattr(config, n) is not None})


@functools.lru_cache(maxsize=256)
def _expected_params(config):
    """Return the shapes of the parameters that a config implies."""
    return jax.eval_shape(lambda: init(jax.random.key(0), config))


def _shapes_by_name(params):
    """List the shapes of a tree's arrays, {"layers.attention.w_q": (l, h, d, k), ...}."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(p, simple=True, separator="."): jnp.shape(a) for p, a in leaves}
