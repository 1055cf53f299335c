"""Sampled sets of paths: drawing them and evaluating many at once, frozen or recomputed.

Sets are Int [*sets, p, L], p paths each, with choices as in `enumeration`. They are data, not
structure: heads are gathered by index, so other paths never recompile. A common beginning of
several paths is computed once: paths are visited in lexicographic order, and each is computed from
the first layer in which it differs from the path before.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rank_collapse import checks
from rank_collapse.annotations import ArrayLike, Key, Leaf, Number
from rank_collapse.network import layers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.precision import full_precision
from rank_collapse.paths.enumeration import check_lengths, check_paths
from rank_collapse.paths.steps import COVERS, SEMANTICS, Semantics, make_steps


class Classifier(NamedTuple):
    """Linear classifier of every token: logits = x w + b. Any pair (w, b) serves.

    Attributes:
        w: [d, c].
        b: [c].
    """

    w: Leaf
    b: Leaf


def sample_path(key: Key, length: Number, depth: int, num_heads: int) -> Int[Array, "l"]:
    """Draw one path of a given length: which layers are skipped, then heads, all uniformly.

    The L − k skipped layers are drawn without replacement, so that all C(L, k) H^k paths of
    length k are equally likely.

    Args:
        key: Random key.
        length: k; may be traced.
        depth, num_heads: L and H.

    Raises:
        ValueError: A length outside 0..L (more skips than layers).
    """
    check_lengths(length, depth)
    checks.check_whole("num_heads", num_heads, 1)
    key_layers, key_heads = jax.random.split(key)
    rank = jax.random.permutation(key_layers, depth)
    heads = jax.random.randint(key_heads, (depth,), 0, num_heads)
    return jnp.where(rank < length, heads, num_heads)


def sample_path_sets(
    key: Key, lengths: ArrayLike, num_repeats: int, num_paths: int, depth: int, num_heads: int
) -> Int[Array, "k r p l"]:
    """Draw independent paths for every length, repeat and member of a set; see `sample_path`.

    Paths of a set are drawn with replacement, as in Dong et al. 2021, section 4.

    Args:
        key: Random key; the paths of a length and repeat do not depend on the others.
        lengths: The path lengths, [k] integers in 0..L.
        num_repeats, num_paths: Sets per length and paths per set.
        depth, num_heads: L and H.

    Raises:
        ValueError: A length outside 0..L.
    """
    check_lengths(lengths, depth)
    counts = {"num_repeats": num_repeats, "num_paths": num_paths, "num_heads": num_heads}
    for name, count in counts.items():
        checks.check_whole(name, count, 1)

    def draw(length, repeat, member):
        """Draw one path, from a key that no other path has."""
        path_key = key
        for index in (length, repeat, member):
            path_key = jax.random.fold_in(path_key, index)
        return sample_path(path_key, length, depth, num_heads)

    draw_set = jax.vmap(draw, (None, None, 0))
    draw_repeats = jax.vmap(draw_set, (None, 0, None))
    draw_lengths = jax.vmap(draw_repeats, (0, None, None))
    return draw_lengths(jnp.asarray(lengths), jnp.arange(num_repeats), jnp.arange(num_paths))


@full_precision
def path_state(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    path: object,
    *,
    semantics: Semantics = "recomputed",
    no_sub_path: bool = False,
    **inputs: ArrayLike | None,
) -> Float[Array, "n d"]:
    """Compute the state at the end of one path; differentiable.

    The two meanings of a path give different numbers, so a figure must name its meaning.
    Recomputed: see `steps.recomputed_step`. Frozen: the path's term of the decomposition, without
    the offset; over all paths these terms and the offset sum to the output.

    Args:
        params, x, config: See `apply`.
        path: Int [L], a choice per layer: 0..H−1 a head, H skip, −1 all heads.
        semantics: "frozen" or "recomputed".
        no_sub_path: Option for recomputed paths, see `steps.recomputed_step`.
        **inputs: mask, bias, segments, positions of `apply`.

    Raises:
        ValueError: A path that does not fit, unknown semantics, or cross-attention.
    """
    path = jnp.asarray(check_paths(path, config.depth, config.num_heads))
    options = {"semantics": semantics, "no_sub_path": no_sub_path, **inputs}
    return path_set_states(params, x, config, path[None], **options)


@full_precision
def path_set_states(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    paths: ArrayLike,
    *,
    semantics: Semantics = "recomputed",
    no_sub_path: bool = False,
    keep: ArrayLike | None = None,
    **inputs: ArrayLike | None,
) -> Float[Array, "*sets n d"]:
    """Sum the final states of the paths of each set.

    A beginning that several paths share is computed once, in whatever sets they are. Vmap over
    examples or seeds with the same paths keeps this. Differentiable in both modes; the reverse mode
    holds O(p L²) states.

    Args:
        paths: Sets of paths, Int [*sets, p, L]; may be traced.
        keep: Bool, broadcast to [*sets, p], True for paths that are members, so that sets of
            several sizes fit into one array; None for all. Other paths take no time if they repeat
            a member.
        params, x, config, semantics, no_sub_path, **inputs: See `path_state`.

    Raises:
        ValueError: In the same cases as `path_state`.
    """
    paths = jnp.asarray(check_paths(paths, config.depth, config.num_heads))
    checks.refuse_if(
        paths.ndim < 2 or not paths.shape[-2],
        f"paths of shape {paths.shape} are not sets [..., p, L]",
    )
    checks.check_choice(f"semantics={semantics!r}", semantics, SEMANTICS)
    params, prepared = prepare_inputs(params, x, config, covers=COVERS[semantics], **inputs)
    return _sum_paths(params, prepared, config, paths, semantics, no_sub_path, keep)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _sum_paths(params, prepared, config, paths, semantics, no_sub_path, keep):
    """Visit all paths in lexicographic order, and add the state of each to the sum of its set.

    Args:
        params, prepared, config, semantics, no_sub_path: See `make_steps`.
        paths: Int [..., paths of a set, depth].
        keep: Bool that broadcasts to the paths, which of them to add; None for all.

    Returns:
        The sums of the sets, [..., n, d].
    """
    step, finish = make_steps(params, prepared, config, semantics, no_sub_path)
    x = prepared.x
    *sets, num_paths, depth = paths.shape
    flat = paths.reshape(-1, depth)
    order, first = visiting_order(flat)
    flat = flat[order]
    members = order // num_paths
    if keep is not None:  # the others get the number of a set that does not exist
        keep = jnp.broadcast_to(keep, paths.shape[:-1]).ravel()
        members = jnp.where(keep[order], members, flat.shape[0])

    def visit(carry, numbered_path):
        """Compute the states of one path from `first_new` on, and add the last to its set.

        Returns:
            ((states of the path, sums of the sets), no result of the path: None).
        """
        states, sums = carry
        path, first_new, member = numbered_path

        def advance(l, states):
            pass_layer = functools.partial(step, states[l], l, path[l])
            state = jax.lax.cond(l < first_new, lambda: states[l + 1], pass_layer)
            return states.at[l + 1].set(state)

        # All layers, though states before `first_new` stay: reverse mode needs fixed ends.
        states = jax.lax.fori_loop(0, depth, advance, states)
        return (states, sums.at[member].add(states[depth], mode="drop")), None

    states = jnp.concatenate([x[None], jnp.zeros((depth, *x.shape), x.dtype)])
    sums = jnp.zeros((flat.shape[0] // num_paths, *x.shape), x.dtype)
    (_, sums), _ = jax.lax.scan(visit, (states, sums), (flat, first, members))
    return jax.vmap(finish)(sums).reshape(*sets, *x.shape)


def visiting_order(paths: Int[Array, "p l"]) -> tuple[Int[Array, "p"], Int[Array, "p"]]:
    """Sort paths lexicographically, so that every distinct beginning is computed once.

    Args:
        paths: Choices by layer.

    Returns:
        The order, and for each path in it the first layer that it does not share with the path
        before; Σ (L − first) layers are computed.
    """
    order = jnp.lexsort(paths.T[::-1])
    paths = paths[order]
    num_shared = jnp.cumprod(paths[1:] == paths[:-1], axis=1).sum(axis=1)
    return order, jnp.concatenate([jnp.zeros_like(num_shared, shape=1), num_shared])


@full_precision
def classify_states(
    classifier: tuple[ArrayLike, ArrayLike],
    state: Float[Array, "*s n d"],
    *,
    normalise: bool = True,
) -> Float[Array, "*s n c"]:
    """Compute logits of summed path states: LayerNorm without gain and bias, then the classifier.

    Args:
        classifier: (w [d, c], b [c]).
        state: Hidden states, or sums of path states.
        normalise: False for the full model, which has normalised its output.
    """
    w, b = classifier
    if normalise:
        flat = layers.apply_norm(None, state.reshape(-1, state.shape[-1]))
        state = flat.reshape(state.shape)
    return state @ w + b.reshape((1,) * (state.ndim - 1) + b.shape)


@full_precision
def path_set_logits(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    paths: ArrayLike,
    classifier: tuple[ArrayLike, ArrayLike],
    **options: object,
) -> Float[Array, "*sets n c"]:
    """Compute the logits of each set of paths for one example, as in the paper's experiments.

    Embedding, sum of the states over the set's paths, LayerNorm without gain and bias,
    classifier. Pure in all arguments: vmap `params` and `classifier` over seeds, `x` and the mask
    over examples, or `jax.lax.map` them with a `batch_size` that bounds the memory.

    Args:
        params, x, config, paths: See `path_set_states`, the embedding included.
        classifier: (w [d, c], b [c]).
        **options: semantics, no_sub_path, keep, mask, bias, segments, positions; see
            `path_set_states`.
    """
    return classify_states(classifier, path_set_states(params, x, config, paths, **options))
