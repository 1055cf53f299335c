"""Equal tokens 1x̄ᵀ and a direction e^s R̂ across them: a network to first order in the residual.

What both laws of the small residual share: the cubic one (`cubic_law`) and the exponential one
(`transverse`) differ in the attention term alone. Norms and MLPs multiply by their Jacobian at x̄.

Axis letters: n tokens, d width.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rank_collapse import struct
from rank_collapse.measures.norms import composite_norm
from rank_collapse.network import layers
from rank_collapse.network.entry import Entry
from rank_collapse.network.gains import scaled
from rank_collapse.network.sublayer import Site, sublayer, token_norm


@struct.dataclass
class Tangent:
    """Equal tokens and a direction across them.

    Attributes:
        mean: x̄ [d].
        rest: R̂ [n, d]; columns sum to 0, max |rest| = 1 or all 0; 0 in rows that do not exist.
        log_scale: Natural logarithm s of its size; −inf where it is 0.
    """

    mean: Any
    rest: Any
    log_scale: Any


def around_mean(x: Float[Array, "n d"], keep: Bool[Array, "n"]) -> Tangent:
    """The mean token and the residual of tokens."""
    mean = jnp.sum(jnp.where(keep[:, None], x, 0), axis=0) / jnp.sum(keep)
    return settled(mean, x - mean[None, :], jnp.zeros((), x.dtype), keep)


def settled(mean: Any, rest: Any, log_scale: Any, keep: Any) -> Tangent:
    """Without the part along 1vᵀ, which stays along it ever after, and with max |rest| = 1."""
    rest = jnp.where(keep[:, None], rest, 0)
    rest = rest - (jnp.sum(rest, axis=0) / jnp.sum(keep))[None, :]
    rest = jnp.where(keep[:, None], rest, 0)
    size = jnp.max(jnp.abs(rest))
    safe = jnp.where(size == 0, 1, size)
    return Tangent(mean, rest / safe, jnp.where(size == 0, -jnp.inf, log_scale + jnp.log(safe)))


def log10_norm(state: Tangent) -> Float[Array, ""]:
    """log10 ‖e^s R̂‖_{1,∞}."""
    return (state.log_scale + jnp.log(composite_norm(state.rest))) / np.log(10.0)


def norm(site: Site, state: Tangent) -> Tangent:
    """The site's norm: its value and its Jacobian at x̄."""
    return _pushed(lambda x: token_norm(site, x[None])[0], state)


def mlp(params: Any, state: Tangent, kind: str, routing: Any = None) -> Tangent:
    """An MLP: its value and its Jacobian at x̄."""
    return _pushed(lambda x: layers.mlp(params, x[None], kind, routing)[0], state)


def add(site: Site, state: Tangent, part: Tangent) -> Tangent:
    """γ part + λ state·[skip]; with a skip the two have one scale."""
    mean, rest = scaled(site.branch_gain, part.mean), scaled(site.branch_gain, part.rest)
    if site.skip:
        mean = mean + scaled(site.skip_gain, state.mean)
        rest = rest + scaled(site.skip_gain, state.rest)
    return Tangent(mean, rest, part.log_scale)


def layer(sites: Any, params: Any, state: Tangent, config: Any, attend: Any, entry: Entry):
    """One layer; attend(state) is the attention branch.

    Args:
        sites: From `sites_of`.
        params: Parameters of the layer.
        state: What comes in.
        config: The network.
        attend: Tangent → Tangent.
        entry: From `enter`.
    """
    start = state
    state, _ = sublayer(sites.attention, state, lambda s: (attend(s), None), norm, add)
    state = settled(state.mean, state.rest, state.log_scale, exists(entry))
    if config.mlp != "none":

        def branch(s):
            return mlp(params.mlp, s, config.mlp, config.routing), None

        state, _ = sublayer(sites.mlp, state, branch, norm, add, start)
        state = settled(state.mean, state.rest, state.log_scale, exists(entry))
    return state


def exists(entry: Entry) -> Bool[Array, "n"]:
    """Which tokens exist."""
    return jnp.ones(entry.x.shape[0], bool) if entry.exists is None else entry.exists


def at_least_float32(params: Any, entry: Entry) -> tuple[Any, Entry]:
    """Parameters and entry in the dtype they share, no lower than float32."""
    dtype = jnp.promote_types(entry.x.dtype, jnp.float32)
    params = jax.tree.map(lambda a: a.astype(dtype), params)
    return params, entry.replace(x=entry.x.astype(dtype))


def _pushed(function, state):
    """A function of one token at the mean token, and its Jacobian on every row of the residual."""
    mean, push = jax.linearize(function, state.mean)
    return Tangent(mean, jax.vmap(push)(state.rest), state.log_scale)
