"""run_cures at tiny size: a row of its table is one network's, whatever program it shares."""

import itertools

import jax
import matplotlib.text
import numpy as np
import pytest
from scipy import stats
from trained_runs import parsed, result_of, rows, run

import rank_collapse as rc
from experiments import initial, run_cures, small_task
from experiments.cures import cases as of_cases, factors, figures, orders
from experiments.cures.cases import Case
from experiments.initial import kept_and_gradients, mean_path_length, tokens
from rank_collapse.runs.seeds import seed_keys

TINY = run_cures.EXPERIMENT.presets["tiny"]


def setup(*arguments):
    return run_cures.setup_of(parsed(run_cures, *TINY, *arguments))


def cases(*arguments):
    return setup(*arguments).cases


def results_of(folder):
    return result_of(run_cures.EXPERIMENT, folder)[0]


@pytest.mark.slow
def test_cures_are_trained_at_tiny_size(tmp_path):
    """The post-norm design and softmax attention are one network."""
    sizes = "--train_depths=2", "--train_width=4", "--train_tokens=3", "--train_steps=1"
    chosen = "--designs=post,depth_scaled", "--variants=softmax,sigmoid", "--train_seeds=2"
    assert run(run_cures, [*TINY, *sizes, *chosen, "--factors="], tmp_path) == 0
    found = results_of(tmp_path)
    trained = found["trained"]
    assert trained.keys() == found["cases"].keys()
    names = ("post", "softmax attention", "sigmoid attention")
    post, softmax, sigmoid = (trained[f"{name}, L=2"]["accuracy"] for name in names)
    assert np.all(post == softmax) and np.any(post != sigmoid)
    assert all(np.all((c["step_seconds"] > 0) & (c["step_seconds"] < 1)) for c in trained.values())
    assert (tmp_path / "figures" / "trained.png").exists()


@pytest.mark.slow
def test_a_row_is_a_network_of_its_own(tmp_path):
    assert run(run_cures, TINY, tmp_path) == 0
    found = {
        (r["cure"], int(r["seed"])): r
        for r in rows(tmp_path)
        if r["part"] == "start" and r["kind"] != "cell"
    }
    assert len(found) == 6
    # From half the branches to whole ones, mean over both temperatures.
    cells = [float(r["log10_residual"]) for r in rows(tmp_path) if r["kind"] == "cell"]
    low, high = np.reshape(cells, (2, 2, 2)).mean(axis=1)  # by residual, temperature, seed
    own = results_of(tmp_path)["cells"], setup().factors, "log10_residual"
    np.testing.assert_allclose(factors.effects_of(*own)["residual"], high - low, atol=1e-6)
    key_params, key_x, key_goal = jax.random.split(seed_keys(0, 2)[1], 3)
    for name, start in (("depth_scaled", "softmax"), ("shaped", "shaped")):
        config = next(c.config for c in cases().values() if c.name == name)
        params = rc.init_variant(key_params, config, start)
        own = kept_and_gradients(params, tokens(key_x, 3, 4, 0.2), config, key_goal)
        row = {n: float(found[name, 1][n]) for n in of_cases.MEASURES}
        kept = np.log10(own["residual"] / own["residual"][0])
        np.testing.assert_allclose(row["log10_residual"], kept[-1], atol=1e-4)
        np.testing.assert_allclose(row["slope"], np.polyfit(range(3), kept, 1)[0], atol=1e-4)
        np.testing.assert_allclose(row["entropy"], own["entropy"].mean(), atol=1e-4)
        np.testing.assert_allclose(row["rank"], own["rank"], atol=1e-4)
        length = mean_path_length(params, tokens(key_x, 3, 4, 0.2), config)
        np.testing.assert_allclose(row["length"], length / 2, atol=1e-4)


def test_programs_are_shared_where_numbers_alone_differ():
    found = cases("--designs=post,depth_scaled", "--variants=centred,attn_scale,shaped,sigmoid")
    programs = {name.split(",")[0]: case.network.program for name, case in found.items()}
    assert programs["post"] == programs["depth_scaled"] != programs["sigmoid attention"]
    assert programs["centred attention"] == programs["attn_scale attention"]
    assert programs["shaped attention"] not in (programs["centred attention"], programs["post"])


def test_a_slope_ends_where_float32_does():
    assert of_cases.slope_of(np.array([0.0, -1, -2, -3])) == pytest.approx(-1)
    assert of_cases.slope_of(np.array([0.0, -2, -4, -6, -6, -6])) == pytest.approx(-2)
    assert of_cases.slope_of(np.array([0.0, -6, -6])) == pytest.approx(-6)


def test_nothing_is_kept_after_the_layer_where_float32_rounds_it_away():
    noise = np.array([[0.5, 0.05, 1e-8, 0.3, 0.0], [0.5, 0.25, 0.5, 0.125, 0.5]], np.float32)
    expected = [[1, 0.1, 1e-6, 1e-6, 1e-6], [1, 0.5, 1, 0.25, 1]]
    np.testing.assert_allclose(initial.kept_of(noise), expected, rtol=1e-6)
    found = {"residual": noise, "entropy": np.ones((2, 4)), "length": np.ones(2)}
    found |= {name: np.ones((2, 4)) for name in ("query", "value")} | {"rank": np.ones(2)}
    own = of_cases.measures_of(found)
    for name, known in (("rank", 1.0), ("log10_gradient", 0.0)):
        np.testing.assert_array_equal(own[name], [np.nan, known])


def test_kinds_of_cures_are_ordered_apart():
    """Designs train and keep more than variants: pooled, what is kept orders all, and within a kind
    it does not. One network under three names has no more weight in the interval than once."""

    def ordered(*kinds):
        """Cures at 12 layers with other numbers, at 100 with these, which 90 is nearest to."""
        cases, trained, starts, ends = {}, {}, {}, {}
        for kind, numbers in kinds:
            for i, (kept, rank, accuracy) in enumerate(zip(*numbers, strict=True)):
                for depth, sign in ((12, -1), (100, 1)):
                    cases[f"{kind} {i} {depth}"] = Case(kind, f"{kind} {i}", depth, None)
                    values = {"log10_residual": sign * kept, "rank": sign * rank}
                    starts[f"{kind} {i} {depth}"] = {n: np.full(2, v) for n, v in values.items()}
                trained[f"{kind} {i}"] = Case(kind, f"{kind} {i}", 90, None)
                ends[f"{kind} {i}"] = {"accuracy": np.full(2, accuracy)}
        own = run_cures.Setup(cases, trained, {}, {}, None)
        return orders.within_kinds({"cases": starts, "trained": ends}, own)

    kept = [-4, -1, -11, -3, -7, -2, -9, -12, -5, -10, -6, -8]
    ranks, accuracy = np.linspace(0.1, 0.65, 12).tolist(), np.linspace(0.7, 0.92, 12).tolist()
    few = "variant", ([-15.0, -13.0, -14.0], ranks[:3], [0.2, 0.3, 0.1])
    found = ordered(("design", (kept, ranks, accuracy)), few)
    assert found.keys() == {"design"}  # too few variants
    own = found["design"]
    assert own["rank"] == pytest.approx(1)
    assert own["residual"] == pytest.approx(stats.spearmanr(kept, accuracy).statistic)
    assert own["difference"][0] == pytest.approx(own["rank"] - own["residual"])
    assert 0 < own["difference"][1] < own["difference"][0] < own["difference"][2]
    assert (own["cures"], own["networks"]) == (12, 12)
    # each under three names, and one whose rank is rounded away
    again = [*kept * 3, -9], [*ranks * 3, np.nan], [*accuracy * 3, 0.1]
    same = ordered(("design", again))["design"]
    assert (same["cures"], same["networks"]) == (36, 12)
    np.testing.assert_allclose(same["difference"], own["difference"])
    assert ordered(("design", (kept, ranks, [0.5] * 12))) == ordered() == {}


def test_gradients_of_zero_have_no_ratio():
    layers, one = np.ones((2, 3)), np.array([0.5, 0.5])
    found = {"residual": np.ones((2, 4)), "query": 0 * layers, "rank": one, "entropy": layers}
    found["length"] = one
    for value in (layers, 0 * layers):
        own = of_cases.measures_of(found | {"value": value})
        assert np.isnan(own["log10_gradient"]).all() and np.all(own["log10_residual"] == 0)
    own = of_cases.measures_of(found | {"query": 0.1 * layers, "value": layers})
    np.testing.assert_allclose(own["log10_gradient"], -1)


def test_a_figure_of_more_depths_than_markers():
    depths = range(2, 12)
    own = setup(f"--depths={','.join(map(str, depths))}", "--designs=post", "--variants=centred")
    one, layers = np.array([0.5, 0.6]), {}
    for name, case in own.cases.items():
        by_layer = dict.fromkeys(("query", "value", "entropy"), np.ones((2, case.depth)))
        layers[name] = by_layer | {"residual": np.ones((2, case.depth + 1)), "rank": one}
        layers[name] |= {"length": np.full(2, np.nan)}
    layers[next(iter(layers))]["query"] *= 0  # drawn without a mark
    results = {"cases": {name: of_cases.measures_of(found) for name, found in layers.items()}}
    drawn = [f(results, own) for f in (figures.cures_figure, figures.curves_figure)]
    assert len(drawn[0].legends[0].get_texts()) == len(depths)
    assert np.isnan(drawn[0].axes[2].lines[0].get_xdata()).all()
    for fig in drawn:
        sizes = [t.get_fontsize() for t in fig.findobj(matplotlib.text.Text) if t.get_text()]
        assert min(sizes) >= 8


def test_intervals_of_shares_stay_between_0_and_1():
    """Two seeds, of which one trains."""
    assert of_cases.ends([0.2, 1.0])[1] < 0
    own = setup("--designs=post", "--variants=softmax", "--train_depths=2")
    name, case = next(iter(own.trained.items()))
    found = {"accuracy": np.array([0.2, 1.0]), "trains": np.array([False, True])}
    trained = {name: found | {"step_seconds": np.full(2, np.nan)}}
    own = own._replace(trained={name: case})
    ax = figures.trained_figure(trained, own).axes[0]
    assert [list(line.get_xdata()) for line in ax.lines] == [[0.0, 1.0], [0.6]]
    assert of_cases.ends([np.nan, 1.0], share=True) == [None] * 3


def test_cells_are_all_combinations_of_all_factors():
    """Floats change no program, sizes do."""
    levels = {
        "depth": (1, 2),
        "width": (4, 8),
        "heads": (1, 2),
        "residual": (0.25, 1.0),
        "temperature": (0.5, 2.0),
    }
    assert levels.keys() == factors.FACTORS.keys()
    texts = ",".join(f"{name}:{low:g}:{high:g}" for name, (low, high) in levels.items())
    own = setup(f"--factors={texts}").cells.values()
    assert len({case.network.program for case in own}) == 8
    for case, of in zip(own, itertools.product(*levels.values()), strict=True):
        c = case.config
        assert (c.depth, c.d_model, c.num_heads, c.branch_gain, c.temperature) == of


def cells_of(values):
    return {str(i): dict.fromkeys(factors.SHOWN, v) for i, v in enumerate(values)}


def test_effects_are_those_that_made_the_numbers():
    """y = 1 + 3 a − 2 b + ½ a b + noise by seed, of levels ±1: effects are twice that."""
    levels = [(-1, -1), (-1, 1), (1, -1), (1, 1)]
    noise = np.array([0.1, -0.1, 0.0])
    values = [1 + (3 + noise) * a - 2 * b + 0.5 * a * b for a, b in levels]
    own = {"depth": (1, 2), "heads": (1, 2)}
    effects = factors.effects_of(cells_of(values), own, "log10_residual")
    expected = {"depth": 6 + 2 * noise, "heads": -4, "depth × heads": 1}
    assert effects.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(effects[name], value, atol=1e-12)
    lost = cells_of([values[0] * np.nan, *values[1:]])
    assert np.isnan(factors.effects_of(lost, own, "log10_residual")["depth"]).all()


def test_two_factors_together_change_what_their_cells_differ_by():
    """Cells as the fault was found: gains of .25 and 1 at 12 and 48 layers, means over widths."""
    means = {(12, 0.25): -0.1, (12, 1.0): -0.94, (48, 0.25): -0.34, (48, 1.0): -3.74}
    levels = list(itertools.product((12, 48), (32, 128), (0.25, 1.0)))
    own = {"depth": (12, 48), "width": (32, 128), "residual": (0.25, 1.0)}
    noise = np.array([0.01, -0.01, 0.0])
    values = [means[d, g] + (0.05 if w == 32 else -0.05) + d * noise for d, w, g in levels]
    simple = factors.simple_effects(cells_of(values), own, "log10_residual")
    expected = {
        "depth at residual 0.25": -0.24,
        "depth at residual 1": -2.8,
        "residual at depth 12": -0.84,
        "residual at depth 48": -3.4,
        "depth and residual together": -3.64,
    }
    assert simple.keys() == expected.keys()
    for name, value in expected.items():
        assert simple[name].mean() == pytest.approx(value)
    main = factors.effects_of(cells_of(values), own, "log10_residual")
    assert main["depth"].mean() + main["residual"].mean() == pytest.approx(-3.64)  # no product
    one = factors.simple_effects(cells_of(values[:2]), {"depth": (1, 2)}, "log10_residual")
    lost = cells_of([values[0] * np.nan, *values[1:]])
    assert one == factors.simple_effects(lost, own, "log10_residual") == {}


def test_the_letter_before_takes_attention():
    """Tokens by themselves tell the first letter and a guess of the others, and do not train."""
    found = small_task.examples_of(jax.random.key(0), 50, 6)
    np.testing.assert_array_equal(found.labels[:, 1:], found.inputs[:, :-1])
    np.testing.assert_array_equal(found.labels[:, 0], found.inputs[:, 0])
    guess = 1 / 6 + 5 / 6 / 5
    accuracy = np.array([[0.2, guess], [0.2, 0.9], [0.2, 0.9]])
    losses = np.ones((3, 4))
    losses[2, 1] = np.nan
    own = small_task.trained({"accuracy": accuracy, "losses": losses}, 6)
    np.testing.assert_array_equal(own, [False, True, False])
