"""Pairwise differences in the memory of n tokens: along the order in which a spanning tree grows.

A table of all differences (`pair_operations`) has n² d numbers. All it says follows from n − 1 of
them. Prim's algorithm adds to the tokens that it has reached the one that is nearest to any of
them, at distance w_t in step t; so it leaves no cluster before all of it is reached. Held are the
order y_0, y_1, .. and the n − 1 differences of neighbours, e_t = y_t − y_{t−1} = e^{T_t} U_t, and

    y_q − y_p = e_{p+1} + .. + e_q.

**What these sums lose does not depend on the scales.** The path between y_p and y_q in a minimum
spanning tree has no edge longer than the two are apart, and its longest is max(w_{p+1} .. w_q); the
path from y_{t−1} to y_t is of edges ≤ w_t. So each term, and each partial sum, is at most n − 1
times the whole: near it in round clusters; many times it where the tree grows along a ring from two
ends by turns. `noise` moves every term anew in every sum, and so sees what the sums lose.

Operations map columns, the differences of all tokens to a token k, to columns. They are composed
(`Columns`) and asked once for each token, in Prim's order, when the next tree grows (`grown`): one
column is held at a time. Attention and MLPs are those of the table.

Axis letters: n, i tokens, k the token that a column is about, t places in the order, d width,
h heads.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse import struct
from rank_collapse.measures.residuals import composite_norm
from rank_collapse.network.gains import scaled
from rank_collapse.theory import pair_operations as ops
from rank_collapse.theory.noise import Silence


class _ByColumn:
    """What has a column per token: its use in operations written for tables as well."""

    def columns(self, reference, noise):
        """x_i − x_r for each head's reference [h]: mantissas [h, n, d] and logarithms [h, n]."""

        def single(head, r):
            return self.column(r, noise.at(head))

        return jax.vmap(single)(jnp.arange(reference.shape[0]), reference)

    def of_columns(self, column, noise) -> "Columns":
        """What an operation gives as columns (k, noise), left as it is; tokens are to be set."""
        return Columns(None, column)


@struct.dataclass
class Tree(_ByColumn):
    """Tokens and the differences of neighbours in Prim's order.

    Attributes:
        tokens: [n, d], in ordinary arithmetic.
        order: Int [n], the token at each place.
        rest: Mantissas of y_t − y_{t−1} [n, d], largest |entry| 1, or 0; 0 at place 0.
        log_scale: Natural logarithms [n]; −inf where two neighbours are equal, and at place 0.
    """

    tokens: Any
    order: Any
    rest: Any
    log_scale: Any

    def column(self, k, noise):
        """x_i − x_k of all tokens i: mantissas [n, d] and logarithms [n].

        Sums over 1, 2, 4, .. steps towards k, each step moved by noise; places before k's go
        forward with the sign turned.
        """
        place = jnp.arange(self.order.shape[0])
        ranks = jnp.zeros_like(self.order).at[self.order].set(place)
        own = ranks[k]
        toward = jnp.sign(own - place)
        # at places before k's the step is that from the next place
        step = jnp.where(toward > 0, place + 1, place)
        rest = -toward[:, None].astype(self.rest.dtype) * noise(self.rest[step])
        log_scale = jnp.where(toward == 0, -jnp.inf, noise(self.log_scale[step]))

        def doubled(level, sums):
            rest, log_scale = sums
            reach = 2**level
            source = place + toward * reach
            inside = (own - source) * toward > 0
            source = jnp.where(inside, source, place)
            further = jnp.where(inside, log_scale[source], -jnp.inf)
            (of_own, of_further), top = ops.two_shares(log_scale, further)
            rest = of_own[:, None] * rest + of_further[:, None] * rest[source]
            # what has a logarithm of −inf stays so
            top = jnp.where(jnp.maximum(log_scale, further) == -jnp.inf, -jnp.inf, top)
            return rest, top

        levels = int(np.ceil(np.log2(max(len(place), 2))))
        rest, log_scale = jax.lax.fori_loop(0, levels, doubled, (rest, log_scale))
        rest, log_scale = ops.normalise(rest, log_scale)
        return rest[ranks], log_scale[ranks]


@struct.dataclass
class Columns(_ByColumn):
    """Tokens [n, d], and a function (k, noise) that gives the column of token k as `Tree` does."""

    tokens: Any
    column: Callable = struct.field(pytree_node=False)


def start(x) -> Tree:
    """The tree of given tokens [n, d]: each subtraction is right to half an ulp."""

    def column(k, noise):
        return ops.normalise(x - x[k][None, :], jnp.zeros(x.shape[:1], x.dtype))

    return grown(Columns(x, column), Silence())


def grown(state, noise) -> Tree:
    """The tree of a state whose columns are known; each is asked for once.

    Tokens at unknown distances (NaN) are reached last, to spoil no difference of others.
    """
    n = state.tokens.shape[0]

    def reach(carry, turn):
        latest, nearest, reached = carry
        rest, log_scale = state.column(latest, noise.at(turn))
        nearest = jnp.minimum(nearest, jnp.where(jnp.isnan(log_scale), jnp.inf, log_scale))
        # below infinity, which is for those reached already
        open_ = jnp.minimum(nearest, jnp.finfo(nearest.dtype).max)
        following = jnp.argmin(jnp.where(reached, jnp.inf, open_))
        carry = following, nearest, reached.at[following].set(True)
        return carry, (following, rest[following], log_scale[following])

    first = jnp.argmax(jnp.ones(n, bool))  # 0, in the integers of argmin
    nearest = jnp.full(n, jnp.inf, state.tokens.dtype)
    carry = first, nearest, jnp.arange(n) == first
    _, (order, rest, log_scale) = jax.lax.scan(reach, carry, jnp.arange(n - 1))
    return Tree(
        state.tokens,
        jnp.concatenate([first[None], order]),
        jnp.concatenate([jnp.zeros_like(state.tokens[:1]), rest]),
        jnp.concatenate([jnp.full(1, -jnp.inf, log_scale.dtype), log_scale]),
    )


def norm(site, state, noise):
    """The norm of a `Site`, column by column as `pair_operations.norm` has it."""
    center = ops.centered(site, noise(state.tokens))
    sigma = ops.deviation(center, site.eps, noise)

    def column(k, own):
        rest, log_scale = state.column(k, own)
        at_k = sigma[k][None], center[k][None, :]
        rest = ops.normalised_difference(ops.centered(site, rest), (sigma, center), at_k, own)
        rest = rest if site.norm is None else scaled(site.norm.gain, rest)
        return ops.normalise(own(rest), log_scale)

    out = Columns(ops.with_gain(site, center / sigma[:, None]), column)
    return out if site.bare is None else grown(out, noise)  # arrays, to be chosen from


def add(site, state, part) -> Columns:
    """γ part + λ state·[skip] of a `Site`, for any float gains, 0 and negative ones included."""

    def column(k, noise):
        out = ops.times(site.branch_gain, *part.column(k, noise))
        if not site.skip:
            return out
        return ops.add_scaled(*out, *ops.times(site.skip_gain, *state.column(k, noise)))

    tokens = scaled(site.branch_gain, part.tokens)
    if site.skip:
        tokens = tokens + scaled(site.skip_gain, state.tokens)
    return Columns(tokens, column)


def told(tree: Tree, keep):
    """log10 ‖res(X)‖_{1,∞} around the mean token, and how far tokens and tree agree.

    Args:
        tree: The state.
        keep: Bool [n], the tokens that count.

    Returns:
        The residual, the largest deviation of the tokens' own differences from the tree's, and the
        largest of the tokens' own differences.
    """

    def row(i):
        rest, log_scale = tree.column(i, Silence())
        plain = tree.tokens - tree.tokens[i][None, :]
        error = jnp.where(keep[:, None], jnp.abs(jnp.exp(log_scale)[:, None] * rest - plain), 0)
        largest = jnp.max(jnp.where(keep[:, None], jnp.abs(plain), 0))
        weights, top = ops.shares(jnp.where(keep, log_scale, -jnp.inf))
        mean = (weights / jnp.sum(keep)) @ jnp.where(keep[:, None], rest, 0)
        return mean, top[0], jnp.where(keep[i], jnp.max(error), 0), jnp.where(keep[i], largest, 0)

    mean, log_scale, error, largest = jax.lax.map(row, jnp.arange(keep.shape[0]))
    log_scale = jnp.where(keep & jnp.any(mean != 0, axis=1), log_scale, -jnp.inf)
    sizes, top = ops.shares(log_scale)
    residual = composite_norm(sizes[:, None] * jnp.where(keep[:, None], mean, 0))
    return (top[0] + jnp.log(residual)) / np.log(10.0), jnp.max(error), jnp.max(largest)
