"""What each head contributes to the output: the sum of all frozen paths that pass it.

Once attention weights, norm statistics and gates are frozen, a head's output reaches the end
through an affine map. Every head's output is carried through the layers above it, without telling
path lengths apart.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.network import attention as attn
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import enter
from rank_collapse.network.gains import layer_gains, scaled
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.precision import full_precision
from rank_collapse.network.sublayer import looked_at, sites_of, sublayer
from rank_collapse.network.transformer import scan_layers
from rank_collapse.paths import frozen
from rank_collapse.paths.contributions import path_gains


@full_precision
def head_contributions(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    *,
    attention_gain: Any = None,
    cross_gain: Any = None,
    mlp_gain: Any = None,
    chunk: int = 12,
    **inputs: Any,
) -> Float[Array, "l h n d"]:
    """Sum of all paths through each head of each layer, of whatever length, biases included.

    The output is linear in the gain of each head once everything is frozen; this is the derivative
    with respect to `head_gain` of `path_contributions`. Paths that pass two heads count for both.
    Cost: about L H / 2 uses of the layers' value, output and MLP matrices.

    Args:
        params, x, config: As in `apply`.
        attention_gain, cross_gain, mlp_gain: See `path_contributions`.
        chunk: Heads carried at once, which bounds the memory beside the result: chunk · n · d_ff.
        **inputs: mask, bias, memory, memory_mask, segments, positions and edit of `apply`.

    Raises:
        ValueError: As `path_contributions`; a chunk below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} is below 1")
    params, entry = enter(params, x, config, **inputs)
    gains = layer_gains(config, entry.x.dtype, params)
    factors = {"attention": attention_gain, "cross": cross_gain, "mlp": mlp_gain}
    _, on_paths = path_gains(config, gains, None, factors)
    return _carry_heads(params, entry, config, on_paths, min(chunk, config.num_heads))


@struct.dataclass
class _Layer:
    """One frozen layer as a map of channels [g, n, d], of which each takes the share `one` of
    biases and of cross-attention."""

    params: Any
    constants: Any
    gains: Any
    index: Any
    entry: Any
    config: Any
    one: float = struct.field(pytree_node=False, default=0.0)

    @property
    def sites(self):
        return sites_of(self.params, self.config, self.gains)

    @property
    def ones(self):
        """[1], the share of biases that all channels take."""
        return jnp.full(1, self.one, self.entry.x.dtype)

    def edited(self, name, c):
        return frozen.carry_edit(self.constants, self.entry.edit, self.index, name, c, self.ones)

    def norm(self, scales):
        return frozen.norm_at(scales, self.ones, self.config)

    def attend(self, c):
        """The attention sublayer."""

        def branch(c):
            weights = self.constants.weights
            part = frozen.frozen_attention(self.params.attention, weights, c, self.ones)
            return self.edited("attention_branch", part), None

        norm = self.norm(self.constants.attention_scale)
        return sublayer(self.sites.attention, c, branch, norm)[0]

    def start(self, seen):
        """The attention sublayer's output due to each of its own heads [h, n, d]."""
        site, norm = self.sites.attention, self.norm(self.constants.attention_scale)
        own = attn.head_outputs(self.params.attention, self.constants.weights, seen)
        own = self.edited("attention_branch", own)
        if site.norms_branch:
            own = norm(site.at_branch, own)
        own = scaled(site.branch_gain, own)
        return norm(site, own) if site.placement == "post" else own

    def rest(self, c, start):
        """The sublayers after attention; `start` is the layer's input, for a parallel MLP."""

        def cross(c):
            if not self.one:
                return jnp.zeros_like(c), None
            memory, weights = self.entry.memory[None], self.constants.cross_weights
            part = frozen.frozen_attention(self.params.cross, weights, memory, self.ones)
            return self.edited("cross_branch", part), None

        def mlp(c):
            part = frozen.frozen_mlp(self.params.mlp, self.constants.gate, c, self.ones)
            return self.edited("mlp_branch", part), None

        c = self.edited("after_attention", c)
        if self.config.cross_attention:
            c, _ = sublayer(self.sites.cross, c, cross, self.norm(self.constants.cross_scale))
            c = self.edited("after_cross", c)
        if self.config.mlp != "none":
            norm = self.norm(self.constants.mlp_scale)
            c, _ = sublayer(self.sites.mlp, c, mlp, norm, start=start)
        return self.edited("hidden", c)


@functools.partial(jax.jit, static_argnames="chunk")
def _carry_heads(params, entry, config, on_paths, chunk):
    h, (n, d) = config.num_heads, entry.x.shape
    last, constants, _ = frozen.freeze(params, entry, config)

    def pieces(fn, c):
        """fn of the heads, `chunk` at a time."""
        if chunk >= h:
            return fn(c)
        return jax.lax.map(lambda one: fn(one[None])[0], c, batch_size=chunk)

    def body(carry, step):
        whole, outputs = carry
        layer, (index, own, gains) = step
        here = _Layer(layer, own, gains, index, entry, config)
        everything = here.replace(one=1.0)
        norm = everything.norm(own.attention_scale)
        seen = looked_at(here.sites.attention, whole, norm)

        def of_layer(item):
            """The heads of one layer: carried on, started, or not there yet and left at 0."""
            origin, c = item
            branches = (
                lambda c: pieces(lambda c: here.rest(here.attend(c), c), c),
                # What a head writes, an MLP beside it does not see.
                lambda c: pieces(lambda c: here.rest(c, jnp.zeros_like(c)), here.start(seen[0])),
                lambda c: c,
            )
            return jax.lax.switch(jnp.sign(origin - index) + 1, branches, c)

        outputs = jax.lax.map(of_layer, (jnp.arange(config.depth), outputs))
        return (everything.rest(everything.attend(whole), whole), outputs), None

    swept = (jnp.arange(config.depth), constants, on_paths)
    carry = (entry.x[None], jnp.zeros((config.depth, h, n, d), entry.x.dtype))
    (_, outputs), _ = scan_layers(body, carry, params, config, swept)
    if config.final_norm:
        scale = frozen.frozen_scale(last, config)
        flat, none = outputs.reshape(-1, n, d), jnp.zeros(config.depth * h, outputs.dtype)
        flat = frozen.frozen_norm(params.final_norm, scale, flat, none, config)
        outputs = flat.reshape(outputs.shape)
    return outputs
