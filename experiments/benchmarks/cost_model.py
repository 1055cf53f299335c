"""What streaming a checkpoint costs, computed: operations, bytes read, memory, time.

    python -m experiments.benchmarks.cost_model       (the table of docs/accelerators.md)

Residuals of five readings of the variants and exact path sums by length, as `streaming` measures
them. Memory that does not hold the states of all texts means several passes over the checkpoint.
"""

import itertools
import math
from typing import NamedTuple

from experiments.benchmarks import timing
from experiments.benchmarks.random_llama import PUBLISHED
from experiments.benchmarks.streaming import operations

VARIANTS = 5  # Networks whose hidden states are carried beside the sums of paths
# Bytes of a parameter of the layer that is there: in float32, a program's copy of it in another
# order, and the next layer's as it lies in the file. Chosen with the measured runs known.
OF_A_PARAMETER = 4 + 4 + 2


# (size, texts of 64 tokens)
TABLE = (
    ("1.1b", 1),
    ("7b", 4),
    ("7b", 10_000),
    ("70b", 4),
    ("405b", 4),
    ("70b", 10_000),
    ("405b", 10_000),
)


class Machine(NamedTuple):
    """Where a checkpoint is streamed.

    Attributes:
        products: Operations a second of float32 products at "highest".
        reading: Bytes a second from the file to where products are computed.
        memory: Bytes that hold weights, states and the process.
        start: Seconds of Python's start and of compilation.
        process: Bytes of the process before the first layer.
    """

    products: float
    reading: float
    memory: float
    start: float
    process: float


# Two cores: products alone, as measured; start and process are what the 1.1B run leaves. H100:
# published rate, the others of the same order.
MACHINES = {
    "2 cores, 24 GB": Machine(170e9, 1e9, 24e9, 18.0, 0.5e9),
    "H100, 80 GB": Machine(67e12, 3e9, 80e9, 60.0, 0.5e9),
}


class Cost(NamedTuple):
    """Operations, bytes read, passes over the checkpoint, bytes at the peak, seconds."""

    flops: float
    read: float
    passes: int
    peak: float
    seconds: float


def parameters(size: str) -> float:
    """Of one layer."""
    _, d, f, h, groups, _ = PUBLISHED[size]
    return 2 * d * d + 2 * d * d * groups / h + 3 * d * f


def streaming_cost(size: str, texts: int, tokens: int, machine: Machine) -> Cost:
    """Of one stream of the checkpoint, or of as many as the states of all texts need.

    States of a text are the sums of all lengths, L + 1 tokens' widths of them, and the hidden
    states of every network; they are there twice while a layer makes new ones of them.
    """
    depth, d, *_ = PUBLISHED[size]
    flops = sum(operations(size, texts, tokens))
    weights = machine.process + OF_A_PARAMETER * parameters(size)
    states = 2 * 4.0 * tokens * d * (depth + 1 + VARIANTS + 1)
    fit = int((machine.memory - weights) // states)
    if fit < 1:
        raise ValueError(f"{size}: {(weights + states) / 1e9:.3g} GB do not fit the memory")
    passes = math.ceil(texts / fit)
    read = passes * depth * 2.0 * parameters(size)
    peak = weights + min(texts, fit) * states
    # The next layer is read meanwhile.
    seconds = machine.start + max(flops / machine.products, read / machine.reading)
    return Cost(flops, read, passes, peak, seconds)


def table() -> str:
    """Sizes by texts of 64 tokens on every machine, as Markdown."""
    heads = ("size, texts", "machine", "TFLOP", "GB read", "passes", "GB at the peak", "hours")
    rows = []
    for (size, texts), (name, machine) in itertools.product(TABLE, MACHINES.items()):
        try:
            cost = streaming_cost(size, texts, 64, machine)
            row = [cost.flops / 1e12, cost.read / 1e9, cost.passes, cost.peak / 1e9]
            row += [f"{cost.seconds / 3600:.2g}"]
        except ValueError:
            row = ["does not fit", *[""] * 4]
        rows.append([f"{size}, {texts}", name, *row])
    return timing.table(heads, rows)


if __name__ == "__main__":
    print(table())
