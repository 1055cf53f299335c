"""Results of run_collapse that are made up: residuals of one variant, one point, several gains."""

import numpy as np

from experiments.collapse import (
    layer_residuals,
)
from experiments.lab.labelled import make_dataset


def make_variant(log10_ratio, rate=3.0, remaining=None):
    """Makes measures of a variant by seed at three layers, from its ratio at the last one and the
    rate, or the remaining share of its first ratio."""
    last = np.asarray(log10_ratio, float)
    if remaining is None:  # steps of a tenth of the last logarithm, and of rate times that
        first, middle = (last - share * last / 10 for share in (rate + 1, rate))
    else:
        first = last - np.log10(remaining)
        middle = (first + last) / 2
    profile = np.stack([first, middle, last], axis=1)
    size = np.zeros_like(profile)
    return {
        "log10_residual": profile,
        "log10_size": size,
        "ratio": np.full_like(profile, 0.3),
        "plain_log10_residual": size,
    }


def make_point(norm="none", weight_scale=1.0, skip_gain=1.0, swept=None, **variants):
    """Makes a point of the axes: measures of each variant, the residual by gain of the MLPs."""
    variables = {f"{m}/{v}": a for v, measures in variants.items() for m, a in measures.items()}
    variables |= {f"swept/{gain}": curve for gain, curve in (swept or {}).items()}
    dataset = make_dataset(variables, ("variant", "layer"), swept=("mlp_gain", "layer"))
    dataset["local_rate"] = layer_residuals.local_rates(dataset.log10_residual)
    return {(norm, weight_scale, skip_gain): dataset}


def make_gains(*gains, rest=(-2.0, -3.0)):
    """Makes the points of gains of the skips, each with another last residual of skips."""
    points = {}
    for gain in gains:
        variants = {"san": make_variant([-9.0, -9.1, -9.2])}
        variants["san_skip"] = make_variant([rest[gain == 1]] * 3)
        points |= make_point("post", 0.5, gain, **variants)
    return points
