"""Mappings of families on small made-up tensors: rotary features, scales, drawn positions."""

import jax
import numpy as np
import pytest

from rank_collapse import pretrained
from rank_collapse.pretrained.loading import random_like
from rank_collapse.pretrained.mapping import Reader
from rank_collapse.pretrained.weights import Weights
from tests.support.closeness import assert_close

LINEAR = {"attention.q": "q", "attention.k": "k", "attention.v": "v", "attention.o": "o"}


class Numbered(Weights):
    """Tensors whose entries are 0, 1, 2, ... in the order of the file."""

    def has_tensor(self, name):
        return True

    def take(self, name, *shape):
        return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def read_attention(**fields):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 5}
    config = pretrained.config_of({"model_type": "cohere", "num_key_value_heads": 2} | sizes)
    reader = Reader(Numbered(), config, {}, lambda kind: True, **fields)
    return reader.read_fields(LINEAR, "layer.")["attention"]


def test_neighbouring_rotary_features_become_two_halves_in_weights_and_biases():
    """Of queries and keys: 0, 2 of a head of width 4 come before 1, 3; values stay."""
    plain, turned = read_attention(), read_attention(interleaved=True)
    order = [0, 2, 1, 3]
    for letter in "qk":
        for kind in "wb":
            name = f"{kind}_{letter}"
            expected = getattr(plain, name)[..., order]
            np.testing.assert_array_equal(getattr(turned, name), expected, err_msg=name)
    np.testing.assert_array_equal(turned.b_q, [[0, 2, 1, 3], [4, 6, 5, 7]])
    for name in ("w_v", "b_v", "w_o", "b_o"):
        np.testing.assert_array_equal(getattr(turned, name), getattr(plain, name))


@pytest.mark.parametrize(
    ("name", "entries", "scale"),
    [
        ("granite", {"logits_scaling": 4.0}, 0.25),
        ("cohere", {"logit_scale": 0.5}, 0.5),
        ("llama", {}, 1.0),
    ],
)
def test_logits_have_the_scale_of_the_config(name, entries, scale):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 5}
    settings = pretrained.settings_of({"model_type": name} | sizes | entries)
    family = pretrained.FAMILIES[name]
    head = family.read_unembedding(Numbered(), settings, family.make_config(settings))
    assert head.scale == scale


def test_drawn_sinusoidal_positions_are_sines_before_cosines():
    """Those of DistilBERT, as of Vaswani et al. 2017, section 3.5: sin and cos alternate."""
    sizes = {"dim": 4, "n_heads": 2, "n_layers": 1, "hidden_dim": 8, "vocab_size": 9}
    source = {"model_type": "distilbert", "sinusoidal_pos_embds": True} | sizes
    _, params = random_like(source, jax.random.key(0))
    positions = np.asarray(params.embedding.positions)
    assert_close(positions[0], [0, 1, 0, 1], atol=1e-7)
    expected = [np.sin(1), np.cos(1), np.sin(0.01), np.cos(0.01)]
    np.testing.assert_allclose(positions[1], expected, rtol=1e-6)
