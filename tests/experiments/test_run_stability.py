"""The binary at tiny size, its numbers, and its errors."""

from functools import partial

import jax
import numpy as np
import pytest

import rank_collapse as rc
from experiments import run_stability
from experiments.stability import design_measures
from experiments.stability.padded_designs import Case, base_config, make_configs
from experiments.train.weight_matrices import get_weight_matrices
from tests.support.closeness import assert_close
from tests.support.runs import parsed, result_of, rows, run

TINY = [
    "--designs=post,admin",
    "--depths=1,2,4",
    "--num_seeds=2",
    "--d_model=8",
    "--num_heads=2",
    "--num_tokens=6",
    "--mlp=none",
    "--num_devices=1",
]


parse_options = partial(parsed, run_stability, *TINY)


def test_designs_that_overflow_are_named_and_kept_apart():
    lines, finite = [], np.ones(3)
    post, deep_post, pre = Case("post", 2, 4), Case("post", 4, 8), Case("pre", 4, 8)
    measures = {post: finite, deep_post: np.array([1, np.inf, 1]), pre: finite}
    networks = {case: {"change.random": values} for case, values in measures.items()}
    assert list(design_measures.keep_finite_designs(networks, lines.append)) == [pre]
    (line,) = lines
    assert line.startswith("--designs=post at depth 4: NaN or overflow") and "kept apart" in line
    with pytest.raises(ValueError, match="--designs=post at depth 4"):
        design_measures.keep_finite_designs(
            {c: networks[c] for c in (post, deep_post)}, lines.append
        )


def read_answers(folder):
    """Reads (results, {quantity: comparison}, claims) of a finished run."""
    measures, _ = result_of(run_stability, folder)
    comparisons = {row.quantity: row for row in run_stability.compare_results(measures)}
    return measures, comparisons, list(run_stability.judge_claims(measures))


@pytest.mark.full
def test_writes_rows_figures_and_answers(tmp_path):
    folder = tmp_path / "run"
    assert run(run_stability, TINY, folder) == 0
    measures, comparisons, claims = read_answers(folder)
    by_cell = {(case.design, case.depth): values for case, values in measures.items()}
    assert by_cell.keys() == {
        (design, depth) for design in ("post", "admin") for depth in (1, 2, 4)
    }
    assert {key: values["shares"].shape for key, values in by_cell.items()} == {
        (design, depth): (2, depth) for design, depth in by_cell
    }
    last = [r for r in rows(folder) if r["design"] == "post" and r["layer"] == r["depth"] == "4"]
    changes = [float(r["change.random"]) for r in last]
    np.testing.assert_allclose(changes, by_cell["post", 4]["change.random"], rtol=1e-5)
    assert comparisons["Post-LN: 1 − token cosine after 4 layers"].published > 0
    assert [(c.key, c.setting, c.draws) for c in claims] == [
        (key, design, 2)
        for design, law in (("Post-LN", "O(N)"), ("Admin", "O(log N)"))
        for key in (law, "independent updates", "gradient steps")
    ]
    # what a step along the gradient does is at least the bound, and not far above it
    over = [values["change.gradient"] / values["gradient_bound"] for values in by_cell.values()]
    assert np.all(np.exp(np.log(over).mean(axis=1)) > 0.99) and np.min(over) < 1e4


def test_omega_is_profiled_on_the_seeds_own_batch():
    """ω of 2 layers inside a network of 4 is that of the 2. Gains that are set stay as they are."""
    options = parse_options("--designs=admin,admin_const", "--mlp=relu", "--depths=2,4")
    configs = make_configs(options)
    first = next(iter(configs.values()))
    sample = jax.jit(lambda key: design_measures.draw(options, key, first))(jax.random.key(0))
    params, batch = sample["params"], sample["batch"]
    assert batch.shape == (design_measures.NUM_PROFILED, 6, 8)
    x, direction = sample["x"], sample["direction"]
    assert x.shape == sample["target"].shape == (6, 8)
    correlation = np.corrcoef(np.ravel(x), np.ravel(sample["target"]))[0, 1]
    assert abs(correlation) < 0.5  # of 48 independent numbers
    for states in (x, batch):  # each of its own, as a norm leaves them
        assert_close(np.mean(states, axis=-1), 0, atol=1e-5)
        assert_close(np.var(states, axis=-1), 1, atol=1e-3)
    assert len({np.asarray(states).tobytes() for states in (x, *batch)}) == 9
    matrices = get_weight_matrices(params)
    assert jax.tree.structure(direction) == jax.tree.structure(matrices)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: np.all(a != b), matrices, direction)))
    profiled = jax.jit(design_measures.profile_omega)
    skip_gains = [profiled(params, batch, config).skip_gain for config in configs.values()]
    short_config = rc.design(base_config(options, 2), "admin", learned=False)
    short = params.replace(layers=jax.tree.map(lambda a: np.asarray(a)[:2], params.layers))
    expected = jax.jit(rc.network.admin_profile)(short, batch, short_config).skip_gain
    np.testing.assert_allclose(skip_gains[0].mlp[:2], expected.mlp, rtol=1e-5)
    np.testing.assert_allclose(skip_gains[0].attention[:2], expected.attention, rtol=1e-5)
    assert_close(skip_gains[2].attention, [2, 2, 1, 1])  # ω² = N = 4, then none
    np.testing.assert_allclose(skip_gains[3].mlp, np.full(4, np.sqrt(8)), rtol=1e-6)


def test_a_statement_of_theorem_2_is_decided_by_what_the_theorem_is_about():
    """Post-LN is decided by β_ii² alone, whatever its output does. Equal shares give N, shares that
    fall as Pre-LN's give ln N, and shares that grow with depth more than N."""
    shares = {
        "equal": lambda n: np.full(n, 0.5),
        "like Pre-LN's": lambda n: 1 / (2 + np.arange(n)),
        "growing": lambda n: np.full(n, 0.01 * n),
    }
    other_quantities = (
        "change.random",
        "change.gradient",
        "change.sgd",
        "expected_change",
        "gradient_bound",
    )
    estimates = {}
    for name, make_shares in shares.items():
        measures = {
            Case("post", depth, 3 * depth): {"shares": np.tile(make_shares(3 * depth), (3, 1))}
            | dict.fromkeys(other_quantities, depth ** np.array([5.0, 6.0, 7.0]))
            for depth in (3, 6, 12, 25)
        }
        first, second, _ = run_stability.judge_claims(measures)
        assert (first.key, second.key) == ("O(N)", "independent updates") and second.estimate > 5
        estimates[name] = first.estimate
    assert estimates["equal"] == pytest.approx(2) and estimates["like Pre-LN's"] == pytest.approx(1)
    assert estimates["growing"] > 3


def make_measures(depths, exponents, design):
    """Makes measures of three seeds that are powers of N, by the exponent of each."""
    return {
        Case(design, depth, 2 * depth): {
            name: np.full(3, float(2 * depth) ** exponent) for name, exponent in exponents.items()
        }
        | {"shares": np.full((3, 2 * depth), 0.5)}
        for depth in depths
    }


def test_each_statement_reads_its_own_change_of_the_output():
    """DeepNorm has a statement about steps of gradient descent, and a design without a law has none
    about shares; gradient steps are compared with random ones."""
    exponents = {"change.random": 2.0, "change.gradient": 2.5, "change.sgd": 1.0}
    exponents |= {"expected_change": 1.75, "gradient_bound": 2.25}
    rows = {
        design: list(run_stability.judge_claims(make_measures((24, 3, 6, 12), exponents, design)))
        for design in ("deepnorm", "post", "none of them")
    }
    keys = {design: [row.key for row in listed] for design, listed in rows.items()}
    both = ["independent updates", "gradient steps"]
    assert keys == {
        "deepnorm": [both[0], "deepnorm", both[1]],
        "post": [run_stability.LAW_OF["post"], *both],
        "none of them": both,
    }
    random, sgd, gradient = rows["deepnorm"]
    assert random.estimate > 2.5 and sgd.estimate == pytest.approx(2)
    assert gradient.estimate == pytest.approx(0.5)
    assert "exponent 2.00; the one law expects 1.75" in random.note
    assert sgd.note.endswith("exponent 1.00")
    low, high = 6**0.25, 48**0.25  # of the least and largest N
    assert f"exponent 2.50, {low:.3g} to {high:.3g} times the bound" in gradient.note
    assert "Σ β_ii² with the exponent 1.00" in rows["post"][0].note


def test_the_deepest_network_is_compared_with_the_law_where_it_is_visible():
    """Post-LN and Pre-LN are compared with each other at their shallowest, where both are there."""
    apart = np.array([[0.5, 0.2, 1e-12], [0.5, 0.8, 1e-3]])
    law = np.log([[0.5, 0.2, 0.1], [0.25, 0.2, 0.1]])
    shallow = {"apart": np.ones((2, 2)), "shares": np.array([[0.5, 0.25], [0.5, 0.75]])}
    deep = {"apart": apart, "expected_log_apart": law, "shares": np.ones((2, 4))}
    results = {
        Case(name, depth, 2 * depth): measures
        for name in ("pre", "post")
        for depth, measures in ((2, deep), (1, shallow))
    }
    lines = list(run_stability.compare_results(results))
    mean, largest, single = lines[:3]
    assert mean.quantity == "Pre-LN: 1 − token cosine after 1 layer"  # at 2 all is rounding
    assert mean.measured == pytest.approx(0.4) and mean.published == pytest.approx(0.2)
    assert largest.measured == pytest.approx(2) and largest.note.endswith(
        "all layers to 1; at layer 1"
    )
    assert single.measured == pytest.approx(4)
    assert single.note == "of 2 networks; the least of a network is 1"
    assert len(lines) == 7 and lines[6].measured == "0.500, 0.500"
    assert lines[6].note == "Liu et al. 2020; 1 layer"
    gap = {c: m | {"apart": apart[:, [0, 2, 1]]} for c, m in results.items() if c.depth == 2}
    assert next(run_stability.compare_results(gap)).quantity.endswith("after 2 layers")
    unknown = {c: m | {"expected_log_apart": law * np.nan} for c, m in results.items()}
    assert next(run_stability.compare_results(unknown)).published is None
    only_pre = {case: values for case, values in results.items() if case.design == "pre"}
    assert len(list(run_stability.compare_results(only_pre))) == 3
