"""Rank collapse with depth: residual of the tokens, layer by layer, at initialisation.

Reproduces the residual figures of Dong, Cordonnier and Loukas (2021) on one network without any
checkpoint: relative residual by layer of pure attention (san), with MLPs (san_mlp), with skips
(san_skip) and of the full Transformer, for any norm placement. Draws what the paper could not: the
residual to any depth, in logarithms, beside the 3^L law and the theorems' bound.

    python -m experiments.run_collapse
    python -m experiments.run_collapse --depth=32 --num_seeds=64 --norm=none,post,pre
    python -m experiments.run_collapse --weight_scale=0.25,0.5,1,2 --skip_gain=0,0.5,1

Half a minute on two cores at the defaults, nearly all of it compiling. Expect the ratio of san and
san_mlp at 0 after three layers, that of san_skip at 0.04 and of transformer at 0.13 after twelve
(more with smaller weights: --weight_scale), and a local rate of 3.00 for san.
"""

from functools import partial

from absl import flags

from experiments.collapse.ensemble import measure_all
from experiments.collapse.entry import ENTRY
from experiments.collapse.figures import figures_of
from experiments.collapse.results import rows_of, summary_of
from experiments.collapse.settings import VARIANTS, configs_of, gains_of, sweep_of
from experiments.shell import cli, inputs, room
from rank_collapse.network.attention import MASKS
from rank_collapse.network.config import INITS
from rank_collapse.network.layers import MLP_KINDS, NORM_KINDS, NORM_PLACEMENTS

FLAGS = cli.make_flags(
    "collapse", num_seeds=8, shows="ratio,variant=last,layer=last",
    traced=("weight_scale", "skip_gain"), execution=("seed_chunk",),
)  # fmt: skip
define = cli.definer(FLAGS)
define("list", "variants", list(VARIANTS), f"Networks, out of {', '.join(VARIANTS)}.")
define("list", "norm", ["none"], f"Norm placements, out of {', '.join(NORM_PLACEMENTS)}.")
define("enum", "norm_kind", "layer", "Kind of norm.", NORM_KINDS)
define("integer", "depth", 12, "Layers; every smaller depth is measured on the way.")
define("integer", "num_heads", 4, "Heads.")
define("integer", "d_model", 64, "Width of the tokens.")
define("integer", "d_ff", None, "Width of the MLP (default 4 d_model).")
define("enum", "mlp", "gelu", "MLP of san_mlp and transformer.", MLP_KINDS[1:])
define("boolean", "san_mlp_skip", False, "Keep the MLP's own skip in san_mlp, as published.")
define("enum", "mask", "none", "Attention mask.", MASKS)
define("integer", "window", 2, "Reach of --mask=local.")
define("enum", "init", "lecun", "Initialisation.", INITS)
define("list", "weight_scale", ["1"], "Multiplies every weight; a list is a sweep.")
define("list", "skip_gain", ["1"], "Multiplies the skips; a list is a sweep.")
define(
    "list", "mlp_gain", [], "Gains of the MLPs at which san_mlp is measured too, without norms "
    "as it is, post-norm with the MLPs' own skip: where they begin to slow the collapse.",
)  # fmt: skip
define("float", "bias_scale", 0.0, "Standard deviation of the biases.")
text = "Prove residuals that rounding decides in float64 too: ball arithmetic, a minute a seed."
define("boolean", "certify", False, text)
inputs.define_flags(define)
define("enum", "dtype", "float32", "Arithmetic of the forward pass.", list(inputs.DTYPES))
define("integer", "seed_chunk", 16, "Seeds in memory at the most.", lower_bound=1)
room.define_flag(define)


def main(options: flags.FlagValues) -> None:
    ids, source = inputs.read_tokens(options)
    sweep = sweep_of(options)
    gains_of(options)  # refused before a folder is made
    networks = {norm: configs_of(options, norm, options.variants) for norm in options.norm}
    mesh = cli.mesh(options)
    with cli.open_run(options, "collapse", extra=source, execution=("seed_chunk",)) as run:
        results = measure_all(options, networks, sweep, ids, mesh, run)
        run.publish(
            rows=partial(rows_of, results),
            figures=figures_of(results),
            summary=partial(summary_of, results),
        )
        print(f"written to {run.path}")


__all__ = ["ENTRY", "FLAGS", "main"]

if __name__ == "__main__":
    cli.run(main, FLAGS)
