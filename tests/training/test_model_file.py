"""Files of trained models: written, read, and refused where they do not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network import encoder_decoder
from rank_collapse.runs.states import flatten_state
from rank_collapse.training.model_file import dump_models, load_models
from rank_collapse.training.training import Recipe, forward, init_model
from tests.support.refusals import is_refused


def make_recipe(**fields):
    embedding = rc.EmbeddingConfig(vocab_size=5, d_embed=6, projection="before_norm")
    return Recipe(rc.transformer(2, 2, 6, embedding=embedding, **fields), 3, 1, 0)


def make_models(recipe, seeds=3):
    init = jax.jit(jax.vmap(lambda key: init_model(key, recipe)))
    return init(jax.random.split(jax.random.key(0), seeds))


def draw_seeds(shape):
    """Weights of two seeds, all different."""
    return np.cos(np.arange(2 * shape.size, dtype=shape.dtype)).reshape(2, *shape.shape)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layer_map": (0, 0)},
        {"skip_gain": jnp.array([0.5, 2.0])},
        {"learned_branch_gain": 0.5, "learned_per_feature": True, "norm_placement": "post"}
        | {"skip_gain": rc.Gains(attention=np.array([1.5, 2.5]), mlp=0.5)}
        | {"norm_gain": np.full((2, 6), 0.75)},
        {"mlp": "swiglu", "position": "rotary", "d_qk": 4, "d_v": 3, "windows": (1, 0)}
        | {"rotary_tables": ((9, (1.0, 0.5)),), "mixing": rc.network.Mixing(0.5, 0.75, -0.25)},
    ],
)
def test_what_is_read_is_what_was_written(fields, tmp_path):
    recipe = make_recipe(**fields)
    models = make_models(recipe)
    (tmp_path / "models.safetensors").write_bytes(dump_models(recipe.config, models))
    config, read = load_models(tmp_path / "models.safetensors")
    jax.tree.map(np.testing.assert_array_equal, (read, config), (models, recipe.config))
    x, run = np.array([0, 3, 1]), jax.jit(forward)
    second, expected = (jax.tree.map(lambda a: np.asarray(a)[1], m) for m in (read, models))
    np.testing.assert_allclose(run(second, x, config), run(expected, x, recipe.config), rtol=1e-6)


def test_any_number_of_outputs_is_read(tmp_path):
    path = tmp_path / "models.safetensors"
    for num_outputs in (1, 2, 4):
        recipe = dataclasses.replace(make_recipe(), num_outputs=num_outputs)
        shapes = jax.eval_shape(lambda r=recipe: init_model(jax.random.key(0), r))
        models = jax.tree.map(draw_seeds, shapes)
        path.write_bytes(dump_models(recipe.config, models))
        config, read = load_models(path)
        assert config == recipe.config and read.classifier.b.shape == (2, num_outputs)
        jax.tree.map(np.testing.assert_array_equal, read, models)


def test_an_encoder_decoder_is_read_with_what_its_halves_share(tmp_path):
    """The vocabularies differ: that of the decoder is the number of outputs."""
    path = tmp_path / "models.safetensors"
    for vocab_size, flags in ((7, {"tied_output": True}), (5, {"shared_embedding": True})):
        table = rc.EmbeddingConfig(vocab_size=5, d_embed=6, positions="learned", num_positions=3)
        encoder = rc.transformer(2, 2, 6, embedding=table, layer_map=(0, 0), skip_gain=0.5)
        decoder = rc.transformer(1, 2, 6, cross_attention=True, mask="causal", windows=(1,))
        decoder = decoder.replace(embedding=table.replace(vocab_size=vocab_size))
        config = rc.network.EncoderDecoderConfig(encoder, decoder, **flags)
        shapes = jax.eval_shape(lambda c=config: encoder_decoder.init(jax.random.key(0), c))
        models = jax.tree.map(draw_seeds, shapes)
        path.write_bytes(dump_models(config, models))
        read_config, read = load_models(path)
        assert read_config == config
        jax.tree.map(np.testing.assert_array_equal, read, models)


@pytest.mark.parametrize(("variant", "field"), [("linear", "mix"), ("sinks", "normalise")])
def test_functions_are_not_written(variant, field):
    with pytest.raises(ValueError, match=f"holds no function: {field}="):  # a line for each array
        dump_models(rc.variant(make_recipe().config, variant), {})


def test_torch_reads_the_weights_by_name(tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    models = make_models(make_recipe())
    path = tmp_path / "models.safetensors"
    path.write_bytes(dump_models(make_recipe().config, models))
    tensors = load_file(path)
    assert set(tensors) == set(flatten_state(models))
    theirs = tensors["network.layers.attention.w_q"].numpy()
    np.testing.assert_array_equal(theirs, models.network.layers.attention.w_q)


def test_other_files_are_refused_in_one_line(tmp_path):
    other = tmp_path / "other.npz"
    np.savez(other, a=np.zeros(3))
    text = tmp_path / "text.npz"
    text.write_text("nothing")
    deeper = tmp_path / "deeper.npz"
    deeper.write_bytes(
        dump_models(make_recipe().config.replace(depth=3), make_models(make_recipe()))
    )
    for path, message in (
        (other, "not a file of trained models"),
        (text, "not a file of trained models"),
        (tmp_path, "is a folder"),
        (deeper, r"attention.b_k of shape \(3, 2, .*not \(3, 3, "),
    ):
        is_refused(message, load_models, path)
    with pytest.raises(OSError):
        load_models(tmp_path / "absent.npz")
