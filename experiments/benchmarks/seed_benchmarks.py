"""Benchmark of seeds: how many train together fastest, and in which way.

The figure is seconds per seed and training step on one machine, with CPU milliseconds, which other
work on the machine changes less. Compilation is timed separately. `sweep` is `training.sweep` with
its own choices; "vmap" and "map" are `jax.jit` of `jax.vmap` or `jax.lax.map` of `jax.lax.scan`,
written by hand; "one by one" calls the compiled training of one seed for each seed; "processes" run
one seed each, as many at a time as there are cores. The ways take turns, round after round. The
overhead of `sweep` over the faster way by hand is the median over rounds.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.flags import FlagValues
from jaxtyping import Array, PyTree

from experiments.benchmarks.limits import LargeProduct, count_flops
from experiments.benchmarks.timing import Report, Timing, say
from experiments.benchmarks.training_benchmarks import TINY as TINY_ARGUMENTS, make_case
from experiments.lab.devices import count_cores
from rank_collapse.runs.progress import Progress
from rank_collapse.runs.seeds import group_size, is_on_cpu, seed_keys, seed_mesh
from rank_collapse.training.engine.axes import make_axes
from rank_collapse.training.engine.functions import trace_functions
from rank_collapse.training.engine.program import Program
from rank_collapse.training.engine.trainer import Trainer
from rank_collapse.training.recipe import Hyper
from rank_collapse.training.training import init_state, train_step

WAYS = ("sweep", "vmap", "map", "one by one", "processes")
# {network: (seeds, steps)}: the CNN's step takes a thousand times that of the MLP.
SIZES = {"mlp": ((1, 4, 16, 64, 256), 200), "sort": ((1, 4, 16, 64), 20), "cnn": ((1, 4, 16), 3)}
RATE = 1e-3
ACCELERATOR_SEEDS = (1, 16, 64, 256, 1024, 4096)
# On an accelerator the time of these is the same for each seed, and one process has the device.
MOST_SEEDS = {"map": 64, "one by one": 16, "processes": 0}
# Sizes that show nothing but that the benchmark works.
TINY_SIZE = ((3,), 4)
TINY = {
    "sizes": dict.fromkeys(SIZES, TINY_SIZE),
    "arguments": TINY_ARGUMENTS,
    "batch_size": 2,
}


def make_network(
    name: str, batch_size: int = 256, arguments: Sequence[str] = ()
) -> tuple[Callable, Callable]:
    """Makes (init, step) of a network.

    Args:
        name: "mlp"; "cnn" of jax#26568, a convolution of 64 channels on images of 32 × 32; "sort",
            the Transformer of run_sort.
        batch_size: Batch size of the CNN.
        arguments: Arguments of run_sort in addition to the published sizes.
    """
    if name == "sort":
        return _make_sort(arguments)
    shape = (64, 32) if name == "mlp" else (batch_size, 32, 32, 3)
    inputs = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    labels = np.random.default_rng(1).integers(0, 10, shape[0])

    def init(key: Array, hyper: Mapping[str, Array]) -> PyTree[Array]:
        """Draws the weights of two layers: (first, last)."""
        key_first, key_last = jax.random.split(key)
        sizes = ((32, 64), (64, 10)) if name == "mlp" else ((3, 3, 3, 64), (32 * 32 * 64, 10))
        draw = jax.nn.initializers.lecun_normal()
        return draw(key_first, sizes[0]), draw(key_last, sizes[1])

    def compute_loss(weights):
        """Computes the cross-entropy of the MLP or of the CNN."""
        x = jnp.asarray(inputs)
        if name == "mlp":
            hidden = jnp.tanh(x @ weights[0])
        else:
            numbers = ("NHWC", "HWIO", "NHWC")
            hidden = jax.lax.conv_general_dilated(
                x, weights[0], (1, 1), "SAME", dimension_numbers=numbers
            )
            hidden = jax.nn.relu(hidden).reshape(len(x), -1)
        logits = jax.nn.log_softmax(hidden @ weights[1])
        return -jnp.take_along_axis(logits, jnp.asarray(labels)[:, None], axis=1).mean()

    def step(state: PyTree[Array], hyper: Mapping[str, Array], index: Array) -> tuple:
        """Makes one step of gradient descent: (the new weights, {"loss": the loss before it})."""
        loss, slope = jax.value_and_grad(compute_loss)(state)
        return jax.tree.map(lambda w, g: w - RATE * g, state, slope), {"loss": loss}

    return init, step


def _make_sort(arguments):
    """Makes (init, step) of the Transformer of run_sort."""
    recipe, make_data, batch_size = make_case("sort", arguments)
    hyper_of_runs = Hyper(learning_rate=jnp.float32(RATE), dropout=0.1)

    def init(key: Array, hyper: Mapping[str, Array]) -> PyTree[Array]:
        key_data, key_state = jax.random.split(key)
        return init_state(key_state, hyper_of_runs, recipe), make_data(key_data)["train"]

    def step(state: PyTree[Array], hyper: Mapping[str, Array], index: Array) -> tuple:
        """Trains one run for one step on the next rows of its examples."""
        state, examples = state
        rows = (index * batch_size + jnp.arange(batch_size)) % len(examples)
        batch = jax.tree.map(lambda a: a[rows], examples)
        counts = jnp.ones(batch_size, bool)
        state, loss = train_step(state, batch, counts, index, 1.0, hyper_of_runs, recipe)
        return (state, examples), {"loss": loss}

    return init, step


def train_one(init: Callable, step: Callable, num_steps: int, key: Array) -> tuple:
    """Trains one seed; returns its state and losses."""
    return jax.lax.scan(
        lambda state, index: step(state, {}, index), init(key, {}), jnp.arange(num_steps)
    )


def make_way(way: str, name: str, num_seeds: int, num_steps: int, **sizes: Any) -> Callable:
    """Makes a function that trains seeds in one of `WAYS`.

    All programs are compiled here, except for "sweep", which compiles in its first call, and
    "processes".

    Args:
        way, name: Names in `WAYS` and `SIZES`.
        num_seeds, num_steps: Number of seeds and steps.
        **sizes: See `make_network`.

    Returns:
        A function that returns (losses [s, steps], seconds). The seconds are None where the caller
        times the call. "processes" trains only as many seeds as there are cores, with losses of
        these alone, and extrapolates the seconds to all seeds.
    """
    init, step = make_network(name, **sizes)
    one = partial(train_one, init, step, num_steps)
    keys = seed_keys(0, num_seeds)
    if way == "sweep":
        call = make_sweep(init, step, num_seeds, num_steps, num_steps)
        return lambda: (call(), None)
    if way == "processes":
        return partial(_train_processes, name, num_seeds, num_steps, sizes)
    if way == "one by one":
        single = jax.jit(one).lower(keys[0]).compile()

        def train_one_by_one():
            losses = [np.asarray(single(key)[1]["loss"]) for key in keys]
            return np.stack(losses), None

        return train_one_by_one
    train_all = {"vmap": jax.vmap(one), "map": partial(jax.lax.map, one)}[way]
    together = jax.jit(train_all).lower(keys).compile()
    return lambda: (np.asarray(together(keys)[1]["loss"]), None)


def make_sweep(
    init: Callable,
    step: Callable,
    num_seeds: int,
    num_steps: int,
    every: int,
    programs: dict[int, Program] | None = None,
) -> Callable[[], np.ndarray]:
    """Makes a function that trains as `sweep` does, with what it compiled in its first call.

    Args:
        init, step, num_seeds, num_steps: What is trained.
        every: Steps in one call.
        programs: Compiled programs of another such function with the same `every`, at most its
            steps; the first call adds those that are missing.

    Returns:
        A function that returns losses [s, steps].
    """
    base_key, mesh = jax.random.key(0), seed_mesh()
    compiled = {} if programs is None else programs
    axes, numbers = make_axes(None, None), np.arange(num_seeds)
    functions = [trace_functions(init, step, None, axes.examples(), {}, base_key.dtype)]

    def call() -> np.ndarray:
        """Trains all runs, and returns their losses by step."""
        trainer = Trainer(
            functions,
            axes=axes,
            base_key=base_key,
            finite=None,
            mesh=mesh,
            at_once=group_size(mesh),
            steps=num_steps,
            every=every,
            store=None,
            progress=Progress(0, "", quiet=True),
            programs=compiled,
        )
        trainer.train(numbers, num_seeds)
        return trainer.points(numbers).metrics(num_steps)["loss"].values

    return call


def _train_processes(name, num_seeds, num_steps, sizes):
    """Trains the first seeds, one process per core, and extrapolates the time to all seeds.

    Only `at_once` seeds are trained: as many as there are cores, and at most `num_seeds`. All seeds
    would take ceil(num_seeds / at_once) turns of the same length.

    Args:
        name: A network of `SIZES`.
        num_seeds: Seeds whose time is estimated.
        num_steps: Steps of each seed.
        sizes: Arguments of `make_network`.

    Returns:
        (losses [at_once, steps], the seconds that all `num_seeds` would take).
    """
    code = "from experiments.benchmarks import seed_benchmarks; "
    code += f"seed_benchmarks.run_alone({name!r}, {num_steps}, {sizes!r})"
    at_once = min(num_seeds, count_cores())
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"XLA_FLAGS": flags, "BENCHMARK_SEED": str(seed)},
        )
        for seed in range(at_once)
    ]
    lines = [process.communicate()[0].split() for process in started]
    slowest = max(float(line[0]) for line in lines)
    num_turns = -(-num_seeds // at_once)
    return np.array([[float(v) for v in line[1:]] for line in lines]), slowest * num_turns


def run_alone(name: str, num_steps: int, sizes: Mapping[str, Any]) -> None:
    """Trains one seed and prints the seconds of its second run, and its losses."""
    key = seed_keys(0, 1, first=int(os.environ["BENCHMARK_SEED"]))[0]
    single = jax.jit(partial(train_one, *make_network(name, **sizes), num_steps))
    jax.block_until_ready(single(key))
    start = time.perf_counter()
    losses = np.asarray(single(key)[1]["loss"])
    print(time.perf_counter() - start, *losses.tolist())


def time_seeds(
    options: FlagValues,
    sizes: Mapping[str, tuple] | None = None,
    num_seeds: Sequence[int] = (),
    **network: Any,
) -> Report:
    """Measures all ways for all networks of `SIZES`.

    Args:
        options: The flags of `experiments.benchmark`.
        sizes: Sizes that replace `SIZES`.
        num_seeds: Numbers of seeds that replace those in `SIZES`.
        **network: See `make_network`.
    """
    timings, figures, mesh = [], {}, seed_mesh()
    is_on_host = is_on_cpu(mesh)
    product = LargeProduct(mesh)
    for name, (numbers, num_steps) in (sizes or SIZES).items():
        arguments = {
            key: network[key] for key in network if (key == "arguments") == (name == "sort")
        }
        init, step = make_network(name, **arguments)
        program = jax.make_jaxpr(partial(train_one, init, step, num_steps))(jax.random.key(0))
        flops, crossover = count_flops(program) / num_steps, None
        if not (num_seeds or is_on_host):
            numbers = ACCELERATOR_SEEDS
        for count in num_seeds or numbers:
            ways = [w for w in WAYS if is_on_host or count <= MOST_SEEDS.get(w, count)]
            case, work = f"{name}, {count} seeds", count * num_steps
            measured = _time_ways(ways, name, count, num_steps, options.rounds, case, arguments)
            best = {way: min(seconds) / work for way, (_, seconds, _) in measured.items()}
            for way, (timing, seconds, cpu) in measured.items():
                timing.seconds = [value / work for value in seconds]
                timings.append(timing)
                if way != "processes":
                    figures[f"CPU ms, {timing.name}"] = (1e3 * min(cpu) / work, None)
                say(f"{timing.name}: {1e3 * timing.best:.4g} ms per seed and step")
            share = flops / min(best.values()) / product.measure_rate()
            figures[
                f"share of the large product's rate, {name}, {count} seeds, the fastest way"
            ] = (
                share,
                None,
            )
            by_hand = min({"vmap", "map"} & best.keys(), key=best.get)
            for kind, place in (("wall", 1), ("CPU", 2)):
                ratios = np.divide(measured["sweep"][place], measured[by_hand][place])
                figures[f"sweep over {by_hand} by hand, {kind} time of a round, {case}"] = (
                    float(np.median(ratios)),
                    None,
                )
            # Where `map` was not timed, nothing is known.
            if crossover is None and best.get("vmap", np.inf) < best.get("map", 0.0):
                crossover = count
        figures[f"seeds from which vmap is faster than map, {name}"] = (
            float("inf") if crossover is None else crossover,
            None,
        )
    return Report(timings, figures)


def _time_ways(ways, name, count, num_steps, rounds, case, arguments):
    """Measures ways in turn.

    Every other round runs in reverse order. Ways that do not fit into memory are left out.

    Args:
        ways: The ways, of `WAYS`.
        name: A network of `SIZES`.
        count: Number of seeds.
        num_steps: Steps of each seed.
        rounds: Number of rounds.
        case: Text that names the case.
        arguments: Further arguments of `make_way`.

    Returns:
        {way: (timing, seconds of each round, CPU seconds of each round)}.
    """
    measured, calls = {}, {}
    for way in ways:
        begun = time.perf_counter()
        try:
            calls[way] = make_way(way, name, count, num_steps, **arguments)
            losses, _ = calls[way]()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            say(f"{case}, {way}: does not fit into memory")
            continue
        timing = Timing(f"{case}, {way}", time.perf_counter() - begun, output=losses)
        measured[way] = timing, [], []
    for number in range(rounds):
        for way in list(measured)[:: -1 if number % 2 else 1]:
            start, cpu_start = time.perf_counter(), time.process_time()
            seconds = calls[way]()[1]
            measured[way][2].append(time.process_time() - cpu_start)
            elapsed = time.perf_counter() - start
            measured[way][1].append(elapsed if seconds is None else seconds)
    return measured
