"""Published curves and runs: what a folder should give, and where published weights go."""

import csv
import functools
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import stats

from experiments.architectures.published_targets import published_targets
from experiments.circle import recurrence, walks as circle
from experiments.circle.walks import PUBLISHED_FELL, PUBLISHED_SEEDS, TOGETHER
from rank_collapse.pretrained import PUBLISHED, published_curves
from rank_collapse.training.training import Model, forward
from tests.oracles.published_weights import load_circle
from tests.support.folders import SHARED_DATA
from tests.support.refusals import is_refused

pytestmark = pytest.mark.full

DEFAULT = SHARED_DATA / "circle"
FOLDER = Path(os.environ.get("RANK_COLLAPSE_CIRCLE", DEFAULT))
FILES = sorted(FOLDER.glob("*.npz"))


@functools.cache
def read_arrays(path):
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


@functools.partial(jax.jit, static_argnames=("config", "num_steps", "skip"))
def roll_out_network(params, classifier, start, config, num_steps, skip):
    def step(points):
        return forward(Model(params, classifier), points, config)

    path = circle.roll_out(step, start, num_steps, skip)
    point, moved = recurrence.equal_tokens(step, path[-1].mean(0), 500)
    return path, recurrence.transverse_jacobian(step, point), moved


@pytest.fixture(params=FILES or [None], ids=lambda f: "absent" if f is None else f.stem)
def runs(request):
    if request.param is None:
        pytest.skip(f"no .npz in {FOLDER}")
    return load_circle(read_arrays(request.param))


def test_published_weights_go_where_the_published_code_went(runs):
    compared = 0
    for name, run in runs.items():
        assert run.config.attention_skip and run.skip == name.startswith("skip")
        path, across, moved = roll_out_network(
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


BERT = PUBLISHED["bert-base-cased"]


def make_curves(shift=0.0, texts=6):
    """Makes curves of texts: .02 off the published ones, at layer 3 of SAN+skip `shift` more."""
    noise = 0.02 * np.random.default_rng(0).normal(size=(4, texts, 13))
    published = published_curves(BERT, 12)["pretrained"]
    curves = {v: np.array(curve) + noise[i] for i, (v, curve) in enumerate(published.items())}
    curves["SAN+skip"][:, 3] += shift
    return curves


def test_what_differs_by_more_than_other_texts_explain_is_a_failure():
    near, far = (published_targets(BERT, make_curves(shift)) for shift in (0.0, 0.5))
    assert len(near) == 52 and not any(t.differs for t in near)
    assert [(t.variant, t.layer) for t in far if t.differs] == [("SAN+skip", 3)]
    (target,) = (t for t in far if t.differs)
    values = make_curves(0.5)["SAN+skip"][:, 3]
    low, high = stats.t.interval(1 - 0.05 / 52, 5, scale=stats.sem(values) * np.sqrt(7))
    assert target.tolerance == pytest.approx((high - low) / 2 + 1e-3)
    assert target.measured == pytest.approx(values.mean())
    broken = make_curves()
    broken["SAN"][0, 1] = np.nan
    assert [(t.variant, t.layer) for t in published_targets(BERT, broken) if t.differs] == [
        ("SAN", 1)
    ]


def test_a_folder_of_another_shape_gets_one_line():
    for settings, curves, words in (
        (BERT | {"hidden_size": 32}, make_curves(), "bert .*12 layers"),
        ({"model_type": "gpt2"}, make_curves(), "gpt2 .*12 layers"),
        (BERT, {v: a[:, :5] for v, a in make_curves().items()}, "bert .*4 layers"),
        (BERT, make_curves(texts=1), "one text"),
    ):
        is_refused(words, published_targets, settings, curves)
