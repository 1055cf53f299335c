"""Benchmarks of training: whole ensembles, beside PyTorch with --baseline=torch.

The figure is seconds per seed and training step, the seeds sharing all cores; PyTorch trains one
seed with all its threads, as its users do. Both run in turns, round after round.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import run_convex_hull, run_memorization, run_sort
from experiments.benchmarks.timing import Report, Timing
from experiments.shell import cli, memory
from rank_collapse.runs.seeds import seed_keys
from rank_collapse.training.ensemble import Ensemble
from rank_collapse.training.training import Hyper, num_batches

# Name: (binary, arguments beside the published sizes, its asked-for speed against PyTorch).
CASES = {
    "sort": (run_sort, (), 8.0),
    "convex_hull": (run_convex_hull, ("--n_train_data=1000",), 3.5),
    "memorization": (run_memorization, ("--n_train_data=80",), 2.0),
}


def train_sort(options: Any) -> Report:
    """Sorting's training steps, 16 seeds."""
    return time_training("sort", options, 16)


def train_convex_hull(options: Any) -> Report:
    """The hull's training steps, 8 seeds."""
    return time_training("convex_hull", options, 8)


def train_memorization(options: Any) -> Report:
    """Memorization's training steps, 4 seeds; random token ids of RTE's lengths and size."""
    return time_training("memorization", options, 4)


def time_training(name: str, options: Any, num_seeds: int, arguments: Sequence[str] = ()) -> Report:
    """Training steps of one of `CASES`, beside PyTorch's where --baseline asks for it.

    Args:
        name: The case.
        options: The flags of `experiments.benchmark`.
        num_seeds: Seeds trained together.
        arguments: Of the binary, beside the case's own: other sizes than the published ones.
    """
    module, own, asked = CASES[name]
    recipe, make_data, batch_size = _setup(name, module, (*own, *arguments))
    ensemble = Ensemble(recipe, make_data, mesh=cli.mesh(options), epochs_per_chunk=1)
    values = Hyper(learning_rate=1e-3, dropout=0.1)
    hyper = jax.tree.map(lambda a: jnp.full(num_seeds, a, jnp.float32), values)
    keys, hyper = ensemble.lay_out((seed_keys(0, num_seeds), hyper))
    ours = Timing(f"ours, {num_seeds} seeds on {ensemble.mesh.size} devices", 0.0)
    begun = time.perf_counter()
    state, data = ensemble.begin(keys, hyper, None)
    state, _ = jax.block_until_ready(ensemble.chunk(state, data, hyper, jnp.int32(0)))
    ours.compile_seconds = time.perf_counter() - begun
    # Per step of the padded examples: packed rows are fewer, but an epoch is the same texts.
    example_data = make_data(jax.random.key(0))
    examples = example_data.get("texts", example_data["train"])
    steps = num_batches(len(examples), batch_size)
    timings, baseline = [ours], ours
    torch_steps = None
    if options.baseline == "torch":
        from experiments.benchmarks import torch_baseline

        baseline = Timing("PyTorch, one seed", 0.0)
        timings.append(baseline)
        padded = dataclasses.replace(recipe, batch_size=batch_size)
        torch_steps = lambda: torch_baseline.step_times(padded, examples, values, steps)[0]  # noqa: E731
    for r in range(options.rounds):
        begun = time.perf_counter()
        state, _ = jax.block_until_ready(ensemble.chunk(state, data, hyper, jnp.int32(r)))
        ours.seconds.append((time.perf_counter() - begun) / steps / num_seeds)
        if torch_steps is not None:
            baseline.seconds.append(torch_steps())
    figures = {
        "ms per seed and step, ours": (1e3 * ours.best, None),
        "peak memory of the process, GB": (memory.peak() / 1e9, None),
    }
    if torch_steps is not None:
        ratio = float(np.median(np.array(baseline.seconds) / np.array(ours.seconds)))
        figures["ms per step, PyTorch"] = (1e3 * baseline.best, None)
        figures[f"times faster than PyTorch (asked {asked:g})"] = (ratio, None)
        figures["ours as a share of PyTorch"] = (1 / ratio, 1 / asked)
    return Report(timings, baseline.name, figures)


def _setup(name, module, arguments):
    """(recipe, make_data, examples in a batch) of a published command, without files."""
    flags = cli.parse(module.FLAGS, list(arguments))
    if name != "memorization":
        setup = module.make_setup(flags)
        return setup.recipe, setup.make_data, flags.batch_sz
    # Lengths as RTE's: median 48, mean 59 of at most 128 tokens, 6000 different ones.
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.9, 0.55, flags.n_train_data), 12, 128).astype(int)
    tokens = rng.integers(0, 6000, (flags.n_train_data, 128))
    mask = np.arange(128)[None] < lengths[:, None]
    tokens[~mask] = 0
    setup = module.setup_of(flags, tokens, mask, vocab_size=6000)
    return setup.recipe, setup.make_data, flags.batch_sz
