"""One layer of one path, frozen or recomputed: the maps from which path sets are computed.

Choices are indexed as in `enumeration`; heads are gathered by index, so that a path is data.
"""

from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.annotations import ArrayLike, DType, Number
from rank_collapse.network import covers
from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.attention_weights import AttentionContext
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
    """Make the functions that pass a path through a layer and finish a sum of paths.

    Args:
        params, prepared: Parameters and inputs from `prepare_inputs`.
        config: The network.
        semantics: "frozen" or "recomputed".
        no_sub_path: Option for recomputed paths, see `recomputed_step`.

    Returns:
        step(state, layer, choice) -> state, and finish(sum of states) -> result.
    """
    gains = layer_gains(config, prepared.x.dtype, params)
    if semantics == "frozen":
        return _make_frozen_steps(params, prepared, config, gains)

    def step(state, layer, choice):
        """Pass a path's state [n, d] through a layer by the head, or skip, that the path
        chooses."""
        return recomputed_step(
            params, prepared, config, gains, state, layer, choice, no_sub_path=no_sub_path
        )

    return step, lambda state: state


def recomputed_step(
    params: TransformerParams,
    prepared: PreparedInputs,
    config: TransformerConfig,
    gains: LayerGains,
    x: Float[Array, "n d"],
    layer: Number,
    choice: ArrayLike,
    *,
    no_sub_path: bool = False,
) -> Float[Array, "n d"]:
    """Pass one layer of a recomputed path: a single head that attends from the path's own state.

    The head adds its slice of the output projection and the full output bias. With a = P_h x W_h +
    b, the layer's sublayer gives N(λ x·[attention_skip] + γ a); with `no_sub_path` it gives γ a
    alone, normalised without gain and bias if the network is post-norm. Then comes the MLP
    sublayer, if there is one. A skip leaves out the whole layer, including the MLP.

    Args:
        params, prepared: Parameters and inputs from `prepare_inputs`.
        config: The network.
        gains: Gains of all layers.
        x: The path's state before this layer.
        layer: Index of the layer; may be traced.
        choice: 0..H−1 a head, H skip, −1 all heads; may be traced.
        no_sub_path: Leave the layer's input out of the attention sublayer's sum.
    """
    attention_stack = params.layers.attention
    row = jnp.asarray(config.layer_map)[layer] if config.layer_map else layer
    layer_gain = jax.tree.map(lambda a: a[layer], gains)
    head_gain = layer_gain.replace(
        mixing=jax.tree.map(lambda a: a[choice][None], layer_gain.mixing)
    )
    if no_sub_path:
        config = config.replace(attention_skip=False)

    def run_layer(attention, context, gains):
        """Compute the layer with the attention parameters of one head."""
        block = jax.tree.map(lambda a: a[row], params.layers.replace(attention=None))
        block = block.replace(attention=attention)
        if no_sub_path and config.norm_placement in ("post", "both"):
            block = block.replace(attention_norm=None)
        inputs = prepared.replace(context=context)
        return compute_layer(Layer(block, gains, layer, config, inputs), x).trace.hidden

    def all_heads():
        attention = jax.tree.map(lambda a: a[row], attention_stack)
        return run_layer(attention, prepared.context, layer_gain)

    def one_head():
        attention = _head_params(attention_stack, row, choice)
        return run_layer(attention, _head_context(prepared.context, choice), head_gain)

    return jax.lax.switch(_choice_kind(choice, config), (all_heads, one_head, lambda: x))


class OnePath(Frozen):
    """The state [1, n, d] of one frozen path, which takes one choice, without biases."""

    def __init__(self, choice: ArrayLike, dtype: DType):
        super().__init__(jnp.zeros(1, dtype))
        self.choice = choice

    def apply_attention(self, layer, branch_input):
        """Apply the chosen head of the layer, or all heads for `ALL_HEADS`."""
        heads = jnp.arange(layer.config.num_heads)
        is_on_path = (heads == self.choice) | (self.choice == ALL_HEADS)
        extra = layer.extra.replace(head_gain=is_on_path.astype(branch_input.dtype))
        return super().apply_attention(layer.replace(extra=extra), branch_input)

    def add_branch(self, layer, spec, c, branch_output):
        """Take the one summand of the attention that is on the path: the branch or the skip, each
        with its gain."""
        if spec.kind != "attention":
            return super().add_branch(layer, spec, c, branch_output)
        skip = apply_gain(spec.skip_gain, c) * layer.config.attention_skip
        return jnp.where(self._is_skip(layer), skip, apply_gain(spec.branch_gain, branch_output))

    def apply_mlp(self, layer, branch_input):
        if layer.config.parallel:
            # A parallel MLP reads past the layer's heads: its branch is on the path of the skip.
            branch_input = jnp.where(self._is_skip(layer), branch_input, 0)
        return super().apply_mlp(layer, branch_input)

    def _is_skip(self, layer):
        return _choice_kind(self.choice, layer.config) == 2


def _make_frozen_steps(params, prepared, config, gains):
    """Make `make_steps` of frozen paths, with the constants of one forward pass.

    Args:
        params, prepared, config: See `make_steps`.
        gains: Gains of all layers.

    Returns:
        (step, finish): step(state, layer, choice) passes a state through one layer of a path, and
        finish(state) applies the final norm.
    """
    constants, final_constants = freeze(params, prepared, config)

    def step(state, l, choice):
        """Pass a path's state [n, d] through layer l, whose weights and norms are frozen, by the
        head, or skip, that the path chooses."""
        layer_gain, extra = jax.tree.map(lambda a: a[l], (gains, constants))
        layer = Layer(layer_params(params, config, l), layer_gain, l, config, prepared, extra)
        return walk_layer(OnePath(choice, state.dtype), layer, state[None])[0][0]

    def finish(state):
        algebra = OnePath(ALL_HEADS, state.dtype)
        return apply_final_norm(algebra, state[None], params, prepared, config, final_constants)[0]

    return step, finish


def _choice_kind(choice, config):
    """Return 0 for all heads, 1 for one head, 2 for the skip."""
    kind = jnp.where(choice == config.num_heads, 2, 1)
    return jnp.where(choice == ALL_HEADS, 0, kind)


def _head_params(stack: AttentionParams, row: Number, head: Number) -> AttentionParams:
    """Return the attention parameters of one head of one layer, without copying the layer.

    Args:
        stack: Parameters of all layers.
        row: Index of a row of the parameters; may be traced.
        head: Index of the head; may be traced.
    """
    by_head = ("w_q", "b_q", "w_k", "b_k", "w_v", "b_v", "w_o", "v_score")
    fields = _pick_head(stack, by_head, row, head)
    relative = stack.relative
    if relative is not None:
        segment = relative.segment[row, :, head][:, None]
        terms = _pick_head(relative, ("w_r", "b_r", "b_s"), row, head)
        relative = relative.replace(**terms, segment=segment)
    return stack.replace(
        **fields,
        b_o=stack.b_o[row],
        relative=relative,
        q_norm=None if stack.q_norm is None else stack.q_norm[row],
        k_norm=None if stack.k_norm is None else stack.k_norm[row],
    )


def _pick_head(stack, names, row, head):
    """Select one head of one layer in arrays that have both axes.

    Args:
        stack: Parameters of attention; each field is [l, h, ...], or None.
        names: Names of the fields.
        row, head: Indices of the layer and the head.

    Returns:
        {name: [1, ...], the head's part with an axis of one head; None for a field that is None}.
    """
    fields = {name: getattr(stack, name) for name in names}
    return {name: None if a is None else a[row, head][None] for name, a in fields.items()}


def _head_context(context: AttentionContext, head: Number) -> AttentionContext:
    """Return the context as one head sees it."""
    mask, bias = context.mask, context.bias
    if mask is not None and mask.ndim == 3 and mask.shape[0] > 1:
        mask = mask[head][None]
    if bias is not None and bias.shape[0] > 1:
        bias = bias[head][None]
    return context.replace(mask=mask, bias=bias, head=head)
