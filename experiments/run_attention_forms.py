"""Attention forms: dot products, scaled or not, and additive attention against the width d_k.

The claim of Vaswani et al., "Attention is all you need" (2017, section 3.2.1): for small d_k the
two functions do alike; for large d_k additive attention is ahead of dot products that are not
scaled, since their variance d_k pushes the softmax to where its gradients are extremely small.
Two parts: scores, weights and gradients on random queries and keys of each --d_k, and the accuracy
of networks that have learned to sort with each function at each --trained_d_k, seed by seed. A
fourth function, additive scores times √d_k, tells what the tanh does from what a small v does.

    python -m experiments.run_attention_forms
    python -m experiments.run_attention_forms --d_k=8 --d_k=512 --trained_d_k=64 --depth=2

Two CPU cores: 275 s of CPU time. Expected: additive attention as good as dot products at d_k = 4
and far ahead at 256, where scaled dot products are ahead of both, and additive scores times √d_k
nearly as bad as dot products without their scale.
Time and memory: python -m experiments.benchmark --benchmark=attention_forms.
"""

from functools import partial

from absl import flags

from experiments import run_sort
from experiments.attention_forms.entry import ENTRY
from experiments.attention_forms.figures import figures_of
from experiments.attention_forms.measure import measure_widths
from experiments.attention_forms.results import rows_of, show, summary_of
from experiments.attention_forms.train import train_widths
from experiments.shell import cli
from experiments.trained import arguments, training

FLAGS = arguments.make_flags(
    "attention_forms",
    shows="accuracy,part=trained",
    joined=False,
    monitor=False,
    **(run_sort.DEFAULTS | {"depth": 1, "hidden_dim": 32, "n_epochs": 30}),
)
define = cli.definer(FLAGS)
define(
    "multi_integer", "d_k", [2**i for i in range(1, 11)],
    "Widths of random queries and keys; may be given several times.", lower_bound=1,
)  # fmt: skip
define(
    "multi_integer", "trained_d_k", [4, 32, 256],
    "Widths at which networks are trained; may be given several times.", lower_bound=1,
)  # fmt: skip
define("integer", "num_tokens", 64, "Random queries, and as many keys.", lower_bound=2)
define(
    "float", "saturation", 0.99, "Largest weight from which a row counts as saturated.",
    lower_bound=0.0, upper_bound=1.0,
)  # fmt: skip
define("boolean", "no_repeat", False, "No letter twice in a sequence.")
for unused in ("keep_models", "seeds_at_once", "epochs_per_chunk", "checkpoint_seconds"):
    delattr(FLAGS, unused)
FLAGS.set_default("num_seeds", 8)
FLAGS.set_default("dropout", 0.0)


def main(options: flags.FlagValues) -> None:
    with training.open_run(options, "attention_forms") as run:
        results = {
            "random": measure_widths(options, run),
            "trained": train_widths(options, run),
        }
        summary = run.publish(
            rows=partial(rows_of, results),
            figures=figures_of(results, options),
            summary=partial(summary_of, results, options),
        )
    show(summary)
    print(f"written to {run.path}")


__all__ = ["ENTRY", "FLAGS", "main"]


if __name__ == "__main__":
    cli.run(main, FLAGS)
