"""run_circle at tiny size: what it trains, its continuation, and what it writes."""

import functools

import jax
import numpy as np
import pytest
from trained_runs import (
    SMALL,
    check_that_deleted_files_come_back,
    rows,
    run,
    seed_of,
    summary,
)  # fmt: skip

from experiments import run_circle
from experiments.circle import cases, results
from experiments.shell import cli
from rank_collapse.training import load_models
from rank_collapse.training.tasks import circle
from rank_collapse.training.training import forward

NAME = "skip+mlp, d=8"
ARGUMENTS = (
    "--circle_skip", "--do_mlp", "--hidden_dim=8", "--n_epochs=2", "--n_train_data=40",
    "--n_eval_data=6", "--n_repeat=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One finished run, never written to again."""
    path = tmp_path_factory.mktemp("circle")
    assert run(run_circle, [*ARGUMENTS, "--keep_models"], path) == 0
    return path


def test_every_step_is_written(folder):
    assert list(summary(folder)["cases"]) == [NAME]
    table = rows(folder)
    assert len(table) == 2 * 6  # seeds, steps
    # The same start for every seed: both walkers on the circle.
    starts = {(r["x1"], r["y1"], r["x2"], r["y2"]) for r in table if r["step"] == "0"}
    assert len(starts) == 1
    x1, y1, x2, y2 = map(float, next(iter(starts)))
    assert np.hypot(x1, y1) == pytest.approx(0.3) and np.hypot(x2, y2) == pytest.approx(0.3)


def test_kept_models_continue_as_the_table_says(folder):
    (path,) = (folder / "models").iterdir()
    assert path.name == "skip+mlp-d=8.npz"
    config, models = load_models(path)
    walk, errors = circle.make_examples(40), []
    for seed in range(2):
        step = jax.jit(functools.partial(forward, seed_of(models, seed), config=config))
        points = walk.inputs[0]
        for row in (r for r in rows(folder) if r["seed"] == str(seed)):
            found = [[float(row[f"x{i}"]), float(row[f"y{i}"])] for i in (1, 2)]
            np.testing.assert_allclose(found, points, atol=1e-5)
            distance = np.linalg.norm(points[0] - points[1])
            np.testing.assert_allclose(float(row["distance"]), distance, atol=1e-5)
            points = step(points)
        after = np.stack([step(x) for x in walk.inputs])
        errors.append(np.sqrt(np.mean((after - walk.labels) ** 2) / 2))
    found = summary(folder)["cases"][NAME]["step_error"]
    assert found == pytest.approx(np.mean(errors), rel=1e-4)


def test_deleted_files_come_back_and_nothing_is_trained(folder, tmp_path, monkeypatch, capsys):
    check_that_deleted_files_come_back(run_circle, ARGUMENTS, folder, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    "arguments, variant, skip, mlp",
    [
        ([], "attention", False, "none"),
        (["--circle_skip"], "skip", True, "none"),
        (["--do_mlp"], "mlp", False, "gelu"),
        (["--circle_skip", "--do_mlp"], "skip+mlp", True, "gelu"),
    ],
)
def test_two_flags_choose_the_variant(arguments, variant, skip, mlp):
    options = cli.parse(run_circle.FLAGS, [*arguments, "--hidden_dim=8"])
    ((name, setup),) = cases.make_cases(options).items()
    assert name == f"{variant}, d=8"
    config = setup.recipe.config
    assert (config.attention_skip, config.mlp, config.d_model) == (skip, mlp, 8)


def test_compare_is_every_variant_at_every_width():
    options = cli.parse(run_circle.FLAGS, ["--compare", "--widths=8", "--widths=4"])
    assert list(cases.make_cases(options)) == [
        f"{variant}, d={width}"
        for width in (8, 4)
        for variant in ("attention", "skip", "mlp", "skip+mlp")
    ]


def test_a_mistake_is_one_line(tmp_path, capsys):
    assert run(run_circle, [*SMALL, "--num_labels=3"], tmp_path / "run") == 2
    error = capsys.readouterr().err.strip()
    assert "num_labels=3" in error and len(error.splitlines()) == 1


def test_a_fall_is_counted_from_a_hundredth_to_a_millionth():
    t = np.arange(60)
    cubic, halved, apart = 0.6 ** (3.0 ** np.minimum(t, 5)), 0.6 * 0.5**t, np.full(60, 0.6)
    # Below 1e-2 at t = 3 and below 1e-6 at t = 4; halving at t = 6 and 20.
    assert results._fall_steps(np.stack([cubic, apart]), 1e-2, 1e-6) == [1, 1]
    assert results._fall_steps(np.stack([cubic, halved]), 1e-2, 1e-6) == [1, 14]
    assert results._fall_steps(apart[None], 1e-2, 1e-6) is None
