"""Sorting: a network trained to sort letters, and the accuracy of its paths of each length alone.

Reproduces the sorting panel of the path-length figure of Dong, Cordonnier and Loukas (2021,
section 4.2) with the whole model and the baseline measured, error bars over seeds and repeats, and
the exact sum over all paths of a length beside the sampled sets.

    python -m experiments.run_sort --width 2 --depth 6 --hidden_dim 48 --seed 2 --num_labels 10 \\
        --seq_len 8 --n_epochs 65 --path_len 0 --n_paths 5 --n_train_data 1000 --n_repeat 5 \\
        --n_eval_data 200 --no_sub_path

Two CPU cores: 59 seconds for 16 seeds. Expected: whole-model accuracy 0.995.
"""

import functools

from experiments.lab import cli
from experiments.paper.path_accuracies import finding
from experiments.paper.path_lengths import paths_experiment
from experiments.train import arguments
from experiments.train.tasks import sorting_setup

FLAGS = arguments.make_flags("sort", no_repeat=False)
arguments.add_path_flags(FLAGS)

EXPERIMENT = paths_experiment(
    "sorting",
    about=__doc__,
    order=50,
    brief="sorting: accuracy of paths by length, 5 paths, 20 paths and all of them",
    flags=FLAGS,
    finding=functools.partial(finding, "of the letters are sorted"),
    setup=sorting_setup,
    presets={
        "quick": "--depth=4 --n_epochs=5 --learning_rate=2e-3 --n_eval_data=60",
        "tiny": "--num_labels=4",
    },
)
main = EXPERIMENT.main

if __name__ == "__main__":
    cli.run(main, FLAGS)
