"""What a checkpoint makes of tokens, layer by layer: measured here for the command and experiments.

    source = rc.pretrained.open_checkpoint(folder)
    report = rc.pretrained.checkpoint_report(source, {"x": ids, "mask": mask})
    report.states["SAN"]["residual_ratio"]  # [b, L + 1], of attention alone
    report.collapsed_at("SAN")              # the first layer below the threshold of MEASURES

Axis letters: b examples, l layers, h heads.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rank_collapse.measures.norms import composite_norm
from rank_collapse.measures.profiles import Profile
from rank_collapse.measures.table import MEASURES, MeasureName
from rank_collapse.network.measured.heads import measure_heads
from rank_collapse.network.measured.states import ProfilePass
from rank_collapse.network.passes import LayerMeasure
from rank_collapse.paths.contributions import LengthPass
from rank_collapse.pretrained.opened import InMemory, OpenCheckpoint
from rank_collapse.pretrained.streaming import AblationSpec, Group, State, stream

WHOLE = "Transformer"
STATES: tuple[MeasureName, ...] = ("residual_ratio", "token_cosine", "effective_rank")
STATES += ("spike_entry", "spike_norm", "spike_share", "spike_token", "spike_feature")
STATES += ("residual_spike",)


@dataclasses.dataclass(frozen=True)
class CheckpointReport:
    """What `checkpoint_report` measured.

    Attributes:
        states: {ablation: `Profile` [b, L + 1]} of the hidden states before the final norm.
        read: `Profile` [b, L + 1] of what attention reads, N(X^l); the last is the output.
        attention: {measure: [b, L, h]}, of `rc.network.attention_profile`.
        path_size: ‖C_k‖_{1,∞} [b, L + 1] of the sum over all paths of length k.
    """

    states: Mapping[str, Profile]
    read: Profile
    attention: Mapping[str, np.ndarray]
    path_size: np.ndarray

    def collapsed_at(self, ablation: str = WHOLE) -> int | None:
        """The first layer whose residual ratio, mean over examples, is below the threshold of
        `rc.MEASURES`; None where none is."""
        alarm = MEASURES["residual_ratio"].alarm
        below = self.states[ablation]["residual_ratio"].mean(axis=0) < alarm.value
        return int(np.argmax(below)) if below.any() else None

    def mean_path_length(self) -> float:
        """Σ_k k ‖C_k‖ / Σ_k ‖C_k‖, mean over examples."""
        share = self.path_size / self.path_size.sum(axis=1, keepdims=True)
        return float(share.mean(axis=0) @ np.arange(share.shape[1]))


def checkpoint_report(
    source: OpenCheckpoint | InMemory,
    inputs: Mapping[str, Any],
    *,
    ablations: Sequence[str] = ("SAN",),
    reading: str = "published",
    measures: Sequence[MeasureName] = STATES,
    chunk: int = 8,
    done: Callable[[State], None] | None = None,
) -> CheckpointReport:
    """Tokens, attention and sums of paths of a checkpoint, in one pass over its weights.

    Args:
        source: An open checkpoint, read layer by layer, or a network in memory.
        inputs: As of `pretrained.stream`: x and a mask [b, n].
        ablations: Of `surgery.ABLATIONS`, beside the whole network: of these the states alone.
        reading: Of `surgery.READINGS`.
        measures: Of the states.
        chunk: Examples at once.
        done: Called after each layer with the state of the stream.

    Raises:
        ValueError, OSError: As of `pretrained.stream`.
    """
    states = ProfilePass(tuple(measures))
    passes = {
        "states": states,
        "read": dataclasses.replace(states, tokens="read"),
        "sums": LengthPass(getattr(source, "biased", True)),
        "attention": LayerMeasure(measure_heads),
    }
    groups = {WHOLE: Group(tuple(passes.items()))}
    for name in ablations:
        groups[name] = Group((("states", states),), AblationSpec(name, reading))
    found = stream(source, inputs, groups, chunk=chunk, done=done)
    whole = found[WHOLE]
    sums = np.asarray(whole["sums"].by_length)
    mask = inputs.get("mask")
    if mask is not None:
        mask = np.broadcast_to(np.asarray(mask, bool)[:, None], sums.shape[:-1])
    return CheckpointReport(
        {name: own["states"] for name, own in found.items()},
        whole["read"],
        whole["attention"],
        np.asarray(composite_norm(sums, mask=mask)),
    )
