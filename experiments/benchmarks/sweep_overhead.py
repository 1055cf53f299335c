"""Benchmark of `training.sweep` beside `jax.lax.map` of `jax.lax.scan` written by hand.

The network is the small MLP, whose step takes microseconds, so that all that is no step shows. Both
ways make all steps in one call, or in calls of a hundred steps, which is the default of `every`.
The figure is CPU time, which other work on the machine changes least.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import seed_benchmarks
from experiments.benchmarks.timing import Report, Timing, describe_round, median_ratio, say
from rank_collapse.runs.seeds import seed_keys

LIMIT = 1.03  # of the time by hand


def time_overhead(
    options: Any, num_seeds: int = 16, num_steps: int = 2000, every: int = 100
) -> Report:
    """Measures CPU seconds of training by `sweep` and by hand.

    Args:
        options: The flags of `experiments.benchmark`.
        num_seeds, num_steps: What is trained.
        every: Steps in one call, where there are several.
    """
    init, step = seed_benchmarks.make_network("mlp")
    calls, timings = [], []
    for size in (num_steps, every):
        for name, make in (("by hand", make_loop), ("sweep", seed_benchmarks.make_sweep)):
            timing = Timing(f"{name}, calls of {size} steps", 0.0)
            begun = time.perf_counter()
            calls.append(make(init, step, num_seeds, num_steps, size))
            timing.output = calls[-1]()
            timing.compile_seconds = time.perf_counter() - begun
            timings.append(timing)
    for number in range(options.rounds):
        for i in range(len(calls))[:: -1 if number % 2 else 1]:
            begun = time.process_time()
            calls[i]()
            timings[i].seconds.append(time.process_time() - begun)
        say(f"{describe_round(timings, number, options.rounds)} of CPU")
    pairs = zip(timings[::2], timings[1::2], strict=True)
    ratios = {f"{b.name}, over by hand": (median_ratio(b, a), LIMIT) for a, b in pairs}
    return Report(timings, ratios)


def make_loop(
    init: Callable, step: Callable, num_seeds: int, num_steps: int, every: int
) -> Callable[[], np.ndarray]:
    """Makes a function that trains seeds one after the other and returns losses [s, steps].

    Args:
        init, step, num_seeds, num_steps: What is trained.
        every: Steps in one call.
    """
    keys = seed_keys(0, num_seeds)
    if every >= num_steps:
        one = partial(seed_benchmarks.train_one, init, step, num_steps)
        together = jax.jit(partial(jax.lax.map, one)).lower(keys).compile()
        return lambda: np.asarray(together(keys)[1]["loss"])

    def train_chunk(states: Any, start: Any) -> Any:
        def train(state: Any) -> Any:
            steps = start + jnp.arange(every)
            return jax.lax.scan(lambda state, index: step(state, {}, index), state, steps)

        return jax.lax.map(train, states)

    begin = jax.jit(partial(jax.lax.map, lambda key: init(key, {}))).lower(keys).compile()
    start = np.int32(0)
    advance = jax.jit(train_chunk, donate_argnums=0).lower(begin(keys), start).compile()

    def call() -> np.ndarray:
        states, losses = begin(keys), []
        for start in range(0, num_steps, every):
            states, metrics = advance(states, np.int32(start))
            losses.append(np.asarray(metrics["loss"]))
        return np.concatenate(losses, axis=1)

    return call
