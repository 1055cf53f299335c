"""The residual sublayer N(λ x + γ N'(branch(N(x)))), written once for every kind of state.

The forward pass, paths, sums of paths and residuals in logarithms all go through `sublayer`; they
differ in what a state is, hence in how it is normalised and how states are added.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.network import layers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.gains import LayerGains, scaled
from rank_collapse.network.parameters import BlockParams


@struct.dataclass
class Site:
    """Where a branch joins the residual stream.

    Attributes:
        norm: NormParams; None for a norm without gain and bias.
        branch_norm: NormParams of N', the norm of what the branch puts out.
        skip_gain, branch_gain: λ and γ, scalars or [d].
        skip: Whether there is a skip.
        placement: "none", "pre" (before the branch), "post" (after the sum), "sandwich" (before
            and after the branch) or "branch" (after the branch).
        kind, eps: Of the norms.
        parallel: Whether the branch looks at the state at the layer's start.
        bare: Whether the branch looks at tokens without a norm where others look at normed ones, a
            traced Bool; None for no.
        after_branch: Whether this is the place of N' itself, see `at_branch`.
    """

    norm: Any
    branch_norm: Any
    skip_gain: Any
    branch_gain: Any
    skip: bool = struct.field(pytree_node=False)
    placement: str = struct.field(pytree_node=False)
    kind: str = struct.field(pytree_node=False)
    eps: float = struct.field(pytree_node=False)
    parallel: bool = struct.field(pytree_node=False, default=False)
    after_branch: bool = struct.field(pytree_node=False, default=False)
    bare: Any = None

    @property
    def norms_input(self) -> bool:
        """Whether the branch looks at normalised tokens."""
        return self.placement in ("pre", "sandwich")

    @property
    def norms_branch(self) -> bool:
        """Whether what the branch puts out is normalised before it joins the sum."""
        return self.placement in ("sandwich", "branch")

    @property
    def at_branch(self) -> "Site":
        """The place of N' as a site, for the functions that normalise at one."""
        return self.replace(norm=self.branch_norm, after_branch=True)


class Sites(NamedTuple):
    """The three sublayers of a layer, in the order in which they are passed."""

    attention: Site
    cross: Site
    mlp: Site


def sites_of(params: BlockParams, config: TransformerConfig, gains: LayerGains) -> Sites:
    """The sublayers of one layer.

    Args:
        params: Parameters of the layer.
        config: The network.
        gains: Of the layer, from `layer_gains`.
    """
    norms = {"placement": config.norm_placement, "kind": config.norm, "eps": config.norm_eps}
    skips = {"attention": config.attention_skip, "cross": config.cross_skip, "mlp": config.mlp_skip}

    def site(kind):
        norm, branch_norm = getattr(params, f"{kind}_norm"), getattr(params, f"{kind}_branch_norm")
        if gains.norm is not None:
            norm = gained(norm, getattr(gains.norm, kind), config.d_model)
        skip, branch = getattr(gains.skip, kind), getattr(gains.branch, kind)
        parallel = config.parallel and kind == "mlp"
        # The one skip of a parallel layer is around its attention: the MLP's carries the sum on.
        return Site(
            norm, branch_norm, skip, branch, skips[kind] or parallel, parallel=parallel,
            bare=gains.bare if kind == "attention" else None, **norms,
        )  # fmt: skip

    return Sites(*map(site, Sites._fields))


def gained(norm: layers.NormParams | None, gain: Any, width: int) -> layers.NormParams:
    """gain · N: a norm with its output multiplied by a scalar or [d]."""
    if norm is None:
        return layers.NormParams(gain=jnp.broadcast_to(gain, (width,)))
    bias = None if norm.bias is None else gain * norm.bias
    return layers.NormParams(gain=gain * norm.gain, bias=bias)


def token_norm(site: Site, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """The site's norm of ordinary tokens."""
    return layers.norm(site.norm, x, site.kind, site.eps)


def token_sum(
    site: Site, x: Float[Array, "*s d"], part: Float[Array, "*s d"]
) -> Float[Array, "*s d"]:
    """γ part + λ x·[skip] of ordinary tokens."""
    total = scaled(site.branch_gain, part)
    return total + scaled(site.skip_gain, x) if site.skip else total


def summands(
    site: Site, x: Float[Array, "n d"], part: Float[Array, "n d"]
) -> tuple[Float[Array, "n d"], Float[Array, "n d"]]:
    """(λ x, γ N'(part)): the two sides of the sum in which a branch joins the stream.

    Args:
        site: Of the sublayer.
        x: The stream that comes in; it comes back as it is where there is no skip.
        part: What the branch puts out, as a trace keeps it.
    """
    if site.norms_branch:
        part = token_norm(site.at_branch, part)
    return scaled(site.skip_gain, x) if site.skip else x, scaled(site.branch_gain, part)


def sublayer(
    site: Site,
    x: Any,
    branch: Callable[[Any], tuple[Any, Any]],
    norm: Callable[[Site, Any], Any] = token_norm,
    add: Callable[[Site, Any, Any], Any] = token_sum,
    start: Any = None,
) -> tuple[Any, Any]:
    """One sublayer: post-norm N(λ x + γ branch(x)), pre-norm λ x + γ branch(N(x)), sandwich
    λ x + γ N'(branch(N(x))); parallel ones with branch(N(start)).

    Args:
        site: Norm, skip and gains.
        x: The state that comes in: tokens [n, d], or whatever `norm` and `add` take.
        branch: Of what it looks at; returns (its part of the sum, what else it has to tell).
        norm: (site, state) → state normalised; for N' the site is `Site.at_branch` and the state
            the branch's part.
        add: (site, x, part) → γ part + λ x·[skip].
        start: The state at the layer's start, which the branch of a parallel sublayer looks at.

    Returns:
        The state that goes out, and what else the branch told.

    Raises:
        ValueError: A parallel sublayer in a pass that gives no start.
    """
    if site.parallel and start is None:
        raise ValueError("this pass does not cover parallel=True")
    part, told = branch(looked_at(site, start if site.parallel else x, norm))
    if site.norms_branch:
        part = norm(site.at_branch, part)
    total = add(site, x, part)
    return (norm(site, total) if site.placement == "post" else total), told


def looked_at(site: Site, x: Any, norm: Callable[[Site, Any], Any] = token_norm) -> Any:
    """What the branch sees of a state: it normalised, or itself."""
    if not site.norms_input:
        return x
    normed = norm(site, x)
    if site.bare is None:
        return normed
    return jax.tree.map(lambda own, a: jnp.where(site.bare, own, a), x, normed)


def norm_input(
    site: Site, x: Float[Array, "n d"], part: Float[Array, "n d"]
) -> Float[Array, "n d"] | None:
    """What the site's norm is applied to, N' where the site is `at_branch`; None without one."""
    if site.after_branch:
        return part if site.norms_branch else None
    if site.placement in ("none", "branch"):
        return None
    return x if site.norms_input else token_sum(site, x, part)
