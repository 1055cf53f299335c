"""Benchmark of `training.sweep` beside `jax.lax.map` of `jax.lax.scan` written by hand.

The network is the small MLP, whose step takes microseconds, so that all work beside the steps
shows. Both ways make all steps in one call, or in calls of some steps. The figures are CPU times,
which other work on the machine changes least, and ratios of times of the same round.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.flags import FlagValues

from experiments.benchmarks import seed_benchmarks
from experiments.benchmarks.timing import Report, Timing, describe_round, median_ratio, say
from rank_collapse.runs.seeds import seed_keys

LIMIT = 1.03  # of the time of one call by hand
DEFAULT_EVERY = 100  # steps in one call of `sweep`
DRAW_ONLY = (0, 0)  # the case without steps, which draws the initial states alone


def time_overhead(
    options: FlagValues,
    num_seeds: int = 16,
    lengths: Sequence[int] = (200, 1000, 4000),
    calls: Sequence[int] = (20, DEFAULT_EVERY),
) -> Report:
    """Measures CPU seconds of training by `sweep` and by hand.

    The limit holds for the longest training, in one call and in calls of at least `DEFAULT_EVERY`
    steps.

    Args:
        options: The flags of `experiments.benchmark`.
        num_seeds: Number of seeds.
        lengths: Numbers of steps.
        calls: Numbers of steps in one call, in addition to all steps in one.
    """
    ways = make_ways(*seed_benchmarks.make_network("mlp"), num_seeds)
    cases = [(n, size) for n in lengths for size in (n, *calls) if size <= n]
    cases = list(dict.fromkeys(cases))  # the same case may come from `lengths` and from `calls`
    timings = _time_cases(ways, [DRAW_ONLY, *cases], options.rounds)
    figures = _compare_ways(timings, cases) | _separate_costs(timings, max(lengths), min(calls))
    return Report(list(timings.values()), figures)


def _time_cases(ways, cases, num_rounds):
    """Compiles every way of every case, then measures all of them in each round.

    Every other round runs in reverse order.

    Args:
        ways: See `make_ways`.
        cases: (steps, steps in one call).
        num_rounds: Number of rounds.

    Returns:
        {(steps, steps in one call, way): its timing in CPU seconds}.
    """
    timings, runs = {}, {}
    for num_steps, size in cases:
        for way, make in ways.items():
            begun, name = time.process_time(), describe_case(num_steps, size)
            runs[num_steps, size, way] = call = make(num_steps, size)
            timing = Timing(f"{name}, {way}", 0.0, output=call())
            timing.compile_seconds = time.process_time() - begun
            timings[num_steps, size, way] = timing
    for number in range(num_rounds):
        for case in list(runs)[:: -1 if number % 2 else 1]:
            begun = time.process_time()
            runs[case]()
            timings[case].seconds.append(time.process_time() - begun)
        say(f"{describe_round(list(timings.values()), number, num_rounds)} of CPU")
    return timings


def _compare_ways(timings, cases):
    """Computes {figure: (time of `sweep` over the time of one call by hand, limit or None)}.

    Args:
        timings: See `_time_cases`.
        cases: (steps, steps in one call), without `DRAW_ONLY`.
    """
    figures, longest = {}, max(num_steps for num_steps, _ in cases)
    for num_steps, size in cases:
        ratio = median_ratio(
            timings[num_steps, size, "sweep"], timings[num_steps, num_steps, "by hand"]
        )
        is_limited = num_steps == longest and size >= min(DEFAULT_EVERY, longest)
        name = f"sweep over one call by hand, {describe_case(num_steps, size)}"
        figures[name] = (ratio, LIMIT if is_limited else None)
    return figures


def _separate_costs(timings, longest, shortest):
    """Computes {figure: (CPU time of the initial states or of a further call, no limit: None)}.

    Args:
        timings: See `_time_cases`.
        longest: Steps of the longest training.
        shortest: The smallest number of steps in one call.
    """
    figures, extra_calls = {}, -(-longest // shortest) - 1
    for way in dict.fromkeys(way for _, _, way in timings):
        figures[f"CPU ms to draw the initial states, {way}"] = (
            1e3 * float(np.median(timings[*DRAW_ONLY, way].seconds)),
            None,
        )
        many = timings[longest, shortest, way].seconds  # in many short calls
        one = timings[longest, longest, way].seconds  # in one call
        figures[f"CPU µs of a further call, {way}"] = (
            1e6 * float(np.median(np.subtract(many, one))) / extra_calls,
            None,
        )
    return figures


def describe_case(num_steps: int, size: int) -> str:
    """Describes a case: "1000 steps in calls of 100".

    Args:
        num_steps: Steps of each seed.
        size: Steps in one call.
    """
    return f"{num_steps} steps" + (f" in calls of {size}" if size < num_steps else " in one call")


def make_ways(init: Callable, step: Callable, num_seeds: int) -> dict[str, Callable]:
    """Makes {way: (steps, steps in one call) → a function that trains and returns losses}.

    The functions of one way share programs where the number of steps in one call is the same.

    Args:
        init, step, num_seeds: Functions and number of the seeds, which are trained one after the
            other.
    """
    keys = seed_keys(0, num_seeds)
    begin = jax.jit(functools.partial(jax.lax.map, lambda key: init(key, {}))).lower(keys).compile()
    programs: defaultdict[int, dict] = defaultdict(dict)

    @functools.cache
    def compile_chunk(size: int) -> Callable:
        """Compiles the training of all seeds for some steps from a traced one on."""

        def train_chunk(states: Any, start: Any) -> Any:
            """Trains all states for `size` steps from a traced one on: (states, metrics)."""

            def train(state: Any) -> Any:
                steps = start + jnp.arange(size)
                return jax.lax.scan(lambda state, index: step(state, {}, index), state, steps)

            return jax.lax.map(train, states)

        advance = jax.jit(train_chunk, donate_argnums=0)
        return advance.lower(begin(keys), np.int32(0)).compile()

    def make_loop(num_steps: int, size: int) -> Callable[[], np.ndarray]:
        """Makes the function that trains with `jax.lax.scan` and returns losses [s, steps]."""
        if (num_steps, size) == DRAW_ONLY:
            return lambda: np.zeros((len(jax.block_until_ready(begin(keys))[0]), 0))
        if size == num_steps:
            one = functools.partial(seed_benchmarks.train_one, init, step, num_steps)
            together = jax.jit(functools.partial(jax.lax.map, one)).lower(keys).compile()
            return lambda: np.asarray(together(keys)[1]["loss"])
        advance = compile_chunk(size)

        def call() -> np.ndarray:
            """Trains all seeds in chunks; losses of steps beyond the last are left out."""
            states, losses = begin(keys), []
            for start in range(0, num_steps, size):
                states, metrics = advance(states, np.int32(start))
                losses.append(np.asarray(metrics["loss"]))
            return np.concatenate(losses, axis=1)[:, :num_steps]

        return call

    def make_sweep(num_steps: int, size: int) -> Callable[[], np.ndarray]:
        """Makes the function that trains as `sweep` does and returns losses [s, steps]."""
        # A shorter training compiles another program: its metrics are shorter.
        shared = programs[size] if size < num_steps else {}
        return seed_benchmarks.make_sweep(init, step, num_seeds, num_steps, max(size, 1), shared)

    return {"by hand": make_loop, "sweep": make_sweep}
