"""Path chains: how products of attention matrices lose rank, and how large paths are by length.

Reproduces the box plots of chained attention of Dong, Cordonnier and Loukas (2021): the residual
of P_path for random paths of length 1 .. L, against 1pᵀ and against the best rank one. Beside
them, what could not be drawn before: the exact sum over all paths of each length, its size as the
skip's share α predicts it, and the error of a sum estimated from 5 or 20 sampled paths.

    python -m experiments.run_path_chains
    python -m experiments.run_path_chains --depth=12 --num_heads=12 --d_model=192 --num_tokens=128

Under a minute on two cores at quick size. Expect the residual of chains to fall by a
constant factor per layer, and the residual of contributions to be largest at short lengths.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import rank_collapse as rc
from experiments.path_chains.results import ENTRY, SAMPLES, figures_of, rows_of, summary_of
from experiments.run_collapse import DTYPES, input_tokens, precision, read_tokens
from experiments.shell import cli
from experiments.shell.progress import Progress
from rank_collapse.measures import residuals
from rank_collapse.network import embedding, layers
from rank_collapse.network.config import INITS, MASKS, NORM_PLACEMENTS
from rank_collapse.paths import chains
from rank_collapse.runs import seeds

FLAGS = cli.make_flags("path_chains", num_seeds=4)


def _define(kind, name, default, text, *choices):
    getattr(flags, f"DEFINE_{kind}")(name, default, *choices, text, flag_values=FLAGS)


_define("integer", "depth", 8, "Layers.")
_define("integer", "num_heads", 4, "Heads.")
_define("integer", "d_model", 64, "Width of the tokens.")
_define("enum", "mlp", "gelu", "MLP of every layer, or none.", layers.MLP_KINDS)
_define("enum", "norm_placement", "post", "Where norms are.", NORM_PLACEMENTS)
_define("enum", "norm_kind", "layer", "Kind of norm.", layers.NORM_KINDS)
_define("enum", "mask", "none", "Attention mask.", MASKS)
_define("integer", "window", 2, "Reach of --mask=local.")
_define("enum", "init", "lecun", "Initialisation.", INITS)
_define("float", "weight_scale", 1.0, "Multiplies every weight.")
_define("float", "skip_gain", 1.0, "Multiplies the skips.")
_define("float", "bias_scale", 0.0, "Standard deviation of the biases.")
_define("integer", "num_paths", 100, "Random paths per length and seed.")
_define("integer", "num_repeats", 5, "Sampled sets per length and seed whose error is measured.")
_define("enum", "inputs", "text", "Tokens.", ("text", "gaussian"))
_define("string", "text_file", None, "UTF-8 text (default: one that comes with the package).")
_define("integer", "num_tokens", 64, "Tokens; fewer where the text is shorter.")
_define("enum", "positions", "sinusoidal", "Positions of text.", embedding.POSITION_KINDS)
_define("enum", "dtype", "float64", "Arithmetic.", [d for d in DTYPES if d != "bfloat16"])


def main(options: flags.FlagValues) -> None:
    ids, source = read_tokens(options)
    config = config_of(options)
    mesh = cli.mesh(options)
    with cli.open_run(options, "path_chains", extra=source) as run:
        if run.summary is None:
            with Progress(options.num_seeds, "path chains", log=run.log) as progress:
                results = run.cached("seeds", lambda: measure_all(options, config, ids, mesh))
                progress.advance(options.num_seeds)
            run.write_rows(rows_of(results, config))
            for name, figure in figures_of(results, config).items():
                run.save_figure(figure, name)
            run.finish(summary_of(results, config))
        print(f"written to {run.path}")


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


def measure_all(options: Any, config: rc.TransformerConfig, ids: Any, mesh: Any) -> dict[str, Any]:
    """Every measure of every seed, [s, ...].

    Raises:
        ValueError: A network whose output is no number.
    """
    with precision(options):
        measure = make_measure(options, config, ids)
        keys = seeds.seed_keys(options.seed, options.num_seeds)
        results = seeds.map_seeds(measure, keys, mesh=mesh)
    bad = np.flatnonzero(~np.isfinite(results["sum_error"]))
    if len(bad):
        raise ValueError(
            f"seed {bad[0]}: NaN or overflow in the network; a smaller --weight_scale or "
            "--norm_placement=post may hold it"
        )
    return results


def make_measure(options: Any, config: rc.TransformerConfig, ids: Any) -> Any:
    """measure(key, None) of one seed."""
    depth, heads = config.depth, config.num_heads
    size = (depth, heads)

    def errors_of(key, params, x, by_length):
        """Relative error of sums estimated from few paths: [len(SAMPLES), L, repeats]."""
        lengths = range(1, depth + 1)
        paths = rc.sample_path_sets(key, lengths, options.num_repeats, max(SAMPLES), *size)
        # Sets of one path each: the states of all paths, shared beginnings computed once.
        terms = rc.path_set_states(params, x, config, paths[..., None, :], semantics="frozen")
        counts = jnp.asarray(rc.count_paths(*size)[1:], x.dtype)
        exact = by_length[1:, None]

        def error(few):
            estimate = counts[:, None, None, None] * terms[:, :, :few].mean(axis=2)
            return jnp.linalg.norm(estimate - exact, axis=(2, 3)) / jnp.linalg.norm(
                exact, axis=(2, 3)
            )

        return jnp.stack([error(few) for few in SAMPLES])

    def measure(key, _):
        key_tokens, key_params, key_chains, key_sets = jax.random.split(key, 4)
        x = input_tokens(key_tokens, ids, options)
        params = rc.init(key_params, config, options.weight_scale, options.bias_scale)
        trace = rc.apply(params, x, config)
        lengths = range(1, depth + 1)
        sampled = rc.sample_path_sets(key_chains, lengths, 1, options.num_paths, *size)[:, 0]
        to_mean, to_rank_one = jax.lax.map(
            lambda path: chains.chained_residual(trace.attention, path),
            sampled.reshape(-1, depth),
        )
        contributions = rc.path_contributions(params, x, config)
        norm, rest = chains.measured_sizes(contributions.by_length)
        skip, branch = chains.branch_sizes(trace)
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


__all__ = ["ENTRY", "FLAGS", "main"]

if __name__ == "__main__":
    cli.run(main, FLAGS)
