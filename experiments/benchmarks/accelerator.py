"""Benchmarks of what only a device can show; `suite` runs them all, one process each.

Sizes are those of --suite_size: "full" for a device, "toy" to see on a CPU that all of it works.
"""

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.benchmarks import memory, training
from experiments.benchmarks.entry_points import entry_points
from experiments.benchmarks.profiles import sweep_of
from experiments.benchmarks.timing import (
    Report,
    Timing,
    compared,
    largest_difference,
    median_ratio,
    time_cases,
)
from rank_collapse.runs import seeds
from rank_collapse.runs.seeds import seed_keys

PRECISIONS = ("highest", "tensorfloat32", "default")
# Compared with float64 beside every measure of the table.
NETWORKS = ("apply", "path_contributions", "log_residual_profile")
SIZES = {
    "full": {
        "network": {"depth": 6, "num_heads": 8, "d_model": 512, "num_tokens": 128, "d_ff": 2048},
        "product": 8192,
        "widths": (2, 4, 8, 16, 32, 64, 128),
        "products": 4096,
        "rows": 128,
        "seeds": (1, 4, 16, 64, 256, 1024, 4096),
        "some_seeds": 256,
        "training": (),
        "sweep": {"depth": 32, "num_tokens": 64, "d_model": 64, "logarithms": False},
    },
    "toy": {
        "network": {"depth": 2, "num_heads": 2, "d_model": 8, "num_tokens": 6, "d_ff": 12},
        "product": 64,
        "widths": (4, 8),
        "products": 8,
        "rows": 4,
        "seeds": (1, 4),
        "some_seeds": 2,
        "training": training.TINY,
        "sweep": {"depth": 2, "num_tokens": 6, "d_model": 8, "logarithms": False},
    },
}


def accuracy(options: Any) -> Report:
    """float32 on the device beside float64 on the host: every measure, and a few networks.

    The figures are the largest difference over the largest value; measures at each precision of
    products, networks at "highest", which the library asks for by itself.
    """
    network = SIZES[options.suite_size]["network"]
    shape, points = (network["num_tokens"], network["d_model"]), entry_points(**network)
    key = jax.random.key(0)
    x = jax.random.normal(key, shape) + 0.5
    scores = 2 * jax.random.normal(key, (network["num_heads"], *shape[:1] * 2))
    given = {"tokens": x, "attention": jax.nn.softmax(scores), "scores": scores}

    def measures(given):
        given = given | {"streams": jnp.stack([given["tokens"], given["tokens"][::-1]])}
        return {name: measure(given[measure.needs]) for name, measure in rc.MEASURES.items()}

    functions = dict.fromkeys(PRECISIONS, (measures, (given,)))
    functions |= {name: (points[name].fn, points[name].draw(key)) for name in NETWORKS}
    cases = {
        name: (_at(name if name in PRECISIONS else None, fn), arguments)
        for name, (fn, arguments) in functions.items()
    }
    timings, figures = time_cases(cases, options.rounds), {}
    for timing in timings:
        fn, arguments = functions[timing.name]
        with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
            exact = fn(*jax.tree.map(lambda a: np.asarray(a, np.float64), arguments))
            exact = jax.tree.map(np.asarray, exact)
        pairs = {timing.name: (timing.output, exact)}
        if timing.name in PRECISIONS:
            pairs = {f"{n}, {timing.name}": (timing.output[n], own) for n, own in exact.items()}
        figures |= {name: (largest_difference(*pair), None) for name, pair in pairs.items()}
    return Report(timings, "highest", figures)


def _at(precision, fn):
    """fn jitted, whose products have this precision, or for None what fn asks for."""

    def call(*arguments):
        with jax.default_matmul_precision(precision):
            return fn(*arguments)

    return jax.jit(call)


def precision(options: Any) -> Report:
    """One large product at each precision: operations a second, and error against float64."""
    n = SIZES[options.suite_size]["product"]
    a, b = jax.random.normal(jax.random.key(0), (2, n, n))
    row = np.asarray(a[0], np.float64) @ np.asarray(b, np.float64)
    cases = {p: (_at(p, jnp.matmul), (a, b)) for p in PRECISIONS}

    def figures(*timings):
        speeds = {f"TFLOP/s, {t.name}": (2e-12 * n**3 / t.best, None) for t in timings}
        errors = {t.name: largest_difference(t.output[0], row) for t in timings}
        return speeds | {f"error, {name}": (error, None) for name, error in errors.items()}

    return compared(cases, options.rounds, figures)


def small_products(options: Any) -> Report:
    """Many small products, [rows, w] [w, w] each, in three forms; and training of small networks.

    One batched product; sums of elementwise products; all in one against a block-diagonal matrix,
    8 at a time. `suite` runs this under several options of the compiler.
    """
    size = SIZES[options.suite_size]
    forms = {
        "batched": jnp.matmul,
        "elementwise": lambda a, b: jnp.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2),
        "block-diagonal": _block_diagonal,
    }
    cases, flops = {}, {}
    for width in size["widths"]:
        keys = jax.random.split(jax.random.key(width))
        a, b = (
            jax.random.normal(k, (size["products"], n, width))
            for k, n in zip(keys, (size["rows"], width), strict=True)
        )
        for form, fn in forms.items():
            if form != "elementwise" or width <= 16:
                cases[f"{form}, width {width}"] = (jax.jit(fn), (a, b))
                flops[f"{form}, width {width}"] = 2 * size["products"] * size["rows"] * width**2
    timings = time_cases(cases, options.rounds)
    figures = {f"GFLOP/s, {t.name}": (flops[t.name] / t.best / 1e9, None) for t in timings}
    trained = training.time_training("sort", options, size["some_seeds"], size["training"])
    figures["training, ms per seed and step"] = (1e3 * trained.timings[0].best, None)
    figures["training, seconds to compile"] = (trained.timings[0].compile_seconds, None)
    return Report([*timings, trained.timings[0]], timings[0].name, figures)


def _block_diagonal(a, b, group=8):
    """Products of [s, n, w] and [s, w, v], `group` of them in one of width group·w."""
    s, n, w = a.shape
    a = a.reshape(s // group, group, n, w).swapaxes(1, 2).reshape(s // group, n, group * w)
    b = b.reshape(s // group, group, w, -1)
    blocks = jnp.einsum("sgwv,gh->sgwhv", b, jnp.eye(group)).reshape(
        s // group, group * w, group * b.shape[-1]
    )
    found = (a @ blocks).reshape(s // group, n, group, b.shape[-1])
    return found.swapaxes(1, 2).reshape(s, n, -1)


def many_seeds(options: Any) -> Report:
    """Training steps and profiles a second against the number of seeds; stops where memory ends."""
    size, timings, figures = SIZES[options.suite_size], [], {}
    for count in size["seeds"]:
        try:
            trained = training.time_training("sort", options, count, size["training"])
            program = jax.jit(jax.vmap(sweep_of(**size["sweep"])))
            (sweep,) = time_cases(
                {f"sweep, {count} seeds": (program, (seed_keys(0, count),))}, options.rounds
            )
        except jax.errors.JaxRuntimeError as error:
            print(f"{count} seeds: {str(error).partition(chr(10))[0]}", file=sys.stderr, flush=True)
            if memory.out_of_memory(error):
                break
            continue
        sweep.output = None
        timings += [trained.timings[0], sweep]
        figures[f"training steps a second, {count} seeds"] = (1 / trained.timings[0].best, None)
        figures[f"profiles a second, {count} seeds"] = (count / sweep.best, None)
    return Report(timings, timings[0].name, figures)


def sharding(options: Any) -> Report:
    """The same seeds on one device and on all: how much faster, and whether they agree."""
    size, cases = SIZES[options.suite_size], {}
    count = seeds.padded_size(size["some_seeds"], seeds.seed_mesh())
    for devices in sorted({1, jax.local_device_count()}):
        mesh = seeds.seed_mesh(jax.local_devices()[:devices])
        call = seeds.spread(lambda key, _: sweep_of(**size["sweep"])(key), mesh)
        keys = seeds.lay_out(seed_keys(0, count), mesh)
        cases[f"{count} seeds on {devices} devices"] = call, (keys, None)
    timings = time_cases(cases, options.rounds)
    one, *others = (jax.tree.map(np.asarray, timing.output) for timing in timings)
    figures = {"devices": (float(jax.local_device_count()), None)}
    for timing, found in zip(timings[1:], others, strict=True):
        figures["times as fast as one"] = (1 / median_ratio(timing, timings[0]), None)
        figures["largest difference"] = (largest_difference(found, one), None)
    return Report(timings, timings[0].name, figures)


def peak_memory(options: Any) -> Report:
    """What a sweep of many seeds takes, beside what its compiled program said; in a fresh process.

    On a CPU the process's peak, which holds Python and XLA as well: what was there before is taken
    from it.
    """
    size = SIZES[options.suite_size]
    keys = seed_keys(0, size["seeds"][-1])
    program = jax.jit(jax.vmap(sweep_of(**size["sweep"]))).lower(keys).compile()
    expected, before = memory.program_bytes(program), memory.peak(jax.local_devices())
    begun = time.perf_counter()
    jax.block_until_ready(program(keys))
    timing = Timing("the sweep", 0.0, [time.perf_counter() - begun])
    peak = memory.peak(jax.local_devices()) - before
    figures = {"GB at the peak": (peak / 1e9, None), "GB expected": (expected / 1e9, None)}
    return Report([timing], timing.name, figures)


BENCHMARKS = {
    f.__name__: f for f in (accuracy, precision, small_products, many_seeds, sharding, peak_memory)
}
