"""How much of its depth a language model uses: measures by layer, and one number per definition.

    report = rc.depth_report(params, ids, config)            # in memory, tied embeddings
    report = rc.depth_report(rc.pretrained.open_checkpoint(folder), ids)   # layer by layer
    print(report)
    report.figure().savefig("depth.png")

The literature has several definitions of "depth used", which disagree on the same network. The
report gives all of them with their sources, and also the exact sums over paths. Lens and cosine
follow the code of Hu et al. 2025; docs/related.md lists the differences.

Axis letters: b examples, l layers, n tokens.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rank_collapse.annotations import ArrayLike
from rank_collapse.checks import refuse_if
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import as_batch
from rank_collapse.network.measured.heads import measure_heads
from rank_collapse.network.measured.influence import InfluencePass, RemovalPass, find_settling_index
from rank_collapse.network.measured.states import ProfilePass
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import LayerMeasure
from rank_collapse.paths.contributions import LengthPass
from rank_collapse.pretrained.opened import InMemory, OpenCheckpoint
from rank_collapse.pretrained.predictions import (
    LensPass,
    lens_measures,
    losses_by_length,
    mean_losses,
    targets_of,
)
from rank_collapse.pretrained.report import compute_length_laws, mean_lengths
from rank_collapse.pretrained.streaming import Group, State, stream
from rank_collapse.pretrained.weights import Unembedding
from rank_collapse.printed import format_count

STATES = ("residual_ratio", "token_cosine", "effective_rank", "spike_norm", "spike_share")
READ = ("residual_ratio", "token_cosine", "effective_rank")
PASSES = {
    "states": ProfilePass(STATES),
    "read": ProfilePass(READ, tokens="read"),
    "attention": LayerMeasure(measure_heads),
    "influence": InfluencePass(),
    "removal": RemovalPass(),
    "lens": LensPass(),
    "sums": LengthPass(),
}
ATTENTION_MEASURES = ("first_column", "entropy")
KL, OVERLAP = 0.1, 0.2  # of the largest, and of the five words: thresholds of Hu et al. 2025
LOSS, SAME = 0.01, 0.99  # changes of the loss that count, share of next tokens: ours
ANGLE = 0.1  # of π, at most between the ends of a block that is not used: ours


class DepthUsed(NamedTuple):
    """One definition of how much depth a network uses.

    Attributes:
        layers: How many of the L layers are used; None where the definition gives no number.
        definition: The definition in words.
        source: Paper.
    """

    layers: int | None
    definition: str
    source: str


class PathLength(NamedTuple):
    """One definition of how long paths must be: a number of heads on a path, not of layers.

    Attributes:
        length: At most L.
        definition: The definition in words.
        source: Paper.
    """

    length: int
    definition: str
    source: str


@dataclasses.dataclass(frozen=True)
class DepthReport:
    """What `depth_report` measured.

    Attributes:
        measures: {name: [b, L], [b, L + 1] or [b, L, L]}, see `depth_report`.
        used: {name: `DepthUsed`}, of the means over examples.
        lengths: {name: `PathLength`}, likewise.
        length_laws: {weighting: [b, L + 1]}, of `report.compute_length_laws`.
    """

    measures: Mapping[str, np.ndarray]
    used: Mapping[str, DepthUsed]
    lengths: Mapping[str, PathLength]
    length_laws: Mapping[str, np.ndarray]

    def by_layer(self) -> dict[str, np.ndarray]:
        """Return {name: [L + 1]}, means over examples by layer or path length; NaN for no value.

        `pandas.DataFrame(report.by_layer())` is a table of it.
        """
        columns = {}
        for name, values in self.measures.items():
            if values.ndim == 2:  # else a table of two layers
                mean = values.mean(axis=0, dtype=np.float64)
                columns[name] = np.concatenate([np.full(self.depth + 1 - len(mean), np.nan), mean])
        return columns

    def figure(self) -> Any:
        """Plot all of it by layer as a matplotlib figure; bands over texts."""
        from rank_collapse.report.depth import depth_figure

        return depth_figure(self.measures, self.length_laws, self.lengths["paths, loss"].length)

    @property
    def depth(self) -> int:
        """Return L."""
        return self.measures["error"].shape[1]

    def __str__(self) -> str:
        width = max(map(len, [*self.used, *self.lengths]))

        def format_line(name, number, estimate):
            """Write the line of one definition: its name, its number, and what it counts."""
            text = "none" if number is None else number
            return f"  {name:{width}}  {text:>4}  {estimate.definition} ({estimate.source})"

        lines = [f"depth used, of {format_count(self.depth, 'layer')}:"]
        lines += [
            format_line(name, estimate.layers, estimate) for name, estimate in self.used.items()
        ]
        lines.append(f"heads on a path, of {self.depth} at most:")
        lines += [
            format_line(name, estimate.length, estimate) for name, estimate in self.lengths.items()
        ]
        means = mean_lengths(self.length_laws).items()
        lines.append(f"  mean length: {', '.join(f'{name} {mean:.1f}' for name, mean in means)}")
        (lowest_name, lowest), (highest_name, highest) = find_extremes(self.used)
        if lowest < highest:
            lines.append(
                f"The definitions disagree: {lowest} by “{lowest_name}”, "
                f"{highest} by “{highest_name}”."
            )
        return "\n".join(lines)


def find_extremes(used: Mapping[str, DepthUsed]) -> tuple[tuple[str, int], tuple[str, int]]:
    """Find the definitions with the fewest and the most layers, as (name, layers) each.

    Args:
        used: The field `used` of a `DepthReport`.
    """
    counts = [
        (name, estimate.layers) for name, estimate in used.items() if estimate.layers is not None
    ]
    return min(counts, key=operator.itemgetter(1)), max(counts, key=operator.itemgetter(1))


def depth_report(
    params: TransformerParams | OpenCheckpoint,
    ids: ArrayLike,
    config: TransformerConfig | None = None,
    *,
    mask: ArrayLike | None = None,
    unembedding: Unembedding | None = None,
    chunk: int = 8,
    done: Callable[[State], None] | None = None,
) -> DepthReport:
    """Measure a language model by layer, and how much of its depth it uses.

    By layer or branch, [b, L] of layers 1 .. L, [b, L + 1] with layer 0:

    lens_kl, lens_overlap        of X^l after the final norm: `lens_measures`
    frozen_kl, frozen_overlap    the same with the norm's statistics of the last state
    {attention,mlp,layer}_cosine, attention_ratio, mlp_ratio, attention_share, block_influence
                                 branch and stream: `rc.network.layer_influence`
    angle, last_angle            of every two states, [b, L + 1, L + 1]
    error, cosine, later, later_most
                                 without each layer: `layer_removal`; the last two [b, L, L]
    loss_without                 nats a token without each layer
    residual_ratio, token_cosine, effective_rank
                                 of the states
    read_residual_ratio, read_token_cosine, read_effective_rank
                                 of what the attention of the next layer reads, N(X^l)
    spike_norm, spike_share      one token beside the others, of `MEASURES`
    first_column, entropy        of attention, means over heads: sinks
    loss_up_to                   nats a token by paths of lengths 0 .. k alone, frozen
    same_up_to                   share of positions with the network's next token
    path_size                    ‖C_k‖_F, the sum over all paths of length k

    Cost: about L/2 + 10 forward passes, and the unembedding of 7 (L + 1) states a token.

    Args:
        params: Parameters of a network in memory, or an open checkpoint, read layer by layer.
        ids: Tokens [n] of one text, [b, n], or a list of texts of different lengths.
        config: Configuration of the network in memory.
        mask: Bool [b, n], the tokens that exist; None for all.
        unembedding: Unembedding of the network in memory; by default the table of its token
            embedding.
        chunk: Examples at once.
        done: Function that is called after each layer with the state of the stream.

    Raises:
        ValueError: The model is not a language model, or `pretrained.stream` raises an error.

    Source: Csordás et al. 2025, Do language models use their depth efficiently?, with the
    thresholds of Hu et al. 2025 (arXiv 2512.14064); Gromov et al. 2024; Men et al. 2024; for sums
    over paths, theorem 2.1 of Dong et al. 2021.
    """
    source, unembedding = _open_source(params, config, unembedding)
    refuse_if(ids is None or not len(ids), "ids hold no text")
    batch = as_batch({"x": [ids] if np.ndim(ids[0]) == 0 else ids, "mask": mask})
    ids, mask = batch["x"], batch.get("mask")
    has_next = targets_of(ids, mask)[1].any(axis=1)
    if not has_next.all():
        raise ValueError(f"text {int(np.argmin(has_next))} has fewer than 2 tokens")
    groups = {"": Group(tuple(PASSES.items()))}
    measured = stream(source, {"x": ids, "mask": mask}, groups, chunk=chunk, done=done)[""]
    removal, sums = measured["removal"], measured["sums"]
    output, outputs = removal.pop("output"), removal.pop("outputs")
    exists = np.ones(ids.shape, bool) if mask is None else mask
    by_length = losses_by_length(unembedding, sums, ids, mask)
    path_sums = np.where(exists[:, None, :, None], sums.by_length, 0)
    measures = {
        **measured["states"].measures,
        **measured["influence"],
        **removal,
        **{f"read_{name}": measured["read"][name] for name in READ},
        "loss_without": mean_losses(unembedding, outputs, ids, mask)[0],
        "loss_up_to": by_length["loss_up_to"],
        "same_up_to": by_length["same_up_to"],
        **{name: measured["attention"][name].mean(axis=-1) for name in ATTENTION_MEASURES},
        "path_size": np.linalg.norm(path_sums, axis=(-2, -1)),
    }
    for index, name in enumerate(("lens", "frozen")):  # as `LensPass` stacks them
        lens = lens_measures(unembedding, measured["lens"][:, index], output, exists)
        measures |= {f"{name}_{measure}": values for measure, values in lens.items()}
    measures = {name: np.asarray(values) for name, values in measures.items()}
    shares, sizes = measures["attention_share"], measures["path_size"]
    laws = compute_length_laws(source.config.num_heads, shares, sizes)
    return DepthReport(measures, *depth_used(measures, by_length["loss"]), laws)


def depth_used(
    measures: Mapping[str, np.ndarray], loss: ArrayLike
) -> tuple[dict[str, DepthUsed], dict[str, PathLength]]:
    """Compute each definition of the depth that is used.

    Args:
        measures: Names of measures, see `depth_report`.
        loss: Loss of the full model [b], in nats per token.

    Returns:
        ({definition: the depth in layers}, {definition: the number of heads on a path}).
    """
    mean = {name: values.mean(axis=0, dtype=np.float64) for name, values in measures.items()}
    depth, loss = len(mean["error"]), float(np.mean(loss))
    kinds = [kind for kind in ("attention", "mlp", "layer") if f"{kind}_cosine" in mean]
    cosine = np.mean([mean[f"{kind}_cosine"] for kind in kinds], axis=0)
    turns = np.flatnonzero((cosine[:-1] < 0) & (cosine[1:] >= 0))
    kl, overlap = mean["lens_kl"][:depth], mean["lens_overlap"]

    def first_layer(reached):
        """Return the first layer reached; like the authors' code, among all layers but the
        last."""
        places = np.flatnonzero(reached[: depth - 1])
        return int(places[0]) if len(places) else None

    def layers_outside_block(angle):
        blocks = [n for n in range(depth + 1) if np.diagonal(angle, n).min() <= ANGLE]
        return depth - max(blocks)

    def is_changed(losses):
        return np.abs(losses - loss) > LOSS * loss

    hu = "Hu et al. 2025, after Csordás et al. 2025"
    paths = "sums over all paths, Dong et al. 2021, theorem 2.1"
    used = {
        "lens, KL": DepthUsed(
            first_layer(kl < KL * kl.max()), f"layers before a KL below {KL} of the largest", hu
        ),
        "lens, top 5": DepthUsed(
            first_layer(overlap > OVERLAP), f"layers before an overlap above {OVERLAP}", hu
        ),
        "cosine": DepthUsed(
            int(turns[-1]) + 1 if len(turns) else None,
            "layers before branches turn from opposing the stream to amplifying it",
            f"{hu}, whose index of the layer is one less",
        ),
        "single layers": DepthUsed(
            int(is_changed(mean["loss_without"]).sum()),
            f"layers without which the loss changes by over {LOSS:.0%}",
            "Men et al. 2024, with our threshold",
        ),
        "blocks, last token": DepthUsed(
            layers_outside_block(mean["last_angle"]),
            f"layers outside of the longest block that turns the last token by at most {ANGLE} π",
            "Gromov et al. 2024, with our threshold",
        ),
        "blocks": DepthUsed(
            layers_outside_block(mean["angle"]),
            "the same with the mean over tokens",
            "after Gromov et al. 2024, with our threshold",
        ),
    }
    lengths = {
        "paths, loss": PathLength(
            int(find_settling_index(~is_changed(mean["loss_up_to"]))),
            f"least k such that paths of up to k heads have the loss within {LOSS:.0%}",
            paths,
        ),
        "paths, token": PathLength(
            int(find_settling_index(mean["same_up_to"] >= SAME)),
            f"least k such that paths of up to k heads have {SAME:.0%} of the next tokens",
            paths,
        ),
    }
    return used, lengths


def _open_source(params, config, unembedding):
    """Return (what `stream` reads, its unembedding)."""
    if isinstance(params, OpenCheckpoint):
        source = params
        unembedding = params.unembedding if unembedding is None else unembedding
    else:
        source = InMemory(params, config)
        if unembedding is None and params.embedding is not None:
            unembedding = Unembedding(params.embedding.tokens)
    if unembedding is None:
        is_network = source is not params
        missing = "the network has no unembedding: it is not a language model"
        raise ValueError(missing if is_network else describe_missing_head(source, "the model"))
    return source, unembedding


def describe_missing_head(source: OpenCheckpoint, name: str) -> str:
    """Say that a checkpoint has no head for the next token.

    Args:
        source: The checkpoint.
        name: Its name in the sentence.
    """
    other = "; its head predicts masked tokens" if source.family.masked_head else ""
    return (
        f"{name} ({source.settings['model_type']}) has no head that predicts the next token, and "
        f"the depth report needs one{other}"
    )
