"""One layer of one path, frozen or recomputed: the maps that path sets are made of.

Choices are those of `enumeration`; heads are gathered by index, so that a path is data.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.network import attention as attn
from rank_collapse.network import layers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams, layer_params
from rank_collapse.network.transformer import (
    block,
    input_states,
    make_context,
    per_layer,
    scan_layers,
    sublayer_input,
    sublayer_output,
    sublayer_sum,
)
from rank_collapse.paths import frozen
from rank_collapse.paths.enumeration import ALL_HEADS

SEMANTICS = ("frozen", "recomputed")


def make_steps(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    semantics: str,
    no_sub_path: bool,
    inputs: dict[str, Any],
) -> tuple[Array, Callable, Callable]:
    """(X^0, step(state, layer, choice) -> state, finish(state)) of either semantics.

    Args:
        params, x, config: As in `apply`.
        semantics: "frozen" or "recomputed".
        no_sub_path: See `recomputed_step`.
        inputs: mask, bias, segments, positions of `apply`.

    Raises:
        ValueError: Unknown semantics, or cross-attention.
    """
    if semantics not in SEMANTICS:
        raise ValueError(f"semantics={semantics!r} is not one of {SEMANTICS}")
    if config.cross_attention:
        raise ValueError("path sets do not cover cross_attention=True; see path_contributions")
    where = {"segments": inputs["segments"], "positions": inputs["positions"]}
    x = input_states(params, x, config, **where)
    context = make_context(params, config, x.shape[0], **inputs)
    if semantics == "frozen":
        return x, *_frozen_stepper(params, x, config, context)

    def step(state, layer, choice):
        return recomputed_step(
            params, state, layer, choice, config, context, no_sub_path=no_sub_path
        )

    return x, step, lambda state: state


def recomputed_step(
    params: TransformerParams,
    x: Float[Array, "n d"],
    layer: Any,
    choice: Any,
    config: TransformerConfig,
    context: attn.AttentionContext,
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
        layer: Index of the layer; may be traced.
        choice: 0..H−1 a head, H skip, −1 all heads; may be traced.
        config: The network.
        context: From `network.make_context`.
        no_sub_path: Leave the layer's input out of the attention sublayer's sum.
    """
    row = jnp.asarray(config.layer_map)[layer] if config.layer_map else layer
    gains = {name: value[layer] for name, value in per_layer(config, x.dtype).items()}
    score = {"score": config.score, "scale": config.scale_scores}
    score["temperature"] = gains["temperature"]

    def run(attention, context):
        rest = params.layers.replace(attention=None)
        rest = jax.tree.map(lambda a: a[row], rest)
        h = sublayer_input(rest.attention_norm, x, config)
        branch, _ = attn.multi_head_attention(attention, h, h, context=context, **score)
        skip = config.attention_skip and not no_sub_path
        total = sublayer_sum(x, branch, skip, gains["skip_gain"], gains["branch_gain"])
        norm = None if no_sub_path else rest.attention_norm
        a = sublayer_output(norm, total, config)
        if config.mlp == "none":
            return a
        branch = layers.mlp(rest.mlp, sublayer_input(rest.mlp_norm, a, config), config.mlp)
        total = sublayer_sum(a, branch, config.mlp_skip, gains["skip_gain"], gains["branch_gain"])
        return sublayer_output(rest.mlp_norm, total, config)

    stack = params.layers.attention
    return jax.lax.switch(
        _kind(choice, config),
        (
            lambda: run(jax.tree.map(lambda a: a[row], stack), context),
            lambda: run(_one_head(stack, row, choice), _head_context(context, choice)),
            lambda: x,
        ),
    )


def _frozen_stepper(params, x, config, context):
    gains = per_layer(config, x.dtype)

    def freeze(x, step):
        layer, gains = step
        trace = block(layer, x, config, context, gains)
        return trace.hidden, frozen.freeze_layer(layer, x, trace, config, gains)

    last, constants = scan_layers(freeze, x, params, config, gains)
    no_bias = jnp.zeros(1, x.dtype)

    def norm(norm_params, scale, c, placement):
        if config.norm_placement != placement:
            return c
        return frozen.frozen_norm(norm_params, scale, c, no_bias, config)

    def step(state, l, choice):
        layer = layer_params(params, config, l)
        own, gain = jax.tree.map(lambda a: a[l], (constants, gains))
        c = state[None]
        branch_input = norm(layer.attention_norm, own.attention_scale, c, "pre")

        def heads(attention, weights):
            return gain["branch_gain"] * frozen.frozen_attention(
                attention, weights, branch_input, no_bias
            )

        stack = jax.tree.map(lambda a: a[None], layer.attention)
        total = jax.lax.switch(
            _kind(choice, config),
            (
                lambda: heads(layer.attention, own.weights),
                lambda: heads(_one_head(stack, 0, choice), own.weights[choice][None]),
                lambda: gain["skip_gain"] * c * config.attention_skip,
            ),
        )
        c = norm(layer.attention_norm, own.attention_scale, total, "post")
        if config.mlp != "none":
            branch_input = norm(layer.mlp_norm, own.mlp_scale, c, "pre")
            branch = frozen.frozen_mlp(layer.mlp, own.gate, branch_input, no_bias)
            total = gain["branch_gain"] * branch
            if config.mlp_skip:
                total = total + gain["skip_gain"] * c
            c = norm(layer.mlp_norm, own.mlp_scale, total, "post")
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


def _one_head(stack, row, head):
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
    )


def _head_context(context, head):
    """The context as one head sees it."""
    mask, bias = context.mask, context.bias
    if mask is not None and mask.ndim == 3 and mask.shape[0] > 1:
        mask = mask[head][None]
    if bias is not None and bias.shape[0] > 1:
        bias = bias[head][None]
    return context.replace(mask=mask, bias=bias)
