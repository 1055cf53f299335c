"""Published residual curves and measured ones of the same weights."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.lab import JsonObject
from rank_collapse.pretrained.published import PUBLISHED, published_curves

READ_OFF = 1e-3  # to which the curves could be read off the figures
ERROR = 0.05  # share of models with the published weights of which a value differs by chance


class Target(NamedTuple):
    """A published residual ratio and the measured one."""

    variant: str
    layer: int
    published: float
    measured: float  # mean over texts
    tolerance: float  # what other texts explain

    @property
    def differs(self) -> bool:
        """Returns whether they differ by more than the tolerance, or nothing finite was
        measured."""
        return not abs(self.measured - self.published) <= self.tolerance


def published_targets(
    settings: JsonObject, curves: Mapping[str, Float[np.ndarray, "b l"]]
) -> list[Target]:
    """Compare the published curves of pretrained weights with measured ones of the same weights.

    The published texts are 32 of wiki_bio. They count as one more text of the kind measured here:
    with mean x̄ and standard deviation s over b texts, x̄ may differ from the published value by t
    s √(1 + 1/b). t is Student's quantile of b − 1 degrees of freedom at 1 − .05/(2m). A further
    0.001 is the precision to which the figures were read off. The m values are compared jointly
    (Bonferroni): it is a failure if one of them differs, which happens by chance in at most 5 % of
    models.

    Args:
        settings: Settings from `rank_collapse.pretrained.settings_of`.
        curves: {variant: residual ratio of each text by layer [b, L + 1]}, of the reading
            "published" of `surgery.ABLATIONS`.

    Raises:
        ValueError: Fewer than two texts, or nothing was published for this family and size.
    """
    count, depth = next(iter(curves.values())).shape
    published = published_curves(settings, depth - 1).get("pretrained")
    if published is None:
        raise ValueError(
            f"no curve was published for {settings.get('model_type')} with {depth - 1} layers of "
            f"this width, only for {', '.join(PUBLISHED)}"
        )
    if count < 2:
        raise ValueError(
            "one text has no spread; the tolerance of the published curves needs two texts"
        )
    # Here: it takes a second, which `--help` need not.
    from scipy import special

    t = special.stdtrit(count - 1, 1 - ERROR / (2 * depth * len(curves)))
    targets = []
    for variant, ratios in curves.items():
        by_layer = np.asarray(ratios, np.float64).T  # [L + 1, b]
        for layer, values in enumerate(by_layer):
            tolerance = t * values.std(ddof=1) * math.sqrt(1 + 1 / count) + READ_OFF
            value, measured = published[variant][layer], float(values.mean())
            targets.append(Target(variant, layer, value, measured, float(tolerance)))
    return targets


def describe_test() -> str:
    """Describes what a value that differs says, and at which level."""
    return (
        f"a single such value refutes agreement at the {100 * ERROR:g} % level: the tolerance "
        "takes the published 32 texts of wiki_bio to vary around their mean as these texts do"
    )
