"""What stands in for a figure's files says another thing of another figure, and the same again."""

import matplotlib.pyplot as plt
import pytest
from figures_as_data import FiguresAsData

from rank_collapse.runs.drawn import drawn


def figure(values, title="t", marks="o"):
    shown, ax = plt.subplots()
    ax.plot(values, marks)
    ax.set_title(title)
    plt.close(shown)
    return shown


def test_equal_figures_are_equal_files_and_others_are_not():
    rendered = []
    draw = FiguresAsData(lambda f: rendered.append(f) or {".png": b"png", ".pdf": b"pdf"})
    first = draw(figure([1, 2, 3]))
    assert draw(figure([1, 2, 3])) == first == {".png": b"png", ".pdf": b"pdf"}
    other = draw(figure([1, 2, 4]))
    assert other == draw(figure([1, 2, 4])) != first and len(rendered) == 1
    draw(figure([1, 2, 3], title="another"))
    assert len(rendered) == 2


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

    draw = FiguresAsData(lambda f: {".png": b"png"})
    assert draw(shown(1.0)) != draw(shown(2.0))


def test_a_figure_of_users_is_the_same_files_each_time():
    first, second = (drawn(figure([1, 2, 3])) for _ in range(2))
    assert first == second and b"CreationDate" not in first[".pdf"]
