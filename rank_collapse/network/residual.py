"""Where a branch joins the residual stream: norms, skips and gains of a sublayer.

The residual stream is X itself, to which branches add (Elhage et al. 2021). The residual res(X) of
Dong et al. 2021 is another thing: X less what all tokens have in common (`measures.residuals`).

Gains are one value for all sublayers, or their own for each kind and layer. Post-norm with gains
reads N(λ x + γ branch(x)). Admin's ω (λ = ω), DeepNet's α (λ = α), LayerScale (γ [L, d]), ReZero
(γ = 0 at first) and 1/√L (γ) are values of these, not code: see `designs`.

Axis letters: l layers, n tokens, d width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.network import layers
from rank_collapse.network.attention import ANY_DISTANCE
from rank_collapse.network.config import TransformerConfig


class Gains(struct.Struct):
    """A gain of each kind of sublayer: a number, [L] or [L or 1, d]; after `layer_gains` [L(, d)].

    As `skip_gain` or `branch_gain` of a config it gives each kind of sublayer its own:
    `config.replace(skip_gain=Gains(attention=2.0, mlp=1.0))`.
    """

    attention: Any = 1.0
    cross: Any = 1.0
    mlp: Any = 1.0


class Unprofiled(struct.Struct):
    """In the place of skip gains that `admin_profile` has still to find."""


class LearnedGains(struct.Struct):
    """Gains of one kind of sublayer that are parameters: [L] or [L, d] in a stack; or None."""

    skip: Any = None
    branch: Any = None


class LayerGains(struct.Struct):
    """Values of one layer, or of a stack, that may be swept or that differ between layers."""

    skip: Gains  # λ
    branch: Gains  # γ
    temperature: Any
    mixing: Any = None  # `attention.Mixing` with leaves [h]; None for none
    norm: Any = None  # Gains of what the norms put out; None for none
    window: Any = None  # How far the layer attends; None where all attend at any distance
    unnormed: Any = None  # Whether its attention reads tokens without a norm; None where none does
    rotated: Any = None  # Whether it has the rotary positions; None where all have them


class ResidualSpec(struct.Struct):
    """How a sublayer joins its branch to the stream: N(λ x + γ N'(branch(N(x))))."""

    norm: Any  # NormParams of N; None for a norm without gain and bias
    branch_norm: Any  # those of N', the norm of the branch's output
    skip_gain: Any  # λ, a scalar or [d]
    branch_gain: Any  # γ
    kind: str = struct.field(pytree_node=False)  # the sublayer's; "final" after the last layer
    skip: bool = struct.field(pytree_node=False)
    placement: str = struct.field(pytree_node=False)  # `ResidualConfig.norm_placement`
    norm_kind: Any = struct.field(pytree_node=False)
    eps: float = struct.field(pytree_node=False)
    parallel: bool = struct.static(False)  # whether the branch reads the layer's start
    after_branch: bool = struct.static(False)  # whether this is the spec of N', see `at_branch`
    unnormed: Any = None  # traced Bool, whether this layer's branch reads tokens without N
    connection: Any = None  # `streams.ConnectionParams`; None for one stream, or for their mean

    @property
    def norms_input(self) -> bool:
        """Whether the branch reads normalised tokens."""
        return self.placement in ("pre", "sandwich")

    @property
    def norms_branch(self) -> bool:
        """Whether the branch's output is normalised before it joins the sum."""
        return self.placement in ("sandwich", "branch", "both")

    @property
    def norms_sum(self) -> bool:
        """Whether the stream is normalised after the sum."""
        return self.placement in ("post", "both")

    @property
    def at_branch(self) -> "ResidualSpec":
        """N' as a spec of its own, for the functions that normalise."""
        return self.replace(norm=self.branch_norm, after_branch=True)


def residual_specs(
    params: Any, config: TransformerConfig, gains: LayerGains
) -> dict[str, ResidualSpec]:
    """The specs of one layer's sublayers, by kind.

    Args:
        gains: Of the layer, from `layer_gains`.
    """
    skips = {"attention": config.attention_skip, "cross": config.cross_skip, "mlp": config.mlp_skip}

    def spec(kind):
        norm, branch_norm = getattr(params, f"{kind}_norm"), getattr(params, f"{kind}_branch_norm")
        if gains.norm is not None:
            norm = scale_norm(norm, getattr(gains.norm, kind), config.d_model)
        parallel = config.parallel and kind == "mlp"
        return ResidualSpec(
            norm,
            branch_norm,
            getattr(gains.skip, kind),
            getattr(gains.branch, kind),
            kind,
            # The one skip of a parallel layer is around its attention: the MLP's carries the sum.
            skip=skips[kind] or parallel,
            placement=config.norm_placement,
            norm_kind=config.norm,
            eps=config.norm_eps,
            parallel=parallel,
            unnormed=gains.unnormed if kind == "attention" else None,
            connection=getattr(params, f"{kind}_connection"),
        )

    return {kind: spec(kind) for kind in config.kinds}


def final_spec(params: Any, config: TransformerConfig) -> ResidualSpec:
    """The norm after the last layer, as a spec."""
    spec = lone_norm(params.final_norm, config.norm, config.norm_eps)
    return spec.replace(connection=params.final_connection)


def lone_norm(norm: Any, kind: Any, eps: float) -> ResidualSpec:
    """A norm that belongs to no sublayer, as a spec."""
    return ResidualSpec(norm, None, 1.0, 1.0, "final", False, "post", kind, eps)


def scale_norm(norm: layers.NormParams | None, gain: Any, width: int) -> layers.NormParams:
    """gain · N: a norm with its output multiplied by a scalar or [d]."""
    if norm is None:
        return layers.NormParams(gain=jnp.broadcast_to(gain, (width,)))
    bias = None if norm.bias is None else gain * norm.bias
    return layers.NormParams(gain=gain * norm.gain, bias=bias)


def normalize_tokens(spec: ResidualSpec, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """The spec's norm of ordinary tokens."""
    return layers.norm(spec.norm, x, spec.norm_kind, spec.eps)


def add_to_stream(
    spec: ResidualSpec, x: Float[Array, "*s d"], part: Float[Array, "*s d"]
) -> Float[Array, "*s d"]:
    """γ part + λ x·[skip] of ordinary tokens."""
    total = apply_gain(spec.branch_gain, part)
    return total + apply_gain(spec.skip_gain, x) if spec.skip else total


def scale_summands(
    spec: ResidualSpec, x: Float[Array, "n d"], part: Float[Array, "n d"]
) -> tuple[Float[Array, "n d"], Float[Array, "n d"]]:
    """(λ x, γ N'(part)): the two sides of the sum in which a branch joins the stream.

    Args:
        spec: Of the sublayer.
        x: The stream before it; returned as it is where there is no skip.
        part: The branch's output, as a trace keeps it.
    """
    if spec.norms_branch:
        part = normalize_tokens(spec.at_branch, part)
    return apply_gain(spec.skip_gain, x) if spec.skip else x, apply_gain(spec.branch_gain, part)


def layer_gains(config: TransformerConfig, dtype: Any, params: Any = None) -> LayerGains:
    """The gains, times those that are learned, and the temperature: one entry per layer.

    Args:
        dtype: Of the arithmetic.
        params: The network's `TransformerParams`, which hold the learned gains.

    Returns:
        Leaves [L], or [L, d] where a gain is given per feature.

    Raises:
        ValueError: A gain of another shape, learned gains without the parameters, or gains that
            are to be profiled first.
    """
    struct.refuse_if(
        isinstance(config.skip_gain, Unprofiled),
        "skip_gain=Unprofiled(): rc.network.admin_profile(params, batch, config) has the gains",
    )
    far = [w or ANY_DISTANCE for w in config.windows]
    return LayerGains(
        skip=_times_learned("skip", config, dtype, params),
        branch=_times_learned("branch", config, dtype, params),
        temperature=_by_layer("temperature", config.temperature, config, dtype),
        mixing=jax.tree.map(lambda a: _by_head(a, config, dtype), config.mixing),
        norm=None if config.norm_gain is None else _each(config, "norm_gain", dtype),
        window=jnp.asarray(far) if far else None,
        unnormed=None if config.first_norm else jnp.arange(config.depth) == 0,
        rotated=jnp.asarray(config.rotary_layers, bool) if config.rotary_layers else None,
    )


def init_gains(config: TransformerConfig) -> dict[str, LearnedGains]:
    """The gains that are trained, where the config starts them: fields of `BlockParams`, stacked.

    Raises:
        ValueError: A start of another shape, or per feature without `learned_per_feature`.
    """
    dtype, rows = jnp.result_type(float), config.layer_map or range(config.depth)
    first = jnp.asarray([rows.index(row) for row in range(config.num_rows)])

    def start(name):
        if getattr(config, name) is None:
            return dict.fromkeys(config.kinds)
        each = _each(config, name, dtype)
        return {kind: per_row(name, getattr(each, kind)) for kind in config.kinds}

    def per_row(name, gain):
        if config.learned_per_feature:
            gain = gain if gain.ndim == 2 else jnp.tile(gain[:, None], config.d_model)
        elif gain.ndim == 2:
            raise ValueError(f"{name} is given per feature, but learned_per_feature=False")
        return gain[first]

    skip, branch = start("learned_skip_gain"), start("learned_branch_gain")
    return {
        f"{kind}_gains": LearnedGains(skip=skip[kind], branch=branch[kind])
        for kind in config.kinds
        if skip[kind] is not None or branch[kind] is not None
    }


def _each(config, name, dtype):
    gain = getattr(config, name)
    kinds = gain if isinstance(gain, Gains) else Gains(gain, gain, gain)
    return Gains(
        *(
            _by_layer(name, value, config, dtype)
            for value in (kinds.attention, kinds.cross, kinds.mlp)
        )
    )


def _times_learned(which, config, dtype, params):
    gains = _each(config, f"{which}_gain", dtype)
    if getattr(config, f"learned_{which}_gain") is None:
        return gains
    if params is None:
        raise ValueError(f"learned_{which}_gain is set: its gains are in the network's parameters")
    for kind in config.kinds:
        own = getattr(gains, kind)
        learned = getattr(getattr(params.layers, f"{kind}_gains"), which).astype(dtype)
        if config.layer_map:
            learned = learned[jnp.asarray(config.layer_map)]
        if own.ndim != learned.ndim:
            own, learned = (a if a.ndim == 2 else a[:, None] for a in (own, learned))
        gains = gains.replace(**{kind: own * learned})
    return gains


def _by_layer(name: str, value: Any, config: TransformerConfig, dtype: Any) -> Array:
    value = jnp.asarray(value, dtype)
    depth, d = config.depth, config.d_model
    features = name != "temperature"
    if value.ndim == 0 or value.shape == (depth,):
        return jnp.broadcast_to(value, (depth,))
    if features and value.shape in ((depth, d), (1, d)):
        return jnp.broadcast_to(value, (depth, d))
    allowed = f"() or [{depth}]" + (f" or [{depth} or 1, {d}]" if features else "")
    raise ValueError(
        f"{name} of shape {value.shape} is not {allowed} for depth={depth}, d_model={d}; "
        "use jax.vmap to sweep it"
    )


def _by_head(value, config, dtype):
    """[L, H] of a number, [L] or [L, H]."""
    value, shape = jnp.asarray(value, dtype), (config.depth, config.num_heads)
    if value.shape not in ((), shape[:1], shape):
        raise ValueError(f"mixing of shape {value.shape} is not (), {shape[:1]} or {shape}")
    return jnp.broadcast_to(value[:, None] if value.ndim == 1 else value, shape)


def apply_gain(gain: Any, x: Array) -> Array:
    """gain · x for a scalar or [d] gain and any x [..., d]."""
    gain = jnp.asarray(gain, x.dtype)
    return gain.reshape((1,) * (x.ndim - 1) + (-1,)) * x if gain.ndim else gain * x
