"""run_collapse at tiny size: what it measures, resume, devices, compilations, bad input."""

from contextlib import nullcontext
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

import rank_collapse as rc
from experiments import run_collapse
from experiments.collapse import (
    collapse_claims,
    collapse_figures,
    layer_residuals,
)
from experiments.collapse.collapse_figures import raised_constant
from experiments.lab import initial_tokens, labelled
from experiments.lab.executor import Chunk
from experiments.lab.labelled import join_datasets, make_dataset
from rank_collapse.measures import residuals
from rank_collapse.theory import logdomain
from tests.oracles import draws
from tests.support.closeness import assert_close
from tests.support.runs import arrays, finished, parsed, result_of, rows, run, verdicts

SIZE = ["--depth=3", "--num_heads=2", "--d_model=8", "--num_tokens=6", "--num_seeds=3"]
TWO = [*SIZE, "--variants=san,san_skip"]


base = finished(run_collapse, *TWO)


@pytest.mark.full
def test_the_run_measures_what_the_library_gives_one_by_one(base):
    options, saved = parsed(run_collapse, *TWO), arrays(base)
    ids, _ = initial_tokens.read_tokens(options)
    key_tokens, key_params = jax.random.split(jax.random.fold_in(jax.random.key(0), 2))
    x = initial_tokens.input_tokens(key_tokens, ids, options)
    for variant, config in run_collapse.make_configs(options, "none", options.variants).items():
        params = rc.init(key_params, config)
        hidden = rc.apply(params, x, config).hidden
        measures = {
            n: saved[f"seeds/{n}/{variant}"][2] for n in ("ratio", *run_collapse.COLUMNS[1:3])
        }
        ratio = [residuals.residual_ratio(h) for h in hidden]
        np.testing.assert_allclose(measures["ratio"], ratio, rtol=1e-3, atol=1e-6)
        profile = logdomain.log_residual_profile(params, x, config)
        assert_close(measures["log10_residual"], profile, atol=1e-3)
        assert_close(measures["plain_log10_residual"][:2], profile[:2], atol=1e-3)


@pytest.mark.full
def test_rows_figures_and_statements_are_of_the_arrays(base):
    table, saved = rows(base), arrays(base)
    for column in ("log10_bound", "tightness_mean"):
        assert all((r[column] != "") == (r["variant"] == "san") for r in table)
    results, _ = result_of(run_collapse, base)
    comparisons = {c.quantity: c for c in run_collapse.compare_results(results)}
    assert "attention alone: residual ratio after 3 layers" in comparisons
    rounded = results.assign(ratio=results.ratio * 0 + np.float32(6e-8))
    first, *_ = run_collapse.compare_results(rounded)
    assert first.measured == "below 1e-06 (rounding)"
    free = [c.measured for q, c in comparisons.items() if "needs no condition" in q]
    assert free and not any(free)
    claims = {row.key: row for row in run_collapse.judge_claims(results)}
    assert claims["rate"].draws == 3
    assert claims["heads bound"].estimate == 0 and "cases" in claims["heads bound"].note
    assert claims["skips"].estimate > 1
    ratio = saved["seeds/ratio/san_skip"]
    remaining = ratio[:, -1] / ratio[:, 0]
    assert claims["skips stop"].estimate == np.mean(remaining > 0.1)


@pytest.fixture
def compilations():
    """The programs that XLA compiles."""
    events, event = [], "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: events.append(name) if name == event else None
    )
    yield events
    jax.monitoring.clear_event_listeners()


@pytest.mark.full
def test_a_sweep_compiles_as_often_as_one_value(base, tmp_path, compilations):
    assert run(run_collapse, TWO, tmp_path / "one") == 0
    single_count, swept = len(compilations), ("--weight_scale=1,0.5,2", "--skip_gain=1,0")
    assert run(run_collapse, [*TWO, *swept], tmp_path) == 0
    assert 0 < len(compilations) - single_count <= single_count
    expected, results = arrays(base), arrays(tmp_path)
    for name, values in expected.items():
        point_values = results[f"weight_scale=1.0/skip_gain=1.0/{name}"]
        np.testing.assert_allclose(point_values, values, rtol=1e-5, err_msg=name)
    without_skip = results["weight_scale=0.5/skip_gain=0.0/seeds/ratio/san_skip"]
    san = results["weight_scale=0.5/skip_gain=1.0/seeds/ratio/san"]
    np.testing.assert_allclose(without_skip, san, rtol=1e-3, atol=1e-6)
    assert (tmp_path / "figures" / "sweep_weight_scale.png").exists()
    assert (tmp_path / "figures" / "sweep_skip_gain.png").exists()


@pytest.mark.full
def test_what_is_not_known_is_a_gap_with_its_reason(tmp_path, capsys):
    """Weights that overflow: empty cells and a line that says why, and the run ends well."""
    arguments = [*SIZE, "--variants=san,san_skip", "--inputs=gaussian", "--weight_scale=1e30,1"]
    assert run(run_collapse, arguments, tmp_path) == 0
    err = capsys.readouterr().err
    assert "attention alone: no ratio in 3 of 3 seeds" in err
    by_scale = {1e30: [], 1: []}
    for row in rows(tmp_path):
        by_scale[float(row["weight_scale"])].append(row)
    assert {r["ratio"] for r in by_scale[1e30] if r["layer"] != "0"} == {""}
    assert all(r["ratio"] and r["log10_residual"] for r in by_scale[1])


@pytest.mark.full
def test_another_text_is_another_config(base, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text("six other tokens in a row")
    assert run(run_collapse, [*TWO, f"--text={other}"], base) == 2
    assert "text_sha256" in capsys.readouterr().err


def test_rates_are_only_given_where_they_mean_something():
    profile = xr.DataArray([2.0, 0.5, -2.0, -6.0, -18.0, -54.0, -np.inf], dims="layer")
    expected = [np.nan, np.nan, np.nan, 4 / 2.5, 3.0, 3.0, np.nan]
    assert_close(layer_residuals.local_rates(profile), expected)


def test_a_layer_above_a_bound_is_counted_but_for_rounding():
    measures = {"log10_residual": [[1.0, 0.0, -5e6]], "bound": [[1.0, -1e-4, -5e6 - 20]]}
    for bound, count in ((measures["bound"], 0), ([[0.0, 9.0, -6e6]], 2)):
        dataset = xr.Dataset(
            {n: (("seed", "layer"), a) for n, a in (measures | {"bound": bound}).items()}
        )
        assert collapse_claims.count_above(dataset, "bound") == count


def make_variant(log10_ratio, rate=3.0, remaining=None):
    """Makes measures of a variant by seed at three layers, from its ratio at the last one and the
    rate, or the remaining share of its first ratio."""
    last = np.asarray(log10_ratio, float)
    if remaining is None:  # steps of a tenth of the last logarithm, and of rate times that
        first, middle = (last - share * last / 10 for share in (rate + 1, rate))
    else:
        first = last - np.log10(remaining)
        middle = (first + last) / 2
    profile = np.stack([first, middle, last], axis=1)
    size = np.zeros_like(profile)
    return {
        "log10_residual": profile,
        "log10_size": size,
        "ratio": np.full_like(profile, 0.3),
        "plain_log10_residual": size,
    }


def make_point(norm="none", weight_scale=1.0, skip_gain=1.0, swept=None, **variants):
    """Makes a point of the axes: measures of each variant, the residual by gain of the MLPs."""
    variables = {f"{m}/{v}": a for v, measures in variants.items() for m, a in measures.items()}
    variables |= {f"swept/{gain}": curve for gain, curve in (swept or {}).items()}
    dataset = make_dataset(variables, ("variant", "layer"), swept=("mlp_gain", "layer"))
    dataset["local_rate"] = layer_residuals.local_rates(dataset.log10_residual)
    return {(norm, weight_scale, skip_gain): dataset}


def judge_points(points):
    return run_collapse.judge_claims(join_datasets(points, run_collapse.AXES))


def compare_points(points):
    return run_collapse.compare_results(join_datasets(points, run_collapse.AXES))


def test_every_variant_has_a_published_curve_to_stand_beside():
    variants = {v: make_variant([-2.0]) for v in run_collapse.NETWORKS}
    comparisons = compare_points(
        make_point("post", **variants) | make_point("post", 2.0, **variants)
    )
    ratios = {c.quantity: c.published for c in comparisons if "ratio" in c.quantity}
    curves = collapse_claims.published_curves(collapse_claims.PUBLISHED["bert-base-cased"], 12)[
        "init"
    ]
    published = [curves[n][2] for n in collapse_claims.PUBLISHED_NAMES.values()]
    assert [*ratios.values()] == 2 * published
    for name in ("weight scale 1, attention and skips", "weight scale 2, attention and skips"):
        assert ratios[f"{name}: residual ratio after 2 layers"] == published[2]


def make_gains(*gains, rest=(-2.0, -3.0)):
    """Makes the points of gains of the skips, each with another last residual of skips."""
    points = {}
    for gain in gains:
        variants = {"san": make_variant([-9.0, -9.1, -9.2])}
        variants["san_skip"] = make_variant([rest[gain == 1]] * 3)
        points |= make_point("post", 0.5, gain, **variants)
    return points


def test_of_a_grid_of_gains_each_number_has_its_label():
    """The example of --help begins with a gain of 0, which says nothing about skips."""
    points = make_gains(0.0, 1.0)
    for row in judge_points(points):
        if row.key == "skips":
            assert row.estimate == pytest.approx(-3.0 + 9.0, abs=0.2)
    ratios = {c.quantity: c for c in compare_points(points)}
    texts = [f"skip gain {gain}, attention and skips" for gain in (0, 1)]
    texts = [f"{text}: residual ratio after 2 layers" for text in texts]
    assert ratios[texts[0]].published is None and ratios[texts[1]].published > 0.1
    finding = collapse_claims.make_finding(join_datasets(points, run_collapse.AXES))
    assert finding.sentence.startswith("Skip gain 1: after 2 layers")


def test_without_skips_of_gain_1_nothing_is_said_of_them():
    points = make_gains(0.0)
    assert {row.key for row in judge_points(points)} <= {"norm", "mlp rate", "mlps stop"}
    quantities = [c.quantity for c in compare_points(points)]
    assert quantities[1].startswith("skip gain 0, attention and skips: ")
    results = join_datasets(points, run_collapse.AXES)
    assert collapse_claims.make_finding(results) is None
    assert collapse_figures.depth_figure(results) is None


def test_the_first_picture_shows_what_the_arrays_have():
    """On a logarithmic axis, at the gain of 1 whichever comes first; the title names the point."""
    results = join_datasets(make_gains(0.5, 1.0), run_collapse.AXES)
    (ax,) = collapse_figures.depth_figure(results).axes
    assert ax.get_yscale() == "log" and ax.get_title() == "skip gain 1"
    lines = {line.get_label(): line.get_ydata() for line in ax.lines}
    chosen = results.sel(norm_placement="post", weight_scale=0.5, skip_gain=1)
    for variant, name in (("san", "attention alone"), ("san_skip", "attention and skips")):
        network = chosen.sel(variant=variant).mean("seed")
        expected = 10.0 ** (network.log10_residual - network.log10_size)
        np.testing.assert_allclose(lines[name], expected, rtol=1e-3)


def test_every_point_of_a_grid_has_a_panel():
    results = join_datasets(make_gains(0.0, 0.5, 1.0), run_collapse.AXES)
    for draw in (collapse_figures.residual_ratio_figure, collapse_figures.log_residual_figure):
        titles = [ax.get_title() for ax in draw(results).axes]
        assert titles == [f"Post-LN, skip gain {gain:g}" for gain in (0.0, 0.5, 1.0)]
    panel = collapse_figures.residual_ratio_figure(results).axes[1]
    lines = {line.get_label(): line.get_ydata() for line in panel.lines}
    expected = results.ratio.sel(skip_gain=0.5, variant="san_skip").mean("seed").squeeze()
    assert_close(lines["attention and skips"], expected)
    many = make_gains(*np.linspace(0.0, 1.0, 1 + labelled.MOST_PANELS).tolist())
    assert collapse_figures.log_residual_figure(join_datasets(many, run_collapse.AXES)) is None


def test_every_scale_of_the_weights_is_a_setting_with_the_first_gain_of_the_skips():
    small, large = ({"san": make_variant([-9.0, -9.1, -9.2], rate)} for rate in (3.0, 1.0))
    points = {}
    for gain in (1.0, 0.5):
        points |= make_point(skip_gain=gain, **small) | make_point(
            weight_scale=2.0, skip_gain=gain, **large
        )
        small = large
    rates = {row.setting: row.estimate for row in judge_points(points) if row.key == "rate"}
    assert rates == {"weight scale 1": pytest.approx(3), "weight scale 2": pytest.approx(1)}


@pytest.mark.parametrize(
    ("rate", "skip", "remaining", "expected"),
    [(3.0, -1.0, 0.2, "within"), (1.5, -9000.0, 0.05, "outside")],
)
def test_statements_of_the_paper_can_come_out_otherwise(rate, skip, remaining, expected):
    offsets = np.linspace(-1, 1, 8)
    spread = rate + np.linspace(-0.01, 0.01, 8)
    skips = make_variant(offsets + skip, remaining=remaining)
    parts = {"san": make_variant(10 * offsets - 800, spread), "san_skip": skips}
    rows = list(judge_points(make_point(**parts, san_mlp=skips, transformer=skips)))
    answers = verdicts(rows)
    assert {answers[key] for key in ("skips stop", "mlps stop", "mlps slow")} == {expected}
    rows += [row for row in judge_points(make_point("post", **parts)) if row.key == "norm"]
    measured = {row.key: row.estimate for row in rows}
    assert measured["rate"] == pytest.approx(rate) and measured["norm"] == pytest.approx(rate)
    assert (measured["skips"] > 0) == (expected == "within")


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


def test_without_skips_post_and_pre_norm_are_one_row():
    """One network up to an outer norm; with skips they are two."""
    variants = {v: make_variant([-9.0, -8.0, -7.0]) for v in run_collapse.NETWORKS}
    norms = {norm: make_point(norm, **variants) for norm in ("none", "post", "pre")}

    def list_norms(key, points):
        texts = [row.setting for row in judge_points(points) if row.key == key]
        return [
            norm
            for norm in norms
            for text in texts
            if labelled.describe_point({"norm_placement": norm}) in text
        ]

    all_points = norms["none"] | norms["post"] | norms["pre"]
    for key in ("mlp rate", "skips", "mlps slow"):
        assert list_norms(key, all_points) == ["none", "post"], key
    assert list_norms("norm", all_points) == ["post"]
    assert list_norms("skips stop", all_points) == ["none", "post", "pre"]
    assert list_norms("norm", norms["none"] | norms["pre"]) == ["pre"]  # where it is the only one
    x = draws.normal(5, 8)
    post = rc.san(3, 2, 8, norm_placement="post", norm="layer")
    params = draws.parameters(post, bias_scale=0.0, gain_scale=0.0)
    pre = rc.apply(params, x, post.replace(norm_placement="pre")).hidden

    def normalize(x):
        x = x - np.mean(x, axis=-1, keepdims=True)
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + post.norm_eps)

    after = rc.apply(params, normalize(np.asarray(x)), post).hidden
    np.testing.assert_allclose(after, normalize(np.asarray(pre)), rtol=1e-4, atol=1e-5)


def test_the_published_form_and_skips_with_mlps_have_rows():
    variants = {v: make_variant([-9.0, -8.0], remaining=0.2) for v in run_collapse.NETWORKS}
    variants["san"]["log10_residual"] = np.array([[0.0, -1.0, -3.0], [0.0, -1.0, -4.0]])
    curves = {"1": np.array([[0.0, -0.2, -0.5], [0.0, -1.0, -2.0]]), "2": np.zeros((2, 3))}
    claims = list(judge_points(make_point("post", swept=curves, **variants)))
    stop = {row.setting.split(",")[0]: row for row in claims if row.key == "mlps stop"}
    text = "MLPs with their own skip"
    assert [*stop] == ["Post-LN", text]  # MLPs alone, and as published
    place = "Post-LN, weight scale 1"
    assert [row.setting for row in claims if row.key == "mlps and skips stop"] == [place]
    assert stop[text].estimate == 0.5
    slow = [r.estimate for r in claims if r.key == "mlps slow" and r.setting.startswith(text)]
    assert slow == pytest.approx([2.25])
    plain = judge_points(make_point("none", swept=curves, **variants))
    assert not any("published" in row.setting for row in plain)


def test_layers_above_a_bound_are_counted_where_the_condition_holds():
    """The published form is counted under the lemma's condition. The form with sums over heads is
    a check in the table."""
    for seeds, broken, covered, count in ((3, 0, 1.0, 0), (3, 1, 1.0, 2), (3, 1, 0.0, None)):
        san = make_variant(np.full(seeds, -8.0))
        bounded = dict.fromkeys(run_collapse.TIGHTNESS, np.ones((seeds, 3)))
        bounded["log10_published_bound"] = np.full((seeds, 3), 9.0)
        bounded["log10_published_bound"][:broken] = -9.0
        bounded |= {"log10_layer_bound": np.zeros((seeds, 3))}
        bounded["admissible"] = np.full((seeds, 3), covered)
        bounded["log10_bound"] = np.full((seeds, 3), -9.0)
        points = make_point(san=san | bounded)
        (row,) = (row for row in judge_points(points) if row.key == "heads bound")
        assert row.estimate == count
        (check,) = (c for c in compare_points(points) if "sums over heads" in c.quantity)
        assert check.measured == 2 * seeds * covered  # of two layers


def test_where_mlps_begin_to_slow_the_collapse():
    gains = np.array([0.5, 1.0, 2.0, 4.0])
    raised = np.array([[-0.2, -0.1, 0.1, 0.2], [-0.2, 0.1, 0.2, 0.3], [0.1, 0.2, 0.3, 0.4]])
    crossings = collapse_claims.crossing(gains, raised)
    assert_close(crossings[:2], [2**0.5, 2 ** (-1 / 3)])
    assert np.isnan(crossings[2])
    beyond = np.where(gains == 4.0, np.nan, raised)  # where the residual is no number
    np.testing.assert_array_equal(collapse_claims.crossing(gains, beyond), crossings)
    curves = {f"{g:g}": np.full((3, 2), -3.0 + g) for g in gains}
    points = make_point(san={"log10_residual": np.full((3, 2), -1.5)}, swept=curves)
    dataset = join_datasets(points, run_collapse.AXES).assign_coords(layer=[0, 1])
    dataset = dataset.isel(weight_scale=0, skip_gain=0)
    np.testing.assert_array_equal(dataset.mlp_gain, gains)
    assert_close(raised_constant(dataset)[0], [[-1 / 3, -1 / 6, 1 / 6, 5 / 6]] * 3)


@pytest.mark.full
def test_the_gain_of_mlps_is_swept_in_one_program(tmp_path):
    """With norms the only gain is 1, which the figure leaves out."""
    arguments = [*SIZE, "--variants=san,san_mlp", "--mlp_gain=1,8", "--norm=none,post"]
    assert run(run_collapse, arguments, tmp_path) == 0
    saved = arrays(tmp_path)
    assert {name for name in saved if "post/seeds/swept" in name} == {
        "norm_placement=post/seeds/swept/1"
    }
    cell = "norm_placement=none/seeds"
    plain, swept = saved[f"{cell}/log10_residual/san_mlp"], saved[f"{cell}/swept/1"]
    np.testing.assert_allclose(swept, plain, rtol=1e-4, atol=1e-4)  # the same network
    larger_gain = saved[f"{cell}/swept/8"]
    assert (larger_gain[:, -1] > swept[:, -1] + 1).all()
    assert (tmp_path / "figures" / "mlp_gain.png").exists()


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


@pytest.mark.full
def test_the_constant_of_the_law_is_that_of_networks_without_skips(base, tmp_path):
    """Its closed form is that of attention alone; figures need no attention alone."""
    results, _ = result_of(run_collapse, base)
    comparisons = list(run_collapse.compare_results(results))
    laws = {c.quantity: c for c in comparisons if "3^L law" in c.quantity}
    assert len(laws) == 2
    assert all("law of attention alone" in quantity for quantity in laws)
    assert all(np.isfinite([c.measured, c.published]).all() for c in laws.values())
    assert run(run_collapse, [*SIZE, "--variants=san_mlp", "--mlp_gain=1,2"], tmp_path) == 0
    assert (tmp_path / "figures" / "log_residual.png").exists()
    assert not (tmp_path / "figures" / "mlp_gain.png").exists()


def test_points_of_a_grid_have_their_own_verdicts_with_their_labels():
    """At a gain of 0 a network with skips has none, and has no row."""
    points = {}
    for gain, remaining in ((0.0, 1e-6), (0.5, 1e-6), (1.0, 0.6)):
        variants = {"san_skip": make_variant([-9.0] * 12, remaining=remaining)}
        points |= {(*key[:2], gain): value for key, value in make_point(**variants).items()}
    rows = {row.setting: row for row in judge_points(points) if row.key == "skips stop"}
    shares = {setting.rpartition("skip gain ")[2]: row.estimate for setting, row in rows.items()}
    assert shares == {"0.5": 0.0, "1": 1.0}


def test_the_cubic_line_ends_at_the_last_point_and_triples():
    """From the first layer that has lost more than three powers of ten."""
    ax = Figure().subplots()
    collapse_figures.draw_cubic_line(ax, np.array([0.1, 1.0, 4.0, 11.0, 32.0]))
    (line,) = ax.lines
    assert_close(line.get_xydata(), [(2, 32 / 9), (3, 32 / 3), (4, 32)])
    collapse_figures.draw_cubic_line(ax, np.array([0.1, 1.0, 4.0, 6.0, 8.0]))  # it does not triple
    assert len(ax.lines) == 1
