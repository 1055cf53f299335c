"""Trainability: which residual designs train at which depth, and why deep Post-LN does not.

Liu et al., "Understanding the difficulty of training Transformers" (2020, table 1): Post-LN of 12
and 18 layers diverges on translation, Pre-LN and Admin train. Here an encoder learns to reverse
letters, token by token, at a size that seeds can be counted at. Three parts: designs by depth, with
and without warm-up; the border of Post-LN in skip gain, learning rate and warm-up; and batch sizes.
Every network is also measured before and while it trains: residual ratio and token cosine by layer,
and the gradients to its matrices, of the very seeds whose failures are counted.

    python -m experiments.run_trainability
    python -m experiments.run_trainability --parts=designs --depths=18 --warmup=0

A seed fails if its loss is not finite or its accuracy at the end is what a guess reaches. Expected
with 18 layers and no warm-up: Post-LN fails in 8 of 8 seeds, Pre-LN, Admin and DeepNorm in none.
The run goes on after the last finished cell when it is started again; asked for other cells of the
same sizes, it trains those that its folder lacks and shows those that are asked for.
"""

from functools import partial

from absl import flags

from experiments.shell import cli, room
from experiments.trainability.cells import ASKED, PARTS, train_cells
from experiments.trainability.entry import ENTRY
from experiments.trainability.figures import figures_of
from experiments.trainability.results import rows_of, show, summary_of
from rank_collapse.training.tasks.sequences import TASKS

FLAGS = cli.make_flags("trainability", num_seeds=8, shows="failed")
define = cli.definer(FLAGS)
define("list", "parts", list(PARTS), f"What is trained, out of {', '.join(PARTS)}.")
define(
    "multi_integer", "depths", [6, 12, 18, 36], "Layers; may be given several times, as may all "
    "lists of numbers below.", lower_bound=1,
)  # fmt: skip
define("list", "designs", ["post", "pre", "admin", "deepnorm"], "Names of residual designs.")
define("multi_integer", "warmup", [0, 100], "Steps of the warm-up.", lower_bound=0)
define("float", "learning_rate", 1e-3, "Adam's, after the warm-up.", lower_bound=0.0)
define("integer", "n_steps", 300, "Training steps.", lower_bound=1)
define("integer", "batch_sz", 32, "Examples per step.", lower_bound=1)
define("enum", "task", "reverse", "What is learned, token by token.", TASKS)
define("integer", "seq_len", 16, "Tokens.", lower_bound=1)
define("integer", "num_labels", 10, "Letters of the alphabet.", lower_bound=2)
define("integer", "hidden_dim", 48, "Width of the tokens.", lower_bound=1)
define("integer", "width", 4, "Heads of each layer.", lower_bound=1)
define("integer", "d_ff", 96, "Width of the MLPs.", lower_bound=1)
define("integer", "n_eval_data", 64, "Examples of the evaluation.", lower_bound=8)
define("integer", "grid_seeds", 4, "Seeds of each cell of border and batch.", lower_bound=1)
define("multi_integer", "border_depths", [6, 12, 18], "Depths of the border.", lower_bound=1)
define(
    "multi_float", "border_gains", [1.0, 1.5, 2.0, 3.0], "Skip gains of Post-LN there.",
    lower_bound=0.0,
)  # fmt: skip
define("multi_float", "border_rates", [3e-4, 1e-3, 3e-3], "Learning rates.", lower_bound=0.0)
define("multi_integer", "batch_sizes", [8, 64], "Batch sizes compared.", lower_bound=1)
define("integer", "batch_depth", 18, "Layers of the networks compared by it.", lower_bound=1)
room.define_flag(define)


def main(options: flags.FlagValues) -> None:
    with cli.open_run(options, "trainability", execution=ASKED) as run:
        results = train_cells(options, run)
        summary = run.publish(
            rows=partial(rows_of, results, options),
            figures=figures_of(results, options),
            summary=partial(summary_of, results, options),
            shown=[cell.name for cell in results],
        )
    show(summary)
    print(f"written to {run.path}")


__all__ = ["ENTRY", "FLAGS", "main"]


if __name__ == "__main__":
    cli.run(main, FLAGS)
