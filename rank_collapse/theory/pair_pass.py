"""A pass over a network in differences of tokens, held in a table or along a spanning tree.

The layer is written once; the two `Form`s differ in what a state is.

Axis letters: n tokens, d width, l layers.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rank_collapse.network.residual import residual_specs as sites_of
from rank_collapse.network.walk import _branch_input, walk
from rank_collapse.theory import pair_operations as ops
from rank_collapse.theory import spanning_tree
from rank_collapse.theory.noise import Noise, copies
from rank_collapse.theory.pair_attention import attention

# Noisy copies of the pass.
REPLICAS = 3
# Differences of the tokens as ordinary numbers must agree with those held to 1 %, beyond rounding.
# That is ε max|x| for each of the operations behind a token; a sum of m terms adds √m ε. 1e3 covers
# sums of 1e4 terms ten times over, and a wrong state is off by all of the difference.
AGREEMENT, ROUNDING = 1e-2, 1e3


def sublayer(site, x, branch, norm, add, start=None):
    class A:
        def norm(self, layer, spec, state):
            return norm(spec, state)

    part, told = branch(_branch_input(A(), None, site, start if site.parallel else x))
    if site.norms_branch:
        part = norm(site.at_branch, part)
    total = add(site, x, part)
    return (norm(site, total) if site.placement == "post" else total), told


class Form(NamedTuple):
    """How a pass holds the differences, as functions.

    Attributes:
        start: The state of given tokens [n, d].
        norm, add: (site, state, noise) and (site, state, part), for `sublayer`.
        held: (state, noise) → the state to go on with after a sublayer.
        told: (state, keep) → log10 of its residual, and whether tokens and differences agree.
        of_copies: (function, arguments of all copies) → its results for all copies.
    """

    start: Any
    norm: Any
    add: Any
    held: Any
    told: Any
    of_copies: Any


@functools.partial(jax.jit, static_argnames="form")
def noisy_profiles(params, entry, config, keep, form):
    """Profiles [copies, L + 1], the first without noise, and where each agrees with itself."""

    def copy(word, ulps):
        return _pass(params, entry, config, keep, form, Noise(word, ulps))

    return form.of_copies(copy, copies(REPLICAS))


def _pass(params, entry, config, keep, form, noise):
    """[L + 1] log10 residuals of one copy, and whether tokens and differences agree."""
    start = form.start(entry.x)

    def body(l, state):
        state = _layer(l.params, state, config, l.gains, entry.context, form, noise.at(l.index))
        return state, form.told(state, keep)

    _, (profile, agree) = walk(body, start, params, entry, config)
    first, _ = form.told(start, keep)
    return jnp.append(first, profile), jnp.append(True, agree)


def _layer(params, state, config, gains, context, form, noise):
    """One layer of the network on the differences."""
    sites, start = sites_of(params, config, gains), state
    context = context.of_layer(gains.window)

    def norm(site, state):
        return form.norm(site, state, noise)

    def attend(seen):
        part = attention(params.attention, seen, config, context, gains.temperature, noise)
        return part, None

    def mlp(seen):
        return ops.mlp(params.mlp, seen, config.mlp, noise), None

    state, _ = sublayer(sites.attention, state, attend, norm, form.add)
    state = form.held(state, noise)
    if config.mlp != "none":
        state, _ = sublayer(sites.mlp, state, mlp, norm, form.add, start)
        state = form.held(state, noise)
    return state


def _of_table(state, keep):
    """What a table tells: see `Form.told`."""
    seen = (keep[:, None] & keep[None, :])[..., None]
    plain = state.tokens[:, None, :] - state.tokens[None, :, :]
    error = jnp.abs(jnp.exp(state.log_scale)[..., None] * state.rest - plain)
    largest = jnp.max(jnp.where(seen, jnp.abs(plain), 0))
    error = jnp.max(jnp.where(seen, error, 0))
    return ops.log10_residual(state, keep), _agree(state, keep, error, largest)


def _of_tree(state, keep):
    """What a tree tells."""
    residual, error, largest = spanning_tree.told(state, keep)
    return residual, _agree(state, keep, error, largest)


def _agree(state, keep, error, largest):
    """Whether the tokens' own differences are those held, as far as tokens resolve any."""
    size = jnp.max(jnp.where(keep[:, None], jnp.abs(state.tokens), 0))
    rounding = ROUNDING * jnp.finfo(size.dtype).eps * size
    return error <= AGREEMENT * largest + rounding


TABLE = Form(
    ops.differences, ops.norm, ops.add,
    held=lambda state, noise: state,
    told=_of_table,
    of_copies=lambda copy, arguments: jax.vmap(copy)(*arguments),
)  # fmt: skip
TREE = Form(
    spanning_tree.start, spanning_tree.norm, spanning_tree.add, spanning_tree.grown,
    told=_of_tree,
    of_copies=lambda copy, arguments: jax.lax.map(lambda one: copy(*one), arguments),
)  # fmt: skip
