"""One layer of one path, frozen or recomputed: the maps that path sets are made of.

Choices are those of `enumeration`; heads are gathered by index, so that a path is data.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.network import covers
from rank_collapse.network.attention import AttentionContext, AttentionParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import PreparedInputs
from rank_collapse.network.parameters import TransformerParams, layer_params
from rank_collapse.network.residual import LayerGains, apply_gain, layer_gains
from rank_collapse.network.transformer import compute_layer
from rank_collapse.network.walk import Layer, apply_final_norm, walk_layer
from rank_collapse.paths.enumeration import ALL_HEADS
from rank_collapse.paths.frozen import Frozen, freeze

Semantics = Literal["frozen", "recomputed"]
SEMANTICS = get_args(Semantics)
_FIELDS = covers.all_fields_but(*covers.CROSS)
COVERS = {
    "frozen": covers.Covers("a set of frozen paths", _FIELDS),
    # A norm over the queries of all heads together does not exist on a path of one head.
    "recomputed": covers.Covers(
        "a set of recomputed paths", _FIELDS | {"qk_norm": ("none", "head")}
    ),
}


def make_steps(
    params: TransformerParams,
    prepared: PreparedInputs,
    config: TransformerConfig,
    semantics: Semantics,
    no_sub_path: bool = False,
) -> tuple[Callable, Callable]:
    """(step(state, layer, choice) -> state, finish(state)) of either semantics."""
    gains = layer_gains(config, prepared.x.dtype, params)
    if semantics == "frozen":
        return _frozen_steps(params, config, gains, prepared)

    def step(state, layer, choice):
        return recomputed_step(
            params, state, config, gains, prepared, layer, choice, no_sub_path=no_sub_path
        )

    return step, lambda state: state


def recomputed_step(
    params: TransformerParams,
    x: Float[Array, "n d"],
    config: TransformerConfig,
    gains: LayerGains,
    prepared: PreparedInputs,
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
        x: The path's state before this layer.
        layer: Index of the layer; may be traced.
        choice: 0..H−1 a head, H skip, −1 all heads; may be traced.
        no_sub_path: Leave the layer's input out of the attention sublayer's sum.
    """
    stack = params.layers.attention
    row = jnp.asarray(config.layer_map)[layer] if config.layer_map else layer
    own_gains = jax.tree.map(lambda a: a[layer], gains)
    if no_sub_path:
        config = config.replace(attention_skip=False)

    def run(attention, context, own_gains=own_gains):
        rest = jax.tree.map(lambda a: a[row], params.layers.replace(attention=None))
        rest = rest.replace(attention=attention)
        if no_sub_path and config.norm_placement in ("post", "both"):
            rest = rest.replace(attention_norm=None)
        inputs = prepared.replace(context=context)
        return compute_layer(Layer(rest, own_gains, layer, config, inputs), x).trace.hidden

    return jax.lax.switch(
        _kind(choice, config),
        (
            lambda: run(jax.tree.map(lambda a: a[row], stack), prepared.context),
            lambda: run(
                _one_head(stack, row, choice),
                _head_context(prepared.context, choice),
                own_gains.replace(mixing=jax.tree.map(lambda a: a[choice][None], own_gains.mixing)),
            ),
            lambda: x,
        ),
    )


class OnePath(Frozen):
    """The state [1, n, d] of one frozen path, which takes one choice, without biases."""

    def __init__(self, choice: Any, dtype: Any):
        super().__init__(jnp.zeros(1, dtype))
        self.choice = choice

    def apply_attention(self, layer, branch_input):
        heads = jnp.arange(layer.config.num_heads)
        taken = (heads == self.choice) | (self.choice == ALL_HEADS)
        extra = layer.extra.replace(head_gain=taken.astype(branch_input.dtype))
        return super().apply_attention(layer.replace(extra=extra), branch_input)

    def add_branch(self, layer, spec, c, part):
        """Of attention the one term that the path takes: the branch or the skip."""
        if spec.kind != "attention":
            return super().add_branch(layer, spec, c, part)
        skip = apply_gain(spec.skip_gain, c) * layer.config.attention_skip
        return jnp.where(self._skips(layer), skip, apply_gain(spec.branch_gain, part))

    def apply_mlp(self, layer, branch_input):
        if layer.config.parallel:
            # A parallel MLP reads past the layer's heads: its branch is on the path of the skip.
            branch_input = jnp.where(self._skips(layer), branch_input, 0)
        return super().apply_mlp(layer, branch_input)

    def _skips(self, layer):
        return _kind(self.choice, layer.config) == 2


def _frozen_steps(params, config, gains, prepared):
    """step(state, layer, choice) and finish(state) with the constants of the forward pass."""
    constants, of_final = freeze(params, prepared, config)

    def step(state, l, choice):
        own_gains, own = jax.tree.map(lambda a: a[l], (gains, constants))
        layer = Layer(layer_params(params, config, l), own_gains, l, config, prepared, own)
        return walk_layer(OnePath(choice, state.dtype), layer, state[None])[0][0]

    def finish(state):
        algebra = OnePath(ALL_HEADS, state.dtype)
        return apply_final_norm(algebra, state[None], params, prepared, config, of_final)[0]

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
    return context.replace(mask=mask, bias=bias, head=head)
