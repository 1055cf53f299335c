"""What run_architectures makes of its measurements: rows and headline numbers."""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from experiments.architectures.models import Model
from rank_collapse import pretrained
from rank_collapse.measures.influence import settled
from rank_collapse.network.surgery import variants_of

KINDS = ("pretrained", "init")
SAME, WITHIN, COSINE = 0.99, 0.01, 0.99  # of positions, of the loss, with the output
NAMES = {"pretrained": "pretrained", "init": "random initialisation"}


class Results:
    """The run's cached arrays of one model: arrays by kind of weights, seeds joined.

    Args:
        arrays: All of the run's, "label/kind and seed/part/.../measure".
        model: The model.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], model: Model):
        self.model, label = model, model.label
        self.found: dict[tuple[str, str], list[np.ndarray]] = {}
        for name, values in arrays.items():
            if name.startswith(f"{label}/"):
                kind, rest = re.fullmatch(r"([a-z]+)\d+/(.*)", name[len(label) + 1 :]).groups()
                self.found.setdefault((kind, rest), []).append(values)

    def get(self, kind: str, name: str) -> np.ndarray | None:
        """[seeds · texts, ...] of one measure, or None where it was not asked for."""
        parts = self.found.get((kind, name))
        return None if parts is None else np.concatenate(parts)

    def by_seed(self, kind: str, name: str) -> np.ndarray | None:
        """[seeds, ...], means over the texts of each set of weights; None as of `get`."""
        parts = self.found.get((kind, name))
        return None if parts is None else np.stack([p.mean(axis=0, dtype=float) for p in parts])

    @property
    def kinds(self) -> list[str]:
        """The kinds of weights that were measured."""
        return [k for k in KINDS if any(kind == k for kind, _ in self.found)]

    def has(self, part: str) -> bool:
        """Whether anything of a part was measured."""
        return any(name.startswith(f"{part}/") for _, name in self.found)

    def names(self, kind: str) -> list[str]:
        """The measures of one kind of weights."""
        return [name for k, name in self.found if k == kind]


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

    def mean(name):
        values = results.get(kind, name)
        return None if values is None else values.mean(axis=0, dtype=np.float64)

    found: dict[str, Any] = {"layers": results.model.config.depth}
    cosine, size = mean("lengths/cosine_up_to"), mean("lengths/size")
    if cosine is not None:
        found["same direction"] = int(settled(cosine >= COSINE))
        found["mean length"] = float(np.arange(len(size)) @ size / size.sum())
    same, loss = mean("next_token/same_up_to"), mean("next_token/loss")
    if same is not None:
        near = np.abs(mean("next_token/loss_up_to") - loss) <= WITHIN * abs(loss)
        found["same next token"] = int(settled(same >= SAME))
        found["same loss"] = int(settled(near))
        found["loss, nats"] = float(loss)
    share = mean("gradients/gradient_share")
    if share is not None:
        found["mean length of the gradient"] = float(np.arange(len(share)) @ share)
    influence = mean("layers/block_influence")
    if influence is not None:
        found["least influential layer"] = int(np.argmin(influence)) + 1
        found["its 1 − cos"] = float(influence.min())
    return found


def rows_of(results: list[Results], setup: Any) -> Iterator[dict[str, Any]]:
    """One row per model, weights, measure and layer (or path length): mean and spread."""
    for model in results:
        for kind in model.kinds:
            for name in model.names(kind):
                part, *rest, measure = name.split("/")
                variant, reading_ = rest or ("Transformer", "")
                values = model.get(kind, name)
                for place in np.ndindex(values.shape[1:]):
                    column = values[(slice(None), *place)].astype(np.float64)
                    yield {
                        "model": model.model.label,
                        "weights": kind,
                        "part": part,
                        "variant": variant,
                        "reading": reading_,
                        "measure": measure,
                        "layer_or_length": place[0] if place else "",
                        "head_or_path": place[1] if len(place) > 1 else "",
                        "mean": float(column.mean()),
                        "std": float(column.std()),
                        "examples": len(column),
                    }


def summary_of(results: list[Results], setup: Any) -> dict[str, dict[str, Any]]:
    """By model: the means that the report and `reproduce` compare with what was published."""
    return {r.model.label: model_summary(r, setup.batches[r.model.label]) for r in results}


def model_summary(results: Results, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Means over texts and seeds, sizes, and the published curves."""
    model, config = results.model, results.model.config
    means = {
        kind: {
            name: np.mean(results.get(kind, name), axis=0, dtype=np.float64).tolist()
            for name in results.names(kind)
            if results.get(kind, name).ndim <= 3
        }
        for kind in results.kinds
    }
    curves: dict[str, dict[str, Any]] = {kind: {} for kind in means}
    ranges: dict[str, dict[str, Any]] = {kind: {} for kind in means}
    for kind, (variant, surgery) in itertools.product(means, variants_of(model.family)):
        own = results.by_seed(kind, f"residuals/{variant}/{surgery}/residual_ratio")
        if own is not None:
            ends = own.min(axis=0).tolist(), own.max(axis=0).tolist()
            ranges[kind][f"{variant}/{surgery}"] = list(ends)
            curves[kind] |= {} if surgery == "text" else {variant: own.tolist()}
    x, mask = batch["x"], batch["mask"]
    tokens = x.shape[1] if mask is None else float(mask.sum(axis=1).mean())
    return {
        "depths": {kind: depths_of(results, kind) for kind in results.kinds},
        "family": model.family,
        "depth": config.depth,
        "heads": config.num_heads,
        "texts": len(x),
        "mean_tokens": tokens,
        "published": pretrained.published_curves(model.settings, config.depth),
        "means": means,
        "curves": curves,
        "ranges": ranges,
    }
