"""Runs of the published circle code, from their weights: the same trajectories, and their speed.

Reads every .npz in the folder of reference data, or in that of RANK_COLLAPSE_CIRCLE.
"""

import csv
import functools
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from published_weights import load_circle

from experiments.run_circle import PUBLISHED_FELL, PUBLISHED_SEEDS
from experiments.trained.circle_walks import TOGETHER
from rank_collapse.theory import recurrence
from rank_collapse.training.tasks import circle
from rank_collapse.training.training import Model, forward

DEFAULT = Path(__file__).resolve().parents[3] / "shared" / "data" / "circle"
FOLDER = Path(os.environ.get("RANK_COLLAPSE_CIRCLE", DEFAULT))
FILES = sorted(FOLDER.glob("*.npz"))


@functools.cache
def arrays_of(path):
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


@functools.partial(jax.jit, static_argnames=("config", "num_steps", "skip"))
def rolled_out(params, classifier, start, config, num_steps, skip):
    def step(points):
        return forward(Model(params, classifier), points, config)

    path = circle.roll_out(step, start, num_steps, skip)
    point, moved = recurrence.equal_tokens(step, path[-1].mean(0), 500)
    return path, recurrence.transverse_jacobian(step, point), moved


@pytest.fixture(params=FILES or [None], ids=lambda f: "absent" if f is None else f.stem)
def runs(request):
    if request.param is None:
        pytest.skip(f"no .npz in {FOLDER}")
    return load_circle(arrays_of(request.param))


def test_published_weights_go_where_the_published_code_went(runs):
    compared = 0
    for name, run in runs.items():
        assert run.config.attention_skip and run.skip == name.startswith("skip")
        path, across, moved = rolled_out(
            run.params, run.classifier, run.trajectory[0], run.config, len(run.trajectory), run.skip
        )
        far = np.abs(np.asarray(path - run.trajectory)).max(axis=(1, 2))
        assert far[:50].max() < 1e-4, (name, far[:50].max())
        steps = recurrence.measured_steps(circle.distance(run.trajectory))
        if np.isfinite(steps) and float(moved) < 1e-5:
            predicted = recurrence.predicted_steps(recurrence.spectral_radius(across))
            # The multiplier is that of the end; the distances are counted in whole steps.
            assert abs(predicted - steps) < 1 + 0.05 * steps, (name, predicted, steps)
            compared += 1
    print(f"{len(runs)} runs, {compared} of them fell")


def test_counts_of_the_published_code(shared_data):
    table = shared_data / "circle" / "outcomes.csv"
    if not table.exists():
        pytest.skip(f"no {table}")
    names = {"base": "base", "skip": "circle_skip", "mlp": "mlp"}
    fell, seeds = dict.fromkeys(PUBLISHED_FELL, 0), dict.fromkeys(PUBLISHED_FELL, 0)
    for row in csv.DictReader(table.read_text().splitlines()):
        cell = names[row["variant"]], int(row["width"])
        fell[cell] += float(row["final_distance"]) < TOGETHER
        seeds[cell] += 1
    assert fell == PUBLISHED_FELL and set(seeds.values()) == {PUBLISHED_SEEDS}
