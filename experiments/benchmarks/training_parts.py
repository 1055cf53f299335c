"""Benchmark of the parts of a training step: what each takes, found by leaving it out.

Each variant trains the same seeds without one part: dropout, Adam (plain gradient descent in its
place), layer norms, or the softmax (the scores themselves are the weights). What a variant does not
need is not computed, so that a part includes its gradient. All take turns, round after round, and
the figure is CPU time, which other work on the machine changes least. The time of the products is
measured apart: each product of the step alone, at its own size, and all of them at the rate of a
large product.
"""

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from experiments.benchmarks.limits import LargeProduct, count_flops, count_product, list_products
from experiments.benchmarks.timing import Report, Timing, describe_round, median_ratio, say
from experiments.benchmarks.training_benchmarks import make_case
from experiments.lab import cli, report_activity
from rank_collapse.runs.seeds import run_seeds, seed_keys, shard_seeds
from rank_collapse.training import training
from rank_collapse.training.ensemble import Ensemble
from rank_collapse.training.recipe import Hyper, Recipe
from rank_collapse.training.tasks.examples import token_mask

NAMES = ("sort", "convex_hull", "memorization")  # of `training_benchmarks.CASES`
SEEDS = 2  # on each device
PARTS = ("dropout", "Adam", "layer norms", "softmax")
# Of the copies of one product that are computed in one call: operations, and numbers.
CALL_FLOPS, CALL_NUMBERS, MOST_COPIES = 3e8, 2e7, 256


def time_training_parts(name: str, options: Any, arguments: Sequence[str] = ()) -> Report:
    """Measures the CPU time of a training step of one of `training_benchmarks.CASES` by parts.

    Args:
        name: The case.
        options: The flags of `experiments.benchmark`.
        arguments: Of the binary, beside the case's own: other sizes than the published ones.
    """
    recipe, make_data, _ = make_case(name, arguments)
    mesh = cli.device_mesh(options)
    examples = make_data(jax.random.key(0))["train"]
    steps = training.num_batches(len(examples), recipe.batch_size)
    timings, advances, program = [], [], None
    for parts in ((), *((part,) for part in PARTS), PARTS):
        without = {0: "whole step", 1: f"without {parts[0] if parts else ''}"}
        timings.append(Timing(without.get(len(parts), "without all of these"), 0.0))
        with report_activity(f"  {timings[-1].name}: compiling"):
            start = time.perf_counter()
            new, advance = _make_variant(recipe, make_data, mesh, parts)
            timings[-1].compile_seconds = time.perf_counter() - start
        program = program or new
        advances.append(advance)
    closed, count = program.functions.step.closed, SEEDS * mesh.size
    flops, large = count_flops(closed) / steps, LargeProduct(mesh)
    products = _make_products(closed, mesh)
    timings.append(Timing("its products alone, at their sizes", 0.0))
    timings.append(Timing("its products at the rate of a large product", 0.0))
    for r in range(options.rounds):
        with report_activity(f"  round {r + 1} of {options.rounds}"):
            for timing, advance in zip(timings, advances, strict=False):
                timing.seconds.append(_time_cpu(advance) / steps / count)
            seconds = sum(times * _time_cpu(call) / copies for call, copies, times in products)
            timings[-2].seconds.append(seconds / steps / mesh.size)
            timings[-1].seconds.append(flops / large.flops * _time_cpu(large.time))
        say(f"{describe_round(timings, r, options.rounds)} of CPU for a seed and step")
    whole, *without, at_size, at_rate = timings
    shares = {t.name.replace("without", "share of"): 1 - median_ratio(t, whole) for t in without}
    shares["share of its products at their sizes"] = median_ratio(at_size, whole)
    shares["share of its products at the rate of a large product"] = median_ratio(at_rate, whole)
    shares["share of the remainder: copies, sums and activations"] = (
        1 - shares["share of all of these"] - shares["share of its products at their sizes"]
    )
    shares["share of padding among the tokens"] = 1 - float(jnp.mean(token_mask(examples)))
    return Report(timings, {figure: (value, None) for figure, value in shares.items()})


def _make_variant(
    recipe: Recipe, make_data: Callable, mesh: Mesh, parts: Sequence[str]
) -> tuple[Any, Callable]:
    """Makes the compiled program of training without some parts, and a call of one epoch."""
    config = recipe.config
    if "layer norms" in parts:
        embedding = config.embedding.replace(norm=False)
        config = config.replace(norm_placement="none", embedding=embedding)
    if "softmax" in parts:
        config = config.replace(normalise=_keep_scores)
    hyper = Hyper(learning_rate=1e-3, dropout=None if "dropout" in parts else 0.1)
    with contextlib.ExitStack() as stack:
        if "Adam" in parts:
            stack.enter_context(mock.patch.object(training, "make_optimizer", _make_plain))
        ensemble = Ensemble(
            dataclasses.replace(recipe, config=config), make_data, mesh=mesh, epochs_per_chunk=1
        )
        count = SEEDS * mesh.size
        values = jax.tree.map(lambda a: jnp.full(count, a, jnp.float32), hyper)
        program, runs = ensemble.begin(seed_keys(0, count), values)
        program.compile(program.size)
    state = [runs]

    def advance() -> None:
        state[0], _ = program.advance(state[0], state[0].step + 1)

    advance()
    return program, advance


def _keep_scores(scores: Any, context: Any) -> Any:
    return scores


def _make_plain(hyper: Hyper, recipe: Recipe) -> Any:
    import optax  # as in `training.make_optimizer`

    return optax.identity()


def _make_products(closed: Any, mesh: Mesh) -> list[tuple[Callable[[], Any], int, int]]:
    """Makes a call for each distinct product: [(call, copies in it on a device, how often)]."""
    counts: Mapping[Any, list] = defaultdict(lambda: [None, 0])
    for equation, times in list_products(closed):
        shapes = tuple(v.aval.str_short() for v in equation.invars)
        entry = counts[shapes, str(equation.params["dimension_numbers"])]
        entry[0], entry[1] = equation, entry[1] + times
    return [(*_make_product(equation, mesh), times) for equation, times in counts.values()]


def _make_product(equation: Any, mesh: Mesh) -> tuple[Callable[[], Any], int]:
    """Makes a call of one product, and how many copies of it a device computes in it."""
    shapes = [v.aval for v in (*equation.invars, *equation.outvars)]
    numbers = sum(a.size for a in shapes)
    most = min(CALL_FLOPS / count_product(equation), CALL_NUMBERS / numbers, MOST_COPIES)
    copies = max(2, int(most))
    operands = shard_seeds(
        [jnp.full((copies * mesh.size, *a.shape), 0.5, a.dtype) for a in shapes[:2]], mesh
    )
    multiply = run_seeds(
        lambda a, b, _: equation.primitive.bind(a, b, **equation.params), mesh, at_once=1
    )

    def call() -> None:
        jax.block_until_ready(multiply(*operands, None))

    call()  # compiles
    return call, copies


def _time_cpu(call: Callable[[], Any]) -> float:
    """Measures the CPU seconds of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start
