"""Made-up measurements of checkpoints: any numbers, of several texts, layers and heads."""

from types import SimpleNamespace

import numpy as np

from rank_collapse.command.checked import Checked
from rank_collapse.command.inputs import Inputs, Opened
from rank_collapse.measures.listings import Spike
from rank_collapse.measures.profiles import Profile
from rank_collapse.pretrained.report import STATES, CheckpointReport

TEXTS, DEPTH, HEADS = 3, 4, 2
MASK = np.arange(5) < np.array([[5], [3], [4]])


def make_profile(rng, **changed):
    """Makes a profile [texts, layers + 1] of numbers from 0.1 to 0.4, with some of them changed."""
    measures = {name: rng.uniform(0.1, 0.4, (TEXTS, DEPTH + 1)) for name in STATES}
    measures["bulk_ratio"] = measures["residual_ratio"].copy()  # no few tokens decide it
    measures |= {name: np.asarray(a, float) for name, a in changed.items() if name in STATES}
    notes = {name: np.zeros((TEXTS, DEPTH + 1), bool) for name in ("rounding", "spiked")}
    return Profile(measures, **notes | {n: changed[n] for n in notes if n in changed})


def make_check(name="a/model", *, states=None, attention=None, spikes=None, seed=0, **options):
    """Makes the measurement of a checkpoint.

    Args:
        name: Name of the checkpoint.
        states: {network of "Transformer", "read" and "SAN": {measure: array}} that are changed.
        attention: {measure: array [texts, layers, heads]} that are changed.
        spikes: Spikes of each text.
        seed: Seed of all other numbers.
        options: is_random=, part=, mask= ("causal" or None), dtype=, x=.
    """
    rng, states = np.random.default_rng(seed), states or {}
    profiles = {n: make_profile(rng, **states.get(n, {})) for n in ("Transformer", "read", "SAN")}
    shape = (TEXTS, DEPTH, HEADS)
    weights = {n: rng.uniform(0.2, 0.9, shape) for n in ("entropy", "first_column")}
    weights["largest_column"] = rng.uniform(0.2, 0.9, shape)
    report = CheckpointReport(
        {"Transformer": profiles["Transformer"], "SAN": profiles["SAN"]},
        profiles["read"],
        weights | (attention or {}),
        rng.uniform(0.5, 2.0, (TEXTS, DEPTH + 1)),
        rng.uniform(0.1, 0.9, (TEXTS, DEPTH)),
        spikes or [[]] * TEXTS,
    )
    config = SimpleNamespace(
        depth=DEPTH, num_heads=HEADS, d_model=16, mask=options.get("mask", "causal")
    )
    source = SimpleNamespace(
        config=config,
        has_random_weights=options.get("is_random", False),
        settings={"part": options["part"]} if "part" in options else {},
        weights=SimpleNamespace(dtype=np.dtype(options.get("dtype", "float32"))),
    )
    x = options.get("x", MASK.astype(int))
    mask = MASK if "x" not in options else None
    return Checked(Opened(name, source, None), Inputs(x, mask, "What they are.", "ids"), report)


SPIKES = [
    [Spike(2, 1, 3, -50.0, 900.0), Spike(1, 1, 3, 40.0, 700.0), Spike(3, 0, 2, 9.0, 20.0)],
    [],
    [Spike(1, 1, 3, 8.0, 800.0), *(Spike(i, 2, 10 + i, 1.0, 100.0 - i) for i in range(8))],
]
