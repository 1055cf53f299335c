"""Open checkpoints and networks in memory: the rows that a batch reads, and layers alone."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rank_collapse as rc
from rank_collapse import pretrained
from rank_collapse.pretrained import InMemory, streaming
from tests.oracles import draws
from tests.support.folders import GOLDEN
from tests.support.refusals import is_refused


@pytest.mark.parametrize(("name", "length"), [("gpt2-head", 20), ("t5-gated", 200)])
def test_as_many_tokens_as_positions_are_read(name, length):
    """Any number by a network without positions; of the table only the rows that they use."""
    ids = np.full((1, length), 5)
    ids[0, 3] = 4
    source = pretrained.open_checkpoint(GOLDEN / name)
    config, outside, batch = source.prepare_batch({"x": ids})
    assert batch["x"].shape == (1, length) and config.embedding.vocab_size == 2
    whole = pretrained.load(GOLDEN / name)[1].embedding.tokens
    np.testing.assert_array_equal(outside.embedding.tokens[batch["x"]], whole[ids])


def test_a_head_beside_tied_embeddings_is_the_table_of_the_tokens(tmp_path):
    """Which of two different tables is the head depends on the version of transformers."""
    copy = Path(shutil.copytree(GOLDEN / "gpt2-head", tmp_path / "gpt2"))
    tensors = load_file(copy / "model.safetensors")
    table = next(array for name, array in tensors.items() if name.endswith("wte.weight"))
    save_file(tensors | {"lm_head.weight": table}, copy / "model.safetensors")
    head = pretrained.open_checkpoint(copy).unembedding
    np.testing.assert_array_equal(head.table.read(0, len(table)), table)
    save_file(tensors | {"lm_head.weight": 2 * table}, copy / "model.safetensors")
    source = pretrained.open_checkpoint(copy)
    is_refused("lm_head.weight differs from the table of the tokens", lambda: source.unembedding)


def test_vectors_are_read_as_they_are():
    """Patches by a network without a table of tokens."""
    source = pretrained.open_checkpoint(GOLDEN / "vit-wide")
    width = source.config.embedding.d_input
    x = np.random.default_rng(0).normal(size=(2, 3, width)).astype(np.float32)
    config, outside, batch = source.prepare_batch({"x": x})
    np.testing.assert_array_equal(batch["x"], x)
    assert config == source.config and outside.embedding.tokens is None


def test_vectors_in_the_place_of_tokens_read_one_row_of_the_table():
    """No token is embedded; in the weights' dtype, whatever that of the file."""
    source = pretrained.open_checkpoint(GOLDEN / "bert", dtype=jnp.bfloat16)
    x = np.ones((2, 3, source.config.d_model), np.float32)
    config, outside, batch = source.prepare_batch({"x": x})
    np.testing.assert_array_equal(batch["x"], x)
    assert outside.embedding.tokens.shape == (1, 24) and config.embedding.vocab_size == 1
    assert outside.embedding.tokens.dtype == jnp.bfloat16


def test_tokens_beyond_the_vocabulary_of_a_network_in_memory_are_refused():
    config = rc.transformer(1, 1, 4, embedding=rc.EmbeddingConfig(vocab_size=7, d_embed=4))
    source = InMemory(draws.parameters(config), config)
    is_refused("token id 7 is not below vocab_size=7", source.prepare_batch, {"x": [[3, 7]]})


def test_a_layer_alone_is_that_of_its_row():
    """Nothing is read ahead."""
    source = pretrained.open_checkpoint(GOLDEN / "albert-groups")
    config, params = pretrained.load(GOLDEN / "albert-groups")
    assert len(set(config.layer_map)) > 1
    for index, row in enumerate(config.layer_map):
        stored = streaming.stored_values(source.stored_layer(index))
        expected = jax.tree.map(lambda a, row=row: a[row], params.layers)
        jax.tree.map(np.testing.assert_array_equal, stored, expected)
