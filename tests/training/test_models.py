"""Encoder-decoders in the trainer: loss, curves, an interrupted ensemble, what is kept of it."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.train.trained_tasks import whole_metrics
from rank_collapse.network import encoder_decoder
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.decoding import Decoded
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.network.encoder_decoder import EncoderDecoderConfig
from rank_collapse.runs.seeds import seed_keys, seed_mesh
from rank_collapse.training import Ensemble, Hyper, Recipe, dump_models, load_models, models
from rank_collapse.training.models import decode_pairs, exact_share, init_model
from rank_collapse.training.tasks import examples, sequences
from rank_collapse.training.training import batch_forward, forward
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals

EMBEDDING = EmbeddingConfig(vocab_size=6, d_embed=8, positions="learned", num_positions=5)
HALF = TransformerConfig(
    depth=1,
    num_heads=2,
    d_model=8,
    mlp="relu",
    d_ff=16,
    attention_skip=True,
    mlp_skip=True,
    norm_placement="post",
    norm_eps=1e-5,
    embedding=EMBEDDING,
)
CONFIG = EncoderDecoderConfig(
    HALF, HALF.replace(cross_attention=True, mask="causal"), shared_embedding=True, tied_output=True
)
RECIPE = Recipe(CONFIG, 6, batch_size=10, num_epochs=4, schedule="inverse_sqrt", unroll=1)
HYPER = Hyper(learning_rate=0.01, warmup=5.0, dropout=0.0)


def make_data(key):
    keys = jax.random.split(key)
    return {
        name: sequences.make_pairs(k, count, 3, 3, "reverse", min_len=1)
        for name, k, count in zip(("train", "eval"), keys, (40, 12), strict=True)
    }


def watch(model, data, hyper, _):
    metrics = {"accuracy": examples.token_accuracy, "loss": examples.loss_metric}
    return whole_metrics(model, data["eval"], CONFIG, metrics)


@pytest.fixture(scope="module")
def ensemble():
    return Ensemble(
        RECIPE, make_data, mesh=seed_mesh(jax.devices()[:1]), epochs_per_chunk=2, watch=watch
    )


@pytest.fixture(scope="module")
def training_run(ensemble):
    return ensemble.train(seed_keys(0, 2), HYPER)


def take_seed(tree, seed=0):
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a)[seed]), tree)


@pytest.mark.full
def test_losses_fall_and_curves_are_the_metrics_of_the_held_out_pairs(training_run):
    assert (training_run.losses[:, -1] < training_run.losses[:, 0] - 0.2).all()
    model, held_out = take_seed(training_run.state.model), take_seed(training_run.data)["eval"]
    held_out = jax.tree.map(jnp.asarray, held_out)
    logits = np.array(jax.jit(lambda m: batch_forward(m, held_out, CONFIG))(model), float)
    labels, mask = np.asarray(held_out.labels), np.asarray(held_out.mask)
    right = (logits.argmax(-1) == labels)[mask].mean()
    np.testing.assert_allclose(training_run.watched["accuracy"][0, -1], right, rtol=1e-5)
    losses = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), labels)
    np.testing.assert_allclose(
        training_run.watched["loss"][0, -1], np.asarray(losses)[mask].mean(), rtol=1e-4
    )
    source, exists, target = held_out.source[5], held_out.source_mask[5], held_out.inputs[5]
    single = encoder_decoder.apply(model, source, target, CONFIG, source_mask=exists)
    assert_close(logits[5][mask[5]], single.logits[mask[5]], atol=1e-5)


@pytest.mark.full
def test_an_interrupted_ensemble_goes_on_with_what_is_watched(ensemble, training_run):
    snapshots, watched = [], []
    ensemble.train(
        seed_keys(0, 2),
        HYPER,
        on_chunk=lambda epoch, snapshot, _: snapshots.append((epoch, snapshot())),
        on_watched=lambda epoch, values, losses: watched.append((epoch, values, losses)),
    )
    assert snapshots[0][0] == 2
    resumed = ensemble.train(
        seed_keys(0, 2),
        HYPER,
        resume=lambda like: snapshots[0],
        on_watched=lambda epoch, values, _: watched.append((epoch, values, None)),
    )
    assert [epoch for epoch, *_ in watched] == [0, 2, 4, 4]
    np.testing.assert_array_equal(resumed.losses, training_run.losses)
    np.testing.assert_array_equal(watched[1][2], training_run.losses[:, :2])
    for name, expected in training_run.watched.items():
        np.testing.assert_array_equal(resumed.watched[name], expected)
        curve = np.stack([values[name] for _, values, _ in watched[:3]], axis=1)
        np.testing.assert_array_equal(expected, curve)
        assert np.isfinite(expected).all() and len(np.unique(expected)) > 2


def test_logits_of_pairs_are_those_of_each_under_its_masks():
    """Of a batch with dropout at a rate of 0, or none; at another, each pair has its own."""
    pairs = sequences.make_pairs(jax.random.key(2), 3, 3, 3, min_len=1)
    # a token that does not exist between others, which the causal mask does not hide
    pairs = pairs.replace(target_mask=pairs.target_mask.at[:, 1].set(False))
    shapes = jax.eval_shape(lambda: encoder_decoder.init(jax.random.key(0), CONFIG))
    rng = np.random.default_rng(0)
    model = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), shapes)
    same = jax.tree.map(lambda a: a[jnp.array([0, 1, 2, 2])], pairs)

    @jax.jit
    def run(rate):
        key = None if rate is None else jax.random.key(1)
        return batch_forward(model, same, CONFIG, dropout_key=key, dropout_rate=rate)

    single = jax.jit(lambda *a: encoder_decoder.apply(model, *a[:2], CONFIG, **a[2]).logits)
    logits, dropped = run(0.0), run(0.5)
    np.testing.assert_allclose(run(None), logits, rtol=1e-4, atol=1e-4)
    for i in range(3):
        masks = {"source_mask": pairs.source_mask[i], "target_mask": pairs.target_mask[i, :-1]}
        expected = single(pairs.source[i], pairs.target[i, :-1], masks)
        np.testing.assert_allclose(logits[i], expected, rtol=1e-4, atol=1e-4)
    assert not np.allclose(dropped[0], logits[0]) and not np.allclose(dropped[2], dropped[3])


def test_initial_weights_of_both_halves_have_their_scale(monkeypatch):
    monkeypatch.setattr(encoder_decoder, "init", lambda *arguments: arguments)
    assert init_model("key", RECIPE, 3.0) == ("key", CONFIG, 3.0)


def test_each_source_is_decoded_under_its_mask_as_long_as_the_longest_target(monkeypatch):
    def greedy_decode(model, source, config, *, begin, end, max_len, source_mask):
        assert (model, config, begin, end, max_len) == ("m", "c", 1, 2, 4)
        return source * source_mask

    monkeypatch.setattr("rank_collapse.training.models.greedy_decode", greedy_decode)
    pairs = sequences.SequencePairs(
        source=jnp.array([[3, 4, 5, 6, 7], [4, 5, 6, 7, 8]]),
        source_mask=jnp.arange(5)[None] < jnp.array([[2], [5]]),
        target=jnp.zeros((2, 5), int),
        target_mask=None,
    )
    decoded = decode_pairs("m", pairs, "c")
    assert decoded.tolist() == [[3, 4, 0, 0, 0], [4, 5, 6, 7, 8]]


def test_exact_sequences_count_the_end_mark_and_no_padding():
    pairs = sequences.make_pairs(jax.random.key(0), 3, 4, 5, "copy", min_len=2)
    labels, mask = np.asarray(pairs.labels), np.asarray(pairs.mask)
    padded = ~mask[:, -1]
    assert padded.any()
    written = np.where(mask, labels, sequences.END)
    assert exact_share(Decoded(jnp.asarray(written), mask, None), pairs) == 1
    for i in range(3):
        wrong = written.copy()
        wrong[i, mask[i].sum() - 1] = sequences.NUM_MARKS  # in place of the end mark
        share = exact_share(Decoded(jnp.asarray(wrong), mask, None), pairs)
        np.testing.assert_allclose(share, 2 / 3, rtol=1e-6)


@pytest.mark.full
def test_weights_are_read_back_with_their_config_and_write_the_same(training_run, tmp_path):
    (tmp_path / "models.safetensors").write_bytes(dump_models(CONFIG, training_run.state.model))
    config, models = load_models(tmp_path / "models.safetensors")
    assert config == CONFIG
    pairs = take_seed(training_run.data)["eval"]
    decode = jax.jit(lambda m: decode_pairs(m, pairs, CONFIG).tokens)
    np.testing.assert_array_equal(
        decode(take_seed(models)), decode(take_seed(training_run.state.model))
    )


@parametrize_refusals(
    [
        ({"num_outputs": 5}, "num_outputs=5 is not the decoder's vocab_size=6"),
        ({"num_outputs": 7}, "num_outputs=7 is not the decoder's vocab_size=6"),
        ({"output_dropout": True}, "output_dropout=True"),
        (
            {"config": EncoderDecoderConfig(HALF.replace(embedding=None), CONFIG.decoder)},
            "encoder.embedding=None",
        ),
    ]
)
def test_recipes_that_do_not_fit_are_named(arguments, message):
    (fields,) = arguments
    is_refused(message, lambda: dataclasses.replace(RECIPE, **fields))


def test_dropouts_of_the_embedding_and_of_the_output_are_independent(monkeypatch):
    """A network that passes on what it takes shows both; 2000 entries, four deviations."""
    calls = []

    def apply(params, x, config, **options):
        calls.append(options)
        return SimpleNamespace(output=x)

    monkeypatch.setattr(models.transformer, "apply", apply)
    chosen, x = TransformerConfig(d_model=50), jnp.ones((40, 50))
    model, key = models.Model({}, (jnp.eye(50), jnp.zeros(50))), jax.random.key(5)
    for options, kept, value in (
        ({}, 1, 1),
        ({"dropout_rate": 0.25}, 1, 1),  # without a key
        ({"dropout_key": key, "dropout_rate": 0.25}, 0.75, 4 / 3),
        ({"dropout_key": key, "dropout_rate": 0.25, "output_dropout": 2.0}, 0.375, 8 / 3),
    ):
        logits = np.asarray(forward(model, x, chosen, **options))
        np.testing.assert_allclose(logits[logits != 0], value, rtol=1e-6)
        assert abs(np.mean(logits != 0) - kept) <= 4 * np.sqrt(kept * (1 - kept) / 2000)
    assert [options["dropout_rate"] for options in calls] == [0, 0.25, 0.25, 0.25]
    keys = [options["dropout_key"] for options in calls]
    assert keys[:2] == [None, None]
    np.testing.assert_array_equal(keys[2], keys[3])  # whatever the output has
    mask, positions = np.arange(40) > 2, np.arange(40) + 1
    for position, passed in (("none", None), ("rotary", positions)):
        rotated = chosen.replace(position=position)
        forward(model, x, rotated, mask=mask, positions=positions)
        assert calls[-1]["mask"] is mask and calls[-1]["positions"] is passed


def test_the_classifier_has_a_key_of_its_own(monkeypatch):
    keys, shape = [], (8, 6)
    monkeypatch.setattr(models.parameters, "init", lambda key, *_, **__: keys.append(key))
    config = HALF.replace(embedding=EMBEDDING)
    root = jax.random.key(3)
    drawn = init_model(root, Recipe(config, 6, batch_size=1, num_epochs=0)).classifier.w
    assert keys[0] != root
    for key in (root, *keys):
        assert not np.allclose(drawn, 0.02 * jax.random.normal(key, shape))
