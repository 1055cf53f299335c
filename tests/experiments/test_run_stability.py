"""The binary at tiny size, its numbers, and its errors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trained_runs import parsed, result_of, rows, run

import rank_collapse as rc
from experiments import run_stability
from experiments.run_stability import EXPERIMENT
from experiments.stability import measure, networks, results
from experiments.stability.networks import Case, base_config, configs_of
from rank_collapse.measures import updates
from rank_collapse.runs.seeds import seed_keys

TINY = [
    "--designs=post,admin",
    "--depths=1,2,4",
    "--layer_depths=1,4",
    "--num_seeds=2",
    "--parts=encoders",
    "--pair_depths=1,2",
    "--pair_layer_depths=1,2",
    "--d_model=8",
    "--num_heads=2",
    "--num_tokens=6",
    "--mlp=none",
    "--nolog_residual",
    "--num_devices=1",
]


asked = partial(parsed, run_stability, *TINY)


def shown(folder):
    """(results, {quantity: comparison}, claims) of a finished run."""
    found, parts = result_of(EXPERIMENT, folder)
    compared = {row.quantity: row for row in EXPERIMENT.compare(found, parts)}
    return found, compared, list(EXPERIMENT.claims(found, parts))


def test_writes_rows_figures_and_answers(tmp_path):
    folder = tmp_path / "run"
    assert run(run_stability, TINY, folder) == 0
    found, _, claims = shown(folder)
    own = {(case.design, case.depth): of for case, of in found["networks"].items()}
    assert own.keys() == {(design, depth) for design in ("post", "admin") for depth in (1, 2, 4)}
    shares = own["post", 4]["exact_shares"]
    assert shares.shape == (2, 5, 6) and abs(shares.sum(axis=2) - 1).max() < 1e-5
    omega = own["admin", 4]["omega.attention"]
    assert np.all(omega[:, 0] == 1) and np.all(omega[:, -1] > 1)
    last = [r for r in rows(folder) if r["design"] == "post" and r["layer"] == r["depth"] == "4"]
    changes = [float(r["change.random"]) for r in last]
    np.testing.assert_allclose(changes, own["post", 4]["change.random"], rtol=1e-5)
    assert [(c.key, c.setting, c.draws) for c in claims] == [
        ("O(N)", "post", 2),
        ("independent updates", "post", 2),
        ("gradient steps", "post", 2),
        ("O(log N)", "admin", 2),
        ("independent updates", "admin", 2),
        ("gradient steps", "admin", 2),
    ]
    # what a step along the gradient does is at least the bound, and not far above it
    over = [of["change.gradient"] / of["gradient_bound"] for of in own.values()]
    assert np.all(np.exp(np.log(over).mean(axis=1)) > 0.99) and np.min(over) < 1e4


def test_designs_that_overflow_are_named_and_kept_apart():
    said, good, bad = [], np.ones(3), np.array([1, np.nan, 1])
    cases = [Case("encoder", *case) for case in (("post", 2, 4), ("post", 4, 8), ("pre", 4, 8))]
    changes = zip(cases, (good, bad, good), strict=True)
    found = {case: {"change.random": values} for case, values in changes}
    assert list(measure.without_overflow(found, said.append)) == cases[2:]
    (line,) = said
    assert line.startswith("post at depth 4: NaN or overflow") and "kept apart" in line
    with pytest.raises(ValueError, match="post at depth 4"):
        measure.without_overflow({case: found[case] for case in cases[:2]}, said.append)


@pytest.mark.slow
def test_networks_that_are_trained_begin_as_those_of_run_trainability(tmp_path):
    more = ["--parts=encoders,training", "--train_designs=post,admin", "--train_depth=1"]
    assert run(run_stability, [*TINY, *more, "--train_steps=50"], tmp_path) == 0
    found, compared, _ = shown(tmp_path)
    trained = found["trained"]
    assert [cell.design for cell in trained] == ["post", "admin"]
    for cell, own in trained.items():
        apart, change = (own["stability"][n] for n in ("apart", "change"))
        np.testing.assert_allclose(1 - own["token_cosine"], apart, rtol=1e-3, atol=1e-5)
        assert change["random"].shape == (2, 3) and np.all(change["random"] > 0)
        quantity = (
            f"{cell.design}, 1 layers trained: 1 − token cosine of the last at steps 0, 25, 50"
        )
        mean = np.exp(np.log(apart[:, 0, -1]).mean())
        assert compared[quantity].measured.startswith(f"{mean:.2g}, ")


@pytest.mark.slow
def test_encoder_decoders(tmp_path):
    assert run(run_stability, [*TINY, "--parts=encoder_decoders"], tmp_path) == 0
    found, compared, claims = shown(tmp_path)
    own = {(case.design, case.depth): of for case, of in found["networks"].items()}
    # one branch in the encoder, two in the decoder, by layer
    assert {case.depth: case.branches for case in found["networks"]} == {1: 3, 2: 6}
    assert {name for name in own["post", 2] if "gradients.cross" in name} == {
        f"{of}gradients.cross.w_{m}" for of in ("", "expected_") for m in "qkvo"
    }
    for half, branches in (("encoder.", 2), ("", 4)):
        shares = own["post", 2][f"{half}exact_shares"]
        assert shares.shape == (2, branches + 1, branches + 2)
        np.testing.assert_allclose(shares.sum(axis=2), 1, atol=1e-5)
    for kind, wanted in profiled_omega(asked("--parts=encoder_decoders")).items():
        np.testing.assert_allclose(own["admin", 2][kind], wanted, rtol=1e-5)
    assert len(claims) == 6 and claims[0].setting == "post, encoder-decoder"
    assert all("encoder-decoder" in quantity for quantity in compared)


def profiled_omega(options):
    """{name: [s, L]} of Admin at 2 layers, by the library on each seed's own weights and batch."""
    plain = base_config(options, 2, "encoder_decoder")
    config, found = rc.design(plain, "admin", learned=False), []
    for key in seed_keys(options.seed, options.num_seeds):
        drawn = measure.draw(options, key, config)
        own = rc.encoder_decoder.admin_profile(drawn["params"], *drawn["batch"], config)
        of_halves = (("encoder.omega", own.encoder), ("omega", own.decoder))
        kinds = ((n, k, half) for n, half in of_halves for k in half.kinds)
        found.append({f"{n}.{k}": getattr(half.skip_gain, k) for n, k, half in kinds})
    return {name: np.stack([one[name] for one in found]) for name in found[0]}


@pytest.mark.parametrize("kind, branches", [("encoder", 2), ("encoder_decoder", 5)])
def test_layers_past_a_networks_own_change_nothing(kind, branches):
    """A network of 2 layers inside one of 4 is the one of 2: gains, and what is cut away."""
    found = configs_of(asked("--designs=pre,depth_scaled", "--mlp=relu"), [2, 4], kind)
    assert [case.branches for case in found] == 2 * [2 * branches, 4 * branches]
    for case, config in found.items():
        for stack in networks.halves(config):
            skip, branch = (getattr(stack, f"{name}_gain").mlp for name in ("skip", "branch"))
            np.testing.assert_array_equal(skip, [1, 1, 1, 1])
            assert np.all(branch[: case.depth] > 0) and not branch[case.depth :].any()


def test_omega_is_profiled_on_the_seeds_own_batch():
    """That of 2 layers inside a network of 4 is that of the 2; given gains stay as they are."""
    options = asked("--designs=admin,admin_const", "--mlp=relu")
    configs = configs_of(options, [2, 4])
    drawn = measure.draw(options, jax.random.key(0), next(iter(configs.values())))
    params, batch = drawn["params"], drawn["batch"]
    assert batch[0].shape == (measure.PROFILED, 6, 8)
    profiled = jax.jit(networks.with_omega)
    found = [profiled(params, batch, config).skip_gain for config in configs.values()]
    own = rc.design(base_config(options, 2, "encoder"), "admin", learned=False)
    short = params.replace(layers=jax.tree.map(lambda a: a[:2], params.layers))
    wanted = rc.admin_profile(short, batch[0], own).skip_gain
    np.testing.assert_allclose(found[0].mlp[:2], wanted.mlp, rtol=1e-5)
    np.testing.assert_allclose(found[0].attention[:2], wanted.attention, rtol=1e-5)
    np.testing.assert_allclose(found[2].attention, [2, 2, 1, 1])  # ω² = N = 4, then none
    np.testing.assert_allclose(found[3].mlp, np.full(4, np.sqrt(8)), rtol=1e-6)


def small_network():
    """(config, weights, other weights, inputs)"""
    config = rc.transformer(2, 2, 8, mlp="relu", d_ff=8)
    params, other = (rc.init(jax.random.key(i), config) for i in (0, 1))
    return config, params, other, (jax.random.normal(jax.random.key(2), (5, 8)),)


def normalised(params, inputs, config):
    return networks.normalised_output(networks.traces(params, inputs, config), config)


def test_the_change_of_an_update_is_the_librarys():
    config, params, other, inputs = small_network()
    direction, before = updates.matrices_of(other), normalised(params, inputs, config)
    moves = {"there": (direction,)}
    found = networks.changes(params, inputs, config, before, moves, 1e-2)["there"]
    moved = updates.moved(params, direction, 1e-2)
    wanted = updates.output_change(params, moved, inputs[0], config)[-1]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_an_sgd_step_and_its_bound_are_those_of_a_step_taken():
    """To first order: a step of η = 1e-3, its loss, and the loss over ‖u‖ squared."""
    config, params, _, inputs = small_network()
    target = jax.random.normal(jax.random.key(3), (5, 8))

    def loss(params):
        return jnp.sum(target * normalised(params, inputs, config)), "aside"

    (gradients,), aside = networks.gradients(loss, params)
    assert aside == "aside"
    found = networks.sgd_change(params, inputs, config, (gradients,))
    eta, own = 1e-3, updates.matrices_of(params)
    moved = updates.with_matrices(params, jax.tree.map(lambda w, g: w - eta * g, own, gradients))
    before, after = (normalised(p, inputs, config) for p in (params, moved))
    np.testing.assert_allclose(found, jnp.mean((after - before) ** 2) / eta**2, rtol=0.05)
    # a step of relative size e along each gradient lowers the loss by e Σ‖W‖‖∂W‖
    e = 1e-3
    stepped = updates.moved(params, jax.tree.map(jnp.negative, gradients), e)
    bound = networks.gradient_bound(params, (gradients,), target, e)
    lowered = (loss(params)[0] - loss(stepped)[0]) ** 2 / jnp.sum(target**2) / target.size
    np.testing.assert_allclose(bound, lowered, rtol=0.05)


def test_places_between_the_laws():
    laws = {"O(N)": 1.0, "O(log N)": 0.3, "O(1)": 0.1}
    found = [results.place(e, laws) for e in (-0.1, 0.1, 0.2, 0.3, 0.65, 1.0, 1.35)]
    np.testing.assert_allclose(found, [-1, 0, 0.5, 1, 1.5, 2, 2.5])


def test_a_statement_of_theorem_2_is_decided_by_what_the_theorem_is_about():
    """Post-LN by β_ii² alone, whatever its output does: equal branches are like N, those that fall
    as Pre-LN's like ln N, and a share that grows with depth is above N. Three branches a layer."""
    shares_of = {
        "equal": lambda n: np.full(n, 0.5),
        "like Pre-LN's": lambda n: 1 / (2 + np.arange(n)),
        "growing": lambda n: np.full(n, 0.01 * n),
    }
    others = ("change.random", "change.gradient", "change.sgd", "expected_change", "gradient_bound")
    found = {}
    for name, of in shares_of.items():
        own = {
            Case("encoder_decoder", "post", depth, 5 * depth): {
                "shares": np.tile(of(3 * depth), (3, 1))
            }
            | dict.fromkeys(others, depth ** np.array([5.0, 6.0, 7.0]))
            for depth in (3, 6, 12, 25)
        }
        assert results.share_sums(own)[0].tolist() == [9, 18, 36, 75]  # the decoder's own
        first, second, _ = EXPERIMENT.claims({"networks": own}, [])
        assert (first.key, second.key) == ("O(N)", "independent updates") and second.estimate > 5
        found[name] = first.estimate
    assert found["equal"] == pytest.approx(2) and found["like Pre-LN's"] == pytest.approx(1)
    assert found["growing"] > 3


@pytest.mark.slow
def test_what_the_law_does_not_cover_is_left_out(tmp_path):
    """Branches that see tokens that no norm has scaled; the rest of the design is measured."""
    small = ["--designs=branch_norm,post", "--depths=1,2", "--layer_depths=1,2"]
    assert run(run_stability, [*TINY, *small], tmp_path) == 0
    _, compared, claims = shown(tmp_path)
    rows = [compared[f"{n}: 1 − token cosine after 2 layers"] for n in ("branch_norm", "post")]
    assert "does not cover" in rows[0].note and rows[0].published is None
    assert "largest ratio of the two over layers" in rows[1].note and rows[1].published > 0
    of_random = {c.setting: c for c in claims if c.key == "independent updates"}
    assert np.isfinite(of_random["branch_norm"].estimate)


def test_exponents_of_the_laws():
    n = np.array([12, 24, 48, 96])
    np.testing.assert_allclose(results.exponents(n, np.stack([3.0 * n, n**0.5])), [1, 0.5])
    laws = results.law_exponents(n)
    assert abs(laws["O(N)"] - 1) < 1e-9 and 0.2 < laws["O(log N)"] < 0.4 and laws["O(1)"] < 0.05
