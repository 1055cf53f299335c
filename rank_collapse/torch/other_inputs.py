"""The stream of another run, which the sublayers of a model take in: `record(…, inputs=…)`."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rank_collapse.agree.recording import open_recording
from rank_collapse.struct import refuse, refuse_if


class OtherInputs:
    """States and branches of a recording, and which of its tokens the model computes.

    Args:
        path: The recording.
        noise: Relative size of what is added to every number that goes into a sublayer.
        seed: Seed of the noise.

    Raises:
        ValueError: It is no recording, or is itself one on another run's inputs.
    """

    def __init__(self, path: str | os.PathLike, noise: float = 0.0, seed: int = 0):
        recording = open_recording(path)
        self.name = recording.path.name
        refuse(
            ("inputs" in recording.metadata, f"{path} was recorded on another run's inputs"),
            (not 0 <= noise < 1, f"noise={noise} is not from 0 to 1"),
        )
        self.mask = recording.read_mask()
        self.shape = recording.shape
        self.states: list[np.ndarray] = []
        self.branches: list[Mapping[str, np.ndarray]] = []
        dtype = np.float64 if recording.arrays["residual"].dtype == np.float64 else np.float32
        for layer in recording.read_layers():
            self.states.append(layer.before.astype(dtype))
            self.branches.append({n: b.astype(dtype) for n, b in layer.branches.items()})
        self.noise = noise
        self.draw = np.random.default_rng(seed)
        self.start = self.count = 0

    def begin_call(self) -> None:
        """Goes on to the tokens of the next call."""
        self.start, self.count = self.start + self.count, 0

    def take_state(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """Returns the stream before a layer, with its noise.

        Args:
            index: Index of the layer.
            like: The model's own state [b, n, d] or [n, d] there.

        Raises:
            ValueError: The recording has no such layer or tokens.
        """
        refuse_if(
            index >= len(self.states),
            f"inputs={self.name} has {len(self.states)} layers, the model more",
        )
        b, n, d = self.shape
        *examples, count, width = like.shape
        refuse_if(
            (int(np.prod(examples)), width) != (b, d) or self.start + count > n,
            f"inputs={self.name} has {b} examples of {n} tokens of width {d}, the model "
            f"{int(np.prod(examples))} of {self.start + count} or more of width {width}",
        )
        self.count = count
        states = self._cut(self.states[index])
        return _convert(states + self._draw_noise(states), like)

    def take_branch(self, index: int, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """Returns a branch of a layer; None where the recording has none.

        The noise of the input of the MLP is added to the branch of the attention.

        Args:
            index: Index of the layer.
            name: Name of the branch.
            like: The model's own.
        """
        if name not in self.branches[index]:
            return None
        branch = self._cut(self.branches[index][name])
        if name == "attention_branch" and self.noise:
            branch = branch + self._draw_noise(self._cut(self.states[index]) + branch)
        return _convert(branch, like)

    def check_complete(self, num_layers: int, mask: torch.Tensor | None) -> None:
        """Check that the model computed all layers and tokens that the recording has.

        Args:
            num_layers: Number of layers of the model.
            mask: Which tokens exist [b, n], as the model got it.

        Raises:
            ValueError: It did not, or others exist.
        """
        n = self.shape[1]
        refuse_if(
            num_layers != len(self.states),
            f"inputs={self.name} has {len(self.states)} layers, the model {num_layers}",
        )
        refuse_if(
            self.start + self.count != n,
            f"inputs={self.name} has {n} tokens, the model computed {self.start + self.count}",
        )
        refuse_if(
            mask is not None and not np.array_equal(mask.bool().numpy(), self.mask),
            f"inputs={self.name} has another mask than the model",
        )

    def _cut(self, array):
        """Return the tokens of this call."""
        return array[:, self.start : self.start + self.count]

    def _draw_noise(self, states):
        """Return noise of the relative size of every number."""
        if not self.noise:
            return 0
        return self.noise * states * self.draw.normal(size=states.shape).astype(states.dtype)


def replace_tensor(values: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """Return arguments or an output with another tensor in the place of one.

    Args:
        values: A tensor, or a tuple, list or mapping that has it.
        old, new: The tensors.
    """
    if values is old:
        return new
    if isinstance(values, Mapping):
        changed = {name: new if value is old else value for name, value in values.items()}
        return type(values)(changed) if type(values) is not dict else changed
    if isinstance(values, (tuple, list)):
        changed_list = [new if value is old else value for value in values]
        is_named = hasattr(values, "_fields")
        return type(values)(*changed_list) if is_named else type(values)(changed_list)
    return values


def _convert(array, like):
    """Return an array as a tensor of the shape, dtype and device of another."""
    return torch.from_numpy(np.ascontiguousarray(array)).reshape(like.shape).to(like)
