"""Measures of a checkpoint by layer: tokens, attention, path lengths and massive activations.

    source = rc.pretrained.open_checkpoint(folder)
    report = rc.pretrained.checkpoint_report(source, {"x": ids, "mask": mask})
    report.states["SAN"]["residual_ratio"]  # [b, L + 1], of attention alone
    report.collapsed_at("SAN")              # the first layer below the threshold of MEASURES

The lengths of paths are counted, weighted by branch shares, and by exact sums.

Axis letters: b examples, l layers, h heads.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from rank_collapse.annotations import AnyArray
from rank_collapse.measures.listings import Spike, spikes
from rank_collapse.measures.norms import composite_norm
from rank_collapse.measures.profiles import Profile
from rank_collapse.measures.spikes import choose_ratio
from rank_collapse.measures.table import MEASURES, MeasureName
from rank_collapse.network.measured.heads import measure_heads
from rank_collapse.network.measured.influence import attention_share
from rank_collapse.network.measured.states import ProfilePass
from rank_collapse.network.passes import LayerMeasure, States
from rank_collapse.paths.contributions import LengthPass
from rank_collapse.paths.lengths import path_length_law
from rank_collapse.pretrained.opened import InMemory, OpenCheckpoint
from rank_collapse.pretrained.streaming import AblationSpec, Group, State, stream

WHOLE, ALONE = "Transformer", "SAN"
STATES: tuple[MeasureName, ...] = (
    "residual_ratio",
    "token_cosine",
    "effective_rank",
    "spike_entry",
    "spike_norm",
    "spike_share",
    "spike_token",
    "spike_feature",
    "residual_spike",
    "bulk_ratio",
)


@dataclasses.dataclass(frozen=True)
class CheckpointReport:
    """Holds the results of `checkpoint_report`.

    Attributes:
        states: {ablation: `Profile` [b, L + 1]} of the hidden states before the final norm.
        read: `Profile` [b, L + 1] of what attention reads, N(X^l); the last is the output.
        attention: {measure: [b, L, h]}, of `network.measured.heads.measure_heads`.
        path_size: ‖C_k‖_{1,∞} [b, L + 1] of the sum over all paths of length k.
        attention_share: λ [b, L], mean share of each attention branch in the stream.
        spikes: `rc.spikes` of each text.
    """

    states: Mapping[str, Profile]
    read: Profile
    attention: Mapping[str, np.ndarray]
    path_size: np.ndarray
    attention_share: np.ndarray
    spikes: Sequence[Sequence[Spike]]

    def collapsed_at(self, ablation: str = WHOLE) -> int | None:
        """Return the first layer whose mean residual ratio is below the alarm of `rc.MEASURES`.

        None if no layer is below it; the mean is over examples, of `decisive_ratios`.

        Args:
            ablation: "Transformer" for the full model, "SAN" for its attention alone.
        """
        threshold = MEASURES["residual_ratio"].alarm.value
        is_below = self.decisive_ratios(ablation).mean(axis=0) < threshold
        return int(np.argmax(is_below)) if is_below.any() else None

    def decisive_ratios(self, ablation: str = WHOLE) -> np.ndarray:
        """Return the residual ratios [b, L + 1]; where a few tokens decide them, without these
        tokens.

        Args:
            ablation: See `collapsed_at`.
        """
        states = self.states[ablation]
        return choose_ratio(states["residual_ratio"], states["bulk_ratio"])

    def length_laws(self, num_heads: int) -> dict[str, np.ndarray]:
        """Compute {weighting: [b, L + 1]}, see `report.compute_length_laws`."""
        return compute_length_laws(num_heads, self.attention_share, self.path_size)


def checkpoint_report(
    source: OpenCheckpoint | InMemory,
    inputs: Mapping[str, object],
    *,
    chunk: int = 8,
    done: Callable[[State], None] | None = None,
) -> CheckpointReport:
    """Measure tokens, attention and sums of paths of a checkpoint in one pass over its weights.

    Args:
        source: An open checkpoint, read layer by layer, or a network in memory.
        inputs: See `pretrained.stream`: x and a mask [b, n].
        chunk: Examples at once.
        done: Function that is called after each layer with the state of the stream.

    Returns:
        `CheckpointReport` of the full model, with the states of its attention alone ("SAN").

    Raises:
        ValueError, OSError: In the same cases as `pretrained.stream`.
    """
    states = ProfilePass(STATES)
    passes = {
        "states": states,
        "read": dataclasses.replace(states, tokens="read"),
        "sums": LengthPass(),
        "attention": LayerMeasure(measure_heads),
        "share": LayerMeasure(attention_share),
        "hidden": States(),
    }
    groups = {
        WHOLE: Group(tuple(passes.items())),
        ALONE: Group((("states", states),), AblationSpec(ALONE)),
    }
    measured = stream(source, inputs, groups, chunk=chunk, done=done)
    full_model = measured[WHOLE]
    path_sums = np.asarray(full_model["sums"].by_length)
    masks = inputs.get("mask")
    if masks is None:
        masks = np.ones((len(path_sums), path_sums.shape[2]), bool)
    path_masks = np.broadcast_to(np.asarray(masks, bool)[:, None], path_sums.shape[:-1])
    hidden = zip(full_model["hidden"], masks, strict=True)
    return CheckpointReport(
        {ablation: results["states"] for ablation, results in measured.items()},
        full_model["read"],
        full_model["attention"],
        np.asarray(composite_norm(path_sums, mask=path_masks)),
        full_model["share"],
        [spikes(states, mask=mask) for states, mask in hidden],
    )


COUNTED, ROLLOUT, BY_NORM = "counted", "rollout", "exact sums by norm"


def compute_length_laws(
    num_heads: int, attention_share: Float[AnyArray, "b l"], path_size: Float[AnyArray, "b k"]
) -> dict[str, Float[np.ndarray, "b k"]]:
    """Compute three distributions of the path length, which give very different answers.

    In the count, each of the (1 + H)^L paths has the same weight. In the rollout, a layer's
    attention has its share λ_l of the stream as weight. In the exact sum, the paths of length k
    together have the norm of their sum as weight.

    Args:
        num_heads: H.
        attention_share: λ [b, L] of each text, in [0, 1].
        path_size: ‖C_k‖ [b, L + 1], of `rc.path_contributions`.

    Returns:
        {weighting: probabilities [b, L + 1] of the lengths 0 .. L}; NaN where all sizes are 0,
        which happens if products of very small weights underflow.

    Source: Dong et al. 2021; arXiv 2602.16837 for the shares.
    """
    share = np.clip(np.asarray(attention_share, np.float64), 0, 1)
    size = np.asarray(path_size, np.float64)
    total = size.sum(axis=1, keepdims=True)
    return {
        COUNTED: path_length_law(np.full_like(share, num_heads / (1 + num_heads))),
        ROLLOUT: path_length_law(share),
        BY_NORM: np.divide(size, total, out=np.full_like(size, np.nan), where=total > 0),
    }


def mean_lengths(laws: Mapping[str, Float[np.ndarray, "b k"]]) -> dict[str, float]:
    """Compute the mean path length Σ_k k p_k of each law, averaged over texts.

    Args:
        laws: Result of `compute_length_laws`.
    """
    return {name: float((law @ np.arange(law.shape[1])).mean()) for name, law in laws.items()}


def tabulate_lengths(laws: Mapping[str, Float[np.ndarray, "b k"]]) -> list[dict[str, object]]:
    """Tabulate mean, median and 99 % quantile of the path length by each law, a row for each.

    A law that is NaN in some text gives None.

    Args:
        laws: Result of `compute_length_laws`.
    """
    rows = []
    for name, mean in mean_lengths(laws).items():
        cumulative = np.cumsum(laws[name].mean(axis=0))
        if np.isnan(mean):
            quantiles = dict.fromkeys(("mean length", "median", "99 % at most"))
            rows.append({"paths weighted": name, **quantiles})
            continue
        row = {
            "paths weighted": name,
            "mean length": mean,
            "median": int(np.argmax(cumulative >= 0.5)),
            "99 % at most": int(np.argmax(cumulative >= 0.99)),
        }
        rows.append(row)
    return rows
