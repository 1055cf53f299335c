"""Tokens at initialisation: texts, Gaussian numbers, and flags that exclude each other."""

import hashlib

import jax
import numpy as np
import pytest

from experiments.lab import cli, initial_tokens, shared_flags
from rank_collapse.network import embedding
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


def test_tokens_of_a_text_are_as_large_as_sines_where_those_are_added():
    """Rows of the table of the seed, times 50 beside sines; after that LayerNorm, by NumPy."""
    ids, key, d = np.array([0, 2, 1, 2, 3]), jax.random.key(4), 8
    places, rates = np.arange(5)[:, None], 10000.0 ** (-np.arange(0, d, 2) / d)
    sines = np.concatenate([np.sin(places * rates), np.cos(places * rates)], axis=1)
    for positions in ("none", "learned", "sinusoidal"):
        config = embedding.EmbeddingConfig(
            vocab_size=4, d_embed=d, positions=positions, num_positions=5
        )
        tables = jax.device_get(embedding.init_embedding(key, config, d))
        x = tables.tokens[ids]
        if positions == "learned":
            x = x + tables.positions
        elif positions == "sinusoidal":
            x = 50 * x + sines
        x = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)
        drawn = initial_tokens.input_tokens(key, ids, parse(f"--positions={positions}"))
        assert_close(drawn, x, rtol=1e-3, atol=1e-4, err_msg=positions)


def test_a_text_is_identified_by_its_content(tmp_path):
    sources = {}
    for name, content in (("a", "one two"), ("b", "one two"), ("c", "one two.")):
        (tmp_path / name).write_text(content)
        sources[name] = initial_tokens.read_tokens(parse(f"--text={tmp_path / name}"))[1]
    digest = hashlib.sha256(b"one two").hexdigest()
    assert sources["a"] == sources["b"] == {"text_sha256": digest} != sources["c"]
