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

from functools import partial

from absl import flags

from experiments.path_chains.entry import ENTRY
from experiments.path_chains.figures import figures_of
from experiments.path_chains.measure import config_of, measure_all
from experiments.path_chains.results import rows_of, summary_of
from experiments.shell import cli, inputs, room
from rank_collapse.network.attention import MASKS
from rank_collapse.network.config import INITS
from rank_collapse.network.layers import MLP_KINDS, NORM_KINDS, NORM_PLACEMENTS

FLAGS = cli.make_flags("path_chains", num_seeds=4, shows="log10_residual,length=last")
define = cli.definer(FLAGS)
define("integer", "depth", 8, "Layers.")
define("integer", "num_heads", 4, "Heads.")
define("integer", "d_model", 64, "Width of the tokens.")
define("enum", "mlp", "gelu", "MLP of every layer, or none.", MLP_KINDS)
define("enum", "norm_placement", "post", "Where norms are.", NORM_PLACEMENTS)
define("enum", "norm_kind", "layer", "Kind of norm.", NORM_KINDS)
define("enum", "mask", "none", "Attention mask.", MASKS)
define("integer", "window", 2, "Reach of --mask=local.")
define("enum", "init", "lecun", "Initialisation.", INITS)
define("float", "weight_scale", 1.0, "Multiplies every weight.")
define("float", "skip_gain", 1.0, "Multiplies the skips.")
define("float", "bias_scale", 0.0, "Standard deviation of the biases.")
define("integer", "num_paths", 100, "Random paths per length and seed.")
define("integer", "num_repeats", 5, "Sampled sets per length and seed whose error is measured.")
inputs.define_flags(define)
define("enum", "dtype", "float64", "Arithmetic.", ("float32", "float64"))
room.define_flag(define)


def main(options: flags.FlagValues) -> None:
    ids, source = inputs.read_tokens(options)
    config = config_of(options)
    mesh = cli.mesh(options)
    with cli.open_run(options, "path_chains", extra=source) as run:
        results = measure_all(options, config, ids, mesh, run)
        run.publish(
            rows=partial(rows_of, results, config),
            figures=figures_of(results, config),
            summary=partial(summary_of, results, config),
        )
        print(f"written to {run.path}")


__all__ = ["ENTRY", "FLAGS", "main"]

if __name__ == "__main__":
    cli.run(main, FLAGS)
