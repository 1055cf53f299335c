"""Benchmarks of training: whole ensembles, and PyTorch with --baseline=torch.

The figure is seconds per seed and training step. The seeds share all cores, or the accelerator.
PyTorch trains in every way of `torch_processes.list_ways`, on the same cores or GPU; the ratio is
to the best of them. All run in turns, round after round. The share of the physical limit is the
time of the step's products at the rate of a large product, measured in the same rounds.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl.flags import FlagValues

from experiments import run_convex_hull, run_memorization, run_sort, run_transformer
from experiments.benchmarks.limits import LargeProduct, compute_share, count_flops
from experiments.benchmarks.timing import Report, Timing, describe_round, median_ratio, say
from experiments.benchmarks.torch_processes import Processes, describe_task, list_ways
from experiments.lab import cli, list_points, report_activity
from experiments.lab.devices import count_cores, device_mesh
from rank_collapse.runs.seeds import seed_keys
from rank_collapse.training import Recipe
from rank_collapse.training.ensemble import Ensemble
from rank_collapse.training.training import Hyper, num_batches

# {name: (binary, arguments beside the published sizes, target speed against the best of PyTorch)}.
CASES = {
    "sort": (run_sort, (), 4.0),
    "convex_hull": (run_convex_hull, ("--n_train_data=1000",), 2.5),
    "memorization": (run_memorization, ("--n_train_data=80",), 2.5),
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


def time_training(
    name: str, options: FlagValues, arguments: Sequence[str] = (), num_seeds: int = 0
) -> Report:
    """Measures the time of training steps of one of `CASES`, and with --baseline PyTorch's.

    Args:
        name: The case.
        options: The flags of `experiments.benchmark`.
        arguments: Arguments of the program in addition to those of the case: other sizes than the
            published ones.
        num_seeds: Number of seeds trained together; 0 for the numbers in `SEEDS`.
    """
    target, num_seeds = CASES[name][2], num_seeds or SEEDS[name]
    recipe, make_data, batch_size = make_case(name, arguments)
    ensemble = Ensemble(recipe, make_data, mesh=device_mesh(options), epochs_per_chunk=1)
    mesh = ensemble.mesh
    values = Hyper(learning_rate=1e-3, dropout=0.1)
    hyper = jax.tree.map(lambda a: jnp.full(num_seeds, a, jnp.float32), values)
    keys = seed_keys(0, num_seeds)
    ours = Timing(f"ours, {num_seeds} seeds on {mesh.size} devices", 0.0)
    start = time.perf_counter()
    with report_activity(f"  {ours.name}: compiling, and the first epoch"):
        program, runs = ensemble.begin(keys, hyper)
        program.compile(program.size)
        runs, _ = program.advance(runs, 1)
    ours.compile_seconds = time.perf_counter() - start
    say(f"{ours.name}: first epoch {ours.compile_seconds:.1f} s, with compiling")
    # Per step of the padded examples: packed rows are fewer, but an epoch is the same texts.
    example_data = make_data(jax.random.key(0))
    examples = example_data.get("texts", example_data["train"])
    steps = num_batches(len(examples), batch_size)
    flops = count_flops(program.functions.step.closed) / steps
    product, rates, ways, cores = LargeProduct(mesh), [], [], count_cores()
    with contextlib.ExitStack() as stack:
        if target and options.baseline == "torch":
            platform = mesh.devices.flat[0].platform
            padded = dataclasses.replace(recipe, batch_size=batch_size)
            task = describe_task(padded, examples, values, platform)
            ways = list_ways(cores, num_seeds, platform)
            processes = stack.enter_context(Processes(task, max(w.processes for w in ways)))
            for way in ways:
                with report_activity(f"  {way.name}: first steps"):
                    processes.measure(way, 1)
        baselines = [Timing(way.name, 0.0) for way in ways]
        timings = [*baselines, ours]
        for r in range(options.rounds):
            with report_activity(f"  round {r + 1} of {options.rounds}"):
                start = time.perf_counter()
                runs, _ = program.advance(runs, r + 2)
                ours.seconds.append((time.perf_counter() - start) / steps / num_seeds)
                rates.append(product.measure_rate())
                for timing, way in zip(baselines, ways, strict=True):
                    timing.seconds.append(processes.measure(way, steps))
            say(f"{describe_round(timings, r, options.rounds)} a seed and step")
    figures = {
        "ms per seed and step, ours": (1e3 * ours.best, None),
        "MFLOP of the products of a seed's step": (flops / 1e6, None),
        "GFLOP/s of a large product on all devices": (max(rates) / 1e9, None),
        "share of that rate, ours": (compute_share(flops, ours.seconds, rates), None),
    }
    if not ways:
        return Report([ours], figures)
    return Report(timings, figures | _compare_with_torch(ours, baselines, target))


def _compare_with_torch(ours, baselines, target):
    """Computes {figure: (value, limit or None)} beside the fastest way of PyTorch.

    Args:
        ours: Timing of a seed's step of this library.
        baselines: Timings of the ways of PyTorch.
        target: How many times faster this library has to be.
    """
    ratios = [1 / median_ratio(ours, timing) for timing in baselines]
    best = int(np.argmin(ratios))
    way = baselines[best].name.partition(", ")[2]
    return {
        f"ms per seed and step, the best of PyTorch ({way})": (
            1e3 * baselines[best].best,
            None,
        ),
        f"times faster than the best of PyTorch (asked {target:g})": (ratios[best], None),
        "ours as a share of the best of PyTorch": (1 / ratios[best], 1 / target),
    }


def make_case(name: str, arguments: Sequence[str] = ()) -> tuple[Recipe, Callable, int]:
    """Makes (recipe, make_data, examples in a batch) of a published command, without files."""
    module, case_arguments, _ = CASES[name]
    (options,) = list_points(cli.parse_flags(module.FLAGS, [*case_arguments, *arguments]))
    if name != "memorization":
        setup = module.make_task(options)
    else:
        # Lengths as RTE's: median 48, mean 59 of at most 128 tokens, 6000 different ones.
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.lognormal(3.9, 0.55, options.n_train_data), 12, 128).astype(int)
        tokens = rng.integers(0, 6000, (options.n_train_data, 128))
        mask = np.arange(128)[None] < lengths[:, None]
        setup = run_memorization.make_text_task(
            options, np.where(mask, tokens, 0), mask, vocab_size=6000
        )
    return setup.recipe, setup.make_data, options.batch_size
