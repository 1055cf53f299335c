"""What each branch is of the stream after it, exactly: shares of variance with norms held fixed.

Axis letters: n tokens, d width, s sublayers (branches) in the order passed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import enter, refuse_edit
from rank_collapse.network.gains import layer_gains
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.precision import full_precision
from rank_collapse.network.sublayer import sites_of, sublayer
from rank_collapse.network.transformer import scan_layers
from rank_collapse.paths import frozen


@full_precision
def variance_shares(
    params: TransformerParams, x: Any, config: TransformerConfig, **inputs: Any
) -> Float[Array, "i j"]:
    """Cov(part_j, x_i)/Var x_i after every sublayer i, of the input, every branch j and the biases.

    With norm statistics frozen, as in `direct_contributions`, x_i is the sum of what its input, the
    branches 1 .. i and the biases of norms wrote, so that every row sums to 1 exactly; variances
    and covariances are over the features, as LayerNorm takes them, and averaged over tokens.
    `measures.dependency` gives the published β_ij², which are these where branches are uncorrelated
    and never negative; a share is negative where a branch takes away what others wrote.

    Args:
        params, x, config: As in `apply`.
        **inputs: mask, bias, memory, memory_mask, segments and positions of `apply`.

    Returns:
        [N + 1, N + 2]: row i the stream after i branches, columns the input, branches 1 .. N and
        the biases of the norms.

    Raises:
        ValueError: An edit; see also `apply`.
    """
    params, entry = enter(params, x, config, **inputs)
    refuse_edit(entry, "variance_shares")
    return _shares(params, entry, config)


@jax.jit
def _shares(params, entry, config) -> Array:
    names = config.kinds
    count = config.depth * len(names) + 2
    _, constants, trace = frozen.freeze(params, entry, config)
    ones = jnp.zeros(count, entry.x.dtype).at[-1].set(1)

    def shares(c):
        c = c - c.mean(axis=-1, keepdims=True)
        whole = c.sum(axis=0)
        return jnp.einsum("snd,nd->s", c, whole) / jnp.sum(jnp.square(whole))

    def body(c, step):
        layer, (index, own, computed, gains) = step
        sites, rows, start = sites_of(layer, config, gains), [], c
        for place, name in enumerate(names):
            part = getattr(computed, f"{name}_branch")
            row = 1 + index * len(names) + place

            def written(seen, row=row, part=part):
                return jnp.zeros_like(seen).at[row].set(part), None

            norm = frozen.norm_at(getattr(own, f"{name}_scale"), ones, config)
            c, _ = sublayer(getattr(sites, name), c, written, norm, start=start)
            rows.append(shares(c))
        return c, jnp.stack(rows)

    gains = layer_gains(config, entry.x.dtype, params)
    swept = (jnp.arange(config.depth), constants, trace, gains)
    c = jnp.zeros((count, *entry.x.shape), entry.x.dtype).at[0].set(entry.x)
    _, rows = scan_layers(body, c, params, config, swept)
    return jnp.concatenate([shares(c)[None], rows.reshape(-1, count)])
