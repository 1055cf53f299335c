"""Many seeds and swept values of anyone's training, in one call: resumable, on all devices.

    result = sweep(init, step, steps=2000, seeds=64, hyper={"learning_rate": [1e-4, 1e-3]})
    result.metrics["loss"].mean("seed")

docs/seeds.md has examples, and the rules for the functions.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rank_collapse.checks import check_whole, refuse_if
from rank_collapse.extras import import_package
from rank_collapse.printed import quote_value
from rank_collapse.runs import seeds as run_seeds
from rank_collapse.runs.progress import Progress
from rank_collapse.training.engine import processes, tracing
from rank_collapse.training.engine.axes import make_axes, name_value
from rank_collapse.training.engine.constant_draws import repeats_draws
from rank_collapse.training.engine.files import SweepFolder
from rank_collapse.training.engine.functions import check_names, trace_functions
from rank_collapse.training.engine.result import Swept
from rank_collapse.training.engine.trainer import Trainer


def sweep(
    init: Callable[..., Any],
    step: Callable[..., Any],
    *,
    steps: int,
    seeds: int = 8,
    every: int = 100,
    hyper: Mapping[str, Any] | None = None,
    static: Mapping[str, Any] | None = None,
    folder: str | os.PathLike | None = None,
    first_seed: int = 0,
    look: Callable[..., Any] | None = None,
    at_once: int | None = None,
    until: Callable[[Any], Any] | None = None,
    round_seeds: int = 8,
    finite: Sequence[str] | None = None,
    key: Any = 0,
    mesh: Mesh | None = None,
    quiet: bool = False,
) -> Swept:
    """Trains many seeds at all swept values.

    The functions are pure functions of one run, whose arrays may be any pytree. They are traced and
    compiled once for each point of `static`; seeds and values of `hyper` are one axis, which is
    spread over the devices. Results do not depend on the devices, on `every`, on `at_once` or on
    the other seeds, except for rounding where XLA compiles other loops.

    Args:
        init: (key, hyper, **static) → state, a pytree of arrays.
        step: (state, hyper, index, **static) → (state, metrics): the state with the same shapes
            and dtypes, and a pytree of arrays, {"loss": []} for example. `index` counts from 0.
        steps: Steps of each run.
        seeds: Number of seeds. Seed s has the key fold_in(key, s) at each value of all others.
        every: Steps in one call; progress, snapshots, looks and the check that states are finite
            come between calls.
        hyper: Traced values by name: a number, or a list of numbers, which is an axis.
        static: Values that are compiled in, by name, given as keywords: any value, or a list of
            them, which is an axis with one compilation each.
        folder: Keeps snapshots. The same call resumes; more seeds or more steps extend.
        first_seed: Number of the first seed.
        look: (state, hyper, key) → pytree of arrays, before training and at each snapshot; `key`
            belongs to the run, is the same at each look, and is independent of the key of `init`.
            Values of `static` that it takes are passed as keywords.
        at_once: Number of runs over which a device vmaps. By default a CPU computes one run after
            the other, and an accelerator as many at once as fit into memory; with keys of the
            generator "rbg", whose draws under vmap depend on the other runs, it is 1 everywhere.
        until: (metrics Dataset of the seeds so far) → whether they are enough; asked after each
            round of seeds. `seeds` is then the largest number of seeds.
        round_seeds: Seeds of one round, with `until`.
        finite: Names of the metrics that must be finite; None for all. A run with another value
            keeps its last finite state, and its later metrics are NaN.
        key: Base key of the seeds, or a whole number for `jax.random.key`.
        mesh: Mesh of the devices, from `runs.seeds.seed_mesh`; all of this process by default.
        quiet: If true, neither progress nor runs that are no longer finite are printed.

    Returns:
        `Swept`: metrics, states, looks.

    Raises:
        ValueError: Invalid functions or values.
        RunError: The folder belongs to another sweep, is in use, or cannot be written.
    """
    steps, every = check_whole("steps", steps, 0), check_whole("every", every, 1)
    count = check_whole("seeds", seeds, 1, 2**31 - 1)
    first = check_whole("first_seed", first_seed, 0, 2**31 - 1 - count)
    round_seeds = check_whole("round_seeds", round_seeds, 1)
    refuse_if(
        until is not None and not callable(until),
        f"until={quote_value(until)} is not a function of the metrics",
    )
    is_path = folder is None or (isinstance(folder, str | os.PathLike) and os.fspath(folder))
    refuse_if(not is_path, f"folder={quote_value(folder)} is not a path")
    is_mesh = mesh is None or (isinstance(mesh, Mesh) and mesh.axis_names == (run_seeds.AXIS,))
    refuse_if(not is_mesh, f"mesh={quote_value(mesh)} is not a mesh made by runs.seeds.seed_mesh")
    import_package("xarray", "training.sweep", "training")  # before anything is trained
    axes, base_key = make_axes(hyper, static), _make_base_key(key)
    mesh = run_seeds.seed_mesh(jax.local_devices()) if mesh is None else mesh
    numbers, static_points = first + np.arange(count), axes.static_points()
    total = len(static_points) * axes.num_hyper * processes.count_share(count) * steps
    with contextlib.ExitStack() as stack:
        for check in (jax.debug_nans, jax.debug_infs):  # `Trainer` names the runs that diverge
            stack.enter_context(check(False))
        progress = stack.enter_context(
            Progress(total, "sweep", quiet=quiet or not processes.is_first())
        )
        functions = []
        for point in static_points:
            with progress.time_activity("tracing"):
                functions.append(
                    trace_functions(init, step, look, axes.examples(), point, base_key.dtype)
                )
        check_names(functions, axes, finite)
        at_once = _choose_group(at_once, mesh, any(f.shares_bits() for f in functions))
        store = None
        if folder is not None:
            config = _describe_sweep(functions, axes, base_key, every, finite)
            store = stack.enter_context(SweepFolder(folder, config))
        _say_notes(functions, axes, base_key, mesh, count, progress)
        trainer = Trainer(
            functions, axes, base_key, finite, mesh, at_once, steps, every, store, progress
        )
        size = count if until is None else min(round_seeds, count)
        for start in range(0, count, size):
            trainer.train(numbers[start : start + size], size)
            points = trainer.points(numbers[: start + size])
            metrics = points.metrics(steps)
            if until is not None and _is_enough(until(metrics)):
                break
        return Swept(
            metrics,
            points.states([f.init.out for f in functions]),
            points.looks([*range(0, steps, every), steps]),
            points.diverged_at(),
            trainer.seconds,
        )


def _choose_group(at_once, mesh, shares_bits):
    """Returns the number of runs over which a device vmaps; None for as many as fit into memory.

    Args:
        at_once: This number, or None for the default.
        mesh: The devices.
        shares_bits: Whether random numbers of a run under vmap would depend on the others.
    """
    if at_once is None:
        return 1 if shares_bits else run_seeds.group_size(mesh)
    refuse_if(
        check_whole("at_once", at_once, 1) > 1 and shares_bits,
        f"at_once={at_once}, but under vmap random numbers of the generator 'rbg' depend on the "
        "other runs: leave at_once out, or use keys of 'threefry2x32'",
    )
    return at_once


def _is_enough(answer):
    """Reads what `until` returned: one truth value."""
    is_one = not isinstance(answer, Mapping | str | None) and np.ndim(answer) == 0
    refuse_if(not is_one, f"until returns {type(answer).__name__}, which is not true or false")
    return bool(answer)


def _make_base_key(key):
    """Returns a typed key of a whole number, of a typed key or of an older one."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        refuse_if(key.ndim, f"key of shape {key.shape} is not one key")
        return key
    if np.ndim(key):
        shape, dtype = np.shape(key), np.asarray(key).dtype
        refuse_if(
            (shape, dtype) != ((2,), np.uint32), f"key of {dtype}{list(shape)} is not a random key"
        )
        return jax.random.wrap_key_data(jnp.asarray(key))
    return jax.random.key(check_whole("key", key, 0, 2**32 - 1))


def _describe_sweep(functions, axes, base_key, every, finite):
    """Describes the settings that determine the results, as JSON stores them."""
    config = {
        "hyper": {name: array.tolist() for name, array in axes.hyper.items()},
        "static": {
            name: [name_value(value) for value in values] for name, values in axes.static.items()
        },
        "key": jax.random.key_data(base_key).tolist(),
        "finite": None if finite is None else sorted(finite),
        "init": [f.init.fingerprint for f in functions],
        "step": [f.step.fingerprint for f in functions],
        "data": [f.init.data + f.step.data for f in functions],
        "look": [f.look.fingerprint + f.look.data for f in functions if f.look is not None],
        "jax": jax.__version__,
    }
    return config | ({"every": every} if config["look"] else {})


def _say_notes(functions, axes, base_key, mesh, count, progress):
    """Reports settings that are often mistakes, but not always.

    Args:
        functions: Traced functions of each static setting.
        axes: The axes of the sweep.
        base_key: Key that the keys of seeds are made of.
        mesh: The devices.
        count: Number of seeds.
        progress: Where the notes are reported.
    """
    if count > 1 and not any(f.uses_key() for f in functions):
        progress.say("note: init does not use its key, so that all seeds are the same run")
    unused = [set(f.list_unused(sorted(axes.hyper))) for f in functions]
    for name in sorted(set.intersection(*unused) & axes.hyper_axes.keys()):
        progress.say(f"note: no function uses hyper[{name!r}], so that its values change nothing")
    values = [leaf[0] for leaf in axes.hyper_leaves(np.zeros(1, int))]
    if tracing.reuses_key(functions[0].init, functions[0].step, base_key, values):
        progress.say(
            "note: a random key that was used is used again in the first two steps, which then "
            "draw the same numbers; jax.random.split it, or fold_in the index"
        )
    if any(repeats_draws(f.step, len(f.state_shapes)) for f in functions):
        progress.say(
            "note: step draws random numbers from a constant key, the same at each step and for "
            "each seed; draw from a key in the state, by fold_in of the index, if this is not meant"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if run_seeds.is_on_cpu(mesh) and mesh.size == 1 < min(cores, count * axes.num_hyper):
        progress.say(
            f"note: JAX has one CPU device for {cores} cores; "
            f"jax.config.update('jax_num_cpu_devices', {cores}) before its first use shares the "
            "seeds among them"
        )
