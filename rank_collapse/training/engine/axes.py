"""The axes of a sweep: swept floats, static values and seeds, and the names of their points."""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rank_collapse.checks import refuse, refuse_if
from rank_collapse.printed import quote_value
from rank_collapse.training.engine.tracing import fits_into_jax

RESERVED = ("seed", "step")  # axes of every result
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclasses.dataclass(frozen=True)
class Axes:
    """Values by name of a sweep.

    Attributes:
        hyper: Every traced value: {name: array, [] of a constant, [values] of an axis}.
        static: Every static value: {name: all its values}.
        hyper_axes, static_axes: The coordinates of those that are swept: {name: values}.
    """

    hyper: Mapping[str, np.ndarray]
    static: Mapping[str, Sequence[Any]]
    hyper_axes: Mapping[str, Sequence[Any]]
    static_axes: Mapping[str, Sequence[Any]]

    @property
    def hyper_shape(self) -> tuple[int, ...]:
        """Returns the number of values of each swept float."""
        return tuple(map(len, self.hyper_axes.values()))

    @property
    def static_shape(self) -> tuple[int, ...]:
        """Returns the number of values of each swept static."""
        return tuple(map(len, self.static_axes.values()))

    @property
    def num_hyper(self) -> int:
        """Returns the number of combinations of the swept numbers."""
        return math.prod(self.hyper_shape)

    def static_points(self) -> list[dict[str, Any]]:
        """Lists the keyword arguments for each combination of the static values, which have a
        program each."""
        names = list(self.static)
        return [
            dict(zip(names, point, strict=True))
            for point in itertools.product(*self.static.values())
        ]

    def examples(self) -> dict[str, Any]:
        """Returns one value of each traced one, of the type that the functions see.

        Python numbers adapt to the dtype of the arrays they are combined with, as in ordinary code:
        float32 weights times a rate stay float32, bfloat16 ones bfloat16.
        """
        return {name: _example(array) for name, array in self.hyper.items()}

    def hyper_leaves(self, points: np.ndarray) -> list[np.ndarray]:
        """Returns the swept numbers of some runs as arrays [r], in the order of a dictionary's
        leaves.

        Args:
            points: For each run the index of its combination of swept numbers, [r].
        """
        axes = np.unravel_index(points, self.hyper_shape) if self.hyper_axes else ()
        index = dict(zip(self.hyper_axes, axes, strict=True))
        with np.errstate(all="ignore"):  # what is too small or large for float32
            return [
                np.asarray(
                    array[index[name]] if name in index else np.full(len(points), array),
                    jax.dtypes.canonicalize_dtype(array.dtype),
                )
                for name, array in sorted(self.hyper.items())
            ]

    def describe_static(self, point: int) -> str:
        """Names a combination of the static values, such as "depth=2"; "" where there are none.

        Args:
            point: Index of the combination.
        """
        index = np.unravel_index(point, self.static_shape) if self.static_axes else ()
        return _join(self.static_axes, index)

    def describe_run(self, point: int, hyper_point: int, seed: int) -> str:
        """Names a run, such as "seed 3 (depth=2, learning_rate=0.1)".

        Args:
            point: Index of the combination of static values.
            hyper_point: Index of the combination of swept numbers.
            seed: Number of the seed.
        """
        index = np.unravel_index(hyper_point, self.hyper_shape) if self.hyper_axes else ()
        parts = [self.describe_static(point), _join(self.hyper_axes, index)]
        values = ", ".join(filter(None, parts))
        return f"seed {seed}" + (f" ({values})" if values else "")


def _join(axes, index):
    return ", ".join(f"{n}={v[i]}" for (n, v), i in zip(axes.items(), index, strict=True))


def _example(array):
    """Returns the first value; of 64 bits, as Python's and NumPy's numbers are, a Python number."""
    first = array.reshape(-1)[0]
    return first.item() if array.dtype in (np.float64, np.int64, bool) else first


def make_axes(hyper: Mapping[str, Any] | None, static: Mapping[str, Any] | None) -> Axes:
    """Makes the axes of a sweep.

    Args:
        hyper: Numbers, or lists of them, by name.
        static: Any values, or lists of them, by name.

    Raises:
        ValueError: Values that mean nothing, or one name for two of them.
    """
    hyper, static = _as_mapping("hyper", hyper), _as_mapping("static", static)
    for name in hyper.keys() & static.keys():
        raise ValueError(f"{name!r} is in both hyper and static: remove one of them")
    arrays = {name: _as_numbers(f"hyper[{name!r}]", value) for name, value in hyper.items()}
    lists = {name: value if isinstance(value, list) else [value] for name, value in static.items()}
    coordinates = {
        name: _label_values(f"static[{name!r}]", value)
        for name, value in static.items()
        if isinstance(value, list)
    }
    hyper_axes = {name: array.tolist() for name, array in arrays.items() if array.ndim}
    for name, values in hyper_axes.items():
        with np.errstate(over="ignore"):
            leaf = np.float32(values) if arrays[name].dtype.kind == "f" else values
        _refuse_repeats(f"hyper[{name!r}]", list(values), leaf)
    return Axes(arrays, lists, hyper_axes, coordinates)


def _as_mapping(name, value):
    """Returns a dictionary of values by name as a copy; {} for None.

    Args:
        name: The argument's name, for messages.
        value: The argument.

    Raises:
        ValueError: No dictionary, or a name that cannot be an axis or a keyword argument.
    """
    refuse_if(
        not isinstance(value or {}, Mapping),
        f"{name}={quote_value(value)} is not a dictionary of values by name",
    )
    for key in value or {}:
        refuse(
            (not isinstance(key, str), f"{name} has the name {key!r}, which is not a string"),
            (key == "", f"{name} has a value without a name, ''"),
            (key in RESERVED, f"{name} has the name {key!r}, which is an axis of every sweep"),
            (
                name == "static" and not str(key).isidentifier(),
                f"static has the name {key!r}, which cannot be a keyword argument",
            ),
        )
    return dict(value or {})


def _as_numbers(name, value):
    """Converts a number or a list of them to an array."""
    label = f"{name}={quote_value(value)}"
    if isinstance(value, range | tuple):
        value = list(value)
    refuse_if(isinstance(value, list) and not value, f"{name} is empty: list at least one value")
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:  # of different lengths, traced
        raise ValueError(f"{label} is neither a number nor a list of numbers") from error
    refuse(
        (not array.size, f"{name} is empty: list at least one value"),
        (
            array.dtype.kind in "OSUMm",
            f"{label} is neither a number nor a list of numbers; other values go to static=",
        ),
        (array.ndim > 1, f"{label} has {array.ndim} axes: a swept value is a list of numbers"),
    )
    refuse_if(array.dtype.kind in "fc" and np.isnan(array).any(), f"{label} has a NaN")
    dtype = jax.dtypes.canonicalize_dtype(np.int64)
    is_long = array.dtype.kind in "iu" and array.dtype.itemsize == 8
    array = array.astype(np.int64) if is_long and array.max() < 2**63 else array
    refuse_if(not fits_into_jax(array), f"{label} does not fit into {dtype}")
    return array


def _label_values(name, values):
    """Return the coordinates of a static axis: numbers and text as they are, other values by their
    names.

    Args:
        name: Name of the axis, for messages.
        values: Its values.

    Raises:
        ValueError: No values, or two with one name.
    """
    refuse_if(not values, f"{name} is empty: list at least one value")
    values = [v.item() if isinstance(v, np.integer | np.bool_) else v for v in values]
    plain = all(isinstance(value, str | int | float) for value in values)
    same = len({isinstance(value, str) for value in values}) == 1
    is_plain = plain and same
    labels = list(values) if is_plain else [name_value(value) for value in values]
    advice = "" if is_plain else ": each needs a name (def, __name__) or its own __repr__"
    _refuse_repeats(name, labels, labels, advice)
    return labels


def name_value(value: Any) -> str:
    """Names a value of any kind: a function by its name, others as they print without addresses.

    The name is the same in every process, as a folder that resumes needs it.
    """
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else _ADDRESS.sub("", str(value))


def _refuse_repeats(name, labels, values, advice=""):
    """Checks that no value comes twice.

    Args:
        name: Name of the values, for messages.
        labels: Texts of the values, for messages.
        values: The values.
        advice: End of the message.

    Raises:
        ValueError: A value comes twice.
    """
    earlier = set()
    for text, value in zip(labels, list(values), strict=True):
        refuse_if(value in earlier, f"{name} has {text!r} twice{advice}")
        earlier.add(value)
