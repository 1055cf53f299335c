"""PyTorch's best on this machine: threads × processes, and seeds stacked by torch.func.

All training runs in processes without JAX. They wait while others are timed, so that every way of
training takes its turn in the same rounds as ours.
"""

import contextlib
import dataclasses
import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from rank_collapse.training import Hyper, Recipe
from rank_collapse.training.tasks.examples import Examples

FILE = Path(__file__).with_name("torch_baseline.py")
GPU_PROCESSES = 4  # which share one GPU


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train seeds on all cores.

    Attributes:
        processes, threads: Processes at once, and the threads of each.
        stacked: Number of seeds that each process stacks; 0 for one seed in a loop.
    """

    processes: int
    threads: int
    stacked: int = 0

    @property
    def name(self) -> str:
        """Returns a name such as "PyTorch, 2 processes of 1 thread"."""
        stacked = f", torch.func of {self.stacked} seeds" if self.stacked else ""
        processes = f"{self.processes} process" + "es" * (self.processes > 1)
        threads = f"{self.threads} thread" + "s" * (self.threads > 1)
        return f"PyTorch, {processes} of {threads}{stacked}"

    @property
    def seeds(self) -> int:
        """Returns how many seeds train at the same time."""
        return self.processes * max(1, self.stacked)


def list_ways(cores: int, num_seeds: int, platform: str = "cpu") -> list[Way]:
    """Lists the ways to train that a user would try.

    On a CPU: all splits of the cores into processes and threads, one thread alone, and stacked
    seeds, in one process or one for each core. On a GPU: one process, several, stacked seeds.

    Args:
        cores: Number of cores of the machine.
        num_seeds: Number of seeds that ours trains together; PyTorch stacks the same number.
        platform: "gpu", or any other for the CPU.
    """
    if platform == "gpu":
        return [Way(1, 1), Way(min(GPU_PROCESSES, cores), 1), Way(1, 1, num_seeds)]
    counts = {2**i for i in range(cores.bit_length())} | {cores}
    splits = [Way(count, cores // count) for count in sorted(counts)]
    stacked = [
        dataclasses.replace(way, stacked=max(1, num_seeds // way.processes))
        for way in (splits[0], splits[-1])
    ]
    return list(dict.fromkeys([Way(1, 1), *splits, *stacked]))


def describe_task(
    recipe: Recipe, examples: Examples, hyper: Hyper, platform: str = "cpu"
) -> SimpleNamespace:
    """Describes a training task by plain values that a process without JAX can read.

    Args:
        recipe, hyper: See `rank_collapse.training`; `hyper` holds Python floats.
        examples: The padded training data.
        platform: JAX's name of the device: "gpu", or any other for the CPU.
    """
    config, embedding = recipe.config, recipe.config.embedding
    labels = np.array(examples.labels)
    arrays = [np.array(examples.inputs), labels if labels.dtype.kind == "f" else labels.astype(int)]
    if examples.mask is not None:
        arrays.append(np.array(examples.mask))
    return SimpleNamespace(
        device="cuda" if platform == "gpu" else "cpu",
        arrays=arrays,
        config=SimpleNamespace(
            depth=config.depth,
            num_heads=config.num_heads,
            d_model=config.d_model,
            mlp=config.mlp,
            embedding=SimpleNamespace(
                vocab_size=embedding.vocab_size,
                d_input=embedding.d_input,
                d_embed=embedding.d_embed,
                positions=embedding.positions,
                num_positions=embedding.num_positions,
                hidden_layer=embedding.hidden_layer,
            ),
        ),
        num_outputs=recipe.num_outputs,
        batch_size=recipe.batch_size,
        shuffle=recipe.shuffle,
        loss=recipe.loss,
        clip_norm=recipe.clip_norm,
        learning_rate=float(hyper.learning_rate),
        weight_decay=float(hyper.weight_decay),
        dropout=float(hyper.dropout),
    )


class Processes(contextlib.ExitStack):
    """Processes that train a task in PyTorch, some or all of them at once. A context manager.

    Args:
        task: Task from `describe_task`.
        count: Number of processes.

    Raises:
        ValueError: PyTorch is not installed.
    """

    def __init__(self, task: SimpleNamespace, count: int):
        super().__init__()
        if importlib.util.find_spec("torch") is None:
            raise ValueError(
                "--baseline=torch needs PyTorch, which is not installed: pip install torch"
            )
        self._processes = []
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, "-P", str(FILE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONWARNINGS": "ignore"},
            )
            self.callback(_stop, process)
            self._processes.append(process)
        for process in self._processes:
            _write(process, pickle.dumps(task))

    def measure(self, way: Way, num_steps: int) -> float:
        """Measures seconds per seed and step.

        Args:
            way: Way that needs at most as many processes as there are; the first call prepares it.
            num_steps: Timed steps of each process.

        Raises:
            RuntimeError: A process failed; it has printed the reason.
        """
        used = self._processes[: way.processes]
        for process in used:
            _write(process, f"{way.threads} {way.stacked} {num_steps}\n".encode())
        answers = [process.stdout.readline() for process in used]
        if not all(answers):
            raise RuntimeError(f"{way.name} failed")
        return max(map(float, answers)) / num_steps / way.seeds


def _write(process, data):
    """Sends bytes to a process.

    Raises:
        RuntimeError: The process has ended.
    """
    try:
        process.stdin.write(data)
        process.stdin.flush()
    except BrokenPipeError as error:
        raise RuntimeError("a process of PyTorch has ended") from error


def _stop(process):
    """Kills a process and closes its pipes."""
    process.kill()
    process.wait()
    process.stdout.close()
    with contextlib.suppress(OSError):  # what it did not read
        process.stdin.close()
