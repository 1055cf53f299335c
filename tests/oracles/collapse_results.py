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


def make_gains(*gains, residuals=(-2.0, -3.0)):
    """Makes the points of gains of the skips, each with another last residual of skips."""
    points = {}
    for gain in gains:
        variants = {"san": make_variant([-9.0, -9.1, -9.2])}
        variants["san_skip"] = make_variant([residuals[gain == 1]] * 3)
        points |= make_point("post", 0.5, gain, **variants)
    return points


NORMS = ("pre", "none", "post")  # in no order
LAYERS, SEEDS = 6, 3
BOUNDS = ("log10_bound", "log10_layer_bound", "log10_published_bound", "tightness_paper")
BOUNDS += ("tightness_mean", "tightness_diameter", "tightness_cubic_diameter")


def draw_variant(draw, variant, norm):
    """Draws measures of a variant: residuals that fall by a law of its own, with a gap, and bounds
    on either side of them; a norm has no theorem, and pre-norm no bounds."""
    shape = SEEDS, LAYERS
    fall = {"san": 3.0, "san_mlp": 2.0}.get(variant, 1.1) ** np.arange(LAYERS)
    profile = -fall * draw.uniform(0.9, 1.6, shape)
    size = draw.normal(4, 2, shape)
    measures = {
        "log10_residual": profile,
        "log10_size": size,
        "ratio": np.minimum(1.0, 10 ** (profile / 4)).astype(np.float32),
        "plain_log10_residual": np.maximum(profile, -7 + size) + draw.normal(0, 0.1, shape),
    }
    if variant in ("san", "san_mlp"):
        measures["log10_residual"][0, -1] = np.nan if variant == "san_mlp" else profile[0, -1]
        if norm != "pre":
            measures |= {n: draw.uniform(-1, 2, shape) for n in BOUNDS if "log10" not in n}
            measures |= {n: profile + draw.normal(0.5, 1, shape) for n in BOUNDS if "log10" in n}
            measures["admissible"] = (draw.random(shape) < 0.6).astype(float)
    if variant == "san":
        measures["log10_cubic"] = profile * draw.uniform(0.9, 1.1, shape)
        if norm == "none":
            measures["log10_c"] = np.maximum.accumulate(draw.normal(size=shape), axis=1)
    return measures


def draw_points(seed, norms=NORMS, scales=(1.0,), gains=(0.5, 1.0)):
    """Draws the points of a run of all four variants, with the gains of the MLPs as they are run:
    all of them without norms, and 1 with post-norm."""
    draw, points = np.random.default_rng(seed), {}
    for norm in norms:
        for scale in scales:
            for gain in gains:
                names = ("transformer", "san_skip", "san_mlp", "san")
                variants = {name: draw_variant(draw, name, norm) for name in names}
                gains_of_mlps = {"none": (0.5, 1, 2, 4), "post": (1,)}.get(norm, ())
                san = variants["san"]["log10_residual"]
                falls = san if norm == "none" else -np.cumsum(np.full(san.shape, 0.2), axis=1)
                swept = {f"{g:g}": falls * draw.uniform(0.5, 1.5, san.shape) for g in gains_of_mlps}
                points |= make_point(norm, scale, gain, swept, **variants)
    return points
