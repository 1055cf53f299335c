"""The encoder-decoder: torch's numbers, causality, padding, tied weights, decoding, path sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network import encoder_decoder
from rank_collapse.network.embedding import EmbeddingConfig
from tests.oracles import torch_transformer
from tests.oracles.encoder_decoders import config, draw_params
from tests.oracles.torch_transformer import SOURCE, TARGET
from tests.support.closeness import assert_close
from tests.support.folders import GOLDEN
from tests.support.marks import full_but
from tests.support.refusals import is_refused, parametrize_refusals

BEGIN, END = 1, 2


apply = jax.jit(encoder_decoder.apply)


@jax.jit
def apply_batch(params, sources, targets, model_config):
    def apply_pair(source, target):
        return encoder_decoder.apply(
            params, source, target, model_config, source_mask=source > 0, target_mask=target > 0
        )

    return jax.vmap(apply_pair)(sources, targets)


SOURCES = jnp.array([3, 4, 5, 6, 7, 0, 0])
EXISTS = SOURCES > 0
TARGETS = jnp.array([BEGIN, 7, 6, 5, 4, 3])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
@pytest.mark.parametrize("source", full_but(["golden", "live"], "golden"))
@pytest.mark.parametrize("placement", torch_transformer.PLACEMENTS)
def test_equal_to_torchs_transformer_with_the_same_weights(placement, source):
    if source == "live":
        pytest.importorskip("torch")
        expected = torch_transformer.run(placement)
    else:
        expected = dict(np.load(GOLDEN / torch_transformer.golden_name(placement)))
    params, model_config = torch_transformer.ours(expected), torch_transformer.config(placement)
    trace = apply_batch(params, SOURCE, TARGET, model_config)
    for our_output, name, exists in (
        (trace.encoder.output, "memory", SOURCE > 0),
        (trace.decoder.output, "output", TARGET > 0),
        (trace.logits, "logits", TARGET > 0),
    ):
        assert_close(our_output[exists], expected[name][exists], atol=1e-5)
    # A token that does not exist between others: its embedding changes none of the others.
    targets, tokens = TARGET.copy(), np.array(params.decoder.embedding.tokens)
    targets[:, 1], tokens[0] = 0, tokens[0] + 1
    changed = params.decoder.embedding.replace(tokens=tokens)
    changed = params.replace(decoder=params.decoder.replace(embedding=changed))
    logits, others, full = (
        apply_batch(p, SOURCE, t, model_config).logits[targets > 0]
        for p, t in ((params, targets), (changed, targets), (params, TARGET))
    )
    assert_close(others, logits, atol=1e-5)
    assert np.abs(full - logits).max() > 1e-2


def test_a_transformation_may_put_anything_in_the_place_of_the_halves():
    """As vmap's in_axes does: a pytree of axes has the structure of the configuration."""
    leaves, structure = jax.tree.flatten(config())
    axes = jax.tree.unflatten(structure, [0] * len(leaves))
    assert jax.tree.leaves(axes) == [0] * len(leaves)
    halves = jax.tree.structure(config(), is_leaf=lambda a: a is not None and hasattr(a, "mask"))
    assert halves.num_leaves == 2
    assert halves.unflatten([None, 3]).decoder == 3


@pytest.mark.full
def test_tied_weights_are_one_array_that_all_uses_train():
    model_config = config(shared_embedding=True, tied_output=True)
    params = draw_params(model_config)
    assert params.w_output is None and params.decoder.embedding.tokens is None
    table = params.encoder.embedding.tokens
    # With three tables of their own, the same values: the gradient is the sum of all three.
    untied_config = config()
    untied = params.replace(
        decoder=encoder_decoder.decoder_params(params, model_config), w_output=table.T
    )

    def loss(p, c):
        logits = apply(p, SOURCES, TARGETS, c).logits
        return jnp.sum(jax.nn.log_softmax(logits) * jnp.arange(9.0)[None, :])

    loss_and_gradient = jax.jit(jax.value_and_grad(loss))
    (tied_loss, tied_gradient), (untied_loss, untied_gradient) = (
        loss_and_gradient(params, model_config),
        loss_and_gradient(untied, untied_config),
    )
    np.testing.assert_allclose(tied_loss, untied_loss, rtol=1e-5)
    parts = (
        untied_gradient.encoder.embedding.tokens,
        untied_gradient.decoder.embedding.tokens,
        untied_gradient.w_output.T,
    )
    assert all(np.abs(part).max() > 1e-3 for part in parts)
    np.testing.assert_allclose(
        tied_gradient.encoder.embedding.tokens, sum(parts), rtol=1e-4, atol=1e-4
    )


@pytest.mark.full
def test_dropout_falls_on_both_halves_and_is_none_without_a_key():
    model_config = config()
    params, key = draw_params(model_config), jax.random.key(3)
    plain, zero, half_dropped = (
        apply(params, SOURCES, TARGETS, model_config, **options)
        for options in (
            {},
            {"dropout_key": key, "dropout_rate": 0.0},
            {"dropout_key": key, "dropout_rate": 0.5},
        )
    )
    assert_close(zero.logits, plain.logits, atol=1e-5)
    for half in ("encoder", "decoder"):
        with_dropout, without_dropout = (
            getattr(half_dropped, half).hidden[0],
            getattr(plain, half).hidden[0],
        )
        share = np.mean(np.asarray(with_dropout) == 0)
        assert 0.2 < share < 0.8
        np.testing.assert_allclose(
            with_dropout[with_dropout != 0], 2 * without_dropout[with_dropout != 0], rtol=1e-5
        )


def test_dropout_falls_on_the_embedding_of_each_half_with_a_key_of_its_own(monkeypatch):
    """Halves that pass on what they take show it; what else they are given is as `apply` has it."""
    calls = []

    def pass_on(params, x, half_config, **options):
        calls.append((x, half_config, options))
        return Passed(x if x.ndim == 2 else jnp.zeros((40, 16)))

    monkeypatch.setattr(encoder_decoder, "EncoderDecoderTrace", lambda *parts: parts)
    monkeypatch.setattr(encoder_decoder.transformer, "apply", pass_on)
    model_config = config(embedding={"positions": "none"}, shared_embedding=True, tied_output=True)
    params = draw_params(model_config)
    ids, mask, causal = jnp.full(40, 5), jnp.arange(40) < 30, jnp.tri(40, dtype=bool)
    row = np.asarray(params.encoder.embedding.tokens[5])
    masks = {"source_mask": mask, "target_mask": causal}
    key = {"dropout_key": jax.random.key(3), "dropout_rate": 0.25}
    for options in ({}, key):
        encoder_decoder.apply(params, ids, ids, model_config, **masks, **options)
    for x, half_config, options in calls[:2]:  # ids, which the halves embed by themselves
        assert x is ids and half_config.embedding is not None
        assert options.get("dropout_key") is None and options["dropout_rate"] == 0
    kept = []
    for x, half_config, options in calls[2:]:
        assert half_config.embedding is None and options["dropout_rate"] == 0.25
        kept.append(np.asarray(x != 0))
        assert abs(kept[-1].mean() - 0.75) < 4 * np.sqrt(0.75 * 0.25 / 640)
        np.testing.assert_allclose(x, kept[-1] * row / 0.75, rtol=1e-5)
    assert np.any(kept[0] != kept[1])
    encoder, decoder = (options for _, _, options in calls[2:])
    assert not np.array_equal(encoder["dropout_key"], decoder["dropout_key"])
    np.testing.assert_array_equal(encoder["mask"], mask)
    np.testing.assert_array_equal(decoder["mask"], causal)
    np.testing.assert_array_equal(decoder["memory_mask"], mask)
    np.testing.assert_array_equal(decoder["memory"], calls[2][0])


class Passed:
    """A trace of which there is the output alone."""

    def __init__(self, output):
        self.output = output


def test_targets_are_shifted_behind_the_begin_mark():
    shifted = encoder_decoder.shift_target(jnp.array([5, 6, 7, END]), BEGIN)
    assert shifted.tolist() == [BEGIN, 5, 6, 7]


def test_logits_have_the_bias_of_the_output_where_there_is_one():
    output, w = jnp.eye(2, 16), jnp.arange(144.0).reshape(16, 9)
    params = draw_params(config()).replace(w_output=w, b_output=None)
    logits = encoder_decoder.compute_logits(params, output, config())
    np.testing.assert_array_equal(logits, w[:2])
    biased = params.replace(b_output=jnp.arange(9.0))
    logits = encoder_decoder.compute_logits(biased, output, config())
    np.testing.assert_array_equal(logits, w[:2] + jnp.arange(9.0)[None])
    tied = config(tied_output=True)
    params = draw_params(tied)
    logits = encoder_decoder.compute_logits(params, output, tied)
    np.testing.assert_allclose(logits, params.decoder.embedding.tokens[:, :2].T, rtol=1e-6)


@parametrize_refusals(
    [
        ({"decoder": {"mask": "local"}}, "decoder.mask='local'"),
        ({"encoder": {"d_model": 8}}, "encoder.d_model=8 is not decoder.d_model=16"),
        ({"decoder": {"embedding": None}}, "decoder.embedding must have a vocab_size"),
        ({"embedding": {"class_token": True}}, "class_token=True moves every token"),
        ({"encoder": {"embedding": None}, "shared_embedding": True}, "of the encoder is None"),
        (
            {"encoder": {"embedding": EmbeddingConfig(8, d_embed=16)}, "shared_embedding": True},
            r"of the encoder is \(8, 16\), of the decoder \(9, 16\)",
        ),
        ({"decoder": {"embedding": EmbeddingConfig(d_input=3, d_embed=16)}}, "have a vocab_size"),
        (
            {"embedding": {"d_embed": 8, "projection": "before_norm"}, "tied_output": True},
            "d_embed=8 is not d_model=16",
        ),
    ]
)
def test_halves_that_do_not_fit_are_named(arguments, message):
    (change,) = arguments
    is_refused(message, lambda: config(**change))


FEW = {"embedding": {"positions": "learned", "num_positions": 8}}
UNTIED, TIED = config(**FEW), config(**FEW, tied_output=True)
MARKS = {"begin": BEGIN, "end": END}


@parametrize_refusals(
    [
        (lambda p: rc.apply(p.decoder, TARGETS, UNTIED.decoder), "needs a memory"),
        (
            lambda p: encoder_decoder.apply(
                p, SOURCES, TARGETS, UNTIED, source_mask=jnp.ones((7, 7), bool)
            ),
            r"source_mask of shape \(7, 7\) is not \[m\]",
        ),
        (
            lambda p: rc.network.greedy_decode(p, SOURCES, UNTIED, **MARKS, max_len=0),
            "max_len=0 is not a whole number from 1 on",
        ),
        (
            lambda p: rc.network.greedy_decode(p, SOURCES, UNTIED, begin=99, end=END, max_len=3),
            "begin=99 is not a whole number from 0 to",
        ),
        (
            lambda p: rc.network.greedy_decode(p, SOURCES, UNTIED, begin=BEGIN, end=9, max_len=3),
            "end=9 is not a whole number from 0 to 8",
        ),
        (
            lambda p: encoder_decoder.apply(p.replace(w_output=None), SOURCES, TARGETS, UNTIED),
            r"params\.w_output is missing, but tied_output=False",
        ),
        (
            lambda p: rc.network.greedy_decode(p, SOURCES, UNTIED, begin=BEGIN, end="2", max_len=3),
            "end='2' is not a whole number",
        ),
        (
            lambda p: rc.network.greedy_decode(p, SOURCES, UNTIED, **MARKS, max_len=9),
            "9 tokens are more than num_positions=8",
        ),
        (
            lambda p: encoder_decoder.apply(p, SOURCES, TARGETS, TIED),
            r"params\.w_output is set, but tied_output=True",
        ),
        (
            lambda p: encoder_decoder.apply(p, jnp.stack([SOURCES] * 2), TARGETS, UNTIED),
            r"x of shape \(2, 7\) is more than one example",
        ),
    ]
)
def test_bad_inputs_are_named(arguments, message):
    (call,) = arguments
    is_refused(message, lambda: call(draw_params(UNTIED)))


@pytest.mark.full
def test_path_sums_of_the_decoder_are_its_output():
    model_config = config(shared_embedding=True)
    params = draw_params(model_config)
    trace = apply(params, SOURCES, TARGETS, model_config, source_mask=EXISTS)
    decoder_params = encoder_decoder.decoder_params(params, model_config)
    parts = rc.path_contributions(
        decoder_params,
        TARGETS,
        model_config.decoder,
        memory=trace.encoder.output,
        memory_mask=EXISTS,
    )
    by_length, offset = parts
    total = by_length.sum(axis=0) + offset
    np.testing.assert_allclose(total, trace.decoder.output, rtol=1e-4, atol=1e-5)
    assert np.abs(parts.from_memory).max() > 1e-2
