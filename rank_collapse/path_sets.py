"""Sampled sets of paths: drawing them and evaluating many at once, frozen or recomputed.

Sets are Int [*sets, p, L], p paths each, with choices as in `rank_collapse.paths`. They are data,
not structure: heads are gathered by index, so that other paths never recompile. Paths that begin
alike are computed once: they are visited in lexicographic order, each from the layer where it
parts from the one before.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rank_collapse import attention as attn
from rank_collapse import frozen, layers
from rank_collapse.config import TransformerConfig
from rank_collapse.network import (
    TransformerParams,
    block,
    input_states,
    layer_params,
    make_context,
    per_layer,
    scan_layers,
    sublayer_input,
    sublayer_output,
    sublayer_sum,
)
from rank_collapse.paths import ALL_HEADS, check_length, check_paths

SEMANTICS = ("frozen", "recomputed")


class Classifier(NamedTuple):
    """Linear read-out of every token: logits = x w + b. Any pair (w, b) serves."""

    w: Any  # [d, c]
    b: Any  # [c]


def sample_path(key: Any, length: Any, depth: int, num_heads: int) -> Int[Array, "l"]:
    """One path of a given length: which layers are skipped, then heads, each drawn uniformly.

    The L − k skipped layers are drawn without replacement, so that all C(L, k) H^k paths of
    length k are equally likely.

    Args:
        key: Random key.
        length: k; may be traced.
        depth, num_heads: L and H.

    Raises:
        ValueError: A length outside 0..L (more skips than layers).
    """
    if not isinstance(length, jax.core.Tracer):
        check_length(int(length), depth)
    key_layers, key_heads = jax.random.split(key)
    rank = jax.random.permutation(key_layers, depth)
    heads = jax.random.randint(key_heads, (depth,), 0, num_heads)
    return jnp.where(rank < length, heads, num_heads)


def sample_path_sets(
    key: Any,
    lengths: Any,
    num_repeats: int,
    num_paths: int,
    depth: int,
    num_heads: int,
) -> Int[Array, "k r p l"]:
    """Independent paths for every length, repeat and member of a set; see `sample_path`.

    Paths of a set are drawn with replacement, as in Dong et al. 2021, section 4.

    Args:
        key: Random key; a length and repeat draws the same whatever others are asked for.
        lengths: The path lengths, [k] integers in 0..L.
        num_repeats, num_paths: Sets per length and paths per set.
        depth, num_heads: L and H.

    Raises:
        ValueError: A length outside 0..L.
    """
    if not isinstance(lengths, jax.core.Tracer):
        for length in lengths:
            check_length(int(length), depth)

    def draw(length, repeat, member):
        own = key
        for index in (length, repeat, member):
            own = jax.random.fold_in(own, index)
        return sample_path(own, length, depth, num_heads)

    for axis in range(3):
        in_axes = [None] * 3
        in_axes[2 - axis] = 0
        draw = jax.vmap(draw, in_axes)
    return draw(jnp.asarray(lengths), jnp.arange(num_repeats), jnp.arange(num_paths))


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


def path_state(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    path: Int[Array, "l"],
    *,
    semantics: str = "recomputed",
    no_sub_path: bool = False,
    mask: Any = None,
    bias: Any = None,
    segments: Any = None,
    positions: Any = None,
) -> Float[Array, "n d"]:
    """The state at the end of one path; differentiable.

    Recomputed: see `recomputed_step`. Frozen: the path's term of the decomposition, without the
    offset; over all paths these terms and the offset sum to the output.

    Args:
        params, x, config, mask, bias, segments, positions: As in `apply`.
        path: A choice per layer: 0..H−1 a head, H skip, −1 all heads.
        semantics: "frozen" or "recomputed".
        no_sub_path: Of recomputed paths, see `recomputed_step`.

    Raises:
        ValueError: A path that does not fit, unknown semantics, or cross-attention.
    """
    check_paths(path, config)
    inputs = {"mask": mask, "bias": bias, "segments": segments, "positions": positions}
    x, step, finish = _stepper(params, x, config, semantics, no_sub_path, inputs)
    for l in range(config.depth):
        x = step(x, l, path[l])
    return finish(x)


def path_set_states(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    paths: Int[Array, "*sets p l"],
    *,
    semantics: str = "recomputed",
    no_sub_path: bool = False,
    mask: Any = None,
    bias: Any = None,
    segments: Any = None,
    positions: Any = None,
) -> Float[Array, "*sets n d"]:
    """Sum over the paths of each set of their final states.

    Every beginning that several paths share is computed once, whatever set they are in. Vmap
    over examples or seeds with the same paths keeps that; reverse-mode gradients need
    `path_state`.

    Args:
        paths: Sets of paths, [*sets, p, L]; may be traced.
        params, x, config, semantics, no_sub_path, mask, bias, segments, positions: As in
            `path_state`.

    Raises:
        ValueError: As `path_state`.
    """
    check_paths(paths, config)
    if paths.ndim < 2:
        raise ValueError(f"paths of shape {paths.shape} are not sets [..., p, L]")
    inputs = {"mask": mask, "bias": bias, "segments": segments, "positions": positions}
    x, step, finish = _stepper(params, x, config, semantics, no_sub_path, inputs)
    *sets, num_paths, depth = paths.shape
    flat = jnp.asarray(paths).reshape(-1, depth)
    order = jnp.lexsort(flat.T[::-1])
    flat = flat[order]
    same = jnp.cumprod(flat[1:] == flat[:-1], axis=1).sum(axis=1)
    first = jnp.concatenate([jnp.zeros_like(same, shape=1), same])
    members = order // num_paths

    def visit(carry, item):
        stack, sums = carry
        path, start, member = item

        def advance(l, stack):
            return stack.at[l + 1].set(step(stack[l], l, path[l]))

        stack = jax.lax.fori_loop(start, depth, advance, stack)
        return (stack, sums.at[member].add(stack[depth])), None

    stack = jnp.concatenate([x[None], jnp.zeros((depth, *x.shape), x.dtype)])
    sums = jnp.zeros((flat.shape[0] // max(num_paths, 1), *x.shape), x.dtype)
    (_, sums), _ = jax.lax.scan(visit, (stack, sums), (flat, first, members))
    return jax.vmap(finish)(sums).reshape(*sets, *x.shape)


def read_out(
    classifier: Any, state: Float[Array, "*s n d"], *, normalize: bool = True, eps: float = 1e-12
) -> Float[Array, "*s n c"]:
    """Logits of summed path states: LayerNorm without gain and bias, then the classifier.

    Args:
        classifier: (w [d, c], b [c]).
        state: Hidden states, or sums of path states.
        normalize: False for the whole model, whose last norm is its own.
        eps: Added to the variance.
    """
    w, b = classifier
    if normalize:
        flat = layers.norm(None, state.reshape(-1, state.shape[-1]), "layer", eps)
        state = flat.reshape(state.shape)
    return state @ w + b.reshape((1,) * (state.ndim - 1) + b.shape)


def path_set_logits(
    params: TransformerParams,
    classifier: Any,
    inputs: Any,
    config: TransformerConfig,
    paths: Int[Array, "*sets p l"],
    **options: Any,
) -> Float[Array, "*sets n c"]:
    """Logits of each set of paths for one example, as the paper's experiments read them.

    Embedding, sum of the states over the set's paths, LayerNorm without gain and bias,
    classifier. Pure in all arguments: vmap `params` and `classifier` over seeds, `inputs` and the
    mask over examples.

    Args:
        params: Parameters, embedding included where the config has one.
        classifier: (w [d, c], b [c]).
        inputs: Token ids [n], vectors [n, i], or hidden states [n, d].
        config: The network.
        paths: Sets of paths.
        **options: semantics, no_sub_path, mask, bias, segments, positions of `path_set_states`.
    """
    return read_out(classifier, path_set_states(params, inputs, config, paths, **options))


def batch_path_set_logits(
    params: TransformerParams,
    classifier: Any,
    inputs: Any,
    config: TransformerConfig,
    paths: Int[Array, "*sets p l"],
    *,
    mask: Bool[Array, "b n"] | None = None,
    semantics: str = "recomputed",
    no_sub_path: bool = False,
    batch_size: int | None = None,
) -> Float[Array, "b *sets n c"]:
    """`path_set_logits` of a batch of examples.

    Args:
        params, classifier, config, paths, semantics, no_sub_path: See `path_set_logits`.
        inputs: [b, n], [b, n, i] or [b, n, d].
        mask: Which tokens exist.
        batch_size: Examples at a time, to bound the memory: states of sets · batch_size · n · d
            numbers are held. None for all at once.
    """

    def single(item):
        return path_set_logits(
            params, classifier, item[0], config, paths,
            semantics=semantics, no_sub_path=no_sub_path, mask=item[1],
        )  # fmt: skip

    size = inputs.shape[0] if batch_size is None else batch_size
    if size >= inputs.shape[0]:
        return jax.vmap(single)((inputs, mask))
    return jax.lax.map(single, (inputs, mask), batch_size=size)


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


def _stepper(params, x, config, semantics, no_sub_path, inputs):
    """(X^0, step(state, layer, choice) -> state, finish(state)) of either semantics."""
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
