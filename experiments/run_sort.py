"""Sorting: a network trained to sort letters, and the accuracy of its paths of each length alone.

Reproduces the sorting panel of the path-length figure in Dong, Cordonnier and Loukas (2021, section
4.2). Measures the full model and the baseline, with error bars over seeds and repeats, and compares
sampled sets of paths with the exact sum over all paths of each length.

    python -m experiments.run_sort --width 2 --depth 6 --hidden_dim 48 --seed 2 --num_labels 10 \\
        --seq_len 8 --n_epochs 65 --path_len 0 --n_paths 5 --n_train_data 1000 --n_repeat 5 \\
        --n_eval_data 200 --no_sub_path

Takes 59 seconds for 16 seeds on two cores. docs/experiments/run_sort.md has the results, and
`experiments.paper.paths.measure` says what is measured.
"""

from experiments.lab import Experiment, Flags, Shown, cli
from experiments.paper.paths.experiment import CLAIM, define_path_flags, run_paths
from experiments.paper.paths.figures import FIGURES as FIGURES
from experiments.train import arguments
from experiments.train.sorting import make_sorting_setup as make_setup

FLAGS = arguments.make_flags("sort", no_repeat=False)
define_path_flags(FLAGS)

EXPERIMENT = Experiment(
    order=50,
    title="Paths: sorting",
    brief="accuracy by path length of networks that sort: 5 paths, 20 paths and all paths",
    claim=CLAIM,
    presets={
        "quick": "--num_seeds=6 --n_repeat=2 --no_sub_path --depth=4 --n_epochs=5 "
        "--learning_rate=2e-3 --n_eval_data=60",
        "reported": "--seed=3000 --num_seeds=6 --no_sub_path",
        "tiny": f"{arguments.TINY} --n_paths=2 --n_repeat=1 --num_labels=4",
    },
)


def main(options: Flags) -> Shown:
    """Trains networks to sort, evaluates their paths by length, and shows what these carry."""
    return run_paths(options, make_setup, "sorting", "of the letters are sorted")


if __name__ == "__main__":
    cli.run(main, FLAGS)
