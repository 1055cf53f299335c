"""Convex hull: a network trained to tell which points lie on the hull, read by path length.

Reproduces the convex-hull panel of the path-length figure of Dong, Cordonnier and Loukas (2021,
section 4.2) with the whole model and the baselines measured, error bars over seeds and repeats, and
the exact sum over all paths of a length beside the sampled sets.

    python -m experiments.run_convex_hull --width 3 --depth 6 --seq_len 10 --hidden_dim 84 \\
        --seed 2 --num_labels 2 --n_epochs 70 --path_len 0 --n_paths 5 --n_train_data 10000 \\
        --n_repeat 5 --ffn2 --n_eval_data 300 --no_sub_path

Two CPU cores: about 100 seconds of training a seed. Expected: whole-model accuracy 0.951.
"""

import functools

import jax
from absl import flags

from experiments.shell import cli
from experiments.trained import arguments, entry, experiment
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.training.tasks import convex_hull, examples
from rank_collapse.training.training import Recipe

FLAGS = arguments.make_flags(
    "convex_hull",
    width=3,
    depth=6,
    hidden_dim=84,
    seq_len=10,
    num_labels=2,
    n_train_data=10000,
    n_eval_data=300,
    n_epochs=70,
    batch_sz=30,
    learning_rate=1e-3,
    weight_decay=1e-3,
)
arguments.add_path_flags(FLAGS)
flags.DEFINE_boolean(
    "ffn2", True, "Points pass linear-gelu-linear before the first layer, not one linear map.",
    flag_values=FLAGS,
)  # fmt: skip


def main(options: flags.FlagValues) -> None:
    experiment.run_experiment(options, make_setup(options))


def make_setup(options: flags.FlagValues) -> experiment.Setup:
    """The experiment of the flags."""
    if options.num_labels != 2:
        raise ValueError(f"num_labels={options.num_labels}: on the hull or not are 2 labels")
    embedding = EmbeddingConfig(d_input=2, d_embed=options.hidden_dim, hidden_layer=options.ffn2)
    return experiment.Setup(
        name="convex_hull",
        title=f"Convex hull of {options.seq_len} points",
        recipe=Recipe(
            config=arguments.network_config(options, embedding),
            num_outputs=2,
            batch_size=options.batch_sz,
            num_epochs=options.n_epochs,
            schedule="milestones",
        ),
        make_data=functools.partial(make_data, options),
        metrics={
            "accuracy": examples.token_accuracy,
            "exact_match": examples.exact_match,
            "auc": examples.area_under_curve,
            "loss": examples.loss_metric,
        },
        published={"whole": 0.90, "baseline": 0.54},
    )


def make_data(options: flags.FlagValues, key) -> dict:
    """Training and evaluation data of one seed."""
    key_train, key_eval = jax.random.split(key)
    train = convex_hull.make_examples(key_train, options.n_train_data, options.seq_len)
    if options.train_as_eval:
        return {"train": train, "eval": train.first(options.n_eval_data)}
    held_out = convex_hull.make_examples(key_eval, options.n_eval_data, options.seq_len)
    return {"train": train, "eval": held_out}


ENTRY = entry.make_entry(
    title="Paths: convex hull",
    task="convex hull",
    quick=(
        "--num_seeds=4", "--n_train_data=2000", "--n_epochs=5", "--n_eval_data=100",
        "--n_repeat=3", "--no_sub_path",
    ),
    paper=("--num_seeds=8", "--no_sub_path"),
)  # fmt: skip


if __name__ == "__main__":
    cli.run(main, FLAGS)
