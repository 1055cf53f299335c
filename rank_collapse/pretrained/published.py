"""The three models whose residual curves were published (Dong et al. 2021): sizes and curves.

curves = {"SAN": ..., "SAN+MLP": ..., "SAN+skip": ..., "Transformer": ...}  # [b, L + 1] each
for target in published_targets(settings, curves):
    print(target, target.differs)
"""

import json
import math
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from rank_collapse.extras import import_package

_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
_BASE |= {"intermediate_size": 3072}
PUBLISHED = {
    "bert-base-cased": {"model_type": "bert", "vocab_size": 28996} | _BASE,
    "albert-base-v2": {"model_type": "albert", "vocab_size": 30000, "embedding_size": 128} | _BASE,
    "xlnet-base-cased": {
        "model_type": "xlnet",
        "vocab_size": 32000,
        "d_model": 768,
        "n_layer": 12,
        "n_head": 12,
        "d_inner": 3072,
    },
}
READ_OFF = 1e-3  # to which the curves could be read off the figures
ERROR = 0.05  # share of models with the published weights of which a value differs by chance
_COMPARED = ("model_type", "hidden_size", "d_model")  # entries that a model of this size shares


def published_curves(settings: dict[str, Any], depth: int) -> dict[str, dict[str, list[float]]]:
    """Returns {"init" or "pretrained": {variant: residual ratio by layer}} of a model of this size.

    Args:
        settings: From `rank_collapse.pretrained.settings_of`.
        depth: Number of layers.

    Returns:
        Empty where nothing was published for this family and size.
    """
    text = resources.files("rank_collapse").joinpath("data/published_residual_curves.json")
    for name, curves in json.loads(text.read_text("utf-8"))["curves"].items():
        published = PUBLISHED[name]
        same = all(settings.get(k) == published[k] for k in _COMPARED if k in published)
        if same and len(curves["init"]["SAN"]) - 1 == depth:
            return curves
    return {}


class Target(NamedTuple):
    """A published residual ratio beside the measured one."""

    variant: str
    layer: int
    published: float
    measured: float  # mean over texts
    tolerance: float  # what other texts explain

    @property
    def differs(self) -> bool:
        """Returns whether they lie beyond the tolerance, or nothing finite was measured."""
        return not abs(self.measured - self.published) <= self.tolerance


def published_targets(
    settings: dict[str, Any], curves: Mapping[str, Float[np.ndarray, "b l"]]
) -> list[Target]:
    """Compare the published curves of pretrained weights with measured ones of the same weights.

    The published texts are 32 of wiki_bio. They count as one more text of the kind measured here:
    a value x̄ of b texts with standard deviation s may be t s √(1 + 1/b) from the published one, t
    Student's quantile of b − 1 degrees of freedom at 1 − .05/(2m), and 0.001, to which the figures
    were read off. The m values are compared jointly (Bonferroni): that one of them differs is a
    failure, which chance alone makes in 5 % of models at most.

    Args:
        settings: From `rank_collapse.pretrained.settings_of`.
        curves: {variant: residual ratio of each text by layer [b, L + 1]}, of the reading
            "published" of `surgery.ABLATIONS`.

    Raises:
        ValueError: Fewer than two texts, or nothing was published for this family and size.
    """
    count, depth = next(iter(curves.values())).shape
    published = published_curves(settings, depth - 1).get("pretrained")
    if published is None:
        raise ValueError(
            f"no curve of {settings.get('model_type')} with {depth - 1} layers of this width was "
            f"published; of {', '.join(PUBLISHED)} there are some"
        )
    if count < 2:
        raise ValueError("one text has no spread: the tolerance of the published curves needs two")
    # Here: it takes a second, which `--help` need not.
    special = import_package("scipy.special", "published_targets", "report")
    t = special.stdtrit(count - 1, 1 - ERROR / (2 * depth * len(curves)))
    return [
        Target(
            variant,
            layer,
            published[variant][layer],
            float(values.mean()),
            float(t * values.std(ddof=1) * math.sqrt(1 + 1 / count) + READ_OFF),
        )
        for variant, ratios in curves.items()
        for layer, values in enumerate(np.asarray(ratios, np.float64).T)
    ]
