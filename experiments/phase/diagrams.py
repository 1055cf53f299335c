"""A phase diagram: cells over two floats, measured, beside the boundary of a theory.

Axis letters: y, x places on the axes, s seeds.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from experiments import small_task
from experiments.initial import FLOOR
from experiments.shell import tidy
from experiments.shell.executor import Executor
from experiments.shell.options import Flags
from rank_collapse.report import Comparison, figures
from rank_collapse.report.claims import Row
from rank_collapse.report.figures import Figure
from rank_collapse.report.statistics import order_of
from rank_collapse.runs.folder import RunFolder

Results = Mapping[str, np.ndarray]
Theory = tuple[np.ndarray, float, str]


@dataclass(frozen=True)
class Diagram:
    """A grid of cells, what is measured of each, and the theory that holds.

    Attributes:
        options: The flags.
        x, y: (name, values) of both axes.
        labels: {measure: what its colour bar says}, the one that the theory is of first, and
            {axis: its label} where that is not its name.
        cells: {name: floats}, row by row.
        of_one_seed: (key, floats) → what is measured of one seed of a cell.
        tables: What is measured of all cells [cells, s, ...] → what is shown, [y, x, s].
        law: () → (values [y, x], level, name) of a closed theory, a quantity whose level is the
            boundary; None where none holds.
        first: The first measure in words.
        claims: Results → rows of statements.
        trained: {name: network} of the cells that are trained too.
        crossed: Whether a boundary outside of the grid is refused.
    """

    options: Flags
    x: tuple[str, np.ndarray]
    y: tuple[str, np.ndarray]
    labels: Mapping[str, str]
    cells: Mapping[str, Any]
    of_one_seed: Callable[[Any, Any], Mapping[str, Any]]
    tables: Callable[[Results], dict[str, np.ndarray]]
    law: Callable[[], Theory | None]
    first: str
    claims: Callable[[Results], list[Row]]
    trained: Mapping[str, small_task.Network] = field(default_factory=dict)
    crossed: bool = False
    extra = None  # nothing beside the flags determines the results

    @functools.cached_property
    def theory(self) -> Theory | None:
        """`law`, computed once."""
        with np.errstate(all="ignore"):
            return self.law()

    def check_boundary(self) -> None:
        """Refuses a boundary that was asked for, by --level or --figure, and is not in the grid.

        Raises:
            ValueError: It names the ranges.
        """
        if self.crossed and self.theory and not self.inside:
            raise ValueError(
                f"the boundary {self.theory[2]!r} is outside of --x_range={self.options.x_range} "
                f"and --y_range={self.options.y_range}"
            )

    @property
    def inside(self) -> bool:
        """Whether the boundary is in the grid; no theory has a number where branches are 0."""
        values, level = np.ma.masked_invalid(self.theory[0]), self.theory[1]
        return bool(values.count() and values.min() < level < values.max())

    def measure(
        self, run: RunFolder, setup_of: Callable[[Flags], "Diagram"]
    ) -> dict[str, np.ndarray]:
        """`tables`, and "theory" [y, x, 1] where one holds."""
        self.check_boundary()

        def cells_of(options):
            return jax.tree.map(np.float32, setup_of(options).cells)

        total = len(self.cells) * self.options.num_seeds
        with Executor(self.options, run, "phase diagram", total) as executor:
            measured = list(executor.measure(self.of_one_seed, cells_of).values())
        if self.trained:
            trained = small_task.train_networks(self.options, self.trained, run).values()
            accuracies = [{"accuracy": cell["accuracy"][:, -1]} for cell in trained]
            measured = [a | b for a, b in zip(measured, accuracies, strict=True)]
        found = self.tables({n: np.stack([cell[n] for cell in measured]) for n in measured[0]})
        return found | ({"theory": self.theory[0][..., None]} if self.theory else {})

    def rows(self, results: Results) -> Iterator[dict[str, Any]]:
        """One row per cell and seed; "limit": the residual is that or less."""
        columns = [name for name, values in results.items() if values.ndim == 3]
        (a, xs), (b, ys) = self.x, self.y
        for row in tidy.rows({**results, a: xs, b: ys}, (b, a, "seed"), columns):
            yield {name: row.get(name) for name in (a, b, "seed", *columns)}

    def compare(self, results: Results) -> list[Comparison]:
        """How the theory orders the cells by the first measure."""
        first = results[next(iter(self.labels))].mean(axis=2)
        order = order_by_theory(results, first) if self.theory else None
        text = f"rank correlation of {self.first} with theory"
        return [] if order is None else [Comparison(f"{text} ({self.theory[2]})", order)]

    def figure(self, results: Results) -> Figure:
        """Each measure over the grid: what is left of the residual, the gradient of the query
        weights over that of the value weights, the entropy of attention, or what has met on the
        sphere; white, dashed: the boundary of theory. Cells at the edge are half as wide. A
        residual of 10⁻⁶ is that or less: float32 rounds it away, and with it what the gradients
        come from, which are left blank; it is in no mean where other seeds have more."""
        shown = [name for name in self.labels if name in results]
        fig, axes = figures.figure(1, len(shown), width=4.0, height=3.3)
        (a, xs), (b, ys) = self.x, self.y
        for ax, name in zip(axes.flat, shown, strict=True):
            values = results[name].mean(axis=2)
            if name == "log10_residual":
                kept = np.ma.array(results[name], mask=results["limit"] > 0)
                values = kept.mean(axis=2).filled(np.log10(FLOOR))
            image = ax.pcolormesh(xs, ys, values, cmap="viridis", shading="nearest")
            fig.colorbar(image, ax=ax, label=self.labels[name])
            if self.theory and self.inside:
                boundary, level, label = self.theory
                lines = ax.contour(xs, ys, boundary, [level], colors="white", linestyles="--")
                from matplotlib.patheffects import withStroke

                lines.set_path_effects([withStroke(linewidth=3, foreground="black")])
                ax.plot([], [], color="white", ls="--", label=label.replace("λ_a", r"$\lambda_a$"))
                ax.legend(loc="lower right", frameon=True, facecolor="#555555", labelcolor="white")
            ax.set(xlabel=self.labels.get(a, a), xlim=(xs[0], xs[-1]))
            ax.set(ylabel=self.labels.get(b, b), ylim=(ys[0], ys[-1]))
        return fig


def order_by_theory(results: Results, values: np.ndarray) -> float | None:
    """The rank correlation of values [y, x] with the theory."""
    theory = results["theory"][..., 0]
    known = np.isfinite(theory) & np.isfinite(values)
    return order_of(theory[known], values[known])


def values_of_axes(flags: Flags) -> tuple[np.ndarray, np.ndarray]:
    """Of x and y."""
    return np.linspace(*flags.x_range, flags.num_x), np.linspace(*flags.y_range, flags.num_y)
