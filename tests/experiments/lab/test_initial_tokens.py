"""Tokens at initialisation: texts, Gaussian numbers, and flags that exclude each other."""

import jax
import numpy as np
import pytest

from experiments.lab import cli, initial_tokens, shared_flags
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused

FLAGS = cli.make_flags("tokens")
shared_flags.define(FLAGS, d_model=8)
initial_tokens.define_flags(FLAGS)


def parse(*arguments):
    return cli.parse_flags(FLAGS, list(arguments))


def test_gaussian_tokens_are_drawn_from_the_key_of_the_seed():
    options = parse("--inputs=gaussian", "--num_tokens=5")
    assert initial_tokens.read_tokens(options) == (None, {})
    x = initial_tokens.input_tokens(jax.random.key(3), None, options)
    assert_close(x, jax.random.normal(jax.random.key(3), (5, 8)), rtol=0)


def test_a_text_is_normalised_and_equal_words_differ_by_their_position(tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_text("one two one")
    ids, source = initial_tokens.read_tokens(parse(f"--text={path}", "--num_tokens=9"))
    assert ids[0] == ids[2] != ids[1] and len(ids) == 3
    assert "the text has 3 tokens, fewer than num_tokens=9" in capsys.readouterr().out
    assert list(source) == ["text_sha256"]
    drawn = {}
    for positions in ("none", "sinusoidal"):
        options = parse(f"--text={path}", f"--positions={positions}")
        drawn[positions] = np.asarray(initial_tokens.input_tokens(jax.random.key(0), ids, options))
    assert_close(drawn["none"][0], drawn["none"][2], rtol=0)
    assert not np.allclose(drawn["sinusoidal"][0], drawn["sinusoidal"][2], atol=0.1)
    for x in drawn.values():
        assert_close(x.mean(axis=1), 0, atol=1e-5)
        np.testing.assert_allclose(x.std(axis=1), 1, rtol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--inputs=gaussian", "--text=a.txt"], "--text and --inputs=gaussian exclude each other"),
        (["--inputs=gaussian", "--num_tokens=1"], "num_tokens=1 is fewer than 2"),
    ],
)
def test_flags_that_exclude_each_other_are_named(arguments, message):
    is_refused(message, initial_tokens.read_tokens, parse(*arguments))
