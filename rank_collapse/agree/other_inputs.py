"""The stream of another run, which the sublayers of a model take in: `inputs=` of a recording."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float

from rank_collapse.agree.recording import open_recording
from rank_collapse.checks import refuse, refuse_if
from rank_collapse.printed import format_count


class OtherInputs:
    """States and branches of a recording, and the tokens of it that the model computes.

    Args:
        path: The recording.
        noise: Relative size of the noise that is added to every number that goes into a sublayer.
        seed: Seed of the noise.
        out: The file that is written.

    Raises:
        ValueError: The file is not a recording, or it is itself a replay on another run's inputs.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        noise: float = 0.0,
        seed: int = 0,
        *,
        out: str | os.PathLike,
    ):
        refuse_if(
            Path(out).suffix != ".safetensors",
            f"{out} has to be a .safetensors file, because inputs= was given: an .npz file cannot "
            "say that its sublayers read the stream of another run",
        )
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
        """Moves to the tokens of the next call."""
        self.start, self.count = self.start + self.count, 0

    def take_state(self, index: int, shape: Sequence[int]) -> Float[np.ndarray, "b n d"]:
        """Returns the recorded state before a layer, which replaces that of the model, with noise
        added.

        Noise of the relative size `noise` (0 by default) measures how much a layer amplifies
        rounding.

        Args:
            index: Index of the layer.
            shape: [b, n, d] or [n, d] of the model's own state there; n counts the tokens of this
                call, which follow those of the calls before.

        Raises:
            ValueError: The recording has no such layer or tokens.
        """
        refuse_if(
            index >= len(self.states),
            f"inputs={self.name} has {format_count(len(self.states), 'layer')}, and the model "
            "has more",
        )
        b, n, d = self.shape
        *examples, count, width = shape
        num_examples = int(np.prod(examples))
        refuse_if(
            (num_examples, width) != (b, d) or self.start + count > n,
            f"inputs={self.name} has {format_count(b, 'example')} of {format_count(n, 'token')} "
            f"of width {d}, and the model has "
            f"{format_count(num_examples, 'example')} of {self.start + count} or more tokens of "
            f"width {width}",
        )
        self.count = count
        states = self._cut(self.states[index])
        return states + self._draw_noise(states)

    def take_branch(self, index: int, name: str) -> Float[np.ndarray, "b n d"] | None:
        """Returns the recorded branch of a layer, with noise; None if the recording does not have
        it.

        The MLP reads the state plus the branch of the attention, so the noise of the MLP's input is
        added to this branch.

        Args:
            index: Index of the layer.
            name: Name of the branch, such as "attention_branch".
        """
        if name not in self.branches[index]:
            return None
        branch = self._cut(self.branches[index][name])
        if name == "attention_branch" and self.noise:
            branch = branch + self._draw_noise(self._cut(self.states[index]) + branch)
        return branch

    def check_complete(self, num_layers: int, mask: Bool[np.ndarray, "b n"] | None) -> None:
        """Check that the model computed all layers and tokens that the recording has.

        Args:
            num_layers: Number of layers of the model.
            mask: Tokens that exist, as in the model's argument.

        Raises:
            ValueError: Layers or tokens are missing, or other tokens exist.
        """
        n = self.shape[1]
        refuse_if(
            num_layers != len(self.states),
            f"inputs={self.name} has {format_count(len(self.states), 'layer')}, and the model "
            f"has {num_layers}",
        )
        refuse_if(
            self.start + self.count != n,
            f"inputs={self.name} has {format_count(n, 'token')}, and the model computed "
            f"{format_count(self.start + self.count, 'token')}",
        )
        refuse_if(
            mask is not None and not np.array_equal(mask, self.mask),
            f"inputs={self.name} has another mask than the model",
        )

    def describe(self) -> dict[str, str]:
        """Returns the metadata of the recording."""
        return {"inputs": self.name, "noise": str(self.noise)}

    def _cut(self, array):
        """Return the tokens of this call."""
        return array[:, self.start : self.start + self.count]

    def _draw_noise(self, states):
        """Return normal noise of every number of the states, of the relative size `noise`; 0
        without noise."""
        if not self.noise:
            return 0
        return self.noise * states * self.draw.normal(size=states.shape).astype(states.dtype)
