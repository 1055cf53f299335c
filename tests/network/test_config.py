"""The config: widths that follow, sublayers, rows, what it refuses, what it prints."""

import re

import jax
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.attention_weights import AttentionContext
from rank_collapse.network.config import DEFAULTS, PARTS, check_config
from tests.oracles.attention_forms import FORM
from tests.support.refusals import is_refused, parametrize_refusals

BASE = {"depth": 4, "num_heads": 4, "d_model": 8}


def make(**fields):
    return rc.TransformerConfig(**(BASE | fields))


def test_widths_that_are_not_given_follow_from_the_model():
    config = make()
    widths = config.qk_width, config.v_width, config.rotated_width, config.ff_width
    assert widths == (2, 2, 2, 32)
    config = make(d_qk=6, d_v=3, d_ff=5, rotary_width=4, position="rotary")
    widths = config.qk_width, config.v_width, config.rotated_width, config.ff_width
    assert widths == (6, 3, 4, 5)
    assert make(d_qk=6).v_width == 2 and make(d_v=3).qk_width == 2


def test_sublayers_are_those_that_the_config_has():
    for fields, kinds in (
        ({}, ("attention",)),
        ({"cross_attention": True}, ("attention", "cross")),
        ({"mlp": "relu"}, ("attention", "mlp")),
        ({"cross_attention": True, "mlp": "relu"}, ("attention", "cross", "mlp")),
    ):
        assert make(**fields).kinds == kinds


def test_rows_of_parameters_and_the_first_layer_of_each():
    for layer_map, num_rows, first in (
        ((), 4, (0, 1, 2, 3)),
        ((0,) * 4, 1, (0,)),
        ((1, 1, 0, 0), 2, (2, 0)),
        ((0, 1, 0, 2), 3, (0, 1, 3)),
    ):
        config = make(layer_map=layer_map)
        assert (config.num_rows, config.first_layer_of_rows) == (num_rows, first)


def test_routing_is_that_of_the_experts():
    assert make(mlp="relu").routing is None
    config = make(mlp="relu", num_experts=3, experts_per_token=2, d_shared=5, d_ff=20, router="all")
    assert config.routing == (3, 2, "all", 5)


def test_each_preset_has_its_skips_and_mlp_and_fields_replace_them():
    for preset, mlp, attention_skip, mlp_skip, placement in (
        (rc.san, "none", False, False, "none"),
        (rc.san_mlp, "gelu", False, False, "none"),
        (rc.san_skip, "none", True, False, "none"),
        (rc.transformer, "gelu", True, True, "post"),
    ):
        config = preset(3, 2, 8)
        assert (config.depth, config.num_heads, config.d_model) == (3, 2, 8)
        chosen = config.mlp, config.attention_skip, config.mlp_skip, config.norm_placement
        assert chosen == (mlp, attention_skip, mlp_skip, placement)
        other = preset(3, 2, 8, mlp="tanh", attention_skip=not attention_skip)
        assert (other.mlp, other.attention_skip) == ("tanh", not attention_skip)


# One head of scaled dot products with softmax, no positions, norms, MLP, gains or skips.
PLAIN = (
    {"depth": 1, "num_heads": 1, "d_model": 64, "init": "lecun", "unroll": 1, "init_gain": 1}
    | {"d_qk": None, "d_v": None, "num_kv_heads": None, "embedding": None, "layer_map": ()}
    | {"mask": "none", "window": 2, "windows": (), "score": "dot", "scale_scores": True}
    | {"qk_norm": "none", "score_cap": 0, "temperature": 1, "cross_attention": False}
    | {"normalise": None, "mixing": None, "mix": None, "family": None, "position": "none"}
    | {"rotary_theta": 1e4, "rotary_scaling": (), "rotary_tables": (), "rotary_width": None}
    | {"rotary_factor": 1, "rotary_layers": (), "local_theta": 0, "num_buckets": 32}
    | {"max_distance": 128, "clamp_distance": 0, "mlp": "none", "d_ff": None, "d_shared": 0}
    | {"num_experts": 0, "experts_per_token": 1, "router": "chosen", "norm": "layer"}
    | {"attention_skip": False, "mlp_skip": False, "cross_skip": True, "norm_eps": 1e-12}
    | {"norm_placement": "none", "final_norm": False, "first_norm": True, "parallel": False}
    | {"learned_per_feature": False, "skip_gain": 1, "branch_gain": 1, "norm_gain": None}
    | {"learned_skip_gain": None, "learned_branch_gain": None}
)


def test_what_is_not_given_is_plain_attention():
    config = rc.TransformerConfig()
    assert {name: getattr(config, name) for name in PLAIN} == PLAIN


def test_every_default_is_in_the_table():
    assert PLAIN.keys() == DEFAULTS.keys()


@pytest.mark.parametrize(
    "part", [*PARTS, rc.TransformerConfig, rc.EmbeddingConfig, AttentionContext]
)
def test_every_field_is_described(part):
    described = part.__doc__.partition("Attributes:")[2]
    names = [name for name in part.__annotations__ if not re.search(rf"\b{name}\b", described)]
    assert not names, f"{part.__name__} does not describe {names}"


@pytest.mark.parametrize("name", sorted(DEFAULTS.keys() - {"family"}))  # which has any name
def test_every_field_refuses_a_wrong_value(name):
    """Where the config is made or, of what may be swept, where it is used."""
    config = rc.transformer(depth=1, num_heads=1, d_model=4, position="rotary")
    is_refused(name, lambda: check_config(config.replace(**{name: "nonsense"})))


def test_what_is_printed_is_what_was_changed():
    config = make(mlp="relu", skip_gain=0.5)
    text = "TransformerConfig(depth=4, num_heads=4, d_model=8, skip_gain=0.5, mlp='relu')"
    assert sorted(repr(config)) == sorted(text)
    assert eval(repr(config), {"TransformerConfig": rc.TransformerConfig}) == config
    assert repr(rc.TransformerConfig()) == "TransformerConfig()"


def test_floats_are_leaves_and_all_else_is_static():
    config = make(skip_gain=0.5, temperature=2.0, norm_gain=0.25, mixing=rc.network.Mixing(3.0))
    leaves = jax.tree.leaves(config)
    assert sorted(leaves) == sorted([0.5, 2, 0.25, 3, 1, 0, 1, 1])  # mixing, branch and init gain
    assert jax.tree.structure(config) != jax.tree.structure(config.replace(norm_eps=1e-5))
    assert jax.tree.structure(config) == jax.tree.structure(config.replace(skip_gain=0.1))


@parametrize_refusals(
    [
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=4"),
        ({"num_kv_heads": 8}, "num_kv_heads=8 does not divide num_heads=4"),
        ({"num_kv_heads": 0}, "num_kv_heads=0 is not a whole number from 1 on"),
        ({"d_model": 6}, "num_heads=4 does not divide d_model=6; give d_qk and d_v"),
        ({"d_model": 6, "d_qk": 2}, "num_heads=4 does not divide d_model=6"),
        ({"d_model": 6, "d_v": 2}, "num_heads=4 does not divide d_model=6"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"unroll": 0}, "unroll=0"),
        ({"d_qk": 0}, "d_qk=0"),
        ({"d_v": 0}, "d_v=0"),
        ({"d_ff": 0}, "d_ff=0"),
        ({"rotary_width": 0}, "rotary_width=0"),
        ({"init": "normal"}, "init='normal' is not one of"),
        ({"score": "cosine"}, "score='cosine' is not one of"),
        ({"qk_norm": "all"}, "qk_norm='all' is not one of"),
        ({"position": "alibi"}, "position='alibi' is not one of"),
        ({"norm": "batch"}, "norm='batch' is not one of"),
        ({"layer_map": (0, 0, 1, -1)}, "layer_map=-1 is not a whole number from 0 on"),
        ({"layer_map": (1, 1, 1, 1)}, "leaves out a row"),
        ({"rotary_layers": [True] * 4}, "is not a tuple of depth=4 entries"),
        ({"position": "rotary", "d_qk": 4, "rotary_width": 6}, "between 2 and 4"),
        ({"position": "rotary", "rotary_scaling": (1.0, 2.0, 3.0)}, "must have 0, 1, 2 or 4"),
        (
            {"position": "rotary", "rotary_tables": ((9, (1.0, 2.0)),)},
            "rotary_tables has 2 frequencies for 1 pairs",
        ),
        ({"position": "rotary", "rotary_tables": ((9, (1.0,), 3),)}, "are not pairs"),
        ({"position": "rotary", "rotary_tables": ([9, (1.0,)],)}, "are not pairs"),
        ({"mix": np.tanh, "mixing": rc.network.Mixing()}, "replaces normalise and mixing"),
        ({"mix": np.tanh, "normalise": np.tanh}, "replaces normalise and mixing"),
    ]
)
def test_fields_that_do_not_fit_are_named(arguments, message):
    (fields,) = arguments
    is_refused(message, lambda: make(**fields))


@pytest.mark.parametrize("field", ["normalise", "mix"])
def test_functions_that_are_none_are_named(field):
    is_refused(f"{field}=3 is not a function", check_config, make(**{field: 3}))


def test_what_is_no_config_is_called_as_its_argument():
    check_config(make(norm_gain=None, mixing=None))
    is_refused("base is a dict, not a TransformerConfig", check_config, {}, "base")
    none = make(skip_gain=None)
    is_refused(r"network\.skip_gain=None is not a number", check_config, none, "network")
    gains = rc.Gains(attention="1")
    is_refused(r"config\.branch_gain\.attention='1' is", check_config, make(branch_gain=gains))
    check_config(make(skip_gain=np.ones(4), temperature=jax.ShapeDtypeStruct((), "float32")))


@parametrize_refusals(
    [
        ({"windows": (1, 2)}, r"windows=\(1, 2\) is not a tuple of depth=3 entries"),
        ({"windows": (1, -2, 0)}, "windows=-2 is not a whole number from 0 on"),
        ({"windows": (1.5, 0, 0)}, "windows=1.5 is not a whole number"),
        ({"windows": "111"}, "windows='?111'? is not a tuple"),
        ({"layer_map": 1}, "layer_map=1 is not a tuple"),
        ({"norm_eps": float("nan")}, "norm_eps=nan is not in"),
        ({"score_cap": -1.0}, "score_cap=-1.0 is not in"),
        ({"rotary_theta": "1e4"}, "rotary_theta='1e4' is not in"),
        ({"clamp_distance": 1.5}, "clamp_distance=1.5 is not a whole number"),
        ({"norm_placement": "post"}, "parallel=True does not support norm_placement='post'"),
        ({"norm_placement": "both"}, "parallel=True does not support norm_placement='both'"),
        ({"d_shared": 12}, "num_experts=4 do not divide the 0 units"),
        ({"d_shared": 16}, "num_experts=4 do not divide the -4 units"),
        ({"rotary_width": 3}, "rotary_width=3 is not even and between 2 and 6"),
        ({"rotary_width": 8}, "rotary_width=8 is not even"),
        ({"rotary_tables": ((9, (1.0,)),)}, "rotary_tables has 1 frequencies for 2 pairs"),
        ({"num_experts": 5}, "num_experts=5 do not divide the 12 units of d_ff=12"),
        ({"d_shared": 3}, "num_experts=4 do not divide the 9 units"),
        ({"mlp": "none"}, "of mlp='none'"),
        ({"experts_per_token": 5}, "experts_per_token=5 is not a whole number from 1 to 4"),
        ({"router": "best"}, "router='best' is not one of"),
        ({"rotary_layers": (True,)}, r"rotary_layers=\(True,\) is not a tuple"),
    ]
)
def test_bad_forms_name_the_value(arguments, message):
    (fields,) = arguments
    is_refused(message, lambda: rc.TransformerConfig(**(FORM | fields)))


def test_presets_are_the_four_curves():
    for k, preset in enumerate((rc.san, rc.san_mlp, rc.san_skip, rc.transformer)):
        assert (preset(2, 2, 8).mlp != "none", preset(2, 2, 8).attention_skip) == (k % 2, k > 1)
    assert rc.transformer(2, 2, 8).ff_width == 32
    assert hash(rc.san(2, 2, 8)) == hash(rc.san(2, 2, 8))


@parametrize_refusals(
    [
        ({"num_heads": 5}, "num_heads=5 does not divide d_model=12"),
        ({"depth": 0}, "depth=0"),
        ({"attention_skip": "no"}, "attention_skip=.no. is not one of"),
        ({"d_ff": -1}, "d_ff=-1"),
        ({"mlp": "cubic"}, "mlp='cubic'"),
        ({"norm_placement": "middle"}, "norm_placement='middle'"),
        ({"mask": "diagonal"}, "mask='diagonal'"),
        ({"layer_map": (0, 0)}, r"layer_map=\(0, 0\) is not a tuple of depth=3 entries"),
        ({"layer_map": (0, 2, 2)}, "leaves out a row"),
        ({"position": "rotary", "d_qk": 3, "d_v": 4}, "even d_qk, not 3"),
    ]
)
def test_bad_configurations_name_the_value(arguments, message):
    (fields,) = arguments
    is_refused(
        message,
        lambda: rc.TransformerConfig(**({"depth": 3, "num_heads": 3, "d_model": 12} | fields)),
    )


def test_an_unknown_field_names_the_nearest():
    is_refused("nearest: 'norm_placement'", rc.transformer, 2, 2, 8, norm_placment="pre")
