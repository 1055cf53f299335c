"""Figures of profiles."""

import numpy as np

import rank_collapse as rc
from rank_collapse.report import figures
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals

L, B, N, D = 3, 2, 5, 4


HIDDEN = np.random.default_rng(0).normal(size=(L, B, N, D)).astype(np.float32)
ONE = rc.profile(HIDDEN[:, 0], measures=("residual_ratio",))


def test_profiles_are_drawn_over_each_other():
    p, q = (rc.profile(HIDDEN[:, b], measures=("residual_ratio", "token_cosine")) for b in (0, 1))
    q = q._replace(measures={"residual_ratio": q["residual_ratio"]})
    for profiles, labels in (([p, q], ["0", "1"]), ({"a": p, "b": q}, ["a", "b"])):
        ratio, cosine = rc.plot(profiles).axes
        for line, one in zip(ratio.get_lines(), (p, q), strict=True):
            np.testing.assert_allclose(line.get_ydata(), one["residual_ratio"], rtol=1e-6)
        assert [text.get_text() for text in ratio.get_legend().get_texts()] == labels
        assert len(cosine.get_lines()) == 1
    cosine = rc.plot([q, q, p]).axes[1]  # the one curve has the colour of its profile
    assert cosine.get_lines()[0].get_color() == figures.color(2)
    assert rc.plot(p).axes[0].get_legend() is None


NOTHING = "has no measures by layer"


@parametrize_refusals(
    [
        ([], NOTHING),
        ({}, NOTHING),
        (ONE._replace(measures={}), r"has no measures by layer, each \[l\] or \[l, b\]"),
        ([ONE, ONE._replace(measures={})], r"has no measures by layer, each \[l\] or \[l, b\]"),
        ({"residual_ratio": np.zeros((2, 3, 4))}, r"\(2, 3, 4\) is not \[l\] or \[l, b\]"),
    ]
)
def test_what_has_no_layers_is_not_drawn(arguments, message):
    is_refused(message, rc.plot, *arguments)


def profiled(**measures):
    """Returns the panels of a profile, by their label."""
    return {ax.get_ylabel(): ax for ax in rc.plot(measures).axes if ax.get_visible()}


def test_a_profile_is_logarithmic_where_it_spans_more_than_a_decade_and_none_is_below_0():
    axes = profiled(
        a=[1.0, 11.0],
        b_c=[1.0, 10.0],
        c=[-1.0, 1.0, 100.0],
        d=[0.0, 1.0, 11.0],
        e=[0.0, 1.0, 5.0],
        f=[1.0, 5.0, np.inf],
    )
    scales = {name: ax.get_yscale() for name, ax in axes.items()}
    linear = dict.fromkeys(("b c", "c", "e", "f"), "linear")
    assert scales == linear | dict.fromkeys("ad", "log")
    assert all(ax.get_xlabel() == "layer" for ax in axes.values())
    assert axes["a"].get_gridspec().get_geometry() == (2, 3)


def test_layers_are_shaded_where_rounding_decides_any_example():
    measures = {"residual_ratio": np.ones((3, 2)), "token_cosine": np.ones((3, 2))}
    rounding = np.array([[False, False], [False, True], [True, True]])
    for ax in rc.plot(rc.Profile(measures, rounding)).axes[:2]:
        spans = [patch.get_extents().transformed(ax.transData.inverted()) for patch in ax.patches]
        assert_close([[s.x0, s.x1] for s in spans], [[0.5, 1.5], [1.5, 2.5]])


def test_panels_of_one_profile_differ_in_colour_and_profiles_keep_theirs_in_every_panel():
    one = {"a": [1.0, 2.0], "b": [1.0, 2.0]}
    assert [ax.lines[0].get_color() for ax in rc.plot(one).axes] == [*figures.COLORS[:2]]
    for ax in rc.plot([one, one]).axes:
        assert [line.get_color() for line in ax.lines] == [*figures.COLORS[:2]]
        assert all(tick == round(tick) for tick in ax.get_xticks())


def test_several_profiles_share_a_scale_that_any_of_them_needs():
    far, near = {"ratio": [1.0, 100.0]}, {"ratio": [5.0, 6.0]}
    for profiles in ([far, near], [near, far]):
        assert rc.plot(profiles).axes[0].get_yscale() == "log"
    assert rc.plot([near, near]).axes[0].get_yscale() == "linear"
