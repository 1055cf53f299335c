"""What run_path_chains measures on one seed, and the network it measures."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh

import rank_collapse as rc
from experiments.shell import inputs
from experiments.shell.progress import Progress
from experiments.shell.room import Room, seeds_done
from rank_collapse.measures import residuals
from rank_collapse.paths import chains
from rank_collapse.runs import seeds
from rank_collapse.runs.folder import RunFolder

SAMPLES = (5, 20)
PART = "seeds"  # the name of what a run keeps


def config_of(options: flags.FlagValues) -> rc.TransformerConfig:
    """The Transformer of the flags.

    Raises:
        ValueError: Sizes that do not fit, or no path to sample.
    """
    for name in ("num_paths", "num_repeats"):
        if options[name].value < 1:
            raise ValueError(f"--{name}={options[name].value} is below 1")
    for name in ("weight_scale", "skip_gain", "bias_scale"):
        if not np.isfinite(options[name].value):
            raise ValueError(f"--{name}={options[name].value} is not finite")
    fields = ("mlp", "norm_placement", "mask", "window", "init", "skip_gain")
    return rc.transformer(
        options.depth,
        options.num_heads,
        options.d_model,
        norm=options.norm_kind,
        **{name: options[name].value for name in fields},
    )


def measure_all(
    options: flags.FlagValues,
    config: rc.TransformerConfig,
    ids: Any,
    mesh: Mesh,
    run: RunFolder,
) -> dict[str, np.ndarray]:
    """Every measure of every seed, [s, ...], chunk by chunk of seeds into the run's arrays.

    Raises:
        ValueError: A network whose output is no number.
        RunError: The run holds measures of another number of seeds.
    """
    total, at_once = options.num_seeds, seeds.seeds_at_once(mesh)
    found = run.part(PART)
    done = seeds_done(found, total, run.path, PART)
    if done == total:
        return found
    with inputs.precision(options), Progress(total, "path chains", log=run.log) as progress:

        def keep(known):
            refuse_overflow(known)
            run.save_arrays({f"{PART}/{name}": values for name, values in known.items()})
            progress.update(len(known["sum_error"]))

        progress.skip(done)
        with Room(options, mesh, run.log) as room:
            call = seeds.spread(make_measure(options, config, ids), mesh, at_once=at_once)
            keys = seeds.seed_keys(options.seed, total)
            # Where a device takes its seeds one by one they are saved as they come.
            most = None if at_once is None else at_once * mesh.size
            return room.map(call, keys, progress=progress, most=most, found=found, keep=keep)


def refuse_overflow(measures: dict[str, np.ndarray]) -> None:
    """Refuses measures of a network whose output is no number.

    Raises:
        ValueError: It is not.
    """
    bad = np.flatnonzero(~np.isfinite(measures["sum_error"]))
    if len(bad):
        raise ValueError(
            f"seed {bad[0]}: NaN or overflow in the network; a smaller --weight_scale or "
            "--norm_placement=post may hold it"
        )


def make_measure(options: flags.FlagValues, config: rc.TransformerConfig, ids: Any) -> Callable:
    """measure(key, None) of one seed."""
    depth = config.depth
    size, lengths = (depth, config.num_heads), range(1, depth + 1)

    def errors_of(key, params, x, by_length):
        """Relative error of sums estimated from few paths: [len(SAMPLES), L, repeats]."""
        paths = rc.sample_path_sets(key, lengths, options.num_repeats, max(SAMPLES), *size)
        # Sets of one path each: the states of all paths, shared beginnings computed once.
        terms = rc.path_set_states(params, x, config, paths[..., None, :], semantics="frozen")
        counts = jnp.asarray(rc.count_paths(*size)[1:], x.dtype)
        exact = by_length[1:, None]

        def size_of(a):
            return jnp.linalg.norm(a, axis=(2, 3))

        def error(few):
            estimate = counts[:, None, None, None] * terms[:, :, :few].mean(axis=2)
            return size_of(estimate - exact) / size_of(exact)

        return jnp.stack([error(few) for few in SAMPLES])

    def measure(key, _):
        key_tokens, key_params, key_chains, key_sets = jax.random.split(key, 4)
        x = inputs.input_tokens(key_tokens, ids, options)
        params = rc.init(key_params, config, options.weight_scale, options.bias_scale)
        trace = rc.apply(params, x, config)
        paths = rc.sample_path_sets(key_chains, lengths, 1, options.num_paths, *size)
        to_mean, to_rank_one = jax.lax.map(
            lambda path: chains.chained_residual(trace.attention, path), paths.reshape(-1, depth)
        )
        contributions = rc.path_contributions(params, x, config)
        norm, rest = chains.measured_sizes(contributions.by_length)
        skip, branch = chains.branch_sizes(params, trace, config)
        return {
            "chain_mean": to_mean.reshape(depth, -1),
            "chain_rank_one": to_rank_one.reshape(depth, -1),
            "log10_norm": norm,
            "log10_residual": rest,
            "initial_residual": residuals.composite_norm(residuals.residual(x)),
            "skip_size": skip,
            "branch_size": branch,
            "estimate_error": errors_of(key_sets, params, x, contributions.by_length),
            "sum_error": jnp.linalg.norm(contributions.total - trace.output)
            / jnp.linalg.norm(trace.output),
        }

    return measure
