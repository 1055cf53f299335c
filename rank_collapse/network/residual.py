"""Where a branch joins the residual stream: norms, skips and gains of a sublayer.

The residual stream is X itself, to which branches add (Elhage et al. 2021). The residual res(X) of
Dong et al. 2021 is another thing: X less what all tokens have in common (`measures.residuals`).
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.network import layers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.gains import LayerGains, scaled
from rank_collapse.network.parameters import BlockParams, TransformerParams


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
    params: BlockParams, config: TransformerConfig, gains: LayerGains
) -> dict[str, ResidualSpec]:
    """The specs of one layer's sublayers, by kind.

    Args:
        gains: Of the layer, from `layer_gains`.
    """
    skips = {"attention": config.attention_skip, "cross": config.cross_skip, "mlp": config.mlp_skip}

    def spec(kind):
        norm, branch_norm = getattr(params, f"{kind}_norm"), getattr(params, f"{kind}_branch_norm")
        if gains.norm is not None:
            norm = gained(norm, getattr(gains.norm, kind), config.d_model)
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


def final_spec(params: TransformerParams, config: TransformerConfig) -> ResidualSpec:
    """The norm after the last layer, as a spec."""
    spec = lone_norm(params.final_norm, config.norm, config.norm_eps)
    return spec.replace(connection=params.final_connection)


def lone_norm(norm: Any, kind: Any, eps: float) -> ResidualSpec:
    """A norm that belongs to no sublayer, as a spec."""
    return ResidualSpec(norm, None, 1.0, 1.0, "final", False, "post", kind, eps)


def gained(norm: layers.NormParams | None, gain: Any, width: int) -> layers.NormParams:
    """gain · N: a norm with its output multiplied by a scalar or [d]."""
    if norm is None:
        return layers.NormParams(gain=jnp.broadcast_to(gain, (width,)))
    bias = None if norm.bias is None else gain * norm.bias
    return layers.NormParams(gain=gain * norm.gain, bias=bias)


def token_norm(spec: ResidualSpec, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """The spec's norm of ordinary tokens."""
    return layers.norm(spec.norm, x, spec.norm_kind, spec.eps)


def token_sum(
    spec: ResidualSpec, x: Float[Array, "*s d"], part: Float[Array, "*s d"]
) -> Float[Array, "*s d"]:
    """γ part + λ x·[skip] of ordinary tokens."""
    total = scaled(spec.branch_gain, part)
    return total + scaled(spec.skip_gain, x) if spec.skip else total


def summands(
    spec: ResidualSpec, x: Float[Array, "n d"], part: Float[Array, "n d"]
) -> tuple[Float[Array, "n d"], Float[Array, "n d"]]:
    """(λ x, γ N'(part)): the two sides of the sum in which a branch joins the stream.

    Args:
        spec: Of the sublayer.
        x: The stream before it; returned as it is where there is no skip.
        part: The branch's output, as a trace keeps it.
    """
    if spec.norms_branch:
        part = token_norm(spec.at_branch, part)
    return scaled(spec.skip_gain, x) if spec.skip else x, scaled(spec.branch_gain, part)
