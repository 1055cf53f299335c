"""Arrays of trained networks that are made up, as `run_trained.measure` returns them.

The small networks of other tests have no sinks, spikes, or losses that differ.
"""

from types import SimpleNamespace

import numpy as np

import rank_collapse as rc
from experiments.trained.opened_networks import Network

DEPTH, HEADS, TEXTS, PATHS = 4, 2, 3, 5
LENGTHS = [0, 1, 2, 4]
CURVES = ("alone", "mlps", "skips", "whole")


def make_network(label, mask, num_heads=HEADS):
    config = rc.transformer(DEPTH, num_heads, 8, mask=mask)
    return Network(label, SimpleNamespace(config=config), {}, None)


def make_arrays(seed, *, has_bounds=False, is_albert=False):
    """Makes up the arrays of a network of 4 layers and 2 heads, 3 texts and 5 paths a length."""
    draw = np.random.default_rng(seed)
    readings = ["", *([", as published"] if is_albert else [])]
    curves = [*CURVES, *(name + r for name in CURVES[:3] for r in readings[1:])]
    arrays = {f"log10_ratio/{name}": -draw.gamma(2.0, 0.3, (TEXTS, DEPTH + 1)) for name in curves}
    arrays |= {
        f"log10_residual/{name}": -np.cumsum(draw.gamma(2.0, 1.0, (TEXTS, DEPTH + 1)), axis=1)
        for name in curves
        if name.startswith(("alone", "mlps"))
    }
    arrays |= {
        "chains/residual": 10.0 ** -draw.gamma(4.0, 1.0, (TEXTS, DEPTH, PATHS)),
        "sinks/first_column": draw.uniform(0, 0.6, (TEXTS, DEPTH, HEADS)),
        "sinks/largest_column": draw.uniform(0.2, 1, (TEXTS, DEPTH, HEADS)),
        "spikes/largest": draw.uniform(50, 500, (TEXTS, DEPTH + 1)),
        "spikes/spike_entry": draw.uniform(100, 3000, (TEXTS, DEPTH + 1)),
        "spikes/spike_token": draw.integers(0, 9, (TEXTS, DEPTH + 1)),
        "paths/lengths": np.tile(LENGTHS, (TEXTS, 1)),
        "paths/log10_residual": draw.normal(size=(TEXTS, DEPTH + 1)),
        "paths/path_size": draw.gamma(1.0, size=(TEXTS, DEPTH + 1)),
        "paths/attention_share": draw.uniform(0, 1, (TEXTS, DEPTH)),
    }
    for name in ("loss", "right"):
        arrays[f"paths/{name}"] = draw.uniform(0, 1, TEXTS)
        for kind in ("frozen", "recomputed"):
            arrays[f"paths/{name}_{kind}"] = draw.uniform(0, 1, (TEXTS, len(LENGTHS)))
    if has_bounds:
        for kind in ("whole", "alone"):
            shape = TEXTS, DEPTH, HEADS
            arrays[f"bounds/{kind}/admissible"] = draw.random(shape) < 0.7
            for measure in ("lemma", "head"):
                arrays[f"bounds/{kind}/{measure}"] = draw.normal(size=shape)
    return arrays
