"""Flags of trained experiments: which there are, and what a task sets in their place."""

import numpy as np

import rank_collapse as rc
from experiments.lab import cli, list_points
from experiments.train import arguments

SIZES = {"depth": 2, "num_heads": 2, "d_model": 8, "num_tokens": 3, "num_labels": 5}
SIZES |= {"batch_size": 4, "n_epochs": 6, "learning_rate": 0.5, "dropout": 0.25}


def parse(*typed, **changes):
    flags = arguments.make_flags("trained", **SIZES | changes)
    return list_points(cli.parse_flags(flags, list(typed)))[0]


def test_a_command_has_the_flags_that_it_asks_for():
    usual = arguments.make_flags("trained", **SIZES)
    assert "monitor" in usual and "until" in usual and "max_seeds" in usual
    assert usual.shows == "accuracy,evaluation=whole" and not usual["do_mlp"].value
    assert usual["num_seeds"].value == 2 and usual["width"] is usual["num_heads"]
    other = arguments.make_flags(
        "trained", shows="loss", num_seeds=5, monitor=False, do_mlp=True, can_grow=False, **SIZES
    )
    assert not {"monitor", "until", "max_seeds"} & {*other}
    assert (other.shows, other["num_seeds"].value, other["do_mlp"].value) == ("loss", 5, True)


def test_numbers_of_the_task_count_before_those_of_the_flags():
    options = parse("--init_scale=2")
    hyper = arguments.make_hyper(options, {"learning_rate": 7.0, "warmup": 3.0})
    assert (hyper.learning_rate, hyper.dropout, hyper.init_scale) == (7.0, 0.25, 2.0)
    assert hyper.warmup == 3.0 and hyper.dropout.dtype == np.float32
    assert arguments.make_hyper(options).learning_rate == 0.5
    embedding = rc.EmbeddingConfig(vocab_size=5, d_embed=8)
    recipe = arguments.make_recipe(options, embedding)
    assert (recipe.batch_size, recipe.num_epochs, recipe.num_outputs) == (4, 6, 5)
    assert arguments.make_recipe(options, embedding, batch_size=9).batch_size == 9


def test_points_that_differ_in_a_number_of_the_training_share_a_program():
    assert len(parse("--learning_rate=0.5,1", "--init_scale=1,2").group) == 4
    assert len(parse("--depth=2,3").group) == 1
