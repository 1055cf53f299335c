"""Residual designs against depth: what an update does to the output, and how tokens collapse.

Reproduces the dependency heat maps and the laws of output change of Liu, Liu, Gao, Chen and Han,
"Understanding the difficulty of training Transformers" (2020), for the residual designs of
`rc.DESIGNS` at initialisation. On the same networks: residual, token
cosine and gradients by layer, and the one law that predicts all of them from the gains.

    python -m experiments.run_stability
    python -m experiments.run_stability --parts=encoders --designs=post,admin_log --mlp=none
    python -m experiments.run_stability --parts=encoders,training --mask=causal --mlp=swiglu

Five and a half minutes of CPU time at the defaults on a busy machine, half of it for the encoders.
Expect 1 − cosine of Post-LN's tokens to halve with every layer (in a decoder, with two attentions
in a layer, to fall to a third), updates in random directions to change its output by about N or
more, and the other designs to lie within a third of the law after 100 layers.
"""

from functools import partial

from absl import flags

from experiments.shell import cli, room
from experiments.stability import training
from experiments.stability.cases import CLAIMS, PARTS, parts_of
from experiments.stability.entry import ENTRY
from experiments.stability.figures import figures_of
from experiments.stability.measure import measure_all
from experiments.stability.results import rows_of, summary_of
from rank_collapse.network.attention import MASKS
from rank_collapse.network.designs import DESIGNS
from rank_collapse.network.layers import MLP_KINDS

FLAGS = cli.make_flags("stability", num_seeds=8, shows="apart,layer=last")
define = cli.definer(FLAGS)
define("list", "parts", ["encoders", "encoder_decoders"], f"Out of {', '.join(PARTS)}.")
define("list", "designs", list(CLAIMS), f"Residual designs, out of {', '.join(DESIGNS)}.")
define("list", "depths", ["6", "12", "25", "50", "100"], "Layers of the networks.")
define("list", "layer_depths", ["6", "50"], "Those of them that are measured by layer too.")
define("list", "pair_depths", ["3", "6", "12", "25"], "Layers of either half of encoder-decoders.")
define("list", "pair_layer_depths", ["6", "25"], "Those that are measured by layer too.")
define("integer", "num_heads", 4, "Heads.", lower_bound=1)
# Normalised tokens of two numbers are (1, -1) or (-1, 1): equal or opposite, whatever the network.
define("integer", "d_model", 64, "Width of the tokens.", lower_bound=3)
define("integer", "d_ff", None, "Width of the MLP (default 4 d_model).", lower_bound=1)
define("integer", "num_tokens", 16, "Tokens, Gaussian and normalised.", lower_bound=2)
define("enum", "mlp", "gelu", "MLP of every layer, or none.", MLP_KINDS)
define("enum", "mask", "none", "Attention mask.", MASKS)
define("boolean", "log_residual", True, "Residuals in logarithms, by a pass of their own.")
define("float", "update_size", 1e-4, "‖W* − W‖/‖W‖ of every matrix, above 0.", lower_bound=0.0)

define("list", "train_designs", ["post", "pre", "admin", "deepnorm"], "Designs that are trained.")
define("integer", "train_depth", 12, "Layers of what is trained.", lower_bound=1)
define("integer", "train_steps", 300, "Steps.", lower_bound=1)
room.define_flag(define)


def main(options: flags.FlagValues) -> None:
    parts = parts_of(options)
    cases = [case for groups in parts.values() for group in groups for case in group.cases]
    mesh = cli.mesh(options)
    with cli.open_run(options, "stability") as run:
        results = measure_all(options, parts, mesh, run)
        trained = training.trained(options, run) if "training" in options.parts else {}
        run.publish(
            rows=partial(rows_of, results, cases),
            figures=figures_of(results, cases) | training.figures_of(trained),
            summary=lambda: summary_of(results, cases) | training.summary_of(trained, options),
        )
        print(f"written to {run.path}")


__all__ = ["ENTRY", "FLAGS", "main"]

if __name__ == "__main__":
    cli.run(main, FLAGS)
