"""Convex hull: a network trained to find the points on the hull, analysed by path length.

Reproduces the convex-hull panel of the path-length figure of Dong, Cordonnier and Loukas (2021,
section 4.2) with the whole model and the baselines measured, error bars over seeds and repeats, and
the exact sum over all paths of a length beside the sampled sets.

    python -m experiments.run_convex_hull --width 3 --depth 6 --seq_len 10 --hidden_dim 84 \\
        --seed 2 --num_labels 2 --n_epochs 70 --path_len 0 --n_paths 5 --n_train_data 10000 \\
        --n_repeat 5 --ffn2 --n_eval_data 300 --no_sub_path

Two CPU cores: about 100 seconds of training a seed. Expected: whole-model accuracy 0.951.
"""

import functools

from absl import flags

import rank_collapse as rc
from experiments.shell import cli
from experiments.trained import arguments, training
from experiments.trained.paths import paths_experiment
from rank_collapse.training.tasks import convex_hull, examples

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


def make_setup(options: flags.FlagValues) -> training.Setup:
    """The experiment of the flags."""
    if options.num_labels != 2:
        raise ValueError(f"num_labels={options.num_labels}: on the hull or not are 2 labels")
    embedding = rc.EmbeddingConfig(d_input=2, d_embed=options.d_model, hidden_layer=options.ffn2)
    make = functools.partial(convex_hull.make_examples, num_points=options.num_tokens)
    return training.Setup(
        options,
        name="convex_hull",
        title=f"Convex hull of {options.num_tokens} points",
        recipe=arguments.recipe(options, embedding, schedule="milestones"),
        make_data=functools.partial(training.train_and_eval, make, options),
        metrics={
            "accuracy": examples.token_accuracy,
            "exact_match": examples.exact_match,
            "auc": examples.area_under_curve,
            "loss": examples.loss_metric,
        },
        published={"whole": 0.90, "baseline": 0.54},
    )


EXPERIMENT = paths_experiment(
    "convex hull",
    about=__doc__,
    order=60,
    brief="the same for points on a convex hull",
    flags=FLAGS,
    setup=make_setup,
    presets={
        "quick": "--depth=4 --d_model=48 --n_train_data=1500 --n_epochs=8 --n_eval_data=60",
        "tiny": "--num_labels=2",
    },
)
main = EXPERIMENT.main

if __name__ == "__main__":
    cli.run(main, FLAGS)
