"""Residuals of one network: rates, published bounds, and what float32 cannot decide."""

from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

import rank_collapse as rc
from experiments.collapse import (
    layer_residuals,
)
from experiments.lab.executor import Chunk
from tests.oracles import draws
from tests.support.closeness import assert_close


def test_rates_are_only_given_where_they_mean_something():
    profile = xr.DataArray([2.0, 0.5, -2.0, -6.0, -18.0, -54.0, -np.inf], dims="layer")
    expected = [np.nan, np.nan, np.nan, 4 / 2.5, 3.0, 3.0, np.nan]
    assert_close(layer_residuals.local_rates(profile), expected)
    both = xr.concat([profile, 2 * profile], "seed").transpose("layer", "seed")
    rates = layer_residuals.local_rates(both)
    assert rates.dims == ("layer", "seed")
    assert_close(rates[:, 0], expected)
    assert_close(rates[:, 1], [np.nan, np.nan, np.nan, 4 / 2.5, 3.0, 3.0, np.nan])


def test_the_published_bound_of_a_layer_has_one_gamma_and_one_beta_for_all_heads():
    config = rc.san_mlp(2, 2, 6)
    params = draws.parameters(config, bias_scale=0.0)
    w_v = np.asarray(params.layers.attention.w_v) * np.float32([0.1, 3.0])[:, None, None]
    params = draws.changed(params, attention={"w_v": w_v})
    report = jax.device_get(rc.bound_report(params, draws.normal(5, 6), config))
    c = 4 * 2 / np.sqrt(3) * report.gamma.max(1) * report.beta.max(1) * report.lipschitz
    assert np.any(report.gamma.argmax(1) != report.beta.argmax(1))
    log10_bound = layer_residuals.bound_profiles(report)["log10_published_bound"][1:]
    np.testing.assert_allclose(log10_bound, np.log10(c) + 3 * report.log10_input, rtol=1e-5)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_plain_residuals_are_of_a_pass_in_the_dtype_and_sums_in_float32_at_least(
    name, monkeypatch, x64
):
    """Weights and tokens are rounded to the dtype; norms of a short dtype are not."""
    dtype = jnp.dtype(name)
    hidden = (np.random.default_rng(0).normal(size=(3, 5, 4)) + 2).astype(dtype)
    passed = []

    def apply(params, x, config):
        passed.append((params["w"].dtype, x.dtype, config))
        return SimpleNamespace(hidden=jnp.asarray(hidden))

    monkeypatch.setattr(layer_residuals.rc, "apply", apply)
    weights = {"w": jnp.ones(2, jnp.float64)}
    measured = layer_residuals.measure_plain(weights, jnp.ones(3, jnp.float64), "config", dtype)
    assert passed == [(dtype, dtype, "config")]

    def compute_norm(a):
        return np.sqrt(np.abs(a).sum(axis=1).max(axis=-1) * np.abs(a).sum(axis=2).max(axis=-1))

    states = hidden.astype(np.float64)
    residual = states - states.mean(axis=1, keepdims=True)
    rtol = 1e-12 if name == "float64" else 1e-5
    expected = {
        "ratio": compute_norm(residual) / compute_norm(states),
        "plain_log10_residual": np.log10(compute_norm(residual)),
        "log10_size": np.log10(compute_norm(states)),
    }
    assert measured.keys() == expected.keys()
    for measure, values in expected.items():
        assert measured[measure].dtype == (jnp.float64 if name == "float64" else jnp.float32)
        assert_close(measured[measure], values, rtol=rtol)


@pytest.mark.parametrize(
    ("config", "laws"),
    [
        (rc.san(2, 2, 6), {"log10_cubic", "bound"}),
        (rc.san_mlp(2, 2, 6), {"bound"}),
        (rc.san(2, 2, 6, norm_placement="post"), {"log10_cubic"}),
        (rc.san_mlp(2, 2, 6, norm_placement="pre"), set()),
        (rc.san_skip(2, 2, 6), set()),
        (rc.transformer(2, 2, 6), set()),
    ],
)
def test_laws_and_bounds_are_those_that_cover_the_network(config, laws, monkeypatch):
    log = SimpleNamespace(profile="profile")
    modules = layer_residuals.cubic_law, layer_residuals.reports
    monkeypatch.setattr(modules[0], "closed_profile", lambda *_, log: [f"cubic {log.profile}"])
    monkeypatch.setattr(modules[1], "report_from_log", lambda *arguments: arguments)
    monkeypatch.setattr(layer_residuals, "bound_profiles", lambda report: {"bound": report})
    measured = layer_residuals.measure_laws("params", "x", config, log)
    values = {"log10_cubic": "cubic profile", "bound": ("params", "x", config, log)}
    assert measured == {"log10_residual": "profile"} | {name: values[name] for name in laws}


def test_bounds_of_a_report_begin_with_its_input():
    """The constant of a stack is the largest so far; a layer is admissible in all of its heads."""
    draw = np.random.default_rng(1)
    log10_c, lipschitz = np.array([0.5, -1.0, 0.75]), np.array([1.0, 10.0, 0.1])
    profile = np.array([1.0, 0.2, -1.0, -4.0])
    sides = draw.normal(size=(5, 3))
    report = SimpleNamespace(
        log10_residual=profile,
        log10_c=log10_c,
        log10_input=profile[:-1] - 0.1,
        lipschitz=lipschitz,
        published_layer=SimpleNamespace(log10_rhs=sides[0]),
        layer=SimpleNamespace(tightness=sides[1]),
        mean_layer=SimpleNamespace(tightness=sides[2]),
        diameter_layer=SimpleNamespace(tightness=sides[3], tightness_cubic=sides[4]),
        admissible=np.array([[True, True], [True, False], [False, False]]),
    )
    c = np.array([0.5, 0.5, 0.5, 0.75])
    powers = 3.0 ** np.arange(4)
    expected = {
        "log10_c": c,
        "log10_bound": c * (powers - 1) / 2 + powers * profile[0],
        "log10_layer_bound": [1.0, *(log10_c + 3 * (profile[:-1] - 0.1))],
        "log10_published_bound": [1.0, *(sides[0] + [0, 1, -1])],
        "tightness_paper": [0.0, *sides[1]],
        "tightness_mean": [0.0, *sides[2]],
        "tightness_diameter": [0.0, *sides[3]],
        "tightness_cubic_diameter": [0.0, *sides[4]],
        "admissible": [1.0, 1.0, 0.0, 0.0],
    }
    measured = layer_residuals.bound_profiles(report)
    assert measured.keys() == expected.keys()
    for name, values in expected.items():
        assert_close(measured[name], values, rtol=1e-5, err_msg=name)


def decide(config, profile, ratio, gains):
    """Decides profiles [s, L + 1] of drawn networks; returns them, and the draws of the seeds."""
    seed_draws = [(draws.tokens(4, 8, s), draws.parameters(config, s)) for s in range(3)]
    stacked = jax.tree.map(lambda *a: np.stack(a), *seed_draws)

    class Measured:
        def __call__(self, chunk):
            return {"log10_residual": {"san": profile}, "ratio": {"san": ratio}}

        def laid_out(self, chunk):
            return stacked, chunk.floats

    progress = SimpleNamespace(time_activity=lambda activity: nullcontext())
    chunk = Chunk(("a",) * 3, (4, 5, 6), None, (np.ones(3), np.asarray(gains)))
    results = layer_residuals.measure_chunk(Measured(), chunk, {"san": config}, "none", progress)
    return results["log10_residual"]["san"], seed_draws


def test_what_float32_cannot_decide_comes_from_float64():
    """Seeds without a number are computed again, except those whose states overflow."""
    config = rc.san(2, 2, 8)
    profile = np.array([[1, 2, 3], [1, np.nan, np.nan], [1, np.nan, np.nan]], np.float32)
    ratio = np.array([[1, 1, 1], [1, 1, 1], [1, np.inf, np.nan]])
    profiles, seed_draws = decide(config, profile, ratio, np.ones(3))
    x, params = seed_draws[1]
    expected = rc.log_residual_profile(params, x, config, replicas=0)
    assert_close(profiles[1], expected, atol=1e-4)
    np.testing.assert_array_equal(profiles[[0, 2]], profile[[0, 2]])
    assert np.isnan(profile[1, 1])  # what was given stays as it was


def test_float64_has_the_gain_of_each_seed_and_infinities_are_not_decided():
    """Seeds of a sweep differ in the gain of their skips: each residual is of its own network."""
    config, gains = rc.san_skip(2, 2, 8), (0.25, 0.5, 1.0)
    profile = np.array([[1, 2, 3], [1, np.nan, np.nan], [1, np.inf, np.inf]], np.float32)
    profiles, seed_draws = decide(config, profile, np.ones((3, 3)), gains)
    for seed in (1, 2):
        x, params = seed_draws[seed]
        expected, other = (
            rc.log_residual_profile(params, x, config.replace(skip_gain=gain), replicas=0)
            for gain in (gains[seed], gains[seed - 1])
        )
        assert abs(expected[-1] - other[-1]) > 0.05  # another gain is another number
        assert_close(profiles[seed], expected, atol=1e-4)
    np.testing.assert_array_equal(profiles[0], profile[0])


def test_every_variant_is_decided_by_its_own_network(monkeypatch):
    """The seeds are drawn once; a line says which seed of which variant is computed again."""
    nan, laid_out, said, asked = np.nan, [], [], []
    profiles = {"san": [[1, nan], [3, 4]], "san_skip": [[5, nan], [7, nan]]}
    networks = {"san": rc.san(1, 2, 8), "san_skip": rc.san_skip(1, 2, 8)}

    class Measured:
        def __call__(self, chunk):
            arrays = {variant: np.float32(values) for variant, values in profiles.items()}
            return {"log10_residual": arrays, "ratio": dict.fromkeys(profiles, np.ones((2, 2)))}

        def laid_out(self, chunk):
            laid_out.append(chunk)
            return (np.array([10.0, 20.0]), np.array([0.1, 0.2])), chunk.floats

    def measure_in_float64(profile, params, x, config):
        asked.append((profile[0], params, x, config))
        return np.float32([profile[0], 100 * x + params])

    monkeypatch.setattr(layer_residuals, "measure_in_float64", measure_in_float64)
    progress = SimpleNamespace(time_activity=lambda text: said.append(text) or nullcontext())
    chunk = Chunk(("a", "a"), (6, 9), None, (np.ones(2), np.array([0.25, 0.5])))
    results = layer_residuals.measure_chunk(Measured(), chunk, networks, "post", progress)
    san, skip = (results["log10_residual"][variant] for variant in profiles)
    assert_close(san, [[1, 1000.1], [3, 4]], rtol=1e-6)
    assert_close(skip, [[5, 1000.1], [7, 2000.2]], rtol=1e-6)
    places = [("san", 0), ("san_skip", 0), ("san_skip", 1)]
    for (_, _, _, config), (variant, row) in zip(asked, places, strict=True):
        assert config == networks[variant].replace(skip_gain=chunk.floats[1][row])
    assert said == [
        f"{variant} (norm=post), seed {chunk.seeds[row]}: residuals in float64"
        for variant, row in places
    ]
    assert len(laid_out) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_float64_is_taken_where_it_has_at_least_as_many_layers(monkeypatch, dtype):
    """+inf is an overflow of the logarithm, so no number; −inf is a residual of exactly 0."""
    profile = np.array([1.0, -np.inf, np.inf, np.nan], dtype)
    read = []

    def give(wide):
        def log_profile(params, x, config):
            read.append((jnp.asarray(params).dtype, jnp.asarray(x).dtype, config))
            return np.array(wide)

        monkeypatch.setattr(layer_residuals, "_log_profile", log_profile)
        arrays = np.ones(2, np.float32), np.ones(3, np.float32), np.int32(7)
        return layer_residuals.measure_in_float64(profile, *arrays)

    nan = np.nan
    fewer, as_many, more = [nan, nan, nan, 4.0], [5.0, nan, nan, 4.0], [5.0, 6.0, nan, 7.0]
    for wide, expected in (
        (fewer, [1.0, -np.inf, nan, nan]),
        (as_many, as_many),
        (more, more),
    ):
        values = give(wide)
        assert values.dtype == dtype
        np.testing.assert_array_equal(values, profile if dtype == np.float64 else expected)
    assert read == ([] if dtype == np.float64 else [(np.float64, np.float64, 7)] * 3)


def test_gaps_are_named_by_variant_seed_layer_and_reason():
    """Seeds are counted by rows, the layer is the first without a number in the first such seed."""
    nan = np.nan
    residual = [
        [[0, 1, 2], [0, nan, nan], [nan, 1, nan]],
        [[0, 1, 2], [0, 1, 2], [0, 1, 2]],
    ]
    ratio = np.ones((2, 3, 3))
    ratio[1, 2, 2] = nan
    dims = ("variant", "seed", "layer")
    results = xr.Dataset(
        {"ratio": (dims, ratio), "log10_residual": (dims, residual)},
        coords={"variant": ["san", "san_skip"]},
    )
    lines = list(layer_residuals.describe_gaps(results))
    assert len(lines) == 2
    assert lines[0] == (
        "attention and skips: no ratio in 1 of 3 seeds, first in seed 2 from layer 2: "
        "the hidden states overflow"
    )
    assert not lines[1].startswith("attention and skips") and lines[1].endswith(
        ": no log10_residual in 2 of 3 seeds, first in seed 1 from layer 1: "
        "rounding decides it in float64 too, or states overflow"
    )


def test_seeds_are_undecided_by_rounding_only_where_all_states_are_finite():
    nan, inf = np.nan, np.inf
    profile = np.array([[0, 1, 2], [0, nan, 2], [0, 1, inf], [0, nan, 2], [0, 1, -inf]])
    ratio = np.ones((5, 3))
    ratio[3, 2] = inf
    assert layer_residuals.find_undecided(profile, ratio).tolist() == [1, 2]
