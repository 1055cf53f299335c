"""Random weights, drawn as the architecture of a checkpoint initialises them."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.annotations import DType, Key, Number
from rank_collapse.pretrained.entries import Settings
from rank_collapse.pretrained.weights import Table, Weights


class Draw(NamedTuple):
    """How a tensor is drawn: normal(0, std), else filled with `value` (a function: of its shape).

    `zero_row`: a row set to zero (the padding token); `truncate`: normal cut at two units.
    """

    std: float | None = None
    value: Number = 0.0
    zero_row: int | None = None
    truncate: bool = False


@dataclasses.dataclass(frozen=True)
class Initialisation:
    """Normal(0, std), biases of zero and unit gains, except for names with these ends."""

    std: str = "initializer_range"  # The entry of config.json that is the standard deviation
    gain: float = 1.0  # Of norms, whose names have "norm" or "ln_" in them
    # {end of a name: the number it is filled with, or the entry that is this number}
    values: Mapping[str, float | str] = dataclasses.field(default_factory=dict)
    padded: tuple[str, ...] = ()  # Tables whose row of `pad_token_id` is zero
    truncated: tuple[str, ...] = ()  # Cut at two standard deviations
    residual: tuple[str, ...] = ()  # Ends of branches, divided by √(2 layers)

    def __call__(self, name: str, settings: Settings, depth: int) -> Draw:
        """Return how one tensor of a model with that many layers is drawn.

        Args:
            name: Name of the tensor.
            settings: Settings of the model.
            depth: Number of layers.
        """
        for end, value in {".bias": 0.0, **self.values}.items():
            if name.endswith(end):
                return Draw(value=settings[value] if isinstance(value, str) else value)
        if "norm" in name.lower() or "ln_" in name:
            return Draw(value=self.gain)
        std = settings[self.std]
        if name.endswith(self.residual):
            std = std / math.sqrt(2 * depth)
        zero_row = settings["pad_token_id"] if name.endswith(self.padded) else None
        return Draw(std, zero_row=zero_row, truncate=name.endswith(self.truncated))


class RandomWeights(Weights):
    """Tensors drawn as a family initialises them; each depends on the key and its name only."""

    is_random = True

    def __init__(
        self,
        key: Key,
        draw: Callable[[str], Draw],
        dtype: DType = jnp.float32,
        *,
        lazy: bool = False,
    ):
        super().__init__(dtype, lazy=lazy)
        self.seed = [int(word) for word in np.ravel(jax.random.key_data(key))]
        self.draw = draw

    def has_tensor(self, name: str) -> bool:
        """Return True: the model has every tensor that the config asks for."""
        return not name.endswith(".")

    def check_depth(self, layer: str, depth: int) -> None:
        """Check nothing: random weights exist for any number of layers, while files may lack some.

        Args:
            layer, depth: As for weights from files.
        """

    def take(self, name: str, *shape: int) -> np.ndarray:
        """Draw one tensor.

        Args:
            name: Name of the tensor, which decides on its values together with the key.
            *shape: Shape of the tensor.
        """
        law = self.draw(name)
        if callable(law.value):
            return law.value(*shape)
        if law.std is None:
            return np.full(shape, law.value, self.dtype)
        # numpy draws a hundred million normals several times faster than jax.random on a CPU.
        generator = np.random.Generator(np.random.Philox([*self.seed, zlib.crc32(name.encode())]))
        values = generator.standard_normal(shape, np.float32)
        while law.truncate and (far := np.abs(values) > 2).any():
            values[far] = generator.standard_normal(int(far.sum()), np.float32)
        values *= np.float32(law.std)
        if law.zero_row is not None and law.zero_row < shape[0]:
            values[law.zero_row] = 0.0
        return values

    def _lazy_table(self, name, rows, width):
        """Return a table that draws no rows beyond the last that is read."""
        table = np.empty((0, width), np.float32)
        needs_all_rows = self.draw(name).truncate  # what is cut is drawn again, after the last row

        def read_rows(first, last):
            """Draw rows of the table from first to last, and more of the table if needed."""
            nonlocal table
            if last > len(table):
                table = self.take(name, rows if needs_all_rows else min(rows, 2 * last), width)
            return table[first:last]

        return Table(read_rows, (rows, width))
