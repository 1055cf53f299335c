"""The sorting experiment with accuracies alone: quick to compile, for tests of training runs."""

from experiments import run_sort
from experiments.lab import cli
from experiments.train import training
from experiments.train.training import ALONE

FLAGS = run_sort.FLAGS
SMALL = (
    "--depth=1",
    "--width=1",
    "--hidden_dim=4",
    "--n_epochs=30",
    "--n_train_data=6",
    "--n_eval_data=4",
    "--batch_sz=3",
    "--num_seeds=2",
    "--num_labels=3",
    "--seq_len=2",
    "--epochs_per_chunk=1",
)


def main(options):
    """Trains and measures; a row for each seed."""
    setup = run_sort.EXPERIMENT.setup(options)
    with cli.open_run(options) as run:
        results = training.results_of(options, {ALONE: setup}, run, training.whole_model)[ALONE]
        accuracy = results["whole"]["accuracy"]
        run.publish(
            rows=lambda: [
                {"evaluation": "whole", "seed": s, "accuracy": float(a)}
                for s, a in enumerate(accuracy)
            ],
            summary=lambda: {"accuracy": float(accuracy.mean())},
        )


if __name__ == "__main__":
    cli.run(main, FLAGS)
