"""One run's sublayers on the other run's inputs: earlier errors do not come in, so each sublayer's
own error is measured.

A replay is the recording of a model whose sublayers all took in the stream of the other run. Probes
are replays whose inputs have noise of a small relative size; they measure how much a sublayer
amplifies rounding.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from rank_collapse.agree.alignment import Alignment
from rank_collapse.agree.recording import Layer, Recording
from rank_collapse.checks import refuse_if


class Replay(NamedTuple):
    """One run's model on the other run's inputs.

    Attributes:
        run: Which of the two runs it computes again, 0 or 1; it takes its inputs from the other
            run.
        recording: The recording that it computed.
        probes: (noiseless, noisy, noisy, …) in one dtype; empty without probes.
    """

    run: int
    recording: Recording
    probes: tuple[Recording, ...] = ()


class Pair(NamedTuple):
    """One layer of both runs, aligned.

    Attributes:
        first, second: The layer in each run; in the replay, the state before it comes from the
            other run.
        inputs: The layer whose states both runs took in; None without a replay.
        gains: {branch name: ‖change of the branch‖ [b, n] for noise of relative size 1}.
    """

    first: Layer
    second: Layer
    inputs: Layer | None
    gains: dict[str, Float[np.ndarray, "b n"]]


def find_replay(first: Recording, second: Recording) -> Replay | None:
    """Find by the metadata which of two recordings is a replay of the other.

    Args:
        first, second: Opened recordings.

    Raises:
        ValueError: Both recordings are replays.
    """
    replays = [index for index, r in enumerate((first, second)) if "inputs" in r.metadata]
    refuse_if(
        len(replays) == 2,
        f"{first.path.name} and {second.path.name} were both recorded on another run's inputs",
    )
    return Replay(replays[0], (first, second)[replays[0]]) if replays else None


def pair_layers(
    first: Recording, second: Recording, alignment: Alignment, replay: Replay | None
) -> Iterator[Pair]:
    """Yield the aligned layers of both recordings.

    Args:
        first, second: The recordings.
        alignment: The alignment of the tokens of both recordings.
        replay: The recording that replaces one of them.
    """
    recordings = [first, second]
    if replay is not None:
        recordings[replay.run] = replay.recording
    probes = [] if replay is None else [probe.read_layers() for probe in replay.probes]
    layers = zip(*(r.read_layers() for r in recordings), strict=True)
    for a, b in layers:
        pair = [alignment.take(a, alignment.first), alignment.take(b, alignment.second)]
        inputs = None
        if replay is not None:
            inputs = pair[1 - replay.run]
            pair[replay.run] = pair[replay.run]._replace(before=inputs.before)
        positions = alignment.first if replay and replay.run == 0 else alignment.second
        probed = [alignment.take(next(probe), positions) for probe in probes]
        gains = _measure_gains(probed, replay) if probed else {}
        yield Pair(pair[0], pair[1], inputs, gains)


def _measure_gains(layers, replay):
    """Measure how much noise in the input of a layer changes each branch: the root mean square over
    noisy probes of ‖change‖ over the size of the noise.

    Args:
        layers: The layer in each probe, first the one without noise.
        replay: The replay, whose probes give the sizes of the noise.

    Returns:
        {name of a branch: [b, n]}.
    """
    noises = [float(probe.metadata["noise"]) for probe in replay.probes[1:]]
    quiet_layer, *noisy_layers = layers
    gains = {}
    for name, branch in quiet_layer.branches.items():
        squares = []  # for each noisy probe, [b, n]
        for noisy, noise in zip(noisy_layers, noises, strict=True):
            change = np.linalg.norm(noisy.branches[name] - branch, axis=-1)
            squares.append((change / noise) ** 2)
        gains[name] = np.sqrt(np.mean(squares, axis=0))
    return gains
