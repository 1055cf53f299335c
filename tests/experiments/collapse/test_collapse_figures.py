"""Figures of run_collapse show what the arrays have."""

import numpy as np
from matplotlib.figure import Figure

from experiments import run_collapse
from experiments.collapse import (
    collapse_figures,
)
from experiments.lab import labelled
from experiments.lab.labelled import join_datasets
from tests.oracles.collapse_results import draw_points, make_gains, make_point, make_variant
from tests.support.closeness import assert_close
from tests.support.figures_as_data import describe


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


def test_the_cubic_line_ends_at_the_last_point_and_triples():
    """From the first layer that has lost more than three powers of ten."""
    ax = Figure().subplots()
    collapse_figures.draw_cubic_line(ax, np.array([0.1, 1.0, 4.0, 11.0, 32.0]))
    (line,) = ax.lines
    assert_close(line.get_xydata(), [(2, 32 / 9), (3, 32 / 3), (4, 32)])
    collapse_figures.draw_cubic_line(ax, np.array([0.1, 1.0, 4.0, 6.0, 8.0]))  # it does not triple
    assert len(ax.lines) == 1


def test_networks_with_a_predicted_law_for_some_seeds_are_drawn():
    results = join_datasets(draw_points(0), run_collapse.AXES)
    is_first = results.seed == results.seed[0]
    some = results.assign(log10_cubic=results.log10_cubic.where(~is_first))
    lines = [collapse_figures.bounds_and_constant_figure(r).axes[1].lines for r in (results, some)]
    assert len(lines[0]) == len(lines[1]) > 2


FIGURES = (
    collapse_figures.depth_figure,
    collapse_figures.residual_ratio_figure,
    collapse_figures.log_residual_figure,
    collapse_figures.local_rate_figure,
    collapse_figures.bounds_and_constant_figure,
    collapse_figures.sweep_weight_scale_figure,
    collapse_figures.sweep_skip_gain_figure,
    collapse_figures.mlp_gain_figure,
)


def test_golden_figures_of_all_variants(golden):
    """Of drawn results; some figures of two scales, and of one norm, differ from those of gains."""
    gains = join_datasets(draw_points(0), run_collapse.AXES)
    drawn = {draw.__name__: draw(gains) for draw in FIGURES}
    scales = {"norms": ("none",), "scales": (2.0, 0.55), "gains": (1.0,)}
    scaled = join_datasets(draw_points(1, **scales), run_collapse.AXES)
    for draw in (FIGURES[0], *FIGURES[4:]):
        drawn[f"{draw.__name__} of two scales"] = draw(scaled)
    parts = [f"== {name}\n{describe(fig) if fig else fig}" for name, fig in drawn.items()]
    golden("collapse_figures.txt", "\n".join(parts))


def test_rates_that_do_not_exist_have_no_figure():
    results = join_datasets(draw_points(0), run_collapse.AXES)
    results["local_rate"] = results.local_rate.where(False)
    assert collapse_figures.local_rate_figure(results) is None


def test_a_grid_of_too_many_panels_has_no_figure():
    many = np.linspace(0.1, 1.0, 1 + labelled.MOST_PANELS).tolist()
    results = join_datasets(make_gains(*many), run_collapse.AXES)
    for draw in (FIGURES[1], FIGURES[2], FIGURES[3]):
        assert draw(results) is None
    assert collapse_figures.sweep_skip_gain_figure(results) is not None  # shades, not panels
    assert collapse_figures.sweep_weight_scale_figure(results) is None  # of a single scale
    variants = {"san": make_variant([-9.0]), "san_skip": make_variant([-2.0])}
    points = {}
    for scale in many:
        for gain in (0.5, 1.0):
            points |= make_point("post", scale, gain, **variants)
    results = join_datasets(points, run_collapse.AXES)
    assert collapse_figures.sweep_skip_gain_figure(results) is None


def test_gains_of_mlps_are_drawn_without_norms_beside_attention_alone():
    """Λ is the logarithm over 3^L; its change is drawn over the gain."""
    curves = {"1": np.array([[0.0, -1, -4], [0.0, -1, -6]]), "4": np.array([[0.0, -1, -1]] * 2)}
    variants = {"san": make_variant([-9.0, -9.0]), "san_mlp": make_variant([-2.0, -2.0])}
    draw = collapse_figures.mlp_gain_figure
    with_norm = make_point("post", swept=curves, **variants)
    assert draw(join_datasets(with_norm, run_collapse.AXES)) is None
    plain = make_point("none", swept=curves, **variants)
    fig = draw(join_datasets(plain | with_norm, run_collapse.AXES))
    (ax,) = fig.axes
    rise = [np.mean([(9 - 4) / 9, (9 - 6) / 9]), (9 - 1) / 9]
    assert_close(ax.lines[0].get_xydata(), [[1, rise[0]], [4, rise[1]]])
    without = make_point("none", swept=curves, san_mlp=variants["san_mlp"])
    assert draw(join_datasets(without, run_collapse.AXES)) is None
    assert draw(join_datasets(make_point("none", **variants), run_collapse.AXES)) is None


def test_the_law_is_drawn_where_it_is_known_and_bounds_of_the_first_network_that_has_one():
    """Without a closed form there is no figure; a norm has the law without a theorem."""
    draw, shape = collapse_figures.bounds_and_constant_figure, (2, 3)
    cubic = {"log10_cubic": np.full(shape, -9.0)}
    unknown = {"log10_cubic": np.full(shape, np.nan)}
    san = make_variant([-9.0, -9.0])
    assert draw(join_datasets(make_point("none", san=san), run_collapse.AXES)) is None
    assert draw(join_datasets(make_point("none", san=san | unknown), run_collapse.AXES)) is None
    normed = make_point("post", san=san | cubic)
    bounds, constant = draw(join_datasets(normed, run_collapse.AXES)).axes
    assert not bounds.lines and len(constant.lines) == 2
    assert_close(constant.lines[1].get_ydata(), -9.0 / 3.0 ** np.arange(3))
    bounded = dict.fromkeys(("tightness_mean", "tightness_paper"), np.full(shape, 2.0))
    bounded["tightness_paper"] = np.full(shape, np.nan)
    bounded["log10_c"] = np.array([[0.5, 9, 9], [1.5, 9, 9]])
    plain = make_point("none", san=san | cubic | bounded)
    bounds, constant = draw(join_datasets(normed | plain, run_collapse.AXES)).axes
    assert [line.get_label() for line in bounds.lines] == [
        collapse_figures.TIGHTNESS["tightness_mean"]
    ]
    assert_close(bounds.lines[0].get_xydata(), [[1, 2], [2, 2]])
    theorem = np.mean(san["log10_residual"][:, 0] + np.array([0.5, 1.5]) / 2)
    (dotted,) = (line for line in constant.lines if line.get_linestyle() == ":")
    assert_close(dotted.get_ydata(), [theorem, theorem])
    assert dotted.get_color() == constant.lines[-2].get_color()
