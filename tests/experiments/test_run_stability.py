"""The binary at tiny size, its numbers, and its errors."""

from functools import partial

import jax
import numpy as np
import pytest

import rank_collapse as rc
from experiments import run_stability
from experiments.stability import design_measures
from experiments.stability.padded_designs import Case, base_config, make_configs
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
    measures = {post: finite, deep_post: np.array([1, np.nan, 1]), pre: finite}
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
