"""What run_architectures has measured of a model, the table of it, and effective depths."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.paper.architectures.models import Model
from rank_collapse.measures.influence import settled

SAME, WITHIN, COSINE = 0.99, 0.01, 0.99  # of positions, of the loss, with the output
COLLAPSED = 0.01  # of the residual ratio
NAMES = {"pretrained": "pretrained", "init": "random initialisation"}


class Results:
    """What was measured of one model: arrays [seeds, texts, ...] by kind of weights and by name.

    Args:
        arrays: All of the run's, "label/kind and seed/part/.../measure".
        model: The model.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], model: Model):
        self.model, found = model, {}
        for name, values in arrays.items():
            if match := re.fullmatch(rf"{re.escape(model.label)}/([a-z]+)\d+/(.*)", name):
                found.setdefault(match[1], {}).setdefault(match[2], []).append(values)
        self.by_kind = {
            kind: {name: np.stack(own) for name, own in found[kind].items()}
            for kind in NAMES
            if kind in found
        }

    @property
    def kinds(self) -> list[str]:
        """The kinds of weights that were measured."""
        return list(self.by_kind)

    def get(self, kind: str, name: str) -> np.ndarray | None:
        """[seeds · texts, ...] of one measure, or None where it was not asked for."""
        values = self.by_kind[kind].get(name)
        return None if values is None else values.reshape(-1, *values.shape[2:])

    def mean(self, kind: str, name: str) -> np.ndarray | None:
        """The mean of `get` over seeds and texts."""
        values = self.get(kind, name)
        return None if values is None else values.mean(axis=0, dtype=float)

    def by_seed(self, kind: str, name: str) -> np.ndarray | None:
        """[seeds, ...], means over the texts of each set of weights; None as of `get`."""
        values = self.by_kind.get(kind, {}).get(name)
        return None if values is None else values.mean(axis=1, dtype=float)

    def has(self, part: str) -> bool:
        """Whether anything of a part was measured."""
        return any(name.startswith(f"{part}/") for own in self.by_kind.values() for name in own)


def depths_of(results: Results, kind: str) -> dict[str, Any]:
    """Effective depths and mean path lengths of one kind of weights, as far as they were measured.

    The effective depth is the least k such that the paths of lengths up to k, and up to any longer
    length, give the same next token on 99 % of positions ("same next token"), the same loss within
    1 % ("same loss"), or a mean cosine of 0.99 with the output ("same direction"). Means are over
    texts. "mean length" weighs each length by ‖C_k‖, "of the gradient" by ‖G_k‖.

    Args:
        results: Of a model.
        kind: Of its weights.
    """
    means = {name: results.mean(kind, name) for name in results.by_kind[kind]}
    found: dict[str, Any] = {"layers": results.model.config.depth}

    def mean_length(of):
        return float(np.arange(len(of)) @ of / of.sum())

    if (cosine := means.get("lengths/cosine_up_to")) is not None:
        found["same direction"] = int(settled(cosine >= COSINE))
        found["mean length"] = mean_length(means["lengths/size"])
    if (loss := means.get("next_token/loss")) is not None:
        near = np.abs(means["next_token/loss_up_to"] - loss) <= WITHIN * abs(loss)
        found["same next token"] = int(settled(means["next_token/same_up_to"] >= SAME))
        found |= {"same loss": int(settled(near)), "loss, nats": float(loss)}
    if (share := means.get("gradients/gradient_share")) is not None:
        found["mean length of the gradient"] = mean_length(share)
    if (turned := means.get("layers/block_influence")) is not None:
        found["least influential layer"] = int(np.argmin(turned)) + 1
        found["its 1 − cos"] = float(turned.min())
    return found


def rows_of(results: Sequence[Results], setup: Any) -> Iterator[dict[str, Any]]:
    """One row per model, weights, measure and layer (or path length): mean and spread."""
    for model in results:
        for kind, name in [(k, name) for k in model.kinds for name in model.by_kind[k]]:
            part, *rest, measure = name.split("/")
            variant, reading = rest or ("Transformer", "")
            values = model.get(kind, name)
            for place in np.ndindex(values.shape[1:]):
                column = values[(slice(None), *place)].astype(float)
                yield {
                    "model": model.model.label,
                    "weights": kind,
                    "part": part,
                    "variant": variant,
                    "reading": reading,
                    "measure": measure,
                    "layer_or_length": place[0] if place else "",
                    "head_or_path": place[1] if len(place) > 1 else "",
                    "mean": float(column.mean()),
                    "std": float(column.std()),
                    "examples": len(column),
                }
