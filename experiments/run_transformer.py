"""Transformer: an encoder-decoder that copies, reverses, sorts or translates, and its attention.

Sequences are made on the device; the translation is between two made-up languages with another
word order, agreement and a lexicon. Trained with warm-up and teacher forcing over seeds, measured
by the tokens it predicts and by the sequences that it writes exactly, decoded greedily.

    python -m experiments.run_transformer --task=reverse
    python -m experiments.run_transformer --task=translation --optimizer=radam --label_smoothing=0.1
"""

import functools

from absl import flags

from experiments.shell import cli
from experiments.trained import arguments, training
from experiments.transformer import cases
from experiments.transformer.entry import ENTRY
from experiments.transformer.figures import figures_of
from experiments.transformer.measure import measure
from experiments.transformer.results import rows_of, show, summary_of
from rank_collapse.training.recipe import OPTIMIZERS

DEFAULTS = {
    "width": 4,
    "depth": 2,
    "hidden_dim": 32,
    "seq_len": 8,
    "num_labels": 10,
    "n_train_data": 4000,
    "n_eval_data": 200,
    "n_epochs": 40,
    "batch_sz": 64,
    "learning_rate": 3e-3,
    "weight_decay": 0.0,
}
FLAGS = arguments.make_flags("transformer", shows="exact", **DEFAULTS)
FLAGS.set_default("do_mlp", True)
FLAGS.set_default("dropout", 0.0)
define = cli.definer(FLAGS)
define("enum", "task", "reverse", "What is learned.", cases.TASKS)
define("integer", "min_len", None, "Letters of the shortest sequence (default: all of seq_len).")
define("enum", "norm", "post", "Where the norms are.", ("post", "pre"))
define("enum", "optimizer", "adam", "Adam or rectified Adam.", OPTIMIZERS)
define("enum", "schedule", "inverse_sqrt", "After the warm-up.", ("inverse_sqrt", "constant"))
define("float", "warmup", 100.0, "Steps of linear warm-up; 0 for none.")
define("float", "label_smoothing", 0.0, "ε of the smoothed labels.")
define("boolean", "tie", True, "One embedding for source, target and output.")


def main(options: flags.FlagValues) -> None:
    setup = cases.make_setup(options)
    with training.open_run(options, setup.name) as run:
        results = training.results_of(options, setup, run, functools.partial(measure, setup))
        summary = run.publish(
            rows=lambda: rows_of(results),
            figures=figures_of(results, setup),
            summary=lambda: summary_of(results, options),
        )
    show(setup.title, summary)
    print(f"written to {run.path}")


__all__ = ["ENTRY", "FLAGS", "main"]


if __name__ == "__main__":
    cli.run(main, FLAGS)
