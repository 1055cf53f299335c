"""What stands in for a figure's files says another thing of another figure, and the same again."""

import matplotlib.pyplot as plt
import pytest
from figures_as_data import as_data

from rank_collapse.runs.drawn import drawn


def figure(values, title="t", marks="o"):
    shown, ax = plt.subplots()
    ax.plot(values, marks)
    ax.set_title(title)
    plt.close(shown)
    return shown


def test_equal_figures_are_equal_files_and_others_are_not():
    first = as_data(figure([1, 2, 3]))
    assert as_data(figure([1, 2, 3])) == first != as_data(figure([1, 2, 4]))
    assert as_data(figure([1, 2, 3], title="another")) != first


def test_texts_of_the_first_figure_of_a_kind_are_set():
    with pytest.raises(ValueError, match="Expected"):
        as_data(figure([1, 2, 3], title="$\\frac{$"))


@pytest.mark.parametrize("kind", ["scatter", "bar", "imshow", "fill_between", "text"])
def test_every_kind_of_artist_counts(kind):
    def shown(value):
        made, ax = plt.subplots()
        if kind == "imshow":
            ax.imshow([[0.0, value]])
        elif kind == "text":
            ax.text(0.5, 0.5, str(value))
        else:
            getattr(ax, kind)([0.0, 1.0], [1.0, value])
        ax.set(xlim=(0, 1), ylim=(0, 1))
        plt.close(made)
        return made

    assert as_data(shown(1.0)) != as_data(shown(2.0))


def test_a_figure_of_users_is_the_same_files_each_time():
    first, second = (drawn(figure([1, 2, 3])) for _ in range(2))
    assert first == second and b"CreationDate" not in first[".pdf"]
