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
from experiments.shell.room import Room
from rank_collapse.measures import residuals
from rank_collapse.paths import chains
from rank_collapse.runs import seeds

SAMPLES = (5, 20)


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
    options: flags.FlagValues, config: rc.TransformerConfig, ids: Any, mesh: Mesh, room: Room
) -> dict[str, np.ndarray]:
    """Every measure of every seed, [s, ...].

    Raises:
        ValueError: A network whose output is no number.
    """
    with inputs.precision(options):
        at_once = seeds.seeds_at_once(mesh)
        call = seeds.spread(make_measure(options, config, ids), mesh, at_once=at_once)
        results = room.map(call, seeds.seed_keys(options.seed, options.num_seeds))
    bad = np.flatnonzero(~np.isfinite(results["sum_error"]))
    if len(bad):
        raise ValueError(
            f"seed {bad[0]}: NaN or overflow in the network; a smaller --weight_scale or "
            "--norm_placement=post may hold it"
        )
    return results


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
