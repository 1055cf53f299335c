"""Benchmarks of training: whole ensembles, beside PyTorch with --baseline=torch.

The figure is seconds per seed and training step. The seeds share all cores, or the accelerator.
PyTorch trains one seed with all its threads, or on the same GPU, as its users do. Both run in
turns, round after round.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import run_convex_hull, run_memorization, run_sort, run_transformer
from experiments.benchmarks.timing import Report, Timing, describe_round, median_ratio, say
from experiments.lab import cli, report_activity
from rank_collapse.runs.seeds import seed_keys
from rank_collapse.training.ensemble import Ensemble
from rank_collapse.training.training import Hyper, num_batches

# {name: (binary, arguments beside the published sizes, its target speed against PyTorch)}.
CASES = {
    "sort": (run_sort, (), 8.0),
    "convex_hull": (run_convex_hull, ("--n_train_data=1000",), 3.5),
    "memorization": (run_memorization, ("--n_train_data=80",), 2.0),
    # An encoder-decoder; PyTorch's baselines are of a single stack.
    "translation": (run_transformer, ("--task=translation", "--n_train_data=1000"), None),
}
# Trained together; memorization is of random token ids of RTE's lengths and size.
SEEDS = {"sort": 16, "convex_hull": 8, "memorization": 4, "translation": 8}
# Sizes that show nothing but that a case works.
TINY = (
    "--depth=1",
    "--width=2",
    "--hidden_dim=8",
    "--n_train_data=8",
    "--n_eval_data=4",
    "--batch_sz=4",
    "--n_epochs=2",
)
BASELINES = ("none", "torch")


def time_training(name: str, options: Any, arguments: Sequence[str] = ()) -> Report:
    """Measures the time of training steps of one of `CASES`, and with --baseline PyTorch's.

    Args:
        name: The case.
        options: The flags of `experiments.benchmark`; --num_seeds are trained together.
        arguments: Of the binary, beside the case's own: other sizes than the published ones.
    """
    target, num_seeds = CASES[name][2], options.num_seeds or SEEDS[name]
    recipe, make_data, batch_size = make_case(name, arguments)
    ensemble = Ensemble(recipe, make_data, mesh=cli.device_mesh(options), epochs_per_chunk=1)
    values = Hyper(learning_rate=1e-3, dropout=0.1)
    hyper = jax.tree.map(lambda a: jnp.full(num_seeds, a, jnp.float32), values)
    keys, hyper = ensemble.lay_out((seed_keys(0, num_seeds), hyper))
    ours = Timing(f"ours, {num_seeds} seeds on {ensemble.mesh.size} devices", 0.0)
    start = time.perf_counter()
    with report_activity(f"  {ours.name}: compiling, and the first epoch"):
        state, data = ensemble.begin(keys, hyper, None)
        epoch = ensemble.chunk.trace(state, data, hyper, jnp.int32(0)).lower().compile()
        state, _ = jax.block_until_ready(epoch(state, data, hyper, jnp.int32(0)))
    ours.compile_seconds = time.perf_counter() - start
    say(f"{ours.name}: first epoch {ours.compile_seconds:.1f} s, with compiling")
    # Per step of the padded examples: packed rows are fewer, but an epoch is the same texts.
    example_data = make_data(jax.random.key(0))
    examples = example_data.get("texts", example_data["train"])
    steps = num_batches(len(examples), batch_size)
    baseline = None
    if target and options.baseline == "torch":
        from experiments.benchmarks.torch_baseline import Training

        padded = dataclasses.replace(recipe, batch_size=batch_size)
        baseline = Training(padded, examples, values, ensemble.mesh.devices.flat[0].platform)
    torch = Timing("PyTorch, one seed", 0.0)
    timings = [torch, ours] if baseline else [ours]
    for r in range(options.rounds):
        with report_activity(f"  round {r + 1} of {options.rounds}"):
            start = time.perf_counter()
            state, _ = jax.block_until_ready(epoch(state, data, hyper, jnp.int32(r)))
            ours.seconds.append((time.perf_counter() - start) / steps / num_seeds)
            if baseline:
                torch.seconds.append(baseline.seconds_per_step(steps))
        say(f"{describe_round(timings, r, options.rounds)} a seed and step")
    figures = {"ms per seed and step, ours": (1e3 * ours.best, None)}
    if not baseline:
        return Report([ours], figures)
    ratio = 1 / median_ratio(ours, torch)
    return Report(
        timings,
        figures
        | {
            "ms per step, PyTorch": (1e3 * torch.best, None),
            f"times faster than PyTorch (asked {target:g})": (ratio, None),
            "ours as a share of PyTorch": (1 / ratio, 1 / target),
        },
    )


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
