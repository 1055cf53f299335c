"""Examples of run_memorization."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import run_memorization as memorization
from experiments.lab import cli, list_points
from tests.support.runs import opened_with


def test_compact_vocabulary_keeps_the_texts():
    tokens = np.array([[7, 100, 7], [0, 3, 100]])
    compact, used = memorization.compact_vocabulary(tokens)
    np.testing.assert_array_equal(used[compact], tokens)
    assert compact.max() == len(used) - 1 == 3


def test_the_published_command_has_the_published_names():
    """Those of the module's documentation, split as a shell does."""
    text = memorization.__doc__.split("experiments.run_memorization", 1)[1].split("\n\n")[0]
    options = cli.parse_flags(memorization.FLAGS, text.replace("\\", "").split())
    assert (options.num_tokens, options.n_epochs, options.batch_size) == (128, 50, 8)
    assert (options.num_heads, options.depth, options.d_model) == (2, 6, 250)
    assert options.output_dir == "snap/RTE" and options.overwrite and options.no_sub_path
    assert (options.n_train_data, options.per_device_eval_batch_size) == (500, 32)
    assert (options.learning_rate, options.task_name) == (3e-4, "RTE")
    others = ("--max_seq_length=9", "--num_train_epochs=7", "--per_device_train_batch_size=3")
    options = cli.parse_flags(memorization.FLAGS, [*others, "--overwrite_output_dir"])
    assert (options.num_tokens, options.n_epochs, options.batch_size) == (9, 7, 3)
    assert options.overwrite and not cli.parse_flags(memorization.FLAGS, []).overwrite


def test_paths_are_at_most_as_long_as_the_network_is_deep():
    options = make_options("--depth=2", "--path_len=3", "--task_name=shipped")
    with pytest.raises(ValueError, match="path_len=3 is larger than depth=2"):
        memorization.make_task(options)


def make_options(*arguments):
    (options,) = list_points(cli.parse_flags(memorization.FLAGS, list(arguments)))
    return options


def test_rows_hold_about_as_many_texts_as_a_batch_is_to_have():
    """Twelve texts of 2 tokens in rows of 8: three rows, and batches of one row hold four texts."""
    tokens, mask = np.tile(np.arange(8), (12, 1)), np.tile(np.arange(8) < 2, (12, 1))
    flags = ("--num_tokens=8", "--d_model=4", "--num_heads=2", "--n_eval_data=5", "--n_epochs=3")
    for batch_size, num_rows in ((4, 1), (8, 2), (12, 3), (1, 1)):
        options = make_options(*flags, f"--batch_size={batch_size}")
        task = memorization.make_text_task(options, tokens, mask, 8, {"texts": "hash"})
        recipe = task.recipe
        assert recipe.batch_size == num_rows and recipe.num_epochs == 3
    assert (recipe.shuffle, recipe.schedule, recipe.clip_norm) == (True, "linear", 1.0)
    assert recipe.config.embedding.vocab_size == 8 and recipe.config.embedding.d_embed == 4
    assert recipe.config.embedding.projection == "before_norm"
    assert list(task.metrics) == ["accuracy", "exact_match", "loss", "auc"]
    assert task.batch_size == 8 and task.extra == {"texts": "hash"}
    assert task.title == "Memorizing random labels of 12 texts"
    assert task.published == {"whole": 0.85, "baseline": 0.5}
    options = make_options(*flags, "--num_labels=3", "--per_device_eval_batch_size=3")
    task = memorization.make_text_task(options, tokens, mask, 8)
    assert list(task.metrics) == ["accuracy", "exact_match", "loss"] and task.batch_size == 3
    data = task.make_data(jax.random.key(0))
    assert len(data["train"]) == 3 and len(data["texts"]) == 12 and len(data["eval"]) == 5
    np.testing.assert_array_equal(data["eval"].labels, data["texts"].labels[:5])
    np.testing.assert_array_equal(data["texts"].inputs, tokens)


def test_labels_of_tokens_are_uniform_and_those_of_the_key():
    tokens, mask = jnp.zeros((60, 50), int), jnp.ones((60, 50), bool)
    first, again, other = (
        memorization.make_examples(jax.random.key(seed), tokens, mask, 3) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first.labels, again.labels)
    assert (first.labels != other.labels).mean() > 0.5
    counts = np.bincount(np.asarray(first.labels).ravel(), minlength=3)
    assert len(counts) == 3 and np.abs(counts / 3000 - 1 / 3).max() < 0.05
    assert (first.labels[0] != first.labels[1]).any()


def test_another_text_is_another_run(monkeypatch):
    make, identify = opened_with(memorization, monkeypatch, "options")
    assert make is memorization.make_task
    assert identify(SimpleNamespace(extra={"texts": "a"})) == {"texts": "a"}
