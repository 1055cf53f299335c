"""The result of a sweep: labelled arrays over its axes, and the states."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rank_collapse.checks import refuse_if
from rank_collapse.extras import import_package
from rank_collapse.printed import quote_value
from rank_collapse.training.engine.axes import Axes, name_value
from rank_collapse.training.engine.functions import Functions
from rank_collapse.training.engine.runs import Runs, join_pieces, wrap_keys


@dataclasses.dataclass(repr=False)
class Swept:
    """The result of a sweep.

    Attributes:
        metrics: xarray.Dataset; each metric has the axes (static lists, hyper lists, "seed",
            "step", then its own axes). NaN after the step at which a run was not finite.
        states: The pytree that `init` made, as NumPy arrays [seed, hyper lists, ...]; random keys
            stay keys. With a list in static it is {value: such a pytree}, with several lists
            {(value, ...): such a pytree}, since shapes may differ.
        looks: xarray.Dataset of what `look` gave, with the axes of the metrics; its "step" is the
            number of steps done, 0 before training. None without `look`.
        diverged_at: xarray.DataArray (static lists, hyper lists, "seed"): the step at which a run
            was no longer finite, −1 for none. The kept state is the one before this step. States
            are checked after every `every` steps: whether one that is infinite for one step only is
            seen depends on `every`.
        seconds: {"compiling", "running"}.
    """

    metrics: Any
    states: Any
    looks: Any
    diverged_at: Any
    seconds: Mapping[str, float]

    def __repr__(self) -> str:
        """Shows names and sizes alone."""
        return f"Swept(metrics={list(self.metrics)}, {dict(self.metrics.sizes)})"

    def state(self, seed: int, **values: Any) -> Any:
        """Returns the pytree of one run.

        Args:
            seed: Number of the seed.
            **values: One value from each list of hyper and static, by name.

        Raises:
            ValueError: The sweep has no such run, or several.
        """
        names = [str(name) for name in self.diverged_at.dims]
        refuse_if(
            {*values, "seed"} != set(names),
            f"state() got values of {sorted(values)}, but this sweep has {names[:-1]}",
        )
        index = {}
        for name, value in (*values.items(), ("seed", seed)):
            labels = self.diverged_at.coords[name].values.tolist()
            is_array = isinstance(value, np.ndarray | jax.Array) and value.ndim > 0
            label = value if not is_array and value in labels else name_value(value)
            refuse_if(label not in labels, f"{name}={quote_value(value)} is not one of {labels}")
            index[name] = labels.index(label)
        num_static = len(names) - 1 - self._num_hyper()
        states = self.states
        if num_static:
            states = list(states.values())[
                np.ravel_multi_index(
                    [index[name] for name in names[:num_static]],
                    self.diverged_at.shape[:num_static],
                )
            ]
        place = (index["seed"], *(index[name] for name in names[num_static:-1]))
        return jax.tree.map(lambda leaf: leaf[place], states)

    def _num_hyper(self):
        return self.diverged_at.attrs["swept floats"]


class Points:
    """All runs of a sweep, by point of the static values.

    Args:
        axes: Axes of the sweep.
        functions, runs: Functions and runs at each point; all runs are done.
        numbers: Numbers of the seeds.
    """

    def __init__(
        self,
        axes: Axes,
        functions: Sequence[Functions],
        runs: Sequence[Runs],
        numbers: np.ndarray,
    ):
        self._axes, self._functions, self._runs, self._numbers = axes, functions, runs, numbers
        self._names = [*axes.static_axes, *axes.hyper_axes, "seed"]
        self._coordinates = {**axes.static_axes, **axes.hyper_axes, "seed": numbers}

    def metrics(self, steps: int) -> Any:
        """Makes the dataset of the metrics of so many steps."""
        leaves = [[join_pieces(p) for p in runs.metrics] for runs in self._runs]
        return self._make_dataset(self._functions[0].metric_names, leaves, np.arange(steps))

    def looks(self, look_steps: Sequence[int]) -> Any:
        """Makes the dataset of the results of `look` after some numbers of steps.

        Args:
            look_steps: The numbers of steps after which `look` measured all runs.

        Returns:
            The dataset; None if there is no `look`.
        """
        if not self._functions[0].look_names:
            return None
        leaves = []
        for runs in self._runs:
            columns = [runs.look_steps.index(step) for step in look_steps]
            leaves.append([join_pieces(pieces)[:, columns] for pieces in runs.looks])
        return self._make_dataset(self._functions[0].look_names, leaves, np.array(look_steps))

    def diverged_at(self) -> Any:
        """Makes the array of the first steps that were not finite."""
        values = self._gather([runs.finite_steps for runs in self._runs])
        attributes = {"swept floats": len(self._axes.hyper_axes)}
        return self._xarray.DataArray(values, self._coordinates, self._names, attrs=attributes)

    @property
    def _xarray(self):
        return import_package("xarray", "training.sweep", "training")

    def _make_dataset(self, listing, leaves, steps):
        """Makes a dataset of what runs recorded at some steps, over the swept axes.

        Args:
            listing: Names of the variables.
            leaves: For each point (one compiled configuration), the arrays of all variables, [runs,
                steps, ...].
            steps: Numbers of the steps.
        """
        axes, variables = self._axes, {}
        for i, name in enumerate(listing):
            values = self._gather(
                [
                    _mask(point[i], runs, steps)
                    for point, runs in zip(leaves, self._runs, strict=True)
                ]
            )
            further = [f"{name}_{k}" for k in range(values.ndim - len(self._names) - 1)]
            variables[name] = [*self._names, "step", *further], values
        constants = {n: a.item() for n, a in axes.hyper.items() if not a.ndim}
        constants |= {
            n: name_value(v[0]) for n, v in axes.static.items() if n not in axes.static_axes
        }
        return self._xarray.Dataset(variables, {**self._coordinates, "step": steps}, constants)

    def _gather(self, values):
        """Joins arrays of all runs to one array over all swept axes.

        Args:
            values: For each combination of static values an array [r, ...]; shorter ones are filled
                with NaN.
        """
        axes, count = self._axes, len(self._numbers)
        shapes = [v.shape[1:] for v in values]
        longest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
        is_ragged = any(shape != longest for shape in shapes)
        dtypes = [v.dtype for v in values]
        if is_ragged:
            dtypes.append(np.dtype(np.float32))  # which can be NaN
        dtype = np.result_type(*dtypes)
        combined = np.zeros((len(values), axes.num_hyper, count, *longest), dtype)
        if is_ragged:
            combined[...] = np.nan
        for i, (value, runs) in enumerate(zip(values, self._runs, strict=True)):
            rows = runs.seeds - self._numbers[0]
            combined[(i, runs.points, rows, *(slice(size) for size in value.shape[1:]))] = value
        return combined.reshape(*axes.static_shape, *axes.hyper_shape, count, *longest)

    def states(self, trees: Sequence[Any]) -> Any:
        """Makes the pytrees of all states: see `Swept`.

        Args:
            trees: Results of `init` at each point of the static values.
        """
        axes, states = self._axes, {}
        for label, runs, functions, tree in zip(
            _list_labels(axes), self._runs, self._functions, trees, strict=True
        ):
            leaves = []
            for leaf, shape in zip(runs.state, functions.state_shapes, strict=True):
                combined = np.empty(
                    (len(self._numbers), axes.num_hyper, *leaf.shape[1:]), leaf.dtype
                )
                combined[runs.seeds - self._numbers[0], runs.points] = leaf
                combined = combined.reshape(len(self._numbers), *axes.hyper_shape, *leaf.shape[1:])
                leaves.append(wrap_keys(combined, shape))
            states[label] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
        return states if axes.static_axes else next(iter(states.values()))


def _list_labels(axes: Axes) -> Iterator[Any]:
    """Lists the keys of the states: the value of one list in static, a tuple of several."""
    for values in itertools.product(*axes.static_axes.values()):
        yield values[0] if len(values) == 1 else values


def _mask(values, runs, steps):
    """Replaces the values after a run's last finite step by NaN: values [r, steps, ...].

    A step that made the state infinite began with a finite state, so its metrics are kept. A look
    after k steps sees the state with which step k begins.

    Args:
        values: Float or int [r, steps, ...].
        runs: The runs, with their last finite steps; −1 for runs that stayed finite.
        steps: Numbers of the steps.
    """
    if values.dtype.kind == "V" or values.dtype.name == "float16":
        values = values.astype(np.float32)  # which xarray computes with
    stopped = runs.finite_steps >= 0
    if not stopped.any():
        return values
    can_be_nan = values.dtype.kind in "fc"
    values = values.astype(values.dtype if can_be_nan else np.float64)  # a copy
    is_later = steps[None, :] > runs.finite_steps[:, None]  # [r, steps]
    values[stopped[:, None] & is_later] = np.nan
    return values
