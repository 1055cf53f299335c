"""binary at tiny size: cells, what is measured of them, who fails, what is written."""

import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from experiments import run_trainability as binary
from experiments.lab.folder import RunFolder
from experiments.train import design_cells, train_networks
from experiments.verdicts.claims import judge_rows
from experiments.verdicts.share_intervals import wilson_interval
from experiments.verdicts.statements import STATEMENTS
from rank_collapse.report.wording import power_of_ten, words
from rank_collapse.runs.seeds import seed_keys
from rank_collapse.training.recipe import Hyper, Recipe, run_config
from rank_collapse.training.tasks.examples import Examples
from rank_collapse.training.training import batch_forward, init_state
from tests.support.closeness import assert_close
from tests.support.runs import arrays, finished, parsed, result_of, rows, run

SIZES = (
    "--num_seeds=2",
    "--n_steps=50",
    "--batch_sz=4",
    "--seq_len=4",
    "--num_labels=3",
    "--hidden_dim=8",
    "--width=2",
    "--d_ff=8",
    "--n_eval_data=8",
)
ARGUMENTS = (
    *SIZES,
    "--depths=2",
    "--designs=post,depth_scaled",
    "--warmup=0,5",
)


folder = finished(binary, *ARGUMENTS)


def test_steps_are_whole_epochs(tmp_path, capsys):
    """40 steps were 25."""
    assert run(binary, ["--n_steps=40"], tmp_path / "run") == 2
    assert "n_steps=40 is not a multiple of 25" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_the_first_seed_chooses_the_seeds(tmp_path):
    arguments = [*SIZES, "--n_steps=25", "--depths=1", "--designs=post", "--warmup=0"]
    later = ["--first_seed=1", "--num_seeds=1"]
    for name, flags in (("both", ()), ("second", later)):
        assert run(binary, [*arguments, *flags], tmp_path / name) == 0
    both, second = (arrays(tmp_path / name) for name in ("both", "second"))
    assert both.keys() == second.keys()
    for name, values in second.items():
        np.testing.assert_allclose(values[0], both[name][1], 1e-4, 1e-6, err_msg=name)


@pytest.mark.full
def test_every_cell_and_seed_is_in_the_table(folder):
    experiment, table = binary, rows(folder)
    results, cells = result_of(experiment, folder)
    assert list(results) == cells and len(cells) == 4 and len(table) == 8
    limit = design_cells.guess_limit(8 * 4, 3)
    for i, (cell, row) in enumerate(zip(cells, experiment.compare_results(results), strict=True)):
        seeds = table[2 * i : 2 * i + 2]
        assert {row["design"] for row in seeds} == {cell.design}
        accuracies = [float(row["accuracy"]) for row in seeds]
        fails = [a <= limit for a in accuracies]
        assert results[cell]["failed"].tolist() == fails
        low, high = wilson_interval(sum(fails), 2)
        assert row.measured == (
            f"{sum(fails)} of 2 ({low:.2f} to {high:.2f}), accuracy {np.mean(accuracies):.3f}"
        )


@pytest.mark.full
def test_designs_and_warm_up_reach_the_training(folder):
    saved = arrays(folder)
    losses = {k.removesuffix("/losses"): v for k, v in saved.items() if k.endswith("/losses")}
    plain = losses["designs depth=2 post rate=0.001 warmup=0 batch=4"]
    for name in ("post rate=0.001 warmup=5", "depth_scaled rate=0.001 warmup=0"):
        assert abs(losses[f"designs depth=2 {name} batch=4"] - plain).max() > 1e-3, name


@pytest.mark.full
def test_a_folder_grows_by_what_it_lacks(folder, tmp_path, monkeypatch):
    """Fewer cells are read without training, and the table has only these. Others are trained."""
    path = tmp_path / "copy"
    shutil.copytree(folder, path)
    monkeypatch.setattr(design_cells.Ensemble, "train", None)
    fewer = [*SIZES, "--depths=2", "--designs=depth_scaled", "--warmup=5"]
    assert run(binary, fewer, path) == 0
    results, _ = result_of(binary, path)
    assert [(cell.design, cell.warmup) for cell in results] == [("depth_scaled", 5)]
    assert len(rows(path)) == 2
    with pytest.raises(TypeError):  # what would have been trained
        run(binary, [*fewer, "--designs=pre"], path)
    assert run(binary, [*fewer, "--n_steps=25"], path) == 2  # other sizes


@pytest.mark.full
def test_an_interrupted_chunk_goes_on_behind_its_last_look(folder, tmp_path, monkeypatch):
    arguments = [*SIZES, "--depths=2", "--designs=depth_scaled", "--warmup=5"]
    save = RunFolder.save_checkpoint

    def save_and_interrupt(run, epoch, state, name):
        save(run, epoch, state, name)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # To end: what there is, is saved.
        patch.setattr(train_networks, "stop_requested", lambda: True)
        patch.setattr(RunFolder, "save_checkpoint", save_and_interrupt)
        assert run(binary, arguments, tmp_path) == 130
    assert run(binary, arguments, tmp_path) == 0
    assert "resumed after epoch 1" in (tmp_path / "log.txt").read_text()
    expected, resumed = arrays(folder), arrays(tmp_path)
    assert {len(resumed[name][0]) for name in resumed if name.endswith("accuracy")} == {3}
    for name in resumed:
        np.testing.assert_allclose(resumed[name], expected[name], 1e-5, 1e-7, err_msg=name)


@pytest.mark.full
def test_measured_before_training_as_by_hand(folder, x64):
    """The loss is the cross-entropy written out; norms are of its gradient in float64."""
    options = parsed(binary, *ARGUMENTS)
    cell = next(c for c in binary.make_cells(options) if c.design == "depth_scaled")
    config, floats = design_cells.split_floats(design_cells.make_network(options, cell))
    recipe = Recipe(config=config, num_outputs=3, batch_size=4, num_epochs=2, shuffle=True)
    hyper = Hyper(dropout=None, network=floats)
    key_data, key_state = jax.random.split(seed_keys(0, 2)[1])
    with jax.enable_x64(False):
        model = init_state(key_state, hyper, recipe).model
        data = design_cells.make_data(options, 4, key_data)
    model = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), model)
    assert floats["branch_gain"] < 1

    @jax.jit
    def loss(model):
        logits = batch_forward(model, data["eval"], run_config(recipe, hyper))
        picked = jnp.take_along_axis(logits, data["eval"].labels[..., None], axis=-1)[..., 0]
        return jnp.mean(jnp.log(jnp.sum(jnp.exp(logits), axis=-1)) - picked)

    gradient = jax.jit(jax.grad(loss))(model)
    saved = arrays(folder)
    stored = {k: saved[f"{cell.name}/{k}"][1, 0] for k in ("loss", "gradients")}
    assert stored["loss"] == pytest.approx(float(loss(model)), rel=1e-4)
    parts = {"attention": design_cells.GRADIENTS[:4], "mlp": design_cells.GRADIENTS[4:]}
    gradients = [
        getattr(getattr(gradient.network.layers, p), n) for p, ns in parts.items() for n in ns
    ]
    norms = [[jnp.linalg.norm(g[layer]) for layer in range(2)] for g in gradients]
    np.testing.assert_allclose(stored["gradients"], norms, rtol=1e-3)


@pytest.mark.full
def test_admin_trains_with_gains_of_each_seeds_own_network(tmp_path):
    """ω of the MLP after the first attention is √(Var x + Var f) of the first batch."""
    arguments = [*SIZES, "--designs=admin", "--depths=1", "--warmup=0"]
    assert run(binary, arguments, tmp_path) == 0
    name = "designs depth=1 admin rate=0.001 warmup=0 batch=4"
    assert np.isfinite(arrays(tmp_path)[f"{name}/losses"]).all()
    options = parsed(binary, *arguments)
    config, floats = design_cells.split_floats(
        design_cells.make_network(options, binary.make_cells(options)[0])
    )
    recipe = Recipe(config=config, num_outputs=3, batch_size=4, num_epochs=2)
    hyper = Hyper(dropout=None, network=floats | {"branch_gain": 2.0})
    omegas = []
    for seed in range(2):
        model = init_state(jax.random.key(seed), hyper, recipe).model
        data = design_cells.make_data(options, 4, jax.random.key(seed))
        gains = design_cells.admin_gains(recipe, model, data, hyper).network
        assert gains["branch_gain"] == 2.0 and float(gains["skip_gain"].attention[0]) == 1
        gain_config = config.replace(branch_gain=2.0, skip_gain=1.0)
        traces = jax.vmap(lambda x, m=model, c=gain_config: rc.apply(m.network, x, c))(
            data["train"].inputs[:4]
        )
        variance = np.var(traces.hidden[:, 0]) + np.var(2.0 * traces.attention_branch)
        omegas.append(float(gains["skip_gain"].mlp[0]))
        assert omegas[-1] == pytest.approx(np.sqrt(variance), rel=1e-5)
    assert omegas[0] != omegas[1]


def make_cell(design, depth, accuracy, warmup=0, seeds=8):
    """Makes {cell: results} of one cell, with the accuracy of its seeds about a mean."""
    states = np.full((seeds, 2, depth + 1), 0.1)
    return {
        design_cells.Cell(depth, design, 1e-3, warmup, 32): {
            "failed": np.zeros(seeds, bool),
            "losses": np.ones((seeds, 1)),
            "accuracy": accuracy + np.outer(0.01 * np.sin(np.arange(seeds)), [1, 1]) - [0.05, 0],
            "residual_ratio": states,
            "token_cosine": states,
            "gradients": np.ones((seeds, 2, len(design_cells.GRADIENTS), depth)),
        }
    }


def judge(results):
    return list(binary.judge_claims(results))


@pytest.mark.parametrize(
    "design, depth, accuracy, key, verdict",
    [
        ("post", 18, 0.1, "post behind", "within"),
        ("post", 12, 0.45, "post behind", "within"),  # more than a guess, 75 % of Pre-LN's
        ("post", 18, 0.6, "post behind", "outside"),
        ("post", 18, 0.54, "post behind", "undecided"),
        ("post", 6, 0.6, "others train", "within"),
        ("post", 6, 0.2, "others train", "outside"),
        ("admin_log", 12, 0.6, "others train", "within"),
        ("pre", 36, 0.6, None, None),
        ("deepnorm", 18, 0.6, None, None),
    ],
)
def test_verdicts_against_the_published_table(design, depth, accuracy, key, verdict):
    """Relative to Pre-LN after the same steps, .6 here. Pre-LN itself counts as not trained."""
    pre, design_cell = make_cell("pre", depth, 0.6), make_cell(design, depth, accuracy)
    rows = [row for row in judge(pre | design_cell) if row.setting.startswith(words(design))]
    assert [row.key for row in rows] == [key] * (key is not None)
    if rows:
        (judged,) = judge_rows(rows, STATEMENTS[key])
        assert judged.verdict == verdict and judged.row.draws == 8
        assert judge(design_cell) == []  # nothing to compare with
        (judged_pre,) = judge_rows(judge(pre), STATEMENTS["others train"])
        assert judged_pre.verdict == "outside"
        # as published, with warm-up, where there is one
        warm = make_cell("pre", depth, 0.6, 100) | make_cell(design, depth, accuracy, 100)
        settings = [row.setting for row in judge(pre | design_cell | warm)]
        assert settings and all("warm-up 100" in setting for setting in settings)
    *_, row = binary.compare_results(pre | design_cell)
    assert (row.published is not None) == bool(key)
    assert row.published == "failed" or key != "post behind"


def test_reverse_is_what_is_learned():
    data = design_cells.make_data(parsed(binary, *ARGUMENTS), 4, jax.random.key(0))
    assert isinstance(data["train"], Examples) and data["train"].inputs.shape == (100, 4)
    np.testing.assert_array_equal(data["train"].labels, data["train"].inputs[:, ::-1])


def make_cells(depth=2, num_seeds=3, num_looks=4):
    """Makes results of two designs, every number another one."""
    cells, draw = {}, np.random.default_rng(0)
    for design in ("post", "admin"):
        cell = design_cells.Cell(depth, design, 1e-3, 0, 4)
        cells[cell] = {
            "residual_ratio": draw.uniform(0.1, 1, (num_seeds, num_looks, depth + 1)),
            "gradients": draw.uniform(0.1, 1, (num_seeds, num_looks, 6, depth)),
            "losses": draw.uniform(1, 2, (num_seeds, 5)),
            "accuracy": draw.uniform(0, 1, (num_seeds, num_looks)),
            "failed": np.array([True, False, False]),
        }
    return cells


def test_solid_lines_are_before_training_and_dashed_ones_after_it():
    """The data of the picture are compared with the arrays."""
    cells = make_cells()
    panels = iter(binary.inside_figure(cells).axes)
    measures = {"residual_ratio": None, "w_q": 0, "w_v": 2}  # places among `design_cells.GRADIENTS`
    for ax, (name, place) in zip(panels, measures.items(), strict=True):
        solid, dashed = ([a for a in ax.lines if a.get_linestyle() == s] for s in ("-", "--"))
        assert len(solid) == len(dashed) == len(cells)
        assert all(tick == round(tick) for tick in ax.get_xticks())
        for results, before, after in zip(cells.values(), solid, dashed, strict=True):
            values = results[name][..., 1:] if place is None else results["gradients"][:, :, place]
            values = np.log10(values)
            assert_close(before.get_ydata(), values[:, 0].mean(axis=0))
            assert_close(after.get_ydata(), np.median(values[:, -1], axis=0))


def test_a_seed_that_overflowed_has_no_residual_after_training():
    cells = make_cells()
    for results in cells.values():
        results["residual_ratio"][0, -1] = np.nan
    for results, row in zip(cells.values(), binary.compare_results(cells), strict=True):
        before, after = results["residual_ratio"][:, 0, -1], results["residual_ratio"][1:, -1, -1]
        norms = results["gradients"][:, 0]
        share = np.median(norms[:, 0] / norms[:, 2])
        assert row.note.endswith(
            f"last residual ratio {before.mean():.1g} before training and {after.mean():.1g} after "
            f"it; gradient of W_Q before it {share:.1g} of W_V's"
        )


def test_the_finding_names_admin_too():
    sentence = binary.make_finding(make_cells()).sentence
    assert "Post-LN learns nothing in 1 of 3 seeds" in sentence
    assert "Admin learns nothing in 1 of 3 seeds" in sentence


def test_the_finding_is_of_the_deepest_networks_and_the_shortest_warm_up():
    """Designs without a place in the paper's table are left out; equal tokens have a ratio of 0."""
    cells = make_cell("post", 6, 0.5, 30) | make_cell("post", 12, 0.5, 100)
    cells |= make_cell("deepnorm", 12, 0.5, 30) | make_cell("pre", 12, 0.5, 30)
    collapsed = make_cell("admin", 12, 0.5, 30, seeds=5)
    for results in collapsed.values():
        results["failed"][:2] = True
        results["residual_ratio"] = results["residual_ratio"] * [[[1.0]], [[1.0]], *[[[0.0]]] * 3]
    finding = binary.make_finding(cells | collapsed)
    assert finding.figure == "loss" and finding.sentence == (
        "Trained with a warm-up of 30 steps, 12 layers of Pre-LN learns nothing in 0 of 8 seeds, "
        f"with a residual ratio of {power_of_ten(-1)}; Admin learns nothing in 2 of 5 seeds, with "
        "a residual ratio of 0 after training."
    )
    assert binary.make_finding(make_cell("deepnorm", 12, 0.5)) is None
    assert "Trained without warm-up, " in binary.make_finding(make_cell("pre", 12, 0.5)).sentence


def test_losses_and_shares_drawn_are_those_of_the_arrays():
    cells = make_cells()
    axes = binary.loss_figure(cells).axes
    lines = [line.get_ydata() for line in axes[0].lines]
    for results, line in zip(cells.values(), lines, strict=True):
        assert_close(line, results["losses"].mean(axis=0))
    (ax,) = binary.share_figure(cells).axes
    shares = [float(container.lines[0].get_ydata()[0]) for container in ax.containers]
    assert_close(shares, [1 / 3, 1 / 3])


def test_the_published_outcomes_are_those_of_the_papers_table():
    """Liu et al. 2020, table 1, WMT'14 English-German, layers of encoder and decoder."""
    table = """
        6  post 27.80  pre 27.27  admin 27.90
        12 post failed pre 28.26  admin 28.58
        18 post failed pre 28.38  admin 29.03
    """
    for line in table.strip().splitlines():
        depth, *cells = line.split()
        for design, outcome in zip(cells[::2], cells[1::2], strict=True):
            cell = SimpleNamespace(design=design, depth=int(depth))
            text = outcome if outcome == "failed" else f"BLEU {outcome}"
            assert binary.published_outcome(cell) == text
    for design, depth in (("post", 36), ("deepnorm", 6)):
        assert binary.published_outcome(SimpleNamespace(design=design, depth=depth)) is None
