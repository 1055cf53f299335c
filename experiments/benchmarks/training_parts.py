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
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from experiments.benchmarks.limits import LargeProduct, count_flops, count_product, list_products
from experiments.benchmarks.timing import Report, Timing, describe_round, median_ratio, say
from experiments.benchmarks.training_benchmarks import make_case
from experiments.lab import report_activity
from experiments.lab.devices import device_mesh
from rank_collapse.runs.seeds import run_seeds, seed_keys, shard_seeds
from rank_collapse.training import training
from rank_collapse.training.ensemble import Ensemble
from rank_collapse.training.recipe import Hyper, Recipe
from rank_collapse.training.tasks.examples import token_mask

NAMES = ("sort", "convex_hull", "memorization")  # of `training_benchmarks.CASES`
SEEDS = 2  # on each device
PARTS = ("dropout", "Adam", "layer norms", "softmax")
CALL_FLOPS, MOST_TURNS = 3e8, 1000  # of one product in one call
MOST_SHOWN = 4  # products


def time_training_parts(name: str, options: Any, arguments: Sequence[str] = ()) -> Report:
    """Measures the CPU time of a training step of one of `training_benchmarks.CASES` by parts.

    Args:
        name: The case.
        options: The flags of `experiments.benchmark`.
        arguments: Of the binary, beside the case's own: other sizes than the published ones.
    """
    recipe, make_data, _ = make_case(name, arguments)
    mesh = device_mesh(options)
    examples = make_data(jax.random.key(0))["train"]
    steps = training.num_batches(len(examples), recipe.batch_size)
    timings, advances, program = [], [], None
    for parts in ((), *((part,) for part in PARTS), PARTS):
        without = {0: "whole step", 1: f"without {parts[0] if parts else ''}"}
        timings.append(Timing(without.get(len(parts), "without all of these"), 0.0))
        with report_activity(f"  {timings[-1].name}: compiling"):
            start = time.perf_counter()
            new, advance = make_variant(recipe, make_data, mesh, parts)
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
            for timing, advance in zip(timings[:-2], advances, strict=True):
                timing.seconds.append(_time_cpu(advance) / steps / count)
            for product in products:
                product.seconds.append(
                    product.times * _time_cpu(product.call) / product.turns / steps / mesh.size
                )
            timings[-2].seconds.append(sum(product.seconds[-1] for product in products))
            timings[-1].seconds.append(flops / large.flops * _time_cpu(large.time))
        say(f"{describe_round(timings, r, options.rounds)} of CPU for a seed and step")
    shares = _compute_shares(timings, products, flops, steps)
    shares["share of padding among the tokens"] = 1 - float(jnp.mean(token_mask(examples)))
    return Report(timings, {figure: (value, None) for figure, value in shares.items()})


def _compute_shares(timings, products, flops, steps):
    """Computes {figure: share of the time of a whole step, or rate of a product}.

    Args:
        timings: Of the whole step, without each part, without all parts, of its products at their
            sizes, and of its products at the rate of a large product.
        products: The products of an epoch.
        flops: Floating-point operations of a step.
        steps: Steps of an epoch.
    """
    whole, *without, at_size, at_rate = timings
    shares = {t.name.replace("without", "share of"): 1 - median_ratio(t, whole) for t in without}
    shares["share of its products at their sizes"] = median_ratio(at_size, whole)
    shares["share of its products at the rate of a large product"] = median_ratio(at_rate, whole)
    shares["share of the remainder: copies, sums and activations"] = (
        1 - shares["share of all of these"] - shares["share of its products at their sizes"]
    )
    for product in sorted(products, key=lambda p: -min(p.seconds))[:MOST_SHOWN]:
        limit = product.times * product.flops / steps / flops * at_rate.best
        shares[f"rate of {product.name}, over that of a large product"] = limit / product.best
        shares[f"share of {product.name}, {product.times / steps:g} times"] = median_ratio(
            product, whole
        )
    return shares


def make_variant(
    recipe: Recipe, make_data: Callable, mesh: Mesh, parts: Sequence[str]
) -> tuple[Any, Callable]:
    """Makes training without some parts, compiled.

    Args:
        recipe, make_data, mesh: What is trained, see `Ensemble`.
        parts: Names of the parts to leave out: "layer norms", "softmax", "dropout" and "Adam".

    Returns:
        (the program, a function that trains for one more epoch).
    """
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


@dataclasses.dataclass
class Product(Timing):
    """A product of a step: seconds of a step in each round.

    Attributes:
        flops: Operations of one.
        times: How often it is computed in an epoch.
        call: Computes it on each device.
        turns: How often that does.
    """

    flops: float = 0.0
    times: int = 0
    call: Callable[[], Any] = lambda: None
    turns: int = 1


def _make_products(closed: Any, mesh: Mesh) -> list[Product]:
    """Makes the distinct products of a program."""
    products: dict[str, Product] = {}
    for equation, times in list_products(closed):
        shapes = " × ".join(v.aval.str_short(short_dtypes=True) for v in equation.invars)
        kind = f"{shapes} {equation.params['dimension_numbers']}"
        if kind not in products:
            call, turns = _make_product(equation, mesh)
            flops = count_product(equation)
            products[kind] = Product(shapes, 0.0, flops=flops, call=call, turns=turns)
        products[kind].times += times
    return list(products.values())


def _make_product(equation: Any, mesh: Mesh) -> tuple[Callable[[], Any], int]:
    """Makes a call that computes one product of a training step many times.

    Args:
        equation: The equation of the product.
        mesh: The devices; each computes the same.

    Returns:
        (the call, how often a device computes the product in it).
    """
    turns = int(max(1, min(CALL_FLOPS / count_product(equation), MOST_TURNS)))

    def repeat(operands, _):
        """Computes the product `turns` times, and returns one entry of the last."""

        def body(_, carry):
            # Barriers: no turn is left out, and of each product all entries are computed.
            first, second = jax.lax.optimization_barrier(carry)[:2]
            product = equation.primitive.bind(first, second, **equation.params)
            return first, second, jax.lax.optimization_barrier(product).ravel()[0]

        entry = jnp.zeros((), equation.outvars[0].aval.dtype)
        return jax.lax.fori_loop(0, turns, body, (*operands, entry))[2]

    shapes = [(v.aval.shape, v.aval.dtype) for v in equation.invars]
    operands = [jnp.full((mesh.size, *shape), 0.5, dtype) for shape, dtype in shapes]
    multiply, operands = run_seeds(repeat, mesh, at_once=1), shard_seeds(operands, mesh)

    def call() -> None:
        jax.block_until_ready(multiply(operands, None))

    call()  # compiles
    return call, turns


def _time_cpu(call: Callable[[], Any]) -> float:
    """Measures the CPU seconds of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start
