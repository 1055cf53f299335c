"""What stands in for a figure's files says another thing of another figure, and the same again."""

import matplotlib.pyplot as plt
import pytest
from figures_as_data import as_data

from rank_collapse.runs.drawn import drawn


def figure(method, *arguments):
    shown, ax = plt.subplots()
    getattr(ax, method)(*arguments)
    ax.set(xlim=(0, 1), ylim=(0, 1))
    plt.close(shown)
    return shown


PAIRS = [([0.0, 1.0], [1.0, value]) for value in (1.0, 2.0)]


@pytest.mark.parametrize(
    ("method", "one", "other"),
    [
        *((method, *PAIRS) for method in ("plot", "scatter", "bar", "fill_between")),
        ("imshow", ([[0.0, 1.0]],), ([[0.0, 2.0]],)),
        ("text", (0.5, 0.5, "a"), (0.5, 0.5, "b")),
        ("set_title", ("a",), ("b",)),
    ],
)
def test_equal_figures_are_equal_files_and_others_are_not(method, one, other):
    first = as_data(figure(method, *one))
    assert as_data(figure(method, *one)) == first != as_data(figure(method, *other))


def test_texts_of_the_first_figure_of_a_kind_are_set():
    with pytest.raises(ValueError, match="Expected"):
        as_data(figure("set_title", "$\\frac{$"))


def test_a_figure_of_users_is_the_same_files_each_time():
    first, second = (drawn(figure("plot", [1, 2, 3])) for _ in range(2))
    assert first == second and b"CreationDate" not in first[".pdf"]
