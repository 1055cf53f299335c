"""The measurements of run_lens in one network: the exact Jacobian from a state to the last one, and
the frozen sum of the same paths.

Axis letters: b texts, v directions, m positions of the output (`POSITIONS`), k path lengths,
n tokens, d width.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import rank_collapse as rc
from rank_collapse.paths import name_states, transport, transport_ranks
from rank_collapse.pretrained import OpenCheckpoint
from rank_collapse.pretrained.predictions import Unembedding

KINDS = {"frozen": True, "exact": False}  # {name: argument `freeze` of `transport`}
DIRECTIONS = ("random", "state", "next")
POSITIONS = ("same", "later")
DISTANCES = (0, 1, 2, 4, 8, 16)  # of the ranks, in tokens
BRANCHES = "attention"


class Probe(NamedTuple):
    """Position and direction of the change of a state, in b texts."""

    source: np.ndarray  # Int [b], the position
    random: np.ndarray  # [b, d], Gaussian
    next: np.ndarray  # [b, d], the next token's row of the head; 0 where there is none


def choose_layer(depth: int, start: float) -> int:
    """Returns the index, from 0, of the layer after whose state the paths start; at least one layer
    follows.

    Args:
        depth: Layers of the network.
        start: Share of the layers.

    Raises:
        ValueError: A network of one layer.
    """
    if depth < 2:
        raise ValueError("a network of one layer has no state that a later layer reads")
    return min(round(start * depth), depth - 2)


def count_tokens(
    params: rc.network.TransformerParams,
    config: rc.TransformerConfig,
    inputs: Mapping[str, np.ndarray],
) -> np.ndarray:
    """Counts the states of each text [b]: its tokens, or the tokens of a spectrogram.

    Args:
        params, config: The network.
        inputs: x and mask [b, n].
    """
    if inputs["mask"] is not None:
        return np.asarray(inputs["mask"]).sum(axis=1)
    states = jax.eval_shape(lambda x: rc.apply(params, x, config).output, inputs["x"][0])
    return np.full(len(inputs["x"]), states.shape[0])


def draw_probe(
    source: OpenCheckpoint, ids: np.ndarray | None, counts: np.ndarray, seed: int
) -> Probe:
    """Draws a position in the second quarter of each text, and a random direction.

    Text i has the same draws for any number of texts.

    Args:
        source: The open checkpoint, for its head.
        ids: Tokens [b, n]; None for a network that reads no tokens. The probe then has rows of 0 in
            place of the rows of the head.
        counts: Tokens of each text.
        seed: Seed of the draws.

    Raises:
        ValueError: A text of one token.
    """
    if min(counts) < 2:
        raise ValueError(
            f"text {int(np.argmin(counts))} has fewer than 2 tokens, so none is later than another"
        )
    draws = [np.random.default_rng([seed, i]) for i in range(len(counts))]
    bounds = [(count // 4, max(count // 4 + 1, count // 2)) for count in counts]
    position = np.array([draw.integers(*pair) for draw, pair in zip(draws, bounds, strict=True)])
    d = source.config.d_model
    head = None if ids is None else read_head(source)
    rows = np.zeros((len(counts), d), np.float32)
    if head is not None:
        rows = head.table.rows(np.asarray(ids)[np.arange(len(counts)), position + 1])
    random = np.stack([draw.normal(size=d) for draw in draws])
    return Probe(position, random.astype(np.float32), np.asarray(rows, np.float32))


def read_head(source: OpenCheckpoint) -> Unembedding | None:
    """Reads the head for next or masked tokens; None if its rows are not as wide as the states.

    Args:
        source: The open checkpoint.
    """
    head = source.unembedding
    if head is None and source.masked_head is not None:
        head = source.masked_head.unembedding
    return head if head is not None and head.table.shape[1] == source.config.d_model else None


def measure_texts(
    params: rc.network.TransformerParams,
    config: rc.TransformerConfig,
    inputs: Mapping[str, np.ndarray],
    probe: Probe,
    layer: int,
) -> dict[str, np.ndarray]:
    """Measures texts one by one.

    Args:
        params, config: The network.
        inputs: x and mask [b, n].
        probe: Probe of these texts.
        layer: Layer from `choose_layer`.

    Returns:
        {"name/direction/position": [b] or [b, k]} of the measures of `compare_kinds`.
    """

    @jax.jit
    def measure(params, text, probe):
        """Measures one text."""
        return measure_text(params, config, text, probe, layer)

    texts = []
    for i in range(len(inputs["x"])):
        text = {name: a[i] for name, a in inputs.items() if a is not None}
        values = measure(params, text, Probe(*(a[i] for a in probe)))
        texts.append({name: np.asarray(array) for name, array in values.items()})
    return {
        f"{name}/{direction}/{position}": np.stack([text[name][j, m] for text in texts])
        for name in texts[0]
        for j, direction in enumerate(DIRECTIONS)
        for m, position in enumerate(POSITIONS)
    }


def measure_text(
    params: rc.network.TransformerParams,
    config: rc.TransformerConfig,
    text: Mapping[str, jax.Array],
    probe: Probe,
    layer: int,
) -> dict[str, Array]:
    """Measures one text, as `compare_kinds` does, along each direction.

    Args:
        params, config: The network.
        text: x, and a mask if there is one.
        probe: Probe of this text.
        layer: Paths start at the state after it.
    """
    mask = text.get("mask")
    states = rc.apply(params, text["x"], config, mask=mask).hidden[layer + 1]
    directions = jnp.stack([probe.random, states[probe.source], probe.next])
    sizes = jnp.linalg.norm(directions, axis=1, keepdims=True)
    directions = directions / jnp.where(sizes > 0, sizes, 1)
    fn = name_states(params, config, mask=mask)

    def move(direction, freeze):
        """Computes how a change of the source token's state along a direction moves the output
        tokens, by path length [k, n, d]; with the weights of the pass frozen, or by the exact
        Jacobian."""
        placed = jnp.zeros_like(states).at[probe.source].set(direction)
        return transport(
            fn,
            text["x"],
            placed,
            layer=layer,
            branches=BRANCHES,
            first_position=0,
            longest=config.depth - 1 - layer,  # all: no layer but those after it is passed
            freeze=freeze,
        ).by_position

    parts = {
        kind: jax.vmap(lambda v, freeze=freeze: move(v, freeze))(directions)
        for kind, freeze in KINDS.items()
    }
    places = jnp.arange(states.shape[0])
    later = places > probe.source
    chosen = jnp.stack([places == probe.source, later if mask is None else later & mask])
    return compare_kinds(*(parts[kind][:, None] * chosen[None, :, None, :, None] for kind in KINDS))


def compare_kinds(
    frozen: Float[Array, "v m k n d"], exact: Float[Array, "v m k n d"]
) -> dict[str, Array]:
    """Compares parts of an influence by path length: those of the sum with frozen weights, and
    those of the exact Jacobian.

    Args:
        frozen, exact: Parts [v, m, k, n, d] for directions v, sets of output positions m and path
            lengths k.

    Returns:
        For each kind "share" [v, m, k], the projections of the parts on their sum, which add up to
        1, and "size", the norms of the parts divided by the norm of the sum; "cosine" [v, m]
        between the two sums; "size_ratio", frozen divided by exact. NaN where a sum is 0.
    """
    sums = {"frozen": frozen.sum(2), "exact": exact.sum(2)}
    norms = {kind: jnp.sqrt(jnp.sum(total**2, axis=(-2, -1))) for kind, total in sums.items()}
    results = {}
    for kind, parts in {"frozen": frozen, "exact": exact}.items():
        norm = norms[kind][..., None]
        products = jnp.sum(parts * sums[kind][:, :, None], axis=(-2, -1))
        results[f"share_{kind}"] = products / norm**2
        results[f"size_{kind}"] = jnp.sqrt(jnp.sum(parts**2, axis=(-2, -1))) / norm
    product = jnp.sum(sums["frozen"] * sums["exact"], axis=(-2, -1))
    results["cosine"] = product / (norms["frozen"] * norms["exact"])
    results["size_ratio"] = norms["frozen"] / norms["exact"]
    return results


def measure_ranks(
    params: rc.network.TransformerParams,
    config: rc.TransformerConfig,
    inputs: Mapping[str, np.ndarray],
    sources: np.ndarray,
    counts: np.ndarray,
    layer: int,
) -> np.ndarray:
    """Measures the effective rank of the exact Jacobian by distance, [b, `DISTANCES`].

    NaN at distances beyond the text.

    Args:
        params, config: The network.
        inputs: x and mask [b, n].
        sources, counts: Changed positions, and number of tokens in each text.
        layer: Layer from `choose_layer`.
    """
    ranks = np.full((len(sources), len(DISTANCES)), np.nan)
    for i, (source, count) in enumerate(zip(sources, counts, strict=True)):
        distances = [m for m in DISTANCES if source + m < count]

        @jax.jit
        def measure(params, x, mask, source=int(source), distances=distances):
            """Computes the effective ranks of the Jacobian from one source position,
            [distances]."""
            fn, options = name_states(params, config, mask=mask), {"branches": BRANCHES}
            return transport_ranks(
                fn, x, layer=layer, source=source, distances=distances, longest=0, **options
            )[-1]

        mask = None if inputs["mask"] is None else inputs["mask"][i]
        ranks[i, : len(distances)] = measure(params, inputs["x"][i], mask)
    return ranks
