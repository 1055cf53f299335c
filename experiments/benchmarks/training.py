"""Benchmarks of training: whole ensembles.

The figure is seconds per seed and training step, the seeds sharing all cores.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import run_convex_hull, run_memorization, run_sort, run_transformer
from experiments.benchmarks.timing import Report, Timing
from experiments.lab import cli
from rank_collapse.runs.seeds import seed_keys
from rank_collapse.training.ensemble import Ensemble
from rank_collapse.training.training import Hyper, num_batches

# {name: (binary, arguments beside the published sizes, seeds trained together)}. Memorization is of
# random token ids of RTE's lengths and size; translation has an encoder-decoder.
CASES = {
    "sort": (run_sort, (), 16),
    "convex_hull": (run_convex_hull, ("--n_train_data=1000",), 8),
    "memorization": (run_memorization, ("--n_train_data=80",), 4),
    "translation": (run_transformer, ("--task=translation", "--n_train_data=1000"), 8),
}


def time_training(
    name: str, options: Any, num_seeds: int | None = None, arguments: Sequence[str] = ()
) -> Report:
    """Measures the time of training steps of one of `CASES`.

    Args:
        name: The case.
        options: The flags of `experiments.benchmark`.
        num_seeds: Seeds trained together; those of the case by default.
        arguments: Of the binary, beside the case's own: other sizes than the published ones.
    """
    num_seeds = num_seeds or CASES[name][2]
    recipe, make_data, batch_size = make_case(name, arguments)
    ensemble = Ensemble(recipe, make_data, mesh=cli.device_mesh(options), epochs_per_chunk=1)
    values = Hyper(learning_rate=1e-3, dropout=0.1)
    hyper = jax.tree.map(lambda a: jnp.full(num_seeds, a, jnp.float32), values)
    keys, hyper = ensemble.lay_out((seed_keys(0, num_seeds), hyper))
    timing = Timing(f"{num_seeds} seeds on {ensemble.mesh.size} devices", 0.0)
    start = time.perf_counter()
    state, data = ensemble.begin(keys, hyper, None)
    epoch = ensemble.chunk.trace(state, data, hyper, jnp.int32(0)).lower().compile()
    state, _ = jax.block_until_ready(epoch(state, data, hyper, jnp.int32(0)))
    timing.compile_seconds = time.perf_counter() - start
    # Per step of the padded examples: packed rows are fewer, but an epoch is the same texts.
    example_data = make_data(jax.random.key(0))
    examples = example_data.get("texts", example_data["train"])
    steps = num_batches(len(examples), batch_size)
    for r in range(options.rounds):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(epoch(state, data, hyper, jnp.int32(r)))
        timing.seconds.append((time.perf_counter() - start) / steps / num_seeds)
    return Report([timing], {"ms per seed and step": (1e3 * timing.best, None)})


def make_case(name: str, arguments: Sequence[str] = ()) -> tuple[Any, Callable, int]:
    """Makes (recipe, make_data, examples in a batch) of a published command, without files."""
    module, case_arguments, _ = CASES[name]
    flags = cli.parse_flags(module.FLAGS, [*case_arguments, *arguments])
    if name != "memorization":
        setup = module.make_setup(flags)
    else:
        # Lengths as RTE's: median 48, mean 59 of at most 128 tokens, 6000 different ones.
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.lognormal(3.9, 0.55, flags.n_train_data), 12, 128).astype(int)
        tokens = rng.integers(0, 6000, (flags.n_train_data, 128))
        mask = np.arange(128)[None] < lengths[:, None]
        setup = run_memorization.make_task(flags, np.where(mask, tokens, 0), mask, vocab_size=6000)
    return setup.recipe, setup.make_data, flags.batch_size
