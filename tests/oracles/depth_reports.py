"""A made-up report of how a checkpoint uses its depth."""

import numpy as np

from rank_collapse.pretrained.used_depth import DepthReport, DepthUsed, PathLength
from rank_collapse.report.depth import PANELS

ONE_TEXT = np.random.default_rng(0).uniform(0.1, 0.9, (1, 4))  # of three layers, X^0 first


BY_LAYER = {name: ONE_TEXT[:, 1:] for curves, *_ in PANELS.values() for name in curves}


DEPTH = DepthReport(
    BY_LAYER | {"later": np.eye(3)[None], "lens_kl": ONE_TEXT, "loss_up_to": ONE_TEXT},
    {"of layers": DepthUsed(2, "a definition", "a paper")},
    {"paths, loss": PathLength(1, "another", "a paper")},
    {"norm": np.array([[0.5, 0.5, 0.0, 0.0]])},
)
