"""The tensors of a checkpoint under the names that a model class has put prefixes before."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.pretrained.weights import CheckpointWeights, LazyLayers, Table, Weights
from tests.support.refusals import is_refused


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (["shared.weight"], ""),
        (["model.shared.weight", "model.encoder.w"], "model."),
        (["a.b.shared.weight"], "a.b."),
        (["model.shared.weight", "unshared.weight"], "model."),  # the end of another word
        (["decoder.shared.weight", "model.decoder.shared.weight"], "decoder."),
        (["model.tokens.weight", "retokens.weight"], "model."),
    ],
)
def test_a_prefix_is_of_whole_names(names, prefix):
    checkpoint = SimpleNamespace(names=names, folder=Path("folder"), file="a.safetensors")
    weights = CheckpointWeights(checkpoint, ("shared.weight", "tokens.weight"))
    assert weights.prefix == prefix


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (["lm_head.weight", "model.layers.0.w"], "model."),
        (["lm_head.weight", "layers.0.w"], ""),
        (["lm_head.weight", "a.model.w"], ""),
    ],
)
def test_the_head_may_stand_for_the_tied_table_of_tokens(names, prefix):
    checkpoint = SimpleNamespace(names=names, folder=Path("folder"), file="a.safetensors")
    weights = CheckpointWeights(checkpoint, ("embed_tokens.weight",), tied=True)
    assert weights.prefix == prefix
    assert weights._name_in_file("embed_tokens.weight") == "lm_head.weight"
    message = "tensor 'embed_tokens.weight' is missing"
    is_refused(message, CheckpointWeights, checkpoint, ("embed_tokens.weight",))


def test_the_end_of_a_longer_name_is_not_the_tensor():
    checkpoint = SimpleNamespace(names=["unshared.weight"], folder=Path("folder"), file="a.bin")
    message = r"folder/a\.bin: tensor 'shared\.weight' is missing"
    is_refused(message, CheckpointWeights, checkpoint, ("shared.weight",))


def test_old_files_call_weight_and_bias_of_a_norm_gamma_and_beta():
    """Where the new name is absent; a tensor of another end has no old name."""
    names = ["m.shared.weight", "m.n.gamma", "m.n.beta", "m.o.weight", "m.o.gamma", "head.bias"]
    checkpoint = SimpleNamespace(names=names, folder=Path("folder"), file="a.bin")
    weights = CheckpointWeights(checkpoint, ("shared.weight",))
    for name, expected in (
        ("n.weight", "m.n.gamma"),
        ("n.bias", "m.n.beta"),
        ("o.weight", "m.o.weight"),
        ("o.bias", "m.o.bias"),
        ("head.bias", "head.bias"),  # outside of the model proper
        ("n.gain", "m.n.gain"),
    ):
        assert weights._name_in_file(name) == expected
        assert weights.has_tensor(name) == (expected in names)
    assert weights.has_tensor("n.") and not weights.has_tensor("p.")


class HeldWeights(Weights):
    """Two layers, the second with a value that is not finite."""

    is_random = False

    def read(self, row):
        a = np.arange(6.0).reshape(2, 3).T
        return {"a": a, "b": np.array([1.0, np.inf if row == 1 and not self.checks else 2.0])}


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_layer_that_is_not_finite_is_refused_on_every_device(backend, monkeypatch):
    """Its tensor is named where reading finds it, the layer otherwise."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    weights = HeldWeights()
    weights.checks = False
    layers = LazyLayers(weights, [0, 2, 1], weights.read)
    assert len(layers) == 3
    stored = layers.get(0, coming=1)
    np.testing.assert_array_equal(stored["a"].value, weights.read(0)["a"])
    assert stored["b"].value.dtype == jnp.float32 and layers.get(0) is stored
    is_refused("layer 1 has values that are not finite", layers.get, 2)
    assert weights.checks
    np.testing.assert_array_equal(layers.get(1)["b"].value, [1, 2])
    last = layers.get(1)
    layers.drop()
    assert layers.get(1) is not last  # which was freed
    weights.is_random = True  # random weights are finite and are not checked
    weights.checks = False
    assert np.isinf(LazyLayers(weights, [1], weights.read).get(0)["b"].value).any()


def test_a_table_is_read_in_chunks_the_last_of_which_is_smaller():
    rows, reads = np.arange(14.0).reshape(7, 2), []

    def read(first, last):
        reads.append((first, last))
        return rows[first:last]

    table = Table(read, rows.shape)
    chunks = list(table.chunks(3))
    assert [first for first, _ in chunks] == [0, 3, 6] and reads == [(0, 3), (3, 6), (6, 7)]
    np.testing.assert_array_equal(np.concatenate([chunk for _, chunk in chunks]), rows)
    np.testing.assert_array_equal(table.rows([6, 0, 6]), rows[[6, 0, 6]])


def test_a_lazy_table_has_the_rows_of_the_whole_tensor():
    rows = np.arange(14.0).reshape(7, 2)
    weights = HeldWeights(lazy=True)
    weights.take = lambda name, *shape: rows.reshape(shape)
    table = weights.table("tokens", 7, 2)
    assert [(first, chunk.tolist()) for first, chunk in table.chunks(3)] == [
        (first, rows[first : first + 3].tolist()) for first in (0, 3, 6)
    ]
    np.testing.assert_array_equal(table.rows([6, 0, 6]), rows[[6, 0, 6]])
