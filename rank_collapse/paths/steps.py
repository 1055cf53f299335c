"""One layer of one path, frozen or recomputed: the maps that path sets are made of.

Choices are those of `enumeration`; heads are gathered by index, so that a path is data.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.network.attention import AttentionContext, AttentionParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import Entry
from rank_collapse.network.gains import LayerGains, layer_gains, scaled
from rank_collapse.network.parameters import TransformerParams, layer_params
from rank_collapse.network.sublayer import sites_of, sublayer
from rank_collapse.network.transformer import block
from rank_collapse.paths import frozen
from rank_collapse.paths.enumeration import ALL_HEADS

SEMANTICS = ("frozen", "recomputed")


def check_semantics(semantics: str, config: TransformerConfig) -> None:
    """Refuses what single paths do not cover.

    Raises:
        ValueError: Unknown semantics, or cross-attention.
    """
    if semantics not in SEMANTICS:
        raise ValueError(f"semantics={semantics!r} is not one of {SEMANTICS}")
    if semantics == "recomputed" and config.qk_norm == "width":
        raise ValueError(
            "qk_norm='width' normalises all heads' queries together: a path of one head has no "
            "such norm; semantics='frozen' does"
        )
    if config.cross_attention:
        raise ValueError("path sets do not cover cross_attention=True; see path_contributions")


def make_steps(
    params: TransformerParams,
    entry: Entry,
    config: TransformerConfig,
    semantics: str,
    no_sub_path: bool = False,
) -> tuple[Callable, Callable]:
    """(step(state, layer, choice) -> state, finish(state)) of either semantics.

    Args:
        params, config: The network.
        entry: From `enter`; paths start at its x.
        semantics: "frozen" or "recomputed".
        no_sub_path: See `recomputed_step`.
    """
    gains = layer_gains(config, entry.x.dtype, params)
    if semantics == "frozen":
        return _frozen_steps(params, config, gains, entry)

    def step(state, layer, choice):
        return recomputed_step(
            params, state, config, gains, entry, layer, choice, no_sub_path=no_sub_path
        )

    return step, lambda state: state


def recomputed_step(
    params: TransformerParams,
    x: Float[Array, "n d"],
    config: TransformerConfig,
    gains: LayerGains,
    entry: Entry,
    layer: Any,
    choice: Any,
    *,
    no_sub_path: bool = False,
) -> Float[Array, "n d"]:
    """One layer of a recomputed path: a single head that attends from the path's own state.

    The head adds its slice of the output projection and the whole output bias. Then, with
    a = P_h x W_h + b: N(λ x·[attention_skip] + γ a), the layer's own sublayer, or with
    `no_sub_path` γ a alone, normalised without gain and bias where the network is post-norm.
    Then the MLP sublayer, if there is one. A skip leaves out the whole layer, MLP included.

    Args:
        params: Parameters.
        x: The path's state before this layer.
        config: The network.
        gains: Of all layers, from `layer_gains`.
        entry: From `enter`.
        layer: Index of the layer; may be traced.
        choice: 0..H−1 a head, H skip, −1 all heads; may be traced.
        no_sub_path: Leave the layer's input out of the attention sublayer's sum.
    """
    stack = params.layers.attention
    row = jnp.asarray(config.layer_map)[layer] if config.layer_map else layer
    own_gains = jax.tree.map(lambda a: a[layer], gains)
    if no_sub_path:
        config = config.replace(attention_skip=False)

    def run(attention, context):
        rest = jax.tree.map(lambda a: a[row], params.layers.replace(attention=None))
        rest = rest.replace(attention=attention)
        if no_sub_path and config.norm_placement == "post":
            rest = rest.replace(attention_norm=None)
        return block(rest, x, config, own_gains, entry.replace(context=context)).hidden

    return jax.lax.switch(
        _kind(choice, config),
        (
            lambda: run(jax.tree.map(lambda a: a[row], stack), entry.context),
            lambda: run(_one_head(stack, row, choice), _head_context(entry.context, choice)),
            lambda: x,
        ),
    )


def _frozen_steps(params, config, gains, entry):
    """step(state, layer, choice) and finish(state) with the constants of the forward pass."""
    no_bias = jnp.zeros(1, entry.x.dtype)

    last, constants, _ = frozen.freeze(params, entry, config)

    def norm_by(scales):
        return frozen.norm_at(scales, no_bias, config)

    def step(state, l, choice):
        layer = layer_params(params, config, l)
        own, own_gains = jax.tree.map(lambda a: a[l], (constants, gains))
        sites = sites_of(layer, config, own_gains)
        stack = jax.tree.map(lambda a: a[None], layer.attention)
        site, norm = sites.attention, norm_by(own.attention_scale)
        c = state[None]

        def chosen(seen):
            """The one term of the sum that the path takes: a branch or the skip."""

            def heads(attention, weights):
                part = frozen.frozen_attention(attention, weights, seen, no_bias)
                part = norm(site.at_branch, part) if site.norms_branch else part
                return scaled(site.branch_gain, part)

            return jax.lax.switch(
                _kind(choice, config),
                (
                    lambda: heads(layer.attention, own.weights),
                    lambda: heads(_one_head(stack, 0, choice), own.weights[choice][None]),
                    lambda: scaled(site.skip_gain, c) * config.attention_skip,
                ),
            ), None

        def mlp(seen):
            return frozen.frozen_mlp(layer.mlp, own.gate, seen, no_bias), None

        # `chosen` makes the term whole, gains and branch norm included.
        around = {"sandwich": "pre", "branch": "none"}.get(site.placement, site.placement)
        c, _ = sublayer(site.replace(placement=around), c, chosen, norm, lambda site, x, part: part)
        if config.mlp != "none":
            # A parallel MLP looks past the layer's heads: its branch is on the path of the skip.
            start = jnp.where(_kind(choice, config) == 2, state[None], 0)
            c, _ = sublayer(sites.mlp, c, mlp, norm_by(own.mlp_scale), start=start)
        return c[0]

    def finish(state):
        if not config.final_norm:
            return state
        scale = frozen.frozen_scale(last, config)
        return frozen.frozen_norm(params.final_norm, scale, state[None], no_bias, config)[0]

    return step, finish


def _kind(choice, config):
    """0 all heads, 1 one head, 2 skip."""
    kind = jnp.where(choice == config.num_heads, 2, 1)
    return jnp.where(choice == ALL_HEADS, 0, kind)


def _one_head(stack: AttentionParams, row: Any, head: Any) -> AttentionParams:
    """Attention parameters of one head of one layer, read without copying the layer."""

    def pick(a):
        return None if a is None else a[row, head][None]

    relative = stack.relative
    if relative is not None:
        relative = relative.replace(
            w_r=pick(relative.w_r),
            b_r=pick(relative.b_r),
            b_s=pick(relative.b_s),
            segment=relative.segment[row, :, head][:, None],
        )
    per_head = {n: pick(getattr(stack, n)) for n in ("w_q", "b_q", "w_k", "b_k", "w_v", "b_v")}
    return stack.replace(
        **per_head,
        w_o=pick(stack.w_o),
        b_o=stack.b_o[row],
        v_score=pick(stack.v_score),
        relative=relative,
        q_norm=None if stack.q_norm is None else stack.q_norm[row],
        k_norm=None if stack.k_norm is None else stack.k_norm[row],
    )


def _head_context(context: AttentionContext, head: Any) -> AttentionContext:
    """The context as one head sees it."""
    mask, bias = context.mask, context.bias
    if mask is not None and mask.ndim == 3 and mask.shape[0] > 1:
        mask = mask[head][None]
    if bias is not None and bias.shape[0] > 1:
        bias = bias[head][None]
    return context.replace(mask=mask, bias=bias)
