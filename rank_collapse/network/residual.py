"""Where a branch joins the residual stream: norms, skips and gains of a sublayer.

The residual stream is X itself, to which branches add (Elhage et al. 2021). The residual res(X) of
Dong et al. 2021 is different: X minus the part that all tokens share (`measures.residuals`).

Gains are one value for all sublayers, or one for each kind and layer. Post-norm with gains
reads N(λ x + γ branch(x)). Admin's ω (λ = ω), DeepNet's α (λ = α), LayerScale (γ [L, d]), ReZero
(γ = 0 at first) and 1/√L (γ) are values of these, not code: see `designs`.

Axis letters: l layers, n tokens, d width.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.annotations import DType, Leaf, Number
from rank_collapse.network import layers
from rank_collapse.network.attention_weights import ANY_DISTANCE
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.layers import NormKind, NormParams


class Gains(struct.Struct):
    """A gain of each kind of sublayer: a number, [L] or [L or 1, d]; after `layer_gains` [L(, d)].

    As `skip_gain` or `branch_gain` of a config it gives each kind of sublayer its own gain:
    `config.replace(skip_gain=Gains(attention=2.0, mlp=1.0))`.
    """

    attention: Number = 1.0
    cross: Number = 1.0
    mlp: Number = 1.0


class Unprofiled(struct.Struct):
    """Placeholder for skip gains that `admin_profile` will compute."""


class LearnedGains(struct.Struct):
    """Gains of one kind of sublayer that are parameters: [L] or [L, d] in a stack; or None."""

    skip: Leaf | None = None
    branch: Leaf | None = None


class LayerGains(struct.Struct):
    """Values of one layer, or of a stack, that may be swept or may differ between layers."""

    skip: Gains  # λ
    branch: Gains  # γ
    temperature: Number
    mixing: Leaf | None = None  # `Mixing` with leaves [h]; None for none
    norm: Any = None  # Gains of the norms' outputs; None for none
    window: Leaf | None = None  # how far the layer attends; None where all attend at any distance
    # Bool, its attention reads tokens without a norm; None where none does
    unnormed: Leaf | None = None
    rotated: Leaf | None = None  # Bool, it has the rotary positions; None where all have them


class ResidualSpec(struct.Struct):
    """How a sublayer joins its branch to the stream: N(λ x + γ N'(branch(N(x))))."""

    norm: NormParams | None  # of N; None for a norm without gain and bias
    branch_norm: NormParams | None  # those of N', the norm of the branch's output
    skip_gain: Leaf  # λ, a scalar or [d]
    branch_gain: Number  # γ
    kind: str = struct.field(pytree_node=False)  # the sublayer's; "final" after the last layer
    skip: bool = struct.field(pytree_node=False)
    placement: str = struct.field(pytree_node=False)  # `ResidualConfig.norm_placement`
    norm_kind: NormKind | Callable = struct.field(pytree_node=False)
    eps: float = struct.field(pytree_node=False)
    parallel: bool = struct.static(False)  # whether the branch reads the layer's start
    after_branch: bool = struct.static(False)  # whether this is the spec of N', see `at_branch`
    unnormed: Leaf | None = None  # traced Bool, whether this layer's branch reads tokens without N

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
        """This spec, with the norm N' of the branch's output in place of the norm N."""
        return self.replace(norm=self.branch_norm, after_branch=True)


def residual_specs(
    params: Any, config: TransformerConfig, gains: LayerGains
) -> dict[str, ResidualSpec]:
    """Make the specs of one layer's sublayers, by kind.

    Args:
        params: `BlockParams` of the layer.
        config: The network.
        gains: Gains of the layer, from `layer_gains`.
    """
    skips = {"attention": config.attention_skip, "cross": config.cross_skip, "mlp": config.mlp_skip}
    specs = {}
    for kind in config.kinds:
        norm = getattr(params, f"{kind}_norm")
        if gains.norm is not None:
            norm = scale_norm(norm, getattr(gains.norm, kind), config.d_model)
        parallel = config.parallel and kind == "mlp"
        specs[kind] = ResidualSpec(
            norm,
            getattr(params, f"{kind}_branch_norm"),
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
        )
    return specs


def final_spec(params: Any, config: TransformerConfig) -> ResidualSpec:
    """Make the spec of the norm after the last layer."""
    return lone_norm(params.final_norm, config.norm, config.norm_eps)


def lone_norm(norm: NormParams | None, kind: NormKind | Callable, eps: float) -> ResidualSpec:
    """Make the spec of a norm that belongs to no sublayer.

    Args:
        norm: `NormParams`, or None for a norm without gain and bias.
        kind, eps: See `layers.apply_norm`.
    """
    return ResidualSpec(norm, None, 1.0, 1.0, "final", False, "post", kind, eps)


def scale_norm(norm: layers.NormParams | None, gain: Number, width: int) -> layers.NormParams:
    """Multiply a norm's output, its gain and bias, by a scalar or [d].

    Args:
        norm: `NormParams`; None for a norm without gain and bias.
        gain: A scalar or [d].
        width: d.
    """
    if norm is None:
        return layers.NormParams(gain=jnp.broadcast_to(gain, (width,)))
    bias = None if norm.bias is None else gain * norm.bias
    return layers.NormParams(gain=gain * norm.gain, bias=bias)


def normalise_tokens(spec: ResidualSpec, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """Apply the spec's norm to ordinary tokens."""
    return layers.apply_norm(spec.norm, x, spec.norm_kind, spec.eps)


def add_to_stream(
    spec: ResidualSpec, x: Float[Array, "*s d"], branch_output: Float[Array, "*s d"]
) -> Float[Array, "*s d"]:
    """Compute γ branch_output + λ x·[skip] for ordinary tokens.

    Args:
        spec: Specification of the sublayer, for γ, λ and its skip.
        x: The stream.
        branch_output: Output of the branch.
    """
    total = apply_gain(spec.branch_gain, branch_output)
    return total + apply_gain(spec.skip_gain, x) if spec.skip else total


def scale_summands(
    spec: ResidualSpec, x: Float[Array, "n d"], branch_output: Float[Array, "n d"]
) -> tuple[Float[Array, "n d"], Float[Array, "n d"]]:
    """Compute (λ x, γ N'(branch_output)), the two sides of the sum where a branch joins the stream.

    Args:
        spec: Specification of the sublayer.
        x: The stream before the branch; returned unchanged where there is no skip.
        branch_output: The output before N', as a trace keeps it.
    """
    if spec.norms_branch:
        branch_output = normalise_tokens(spec.at_branch, branch_output)
    stream = apply_gain(spec.skip_gain, x) if spec.skip else x
    return stream, apply_gain(spec.branch_gain, branch_output)


def layer_gains(config: TransformerConfig, dtype: DType, params: Any = None) -> LayerGains:
    """Compute the values that may be swept or differ between layers: gains, temperature, windows.

    Args:
        config: The network.
        dtype: Number format of the arithmetic.
        params: The network's `TransformerParams`, which hold the learned gains.

    Returns:
        Leaves [L], or [L, d] where a gain is given per feature.

    Raises:
        ValueError: A gain of another shape, learned gains without the parameters, or gains that
            `admin_profile` has to compute first.
    """
    if isinstance(config.skip_gain, Unprofiled):
        raise ValueError(
            "skip_gain=Unprofiled() has no values; rc.network.admin_profile(params, batch, config) "
            "computes them"
        )
    windows = [window or ANY_DISTANCE for window in config.windows]
    return LayerGains(
        skip=_effective_gains("skip", config, dtype, params),
        branch=_effective_gains("branch", config, dtype, params),
        temperature=_broadcast_to_layers("temperature", config.temperature, config, dtype),
        mixing=jax.tree.map(lambda a: _broadcast_to_heads(a, config, dtype), config.mixing),
        norm=None if config.norm_gain is None else _gains_by_kind(config, "norm_gain", dtype),
        window=jnp.asarray(windows) if windows else None,
        unnormed=None if config.first_norm else jnp.arange(config.depth) == 0,
        rotated=jnp.asarray(config.rotary_layers, bool) if config.rotary_layers else None,
    )


def init_gains(config: TransformerConfig) -> dict[str, LearnedGains]:
    """Initialise the gains that are parameters, at the values `config.learned_…_gain`.

    Args:
        config: The network.

    Returns:
        {"attention_gains": `LearnedGains`, ...} for `BlockParams`, with a leading axis for the rows
        of the parameters; only sublayers that have learned gains.

    Raises:
        ValueError: Initial gains of another shape, or per feature without `learned_per_feature`.
    """
    starts = {kind: {} for kind in config.kinds}
    for gain_kind in ("skip", "branch"):
        name = f"learned_{gain_kind}_gain"
        if getattr(config, name) is None:
            continue
        gains = _gains_by_kind(config, name, jnp.result_type(float))
        for kind in config.kinds:
            gain = getattr(gains, kind)
            if config.learned_per_feature and gain.ndim == 1:
                gain = jnp.tile(gain[:, None], config.d_model)
            elif gain.ndim == 2 and not config.learned_per_feature:
                raise ValueError(f"{name} is given per feature, but learned_per_feature=False")
            starts[kind][gain_kind] = gain[jnp.asarray(config.first_layer_of_rows)]
    return {f"{kind}_gains": LearnedGains(**gains) for kind, gains in starts.items() if gains}


def _gains_by_kind(config, name, dtype):
    """Broadcast a gain of the config to `Gains` with leaves [L] or [L, d].

    Args:
        config: The network.
        name: Name of its field, such as "skip_gain".
        dtype: Number format of the arithmetic.
    """
    gain = getattr(config, name)
    gains = gain if isinstance(gain, Gains) else Gains(gain, gain, gain)
    return Gains(
        attention=_broadcast_to_layers(name, gains.attention, config, dtype),
        cross=_broadcast_to_layers(name, gains.cross, config, dtype),
        mlp=_broadcast_to_layers(name, gains.mlp, config, dtype),
    )


def _effective_gains(gain_kind, config, dtype, params):
    """Multiply the config's gains by the learned ones, if there are any.

    Args:
        gain_kind: "skip" or "branch".
        config: The network.
        dtype: Number format of the arithmetic.
        params: `TransformerParams`, or None.

    Returns:
        `Gains` with leaves [L] or, per feature, [L, d].

    Raises:
        ValueError: The config has learned gains, but there are no parameters.
    """
    gains = _gains_by_kind(config, f"{gain_kind}_gain", dtype)
    if getattr(config, f"learned_{gain_kind}_gain") is None:
        return gains
    if params is None:
        raise ValueError(f"learned_{gain_kind}_gain is set: its gains are in the parameters")
    for kind in config.kinds:
        constant = getattr(gains, kind)
        learned = getattr(getattr(params.layers, f"{kind}_gains"), gain_kind).astype(dtype)
        if config.layer_map:
            learned = learned[jnp.asarray(config.layer_map)]
        if constant.ndim < learned.ndim:  # learned per feature
            constant = constant[:, None]
        elif learned.ndim < constant.ndim:
            learned = learned[:, None]
        gains = gains.replace(**{kind: constant * learned})
    return gains


def _broadcast_to_layers(name: str, value: object, config: TransformerConfig, dtype: DType) -> Leaf:
    """Broadcast a number, [L] or [L or 1, d] to [L] or [L, d].

    Args:
        name: Name of the field, for the message; only "temperature" cannot be per feature.
        value: The field's value.
        config: The network.
        dtype: Number format of the arithmetic.

    Raises:
        ValueError: A number of another shape.
    """
    value = jnp.asarray(value, dtype)
    depth, d = config.depth, config.d_model
    may_have_features = name != "temperature"
    if value.ndim == 0 or value.shape == (depth,):
        return jnp.broadcast_to(value, (depth,))
    if may_have_features and value.shape in ((depth, d), (1, d)):
        return jnp.broadcast_to(value, (depth, d))
    allowed = f"() or [{depth}]" + (f" or [{depth} or 1, {d}]" if may_have_features else "")
    raise ValueError(
        f"{name} of shape {value.shape} is not {allowed} for depth={depth}, d_model={d}; "
        "use jax.vmap to sweep it"
    )


def _broadcast_to_heads(value, config, dtype):
    """Broadcast a number, [L] or [L, H] to [L, H].

    Raises:
        ValueError: A number of another shape.
    """
    value, shape = jnp.asarray(value, dtype), (config.depth, config.num_heads)
    if value.shape not in ((), shape[:1], shape):
        raise ValueError(f"mixing of shape {value.shape} is not (), {shape[:1]} or {shape}")
    return jnp.broadcast_to(value[:, None] if value.ndim == 1 else value, shape)


def apply_gain(gain: Number, x: Leaf) -> Leaf:
    """Multiply x [..., d] by a scalar or [d] gain."""
    gain = jnp.asarray(gain, x.dtype)
    return gain.reshape((1,) * (x.ndim - 1) + (-1,)) * x if gain.ndim else gain * x
