"""run_phase at tiny size: what a cell holds is one network's, and where the boundaries are."""

import jax
import numpy as np
import pytest
from trained_runs import parsed, rows, run

import rank_collapse as rc
from experiments import initial, run_phase, small_task
from experiments.phase import curves
from experiments.shell.statements import STATEMENTS
from rank_collapse.report.claims import WITHIN, judged
from rank_collapse.runs.seeds import seed_keys
from rank_collapse.theory import phases, sphere

OWN = run_phase.EXPERIMENT
TINY = OWN.presets["tiny"]


def setup(*arguments):
    return run_phase.setup_of(parsed(run_phase, *TINY, *arguments))


@pytest.mark.slow
def test_a_cell_is_a_network_of_its_own(tmp_path):
    arguments = ("--variant=shaped", "--x=beta", "--y=mlp_gain", "--y_range=0.5,1", "--x_range=0,1")
    assert run(run_phase, [*TINY, *arguments], tmp_path) == 0
    table = rows(tmp_path)
    assert [(float(r["beta"]), float(r["mlp_gain"])) for r in table] == [
        (0, 0.5),
        (1, 0.5),
        (0, 1),
        (1, 1),
    ]
    own = setup(*arguments)
    floats = own.cells["mlp_gain=0.5, beta=1"]
    found = own.of_one_seed(seed_keys(0, 1)[0], floats)
    kept = np.log10(found["residual"][-1] / found["residual"][0])
    np.testing.assert_allclose(float(table[1]["log10_residual"]), kept, atol=1e-4)
    assert 0 < float(found["entropy"].mean()) <= 1 + 1e-6
    assert own.theory is None


def test_boundaries():
    """Where each theory's quantity passes its level, and where none holds."""
    values, level, _ = setup("--figure=critical1", "--depth=1", "--y_range=0.5,0.6").theory
    np.testing.assert_allclose(values[0] - level, [0.1 - 1, 2 - 1])
    values, level, _ = setup("--figure=cowsik4", "--x_range=0.5,3", "--y_range=0.3,0.9").theory
    assert level == 0 and values[0, 0] < 0 < values[0, 1] and values[1, 1] < 0
    # Attention alone in the post-norm network: p' = (1 + α²) p/(p + (1 − p) Y + α²).
    own = setup("--mlp=none", "--cosine=0.5", "--x_range=0.5,8", "--num_tokens=16")
    kept = 10 ** own.theory[0]
    assert own.theory[1] == -1 and np.all(kept[:, 0] < kept[:, 1])
    for moved in ("--value_scale=3", "--attention_gain=0.3", "--mlp_gain=2", "--mask=causal"):
        assert setup(moved).theory is None
    for moved in ("--value_scale=3", "--score_scale=4", "--norm_placement=post"):
        assert setup("--figure=cowsik4", moved).theory is None
    assert setup("--mlp=none", "--mlp_gain=2").theory is not None  # there is none
    assert setup("--variant=sigmoid").theory is None


def test_a_theory_is_compared_where_it_has_numbers():
    own = setup("--x=score_scale", "--x_range=-2,2")
    values = own.theory[0]
    np.testing.assert_array_equal(values[:, 0], values[:, 1])  # scores of either sign
    own = setup("--x=branch_gain", "--x_range=0,2", "--num_x=3")
    values = own.theory[0]
    assert np.isnan(values[:, 0]).all() and np.isfinite(values[:, 1:]).all()
    results = measured(own, np.where(np.isnan(values), 1, 10.0**values)[..., None])
    (order,) = own.compare(results)
    assert order.measured == pytest.approx(1)
    assert np.nanmax(np.abs(results["log10_gradient"])) == 0
    own.figure(results)
    gradient = measured(own, np.ones((2, 3, 1)), query=0)["log10_gradient"]
    assert gradient.shape == (2, 3, 1) and np.isnan(gradient).all()


def measured(own, last, query=1):
    """Results of networks whose residual [y, x, s] is `last` of the input's."""
    residual = np.stack([np.ones_like(last), last], axis=-1)
    sizes = np.ones(residual.shape)
    found = {"residual": residual, "query": query * sizes, "value": sizes, "entropy": sizes}
    found = {name: values.reshape(-1, *values.shape[2:]) for name, values in found.items()}
    found |= {"rank": found["residual"][..., 0]}
    return own.tables(found) | {"theory": own.theory[0][..., None]}


def test_a_residual_that_is_rounded_away_is_a_limit_and_in_no_mean():
    """-6.0 stood in the table as if it was measured."""
    own = setup("--level=0.1")
    last = np.array([[[1e-9, 3e-8], [1e-3, 1e-9]], [[0.1, 0.01], [1.0, 1.0]]])
    results = measured(own, last)
    table = list(own.rows(results))
    kept = [(row["log10_residual"], row["limit"]) for row in table]
    assert kept[:2] == [(-6, 1), (-6, 1)] and kept[3] == (-6, 1)
    np.testing.assert_allclose(kept[4:], [(-1, 0), (-2, 0), (0, 0), (0, 0)], atol=1e-12)
    assert table[0]["log10_gradient"] is table[0]["effective_rank"] is None
    drawn = own.figure(results).axes[0].collections[0].get_array()
    np.testing.assert_allclose(drawn, [[-6, -3], [-1.5, 0]], atol=1e-12)
    own.figure(measured(own, 0 * last))


@pytest.mark.slow
def test_what_is_measured_of_one_network():
    config = rc.transformer(2, 2, 8, norm="rms")
    params = rc.init(jax.random.key(0), config)
    x = initial.tokens(jax.random.key(1), 5, 8, 0.3)
    found = initial.kept_and_gradients(params, x, config, jax.random.key(2))
    goal = jax.random.normal(jax.random.key(2), x.shape)
    norms = rc.gradient_norms(lambda p: (goal * rc.apply(p, x, config).output).sum(), params)
    np.testing.assert_allclose(found["query"], norms["attention"]["w_q"], rtol=1e-4)
    np.testing.assert_allclose(found["value"], norms["attention"]["w_v"], rtol=1e-4)
    trace = rc.apply(params, x, config)
    expected = rc.attention_entropy(trace.attention).mean(axis=1) / np.log(5)
    np.testing.assert_allclose(found["entropy"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    "arguments", ["--figure=critical1 --depth=1 --x_range=0.2,0.5", "--level=1e-6", "--level=99"]
)
def test_a_boundary_that_is_asked_for_is_in_the_grid(arguments):
    with pytest.raises(ValueError, match=r"the boundary .* is outside of --x_range="):
        setup(*arguments.split()).check_boundary()
    setup("--x_range=0.2,0.5").check_boundary()  # nobody asked
    setup("--figure=critical1", "--depth=1").check_boundary()


@pytest.mark.slow
def test_cells_are_trained_at_the_sizes_of_the_diagram(tmp_path):
    arguments = ("--train", "--train_steps=1", "--train_tokens=3")
    assert run(run_phase, [*TINY, *arguments], tmp_path) == 0
    assert all(0 <= float(r["accuracy"]) <= 1 for r in rows(tmp_path))
    own = setup(*arguments)
    assert len({network.program for network in own.trained.values()}) == 1  # one program
    network = own.trained["trained skip_gain=2, score_scale=4"]
    params = rc.init(jax.random.key(0), network.config)
    found = network.start(params, network.floats).layers.attention.w_q
    expected = 4 * np.sqrt(np.log(3)) * params.layers.attention.w_q
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert network.config.skip_gain.attention == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("figure", "arguments", "keys"),
    [
        (
            "giorlandino4",
            ("--depth=3", "--d_model=8", "--num_tokens=4", "--num_seeds=3"),
            {"gain control"},
        ),
        ("mindthegap", ("--num_seeds=2",), {"gap", "gap removed"}),
        ("geshkovski", ("--num_y=2", "--num_seeds=3"), {"clusters"}),
        (
            "noci1",
            ("--train_steps=1", "--train_tokens=3", "--d_model=8", "--num_seeds=2"),
            {"deeper aligns", "scaling helps"},
        ),
    ],
)
def test_figures_at_tiny_size(figure, arguments, keys, tmp_path):
    assert run(run_phase, [f"--figure={figure}", *arguments], tmp_path) == 0
    shown = OWN.read(tmp_path)
    assert {row.key for row in shown.claims} == keys
    assert shown.comparisons and len(rows(tmp_path)) > 3


def test_cosines_before_training_are_those_of_networks_as_drawn(tmp_path):
    """Of one network, token by token in numpy; nothing is trained."""
    sizes = ("--train_steps=0", "--train_tokens=4", "--d_model=8", "--num_heads=2")
    assert run(run_phase, ["--figure=noci1", *sizes, "--num_seeds=3"], tmp_path) == 0
    found = [r for r in rows(tmp_path) if r["curve"].startswith("L = 12,") and r["seed"] == "1"]
    assert [float(r["x"]) for r in found] == [*range(13)]
    config = rc.design(rc.transformer(12, 2, 8, mlp="relu"), "depth_scaled")
    config = config.replace(embedding=small_task.embedding_of(config, 4))
    key_params, key_data = jax.random.split(seed_keys(0, 3)[1])
    params, cosines = rc.init(key_params, config), []
    for letters in small_task.examples_of(key_data, small_task.EVAL, 4).inputs:
        x = np.asarray(rc.apply(params, letters, config).hidden, float)
        unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
        cosines.append((unit @ unit.swapaxes(1, 2))[:, ~np.eye(4, dtype=bool)].mean(axis=1))
    values = [float(r["value"]) for r in found]
    np.testing.assert_allclose(values, np.mean(cosines, axis=0), rtol=1e-4, atol=1e-6)


def test_only_the_theory_that_a_statement_cites_tests_it():
    """λ_a of Cowsik et al.; other theories' order is shown and is no row."""
    counts = []
    for figure in ("cowsik4", "giorlandino1", "critical1"):
        own = setup(f"--figure={figure}", "--depth=1")
        results = measured(own, np.arange(1.0, 13).reshape(2, 2, 3))
        counts.append([row.draws for row in own.claims(results)])
        assert own.compare(results)
    assert counts == [[3], [], []]


def test_slopes_of_the_gap_at_published_sizes_and_beyond():
    """A law that is flat up to 150 tokens and falls like 1/√n from there on."""
    own = setup("--figure=mindthegap")
    ratio = np.minimum(1, (150 / own.x) ** 0.5)[None]
    slopes = {row.setting: row.estimate for row in own.claims({"A": ratio, "AX": ratio**2})}
    assert slopes == pytest.approx(
        {
            "A, n from 20 to 150": 0,
            "AX, n from 20 to 150": 0,
            "A, n from 150 to 600": -0.5,
            "AX, n from 150 to 600": -1,
        },
        abs=1e-9,
    )


def test_curves_that_are_their_theory():
    """Every statement is answered as it says."""
    own = setup("--figure=giorlandino4", "--depth=40", "--num_tokens=32")
    limit = own.published()["post-LN"]
    rho, p = 0.2, []
    for _ in range(3):  # as its authors write the block, where Y = 0
        rho = phases.attention_step(1.0, rho, curves.BETA, 1.0)[1]
        rho = phases.mlp_step(1.0, rho, 1.0, curves.WEIGHT, curves.BIAS)[1]
        p.append(rho)
    np.testing.assert_allclose(limit[1:4], p, rtol=1e-5)
    found = {
        name: np.asarray(law) + 1e-3 * np.array([[0], [1], [-1], [0], [1], [-1]])
        for name, law in own.theory({}).items()
    }
    for row in own.compare(found):
        assert row.measured == pytest.approx(row.published, abs=1e-6) and "layer 40" in row.quantity
    rows = own.claims(found)
    assert [j.verdict for j in judged(rows, STATEMENTS["gain control"].claimed)] == [WITHIN] * 2
    own.figure(found)
    own = setup("--figure=mindthegap")
    laws = own.theory({})
    slopes = {name: laws.get(name, laws["A"])[None] for name in curves.MATRICES}
    for row in own.claims(slopes):
        expected = 0 if row.key == "gap removed" else -0.5
        assert row.estimate == pytest.approx(expected, abs=1e-6)


def test_tokens_meet_on_the_sphere_when_the_law_says():
    grid = "--num_x=4", "--x_range=0,12", "--y_range=1,4", "--num_tokens=32", "--d_model=64"
    own = setup("--figure=geshkovski", *grid)
    assert list(own.cells.values()) == [1, 4]
    found = {name: np.stack([v]) for name, v in own.of_one_seed(jax.random.key(0), 1.0).items()}
    # One draw of both rows; times of the law at the other row are later.
    results = own.tables({name: np.stack([v, v]) for name, v in found.items()})
    assert results["together"].shape == (2, 4, 1)
    assert results["together"][0, 0, 0] == 0 and results["clusters"][0, 0, 0] == 1
    assert results["together"][0, -1, 0] == 1 and results["clusters"][0, -1, 0] == 1 / 32
    law = 0.1 * np.argmax(sphere.equiangular_cosine(0.0, 1.0, 32, 120, 0.1) > 0.999)

    def late(meeting, *grid):
        rows = setup("--figure=geshkovski", *grid).claims(results | {"meeting": meeting})
        return {row.setting: row.estimate for row in rows}

    expected = float(results["meeting"][0, 0] / law)
    assert late(results["meeting"], *grid)["β=1"] == pytest.approx(expected, rel=1e-6)
    never = np.where([[True], [False]], -1.0, results["meeting"])
    assert late(never, *grid)["β=1"] == pytest.approx(float(12 / law))
    assert not late(results["meeting"], *grid, "--x_range=0,5.4")
    values, level, _ = own.theory
    assert values[0, 0] == 0 < level < values[0, -1] and values[1, 2] < values[0, 2]
    own.figure(results)
