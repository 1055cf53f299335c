"""Convex hull: a network trained to find the points on the hull, analysed by path length.

Reproduces the convex-hull panel of the path-length figure of Dong, Cordonnier and Loukas (2021,
section 4.2) with the whole model and the baselines measured, error bars over seeds and repeats, and
the exact sum over all paths of a length beside the sampled sets.

    python -m experiments.run_convex_hull --width 3 --depth 6 --seq_len 10 --hidden_dim 84 \\
        --seed 2 --num_labels 2 --n_epochs 70 --path_len 0 --n_paths 5 --n_train_data 10000 \\
        --n_repeat 5 --ffn2 --n_eval_data 300 --no_sub_path

Two CPU cores: about 100 seconds of training a seed. Expected: whole-model accuracy 0.951.
"""

from experiments.lab import cli
from experiments.paper.path_lengths import paths_experiment
from experiments.train import arguments
from experiments.train.tasks import hull_setup

FLAGS = arguments.make_flags(
    "convex_hull",
    num_heads=3,
    d_model=84,
    num_tokens=10,
    num_labels=2,
    n_train_data=10000,
    n_eval_data=300,
    n_epochs=70,
    weight_decay=1e-3,
)
arguments.add_path_flags(FLAGS)
cli.definer(FLAGS)(
    "boolean",
    "ffn2",
    True,
    "Points pass linear-gelu-linear before the first layer, not one linear map.",
)


EXPERIMENT = paths_experiment(
    "convex hull",
    about=__doc__,
    order=60,
    brief="the same for points on a convex hull",
    flags=FLAGS,
    setup=hull_setup,
    presets={
        "quick": "--depth=4 --d_model=48 --n_train_data=1500 --n_epochs=8 --n_eval_data=60",
        "tiny": "--num_labels=2",
    },
)
main = EXPERIMENT.main

if __name__ == "__main__":
    cli.run(main, FLAGS)
