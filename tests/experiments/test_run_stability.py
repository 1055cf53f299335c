"""The binary at tiny size, its numbers, and its errors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trained_runs import parsed, result_of, rows, run

import rank_collapse as rc
from experiments import run_stability
from experiments.note.stability import measure, results
from experiments.note.stability.measure import Case, base_config, make_configs
from experiments.train.weights import get_weight_matrices, replace_weight_matrices
from rank_collapse.network.measured import updates

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


asked = partial(parsed, run_stability, *TINY)


def shown(folder):
    """(results, {quantity: comparison}, claims) of a finished run."""
    found, configs = result_of(run_stability, folder)
    compared = {row.quantity: row for row in run_stability.compare_results(found, configs)}
    return found, compared, list(run_stability.judge_claims(found, configs))


@pytest.mark.full
def test_writes_rows_figures_and_answers(tmp_path):
    folder = tmp_path / "run"
    assert run(run_stability, TINY, folder) == 0
    found, compared, claims = shown(folder)
    own = {(case.design, case.depth): of for case, of in found.items()}
    assert own.keys() == {(design, depth) for design in ("post", "admin") for depth in (1, 2, 4)}
    assert {key: of["shares"].shape for key, of in own.items()} == {
        (design, depth): (2, depth) for design, depth in own
    }
    last = [r for r in rows(folder) if r["design"] == "post" and r["layer"] == r["depth"] == "4"]
    changes = [float(r["change.random"]) for r in last]
    np.testing.assert_allclose(changes, own["post", 4]["change.random"], rtol=1e-5)
    assert compared["post: 1 − token cosine after 4 layers"].published > 0
    assert [(c.key, c.setting, c.draws) for c in claims] == [
        (key, design, 2)
        for design, law in (("post", "O(N)"), ("admin", "O(log N)"))
        for key in (law, "independent updates", "gradient steps")
    ]
    # what a step along the gradient does is at least the bound, and not far above it
    over = [of["change.gradient"] / of["gradient_bound"] for of in own.values()]
    assert np.all(np.exp(np.log(over).mean(axis=1)) > 0.99) and np.min(over) < 1e4


def test_layers_past_a_networks_own_change_nothing():
    """A network of 2 layers inside one of 4 is the one of 2: gains, and what is cut away."""
    found = make_configs(asked("--designs=pre,depth_scaled", "--mlp=relu", "--depths=2,4"))
    assert [case.branches for case in found] == 2 * [4, 8]
    for case, config in found.items():
        np.testing.assert_array_equal(config.skip_gain.mlp, [1, 1, 1, 1])
        branch = config.branch_gain.mlp
        assert np.all(branch[: case.depth] > 0) and not branch[case.depth :].any()


def test_omega_is_profiled_on_the_seeds_own_batch():
    """That of 2 layers inside a network of 4 is that of the 2; given gains stay as they are."""
    options = asked("--designs=admin,admin_const", "--mlp=relu", "--depths=2,4")
    configs = make_configs(options)
    drawn = measure.draw(options, jax.random.key(0), next(iter(configs.values())))
    params, batch = drawn["params"], drawn["batch"]
    assert batch.shape == (measure.NUM_PROFILED, 6, 8)
    profiled = jax.jit(measure.profile_omega)
    found = [profiled(params, batch, config).skip_gain for config in configs.values()]
    own = rc.design(base_config(options, 2), "admin", learned=False)
    short = params.replace(layers=jax.tree.map(lambda a: a[:2], params.layers))
    wanted = rc.network.admin_profile(short, batch, own).skip_gain
    np.testing.assert_allclose(found[0].mlp[:2], wanted.mlp, rtol=1e-5)
    np.testing.assert_allclose(found[0].attention[:2], wanted.attention, rtol=1e-5)
    np.testing.assert_allclose(found[2].attention, [2, 2, 1, 1])  # ω² = N = 4, then none
    np.testing.assert_allclose(found[3].mlp, np.full(4, np.sqrt(8)), rtol=1e-6)


def small_network():
    """(config, weights, other weights, tokens)"""
    config = rc.transformer(2, 2, 8, mlp="relu", d_ff=8)
    params, other = (rc.init(jax.random.key(i), config) for i in (0, 1))
    return config, params, other, jax.random.normal(jax.random.key(2), (5, 8))


def normalised(params, x, config):
    return measure.normalised_output(rc.apply(params, x, config), config)


def test_the_change_of_an_update_is_the_librarys():
    config, params, other, x = small_network()
    direction, before = get_weight_matrices(other), normalised(params, x, config)
    found = measure.output_changes(params, x, config, before, {"there": direction}, 1e-2)["there"]
    moved = measure.move_weights(params, direction, 1e-2)
    wanted = updates.output_change(params, moved, x, config)[-1]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_an_sgd_step_and_its_bound_are_those_of_a_step_taken():
    """To first order: a step of η = 1e-3, its loss, and the loss over ‖u‖ squared."""
    config, params, _, x = small_network()
    target = jax.random.normal(jax.random.key(3), (5, 8))

    def loss(params):
        return jnp.sum(target * normalised(params, x, config)), "aside"

    gradients, aside = measure.matrix_gradients(loss, params)
    assert aside == "aside"
    found = measure.sgd_change(params, x, config, gradients)
    eta, own = 1e-3, get_weight_matrices(params)
    moved = replace_weight_matrices(params, jax.tree.map(lambda w, g: w - eta * g, own, gradients))
    before, after = (normalised(p, x, config) for p in (params, moved))
    np.testing.assert_allclose(found, jnp.mean((after - before) ** 2) / eta**2, rtol=0.05)
    # a step of relative size e along each gradient lowers the loss by e Σ‖W‖‖∂W‖
    e = 1e-3
    stepped = measure.move_weights(params, jax.tree.map(jnp.negative, gradients), e)
    bound = measure.gradient_bound(params, gradients, target, e)
    lowered = (loss(params)[0] - loss(stepped)[0]) ** 2 / jnp.sum(target**2) / target.size
    np.testing.assert_allclose(bound, lowered, rtol=0.05)


def test_places_between_the_laws():
    laws = {"O(N)": 1.0, "O(log N)": 0.3, "O(1)": 0.1}
    found = [results.place_between(e, laws) for e in (-0.1, 0.1, 0.2, 0.3, 0.65, 1.0, 1.35)]
    np.testing.assert_allclose(found, [-1, 0, 0.5, 1, 1.5, 2, 2.5])


def test_a_statement_of_theorem_2_is_decided_by_what_the_theorem_is_about():
    """Post-LN by β_ii² alone, whatever its output does: equal branches are like N, those that fall
    as Pre-LN's like ln N, and a share that grows with depth is above N."""
    shares_of = {
        "equal": lambda n: np.full(n, 0.5),
        "like Pre-LN's": lambda n: 1 / (2 + np.arange(n)),
        "growing": lambda n: np.full(n, 0.01 * n),
    }
    others = ("change.random", "change.gradient", "change.sgd", "expected_change", "gradient_bound")
    found = {}
    for name, of in shares_of.items():
        own = {
            Case("post", depth, 3 * depth): {"shares": np.tile(of(3 * depth), (3, 1))}
            | dict.fromkeys(others, depth ** np.array([5.0, 6.0, 7.0]))
            for depth in (3, 6, 12, 25)
        }
        first, second, _ = run_stability.judge_claims(own, {})
        assert (first.key, second.key) == ("O(N)", "independent updates") and second.estimate > 5
        found[name] = first.estimate
    assert found["equal"] == pytest.approx(2) and found["like Pre-LN's"] == pytest.approx(1)
    assert found["growing"] > 3


def test_exponents_of_the_laws():
    n = np.array([12, 24, 48, 96])
    np.testing.assert_allclose(results.fit_exponents(n, np.stack([3.0 * n, n**0.5])), [1, 0.5])
    laws = results.law_exponents(n)
    assert abs(laws["O(N)"] - 1) < 1e-9 and 0.2 < laws["O(log N)"] < 0.4 and laws["O(1)"] < 0.05
