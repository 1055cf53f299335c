"""Statements of run_collapse: each can come out otherwise."""

import numpy as np
import pytest
import xarray as xr

import rank_collapse as rc
from experiments import run_collapse
from experiments.collapse import (
    collapse_claims,
    collapse_figures,
)
from experiments.collapse.collapse_figures import raised_constant
from experiments.lab import labelled
from experiments.lab.labelled import join_datasets
from tests.oracles import draws
from tests.oracles.collapse_results import draw_points, make_gains, make_point, make_variant
from tests.support.closeness import assert_close
from tests.support.runs import verdicts


def test_a_layer_above_a_bound_is_counted_but_for_rounding():
    measures = {"log10_residual": [[1.0, 0.0, -5e6]], "bound": [[1.0, -1e-4, -5e6 - 20]]}
    for bound, count in ((measures["bound"], 0), ([[0.0, 9.0, -6e6]], 2)):
        dataset = xr.Dataset(
            {n: (("seed", "layer"), a) for n, a in (measures | {"bound": bound}).items()}
        )
        assert collapse_claims.count_above(dataset, "bound") == count


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
    assert finding.sentence.endswith("grows by a factor of 3.00 a layer.")
    for rate, end in ((0.8, "grows by a factor of 0.80 a layer."), (np.nan, "with skips 0.30.")):
        variants = {"san": make_variant([-9.0], 3.0), "san_skip": make_variant([-1.0])}
        results = join_datasets(make_point("post", **variants), run_collapse.AXES)
        results["local_rate"] = results.local_rate.where(False, rate)
        assert collapse_claims.make_finding(results).sentence.endswith(end)


def test_without_skips_of_gain_1_nothing_is_said_of_them():
    points = make_gains(0.0)
    assert {row.key for row in judge_points(points)} <= {"norm", "mlp rate", "mlps stop"}
    quantities = [c.quantity for c in compare_points(points)]
    assert quantities[1].startswith("skip gain 0, attention and skips: ")
    results = join_datasets(points, run_collapse.AXES)
    assert collapse_claims.make_finding(results) is None
    assert collapse_figures.depth_figure(results) is None


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
    other = {"2": curves["1"], "4": curves["2"]}  # nothing was published of these gains
    keys = [row.key for row in judge_points(make_point("post", swept=other, **variants))]
    assert keys.count("mlps stop") == keys.count("mlps slow") == 1
    no_san = {name: variants[name] for name in ("san_mlp", "san_skip")}
    keys = {row.key for row in judge_points(make_point("none", swept=curves, **no_san))}
    assert keys == {"mlp rate", "skips stop", "mlps stop", "law of the fall"}


def test_a_deeper_network_stands_beside_the_last_published_layer():
    profile = -np.arange(15.0)[None]
    deep = dict.fromkeys(("log10_residual", "log10_size", "plain_log10_residual"), profile)
    points = make_point("post", san_skip=deep | {"ratio": np.full((1, 15), 0.25)})
    first, *_ = compare_points(points)
    curves = collapse_claims.published_curves(collapse_claims.PUBLISHED["bert-base-cased"], 12)
    assert first.quantity.endswith("residual ratio after 14 layers")
    assert first.published == curves["init"]["SAN+skip"][12]
    # rounding decides more of them in a shorter format
    for dtype, measured in ((np.float16, "below 1e-03 (rounding)"), (np.float32, 2**-12)):
        deep["ratio"] = np.full((1, 15), 2**-12, dtype)
        first, *_ = compare_points(make_point("post", san_skip=deep))
        assert first.measured == measured


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
        (check,) = (
            c
            for c in compare_points(points)
            if "above the bound with sums over heads" in c.quantity
        )
        assert check.measured == 2 * seeds * covered  # of two layers


def test_layers_above_a_free_bound_are_counted_where_it_has_numbers():
    """The bound of the paper's lemma is not free; an input is its own bound."""
    bounds = dict.fromkeys(run_collapse.TIGHTNESS, np.full((2, 3), -1.0))
    bounds["tightness_mean"] = np.array([[-1.0, np.nan, 0.5], [-1, -0.1, -0.1]])
    bounds["tightness_diameter"] = np.array([[-1.0, 1, 1], [-1, 1, -1e-4]])
    bounds["tightness_cubic_diameter"] = np.full((2, 3), np.nan)
    bounds |= dict.fromkeys(
        ("log10_published_bound", "log10_layer_bound", "log10_bound"), np.full((2, 3), 9.0)
    )
    san = make_variant([-8.0, -8.0]) | bounds | {"admissible": np.ones((2, 3))}
    lines = {c.quantity: c for c in compare_points(make_point(san=san))}
    (check,) = (c for q, c in lines.items() if "needs no condition" in q)
    assert check.measured == 1 and check.published == 0  # a mean of 0 and 2 layers
    medians = {q.partition(": ")[0]: c.measured for q, c in lines.items() if "median over" in q}
    names = run_collapse.TIGHTNESS
    expected = {"tightness_paper": -1.0, "tightness_diameter": np.mean([1.0, (1 - 1e-4) / 2])}
    expected["tightness_mean"] = np.mean([0.5, -0.1])
    for name, value in expected.items():
        (measured,) = (m for text, m in medians.items() if names[name] in text)
        assert measured == pytest.approx(value), name


def test_where_mlps_begin_to_slow_the_collapse():
    gains = np.array([0.5, 1.0, 2.0, 4.0])
    raised = np.array([[-0.2, -0.1, 0.1, 0.2], [-0.2, 0.1, 0.2, 0.3], [0.1, 0.2, 0.3, 0.4]])
    crossings = collapse_claims.crossing(gains, raised)
    assert_close(crossings[:2], [2**0.5, 2 ** (-1 / 3)])
    assert np.isnan(crossings[2])
    touched = np.array([-0.2, 0.0, 0.1, 0.2])
    assert_close(collapse_claims.crossing(gains, touched), gains[1])
    beyond = np.where(gains == 4.0, np.nan, raised)  # where the residual is no number
    np.testing.assert_array_equal(collapse_claims.crossing(gains, beyond), crossings)
    curves = {f"{g:g}": np.full((3, 2), -3.0 + g) for g in gains}
    points = make_point(san={"log10_residual": np.full((3, 2), -1.5)}, swept=curves)
    dataset = join_datasets(points, run_collapse.AXES).assign_coords(layer=[0, 1])
    dataset = dataset.isel(weight_scale=0, skip_gain=0)
    np.testing.assert_array_equal(dataset.mlp_gain, gains)
    assert_close(raised_constant(dataset)[0], [[-1 / 3, -1 / 6, 1 / 6, 5 / 6]] * 3)


def test_points_of_a_grid_have_their_own_verdicts_with_their_labels():
    """At a gain of 0 a network with skips has none, and has no row."""
    points = {}
    for gain, remaining in ((-0.5, 1e-6), (0.0, 1e-6), (0.5, 1e-6), (1.0, 0.6)):
        variants = {"san_skip": make_variant([-9.0] * 12, remaining=remaining)}
        points |= {(*key[:2], gain): value for key, value in make_point(**variants).items()}
    rows = {row.setting: row for row in judge_points(points) if row.key == "skips stop"}
    shares = {setting.rpartition("skip gain ")[2]: row.estimate for setting, row in rows.items()}
    assert shares == {"-0.5": 0.0, "0.5": 0.0, "1": 1.0}


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("gains", {}),
        ("scales", {"scales": (2.0, 0.55), "gains": (1.0,)}),
        ("pre", {"norms": ("pre", "none"), "gains": (1.0,)}),
    ],
)
def test_golden_claims_of_all_variants(name, grid, golden):
    """Rows, numbers and finding of drawn results: norms in no order, gaps, and layers on either
    side of each bound."""
    results = join_datasets(draw_points(0, **grid), run_collapse.AXES)
    lines = [
        f"{row.key} | {row.setting} | {row.draws} of {row.num_made} | {row.estimate} | {row.note}"
        for row in collapse_claims.judge_claims(results)
    ]
    lines += map(str, collapse_claims.compare_results(results))
    lines.append(str(collapse_claims.make_finding(results)))
    golden(f"collapse_claims.{name}.txt", "\n".join(lines))
