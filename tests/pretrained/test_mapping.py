"""Mappings of families on small made-up tensors: rotary features, scales, drawn positions."""

import operator

import jax
import numpy as np
import pytest

from rank_collapse import pretrained
from rank_collapse.pretrained.checkpoint_files import open_weights
from rank_collapse.pretrained.loading import random_like
from rank_collapse.pretrained.mapping import Reader
from rank_collapse.pretrained.weights import Weights
from tests.support.closeness import assert_close
from tests.support.folders import GOLDEN

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
        ("llama", {"logit_scale": 0.5}, 1.0),  # an entry of other families
    ],
)
def test_logits_have_the_scale_of_the_config(name, entries, scale):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 5}
    settings = pretrained.settings_of({"model_type": name} | sizes | entries)
    family = pretrained.FAMILIES[name]
    head = family.read_unembedding(Numbered(), settings, family.make_config(settings))
    assert head.scale == scale


@pytest.mark.parametrize(("cap", "expected"), [(0.0, None), (None, None), (2.5, 2.5)])
def test_a_cap_of_0_is_none(cap, expected):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 5}
    sizes |= {"num_key_value_heads": 2, "head_dim": 4}
    source = {"model_type": "gemma2", "final_logit_softcapping": cap} | sizes
    settings, family = pretrained.settings_of(source), pretrained.FAMILIES["gemma2"]
    head = family.read_unembedding(Numbered(), settings, family.make_config(settings))
    assert head.softcap == expected


def test_drawn_sinusoidal_positions_are_sines_before_cosines():
    """Those of DistilBERT, as of Vaswani et al. 2017, section 3.5: sin and cos alternate."""
    sizes = {"dim": 4, "n_heads": 2, "n_layers": 1, "hidden_dim": 8, "vocab_size": 9}
    source = {"model_type": "distilbert", "sinusoidal_pos_embds": True} | sizes
    _, params = random_like(source, jax.random.key(0))
    positions = np.asarray(params.embedding.positions)
    assert_close(positions[0], [0, 1, 0, 1], atol=1e-7)
    expected = [np.sin(1), np.cos(1), np.sin(0.01), np.cos(0.01)]
    np.testing.assert_allclose(positions[1], expected, rtol=1e-6)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 2), (3, 1)])
def test_grouped_maps_in_one_tensor_are_queries_then_keys_then_values(heads, groups):
    """One head of each makes three maps, each of which keeps its axis of heads."""
    sizes = {"hidden_size": 24, "num_attention_heads": heads, "num_key_value_heads": groups}
    config = pretrained.config_of({"model_type": "phi3", "num_hidden_layers": 1} | sizes)
    reader = Reader(Numbered(), config, {"g": groups}, lambda kind: True)
    attention = reader.read_fields({"attention.qkv_grouped": "qkv", "attention.o": "o"}, "layer.")[
        "attention"
    ]
    width = 24 // heads
    rows = np.split(np.arange((heads + 2 * groups) * width), [24, 24 + groups * width])
    for letter, biases in zip("qkv", rows, strict=True):
        biases = biases.reshape(-1, width)
        np.testing.assert_array_equal(getattr(attention, f"b_{letter}"), biases)
        expected = 24 * biases[:, None, :] + np.arange(24)[None, :, None]
        np.testing.assert_array_equal(getattr(attention, f"w_{letter}"), expected)


def by_head(w):
    """[(h k), d] → [h, d, k], of three heads."""
    return w.reshape(3, -1, w.shape[1]).transpose(0, 2, 1)


def from_heads(w):
    """[d, (h v)] → [h, v, d]."""
    return w.T.reshape(3, -1, len(w))


def same(a):
    return a


def list_maps(stem, query, key, value, output):
    """(place, tensor, its axes) of four maps of attention, as most families have them."""
    maps = [
        (f"w_{letter}", name, by_head)
        for letter, name in zip("qkv", (query, key, value), strict=True)
    ]
    maps.append(("w_o", output, from_heads))
    return [(f"layers.{place}", f"{stem}.{name}.weight", axes) for place, name, axes in maps]


def within(part, rows):
    """The same maps, of a part such as "attention" or "cross"."""
    return [(place.replace("layers.", f"layers.{part}."), *row) for place, *row in rows]


ALBERT = "albert.encoder.albert_layer_groups.1.albert_layers.0"
DISTIL, XLNET, GPT2 = "transformer.layer.1", "layer.1", "transformer.h.1"
T5, DECODER = "encoder.block.1.layer", "decoder.block.1.layer"
SELF = [f"0.SelfAttention.{letter}" for letter in "qkvo"]
QKV = [(f"attention.w_{letter}", i) for i, letter in enumerate("qkv")]
# {folder, part: (row of the layer, [(place, tensor, its axes)])}
PLACES = {
    ("albert-groups", None): (
        2,
        [
            *within(
                "attention", list_maps(f"{ALBERT}.attention", "query", "key", "value", "dense")
            ),
            ("layers.attention_norm.gain", f"{ALBERT}.attention.LayerNorm.weight", same),
            ("layers.mlp.w_in", f"{ALBERT}.ffn.weight", np.transpose),
            ("layers.mlp.w_out", f"{ALBERT}.ffn_output.weight", np.transpose),
            ("layers.mlp_norm.bias", f"{ALBERT}.full_layer_layer_norm.bias", same),
            (
                "embedding.w_project",
                "albert.encoder.embedding_hidden_mapping_in.weight",
                np.transpose,
            ),
        ],
    ),
    ("distilbert", None): (
        1,
        [
            *within(
                "attention", list_maps(f"{DISTIL}.attention", "q_lin", "k_lin", "v_lin", "out_lin")
            ),
            ("layers.attention_norm.gain", f"{DISTIL}.sa_layer_norm.weight", same),
            ("layers.mlp.w_in", f"{DISTIL}.ffn.lin1.weight", np.transpose),
            ("layers.mlp.w_out", f"{DISTIL}.ffn.lin2.weight", np.transpose),
            ("layers.mlp_norm.bias", f"{DISTIL}.output_layer_norm.bias", same),
        ],
    ),
    ("xlnet", None): (
        1,
        [
            *(
                (
                    f"layers.attention.{place}",
                    f"{XLNET}.rel_attn.{name}",
                    lambda w: w.swapaxes(0, 1),
                )
                for place, name in (("w_q", "q"), ("w_k", "k"), ("w_v", "v"), ("relative.w_r", "r"))
            ),
            ("layers.attention.w_o", f"{XLNET}.rel_attn.o", lambda w: w.transpose(1, 2, 0)),
            ("layers.attention.b_q", f"{XLNET}.rel_attn.r_w_bias", same),
            ("layers.attention.relative.b_r", f"{XLNET}.rel_attn.r_r_bias", same),
            ("layers.attention.relative.b_s", f"{XLNET}.rel_attn.r_s_bias", same),
            ("layers.attention.relative.segment", f"{XLNET}.rel_attn.seg_embed", same),
            ("layers.attention_norm.gain", f"{XLNET}.rel_attn.layer_norm.weight", same),
            ("layers.mlp.w_in", f"{XLNET}.ff.layer_1.weight", np.transpose),
            ("layers.mlp_norm.gain", f"{XLNET}.ff.layer_norm.weight", same),
        ],
    ),
    ("t5-gated", "encoder"): (
        1,
        [
            *within("attention", list_maps(T5, *SELF)),
            ("layers.attention_norm.gain", f"{T5}.0.layer_norm.weight", same),
            ("layers.mlp.w_gate", f"{T5}.1.DenseReluDense.wi_0.weight", np.transpose),
            ("layers.mlp.w_in", f"{T5}.1.DenseReluDense.wi_1.weight", np.transpose),
            ("layers.mlp_norm.gain", f"{T5}.1.layer_norm.weight", same),
            ("final_norm.gain", "encoder.final_layer_norm.weight", same),
        ],
    ),
    ("t5-gated", "decoder"): (
        1,
        [
            *within("attention", list_maps(DECODER, *SELF)),
            *within("cross", list_maps(DECODER, *(f"1.EncDecAttention.{n}" for n in "qkvo"))),
            ("layers.attention_norm.gain", f"{DECODER}.0.layer_norm.weight", same),
            ("layers.cross_norm.gain", f"{DECODER}.1.layer_norm.weight", same),
            ("layers.mlp.w_out", f"{DECODER}.2.DenseReluDense.wo.weight", np.transpose),
            ("layers.mlp_norm.gain", f"{DECODER}.2.layer_norm.weight", same),
            ("final_norm.gain", "decoder.final_layer_norm.weight", same),
        ],
    ),
    ("gpt2-head", None): (
        1,
        [
            *(
                (
                    f"layers.{place}",
                    f"{GPT2}.attn.c_attn.weight",
                    lambda w, i=i: by_head(np.split(w, 3, axis=1)[i].T),
                )
                for place, i in QKV
            ),
            ("layers.attention.w_o", f"{GPT2}.attn.c_proj.weight", lambda w: from_heads(w.T)),
            ("layers.attention_norm.gain", f"{GPT2}.ln_1.weight", same),
            ("layers.mlp.w_in", f"{GPT2}.mlp.c_fc.weight", same),
            ("layers.mlp_norm.gain", f"{GPT2}.ln_2.weight", same),
            ("final_norm.bias", "transformer.ln_f.bias", same),
        ],
    ),
}


@pytest.mark.parametrize(("name", "part"), PLACES)
def test_each_tensor_is_at_its_place(name, part):
    """Also those whose shapes are equal, such as queries and keys, or gate and up."""
    row, places = PLACES[name, part]
    _, params = pretrained.load(GOLDEN / name, part=part)
    tensors = open_weights(GOLDEN / name)
    for place, tensor, axes in places:
        array = operator.attrgetter(place)(params)
        array = array[row] if place.startswith("layers.") else array
        np.testing.assert_array_equal(array, axes(tensors.read(tensor)), err_msg=place)


def test_entries_of_other_families_change_nothing():
    """GPT-2 has no groups of heads, whatever a file says of them."""
    sizes = {"n_embd": 6, "n_head": 3, "n_layer": 1, "vocab_size": 5, "n_positions": 4}
    source = {"model_type": "gpt2", "num_key_value_heads": 2} | sizes
    _, params = random_like(source, jax.random.key(0))
    assert params.layers.attention.w_k.shape == (1, 3, 6, 2)


def test_a_first_layer_without_a_norm_has_one_of_gain_1_and_bias_0():
    sizes = {"hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 3}
    config = pretrained.config_of({"model_type": "modernbert", "norm_bias": True} | sizes)
    reader, names = Reader(Numbered(), config, {}, lambda kind: True), "modernbert"
    names = pretrained.FAMILIES[names].names
    first, second = (reader.read_layer(names, (index,)) for index in (0, 1))
    assert first.attention_norm.gain.tolist() == [1] * 4
    assert first.attention_norm.bias.tolist() == [0] * 4
    for norm in (first.mlp_norm, second.attention_norm, second.mlp_norm):
        assert norm.gain.tolist() == norm.bias.tolist() == [0, 1, 2, 3]
