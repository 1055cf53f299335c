"""Inputs and parameters that contradict the configuration are refused by name."""

import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.input_checks import check_bias, check_mask, is_embedded
from rank_collapse.network.inputs import prepare_inputs
from tests.oracles import draws
from tests.oracles.passes import PASSES, D, N, group_heads, san
from tests.support.refusals import each_is_refused, is_refused, parametrize_refusals

X = draws.normal(N, D)


@pytest.mark.parametrize("name", PASSES)
def test_a_config_that_contradicts_the_parameters_is_refused_everywhere(name):
    config, params = san()
    each_is_refused(
        (
            lambda: PASSES[name](params, X, config.replace(num_heads=1)),
            r"w_q is of shape \(2, 4, 8, 2\); the config implies \(2, 1, 8, 8\)",
        ),
        (lambda: PASSES[name](params, X, config.replace(depth=3)), r"depth=3"),
    )


def test_what_contradicts():
    config = rc.transformer(2, 2, D, mlp="swiglu")
    params = draws.parameters(config)
    without = params.replace(layers=params.layers.replace(mlp_norm=None))
    grouped = draws.changed(params, attention={"w_k": params.layers.attention.w_k[:, :1]})
    for changed, fields, message in (
        (params, {"mlp": "relu"}, r"w_gate of shape .* has no place in the config .*mlp='relu'"),
        (params, {"d_ff": 999}, "d_ff=999"),
        (without, {}, "mlp_norm.gain is missing"),
        (grouped, {}, r"w_k is of shape"),
        (
            group_heads(draws.parameters(rc.san(2, 4, D)), 2)[0],
            {"mlp": "none", "num_heads": 3, "d_qk": 2, "d_v": 2},
            "num_heads=3",
        ),
    ):
        is_refused(message, rc.apply, changed, X, config.replace(**fields))
    three = rc.san(2, 3, D, d_qk=2, d_v=2)  # of which two groups are no part
    params_of_three = draws.parameters(three)
    attention = params_of_three.layers.attention
    few = {name: getattr(attention, name)[:, :2] for name in ("w_k", "b_k", "w_v", "b_v")}
    pairs = draws.changed(params_of_three, attention=few)
    is_refused(r"[wb]_[kv] is of shape \(2, 2, ", rc.apply, pairs, X, three)
    empty = draws.changed(
        params_of_three,
        attention={name: getattr(attention, name)[:, :0] for name in few},
    )
    is_refused(r"[wb]_[kv] is of shape \(2, 0, ", rc.apply, empty, X, three)
    # Ablations on the same weights leave parts unused.
    prepare_inputs(params, X, config.replace(norm="rms"))  # the biases of norms
    rc.apply(params, X, config.replace(mlp="none"))
    rc.apply(params, X, config.replace(norm_placement="none", attention_skip=False))


def test_masks_and_biases_have_at_most_the_axes_of_scores():
    """Axes of length 1 are those of every head or query."""
    shape = (2, 3, 4)
    for sizes in ((4,), (3, 4), (2, 3, 4), (1, 3, 4), (2, 1, 4), (1, 1, 4), (1, 4)):
        bias = check_bias(np.zeros(sizes), shape)
        assert bias.shape == (1,) * (3 - len(sizes)) + sizes
        assert check_mask(np.ones(sizes, bool), shape, "mask").shape == sizes
    for sizes in ((1, 2, 3, 4), (1, 1, 1, 4), (3, 3, 4), (2, 4), (2, 3, 3)):
        is_refused(r"bias of shape \(", check_bias, np.zeros(sizes), shape)
        is_refused(r"mask of shape \(", check_mask, np.ones(sizes, bool), shape, "mask")
    for sizes in ((), (1,), (3, 1), (2, 3, 1)):  # a mask has an entry for each key
        assert check_bias(np.zeros(sizes), shape).ndim == 3
        is_refused(r"mask of shape \(", check_mask, np.ones(sizes, bool), shape, "mask")


TEXT = {"embedding": rc.EmbeddingConfig(vocab_size=11, d_embed=D)}


@parametrize_refusals(
    [
        (TEXT, {"x": jnp.array([3, 50])}, "token id 50 is not below vocab_size=11"),
        (TEXT, {"x": jnp.array([-1, 2])}, "token id -1 is not below vocab_size=11"),
        ({}, {"x": X, "memory": X}, "cross_attention=False"),
        ({}, {"x": X, "dropout_rate": 0.1}, r"dropout_rate=0.1 needs a dropout_key"),
        ({}, {"x": X, "dropout_key": 3, "dropout_rate": 0.1}, "dropout_key of shape"),
        ({}, {"x": None}, "x of type NoneType is not an array of numbers"),
        ({}, {"x": X, "bias": "causal"}, "bias of type str is not an array of numbers"),
        ({}, {"x": X, "dropout_rate": np.full(2, 0.1)}, r"dropout_rate=array\(\[0.1, 0.1\]\)"),
        ({}, {"x": X + 1j}, r"x of shape \(5, 8\) and dtype complex64"),
        ({}, {"x": X[None]}, r"\(1, 5, 8\) .* \(the config has no embedding\); use jax.vmap"),
        ({}, {"x": X[0]}, r"x of shape \(8,\) and .* \(the config has no embedding\)$"),
        ({}, {"x": jnp.ones((2, 8), int)}, r"int32 is .* embedding\); use jax.vmap for a batch$"),
        (TEXT, {"x": X + 1j}, r"complex64 is not \[n, d_model=8\]$"),
    ]
)
def test_inputs_of_no_use_and_token_ids_outside_the_vocabulary_are_refused(arguments, message):
    fields, inputs = arguments
    is_refused(message, lambda: rc.apply(san(**fields)[1], config=san(**fields)[0], **inputs))


TABLES = rc.EmbeddingConfig(
    vocab_size=11, d_embed=D, positions="learned", num_positions=9, num_segments=2
)
BARE = rc.EmbeddingConfig(vocab_size=11, d_embed=D)


ONE, INDEX = np.ones(1, int), np.zeros(N, int)


@parametrize_refusals(
    [
        ({"num_heads": 1}, {"bias": np.zeros((4, N, N))}, r"bias of shape \(4, 5, 5\)"),
        ({}, {"bias": np.tri(N, dtype=bool)}, "bias .* dtype bool .* mask="),
        ({"num_heads": 1}, {"mask": np.ones((4, N, N), bool)}, r"mask of shape \(4, 5, 5\)"),
        ({"position": "rotary"}, {"positions": ONE}, "positions .* each of 5 tokens"),
        ({"position": "relative_key"}, {"segments": ONE}, "segments .* each of 5 tokens"),
        ({"embedding": TABLES}, {"positions": ONE}, "positions .* each of 5 tokens"),
        ({"embedding": TABLES}, {"segments": ONE}, "segments .* each of 5 tokens"),
        ({"embedding": TABLES}, {"segments": np.full(N, 2)}, "segment 2 is not below num_segments"),
        ({"embedding": TABLES}, {"positions": np.full(N, 9)}, "position 9 is not below num_posit"),
        ({"embedding": TABLES}, {"positions": np.ones(N)}, "positions of dtype .* not integers"),
        ({"embedding": TABLES}, {"segments": np.ones(N)}, "segments of dtype .* not integers"),
        ({}, {"segments": np.ones(N, int)}, "segments are given, but this network does not use"),
        ({"embedding": BARE}, {"positions": INDEX}, "positions are given, but this network does"),
        ({"embedding": BARE}, {"segments": INDEX}, "segments are given, but this network does not"),
        ({"embedding": TABLES}, {"x": X, "positions": INDEX}, "positions are given, but this net"),
        (
            {"embedding": TABLES},
            {"x": X, "segments": INDEX},
            "segments are given, but this network",
        ),
        ({}, {"positions": np.ones(N, int)}, "positions are given, but this network does not use"),
        ({"cross_attention": True}, {}, "cross_attention=True needs a memory"),
        ({}, {"memory_mask": np.ones(N, bool)}, "cross_attention=False"),
        (
            {"cross_attention": True},
            {"memory": X[:3], "memory_mask": np.ones(4, bool)},
            r"memory_mask of shape \(4,\) does not fit 5 tokens and 3 keys",
        ),
        ({"cross_attention": True}, {"memory": X[:, 1:]}, r"memory of shape \(5, 7\)"),
        ({"cross_attention": True}, {"memory": X[:0]}, r"memory of shape \(0, 8\)"),
    ]
)
def test_what_would_be_broadcast_to_all_tokens_or_heads_is_refused(arguments, message):
    fields, inputs = arguments
    is_refused(message, lambda: apply_to_tokens(rc.san(2, 2, D).replace(**fields), inputs))


def apply_to_tokens(config, inputs):
    inputs = {"x": np.arange(N) if config.embedding else X} | inputs
    return rc.apply(draws.parameters(config, 1), config=config, **inputs)


@pytest.mark.parametrize(("d_input", "is_read"), [(8, True), (3, False)])
def test_vectors_of_the_models_width_are_states_unless_the_embedding_reads_such(d_input, is_read):
    embedding = rc.EmbeddingConfig(d_input=d_input, d_embed=8)
    config = rc.san(1, 2, 8, embedding=embedding)
    assert is_embedded(np.ones((2, 8)), config) == is_read
    assert is_embedded(np.ones((2, d_input)), config)
