"""Inputs of the commands: images and features, token ids, and what is refused."""

import jax
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.command import inputs, main, parse_flags
from rank_collapse.command.checked import WHOLE
from rank_collapse.command.checkpoint import measure_checkpoint
from rank_collapse.command.inputs import Opened, open_source, read_inputs
from tests.support.folders import REPOSITORY
from tests.support.refusals import is_refused

GOLDEN = REPOSITORY / "tests" / "golden" / "bert"


WHISPER = {"model_type": "whisper", "num_mel_bins": 6, "encoder_layers": 2, "d_model": 16}


WHISPER |= {"encoder_attention_heads": 2, "encoder_ffn_dim": 24, "max_source_positions": 10}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["images", "features"])
def test_images_and_features_are_read_or_drawn(kind, tmp_path):
    if kind == "images":
        opened = open_source(str(GOLDEN.parent / "vit-wide"))
        sides = opened.source.settings["image_size"]
        sides = [sides] * 2 if isinstance(sides, int) else sides
        shape = (2, opened.source.settings["num_channels"], *sides)
    else:
        source = rc.pretrained.open_random(WHISPER, jax.random.key(0))
        opened, shape = Opened("whisper", source, None), (2, 6, 20)  # as feature extractors give it
    array = np.random.default_rng(1).standard_normal(shape, np.float32)
    np.save(tmp_path / "x.npy", array)
    flags = ("x", "--num_texts=1")
    random_inputs = read_inputs(parse_flags(["check", *flags]), opened)
    file_inputs = read_inputs(
        parse_flags(["check", *flags, "--inputs", str(tmp_path / "x.npy")]), opened
    )
    assert (
        file_inputs.x.shape == random_inputs.x.shape
        and "Drawn" in random_inputs.description
        and len(file_inputs.x) == 1
    )
    if kind == "features":
        np.testing.assert_array_equal(file_inputs.x[0], array[0].T)
    ratios = measure_checkpoint(opened, file_inputs).networks[WHOLE]["residual_ratio"]
    config, params = rc.pretrained.random_like(WHISPER, jax.random.key(0))
    if kind == "images":
        config, params = rc.pretrained.load(opened.folder)
    expected = rc.profile(rc.apply(params, file_inputs.x[0], config).hidden)["residual_ratio"]
    np.testing.assert_allclose(ratios[0], expected, rtol=1e-4)


@pytest.mark.parametrize("kind", ["an archive", "a broken archive", "nothing"])
def test_files_of_images_that_are_none_are_refused(kind, tmp_path, capsys):
    path = tmp_path / "x.npy"
    with open(path, "wb") as file:
        if kind == "an archive":
            np.savez(file, a=np.ones(2))
        elif kind == "nothing":
            np.save(file, np.ones((0, 3, 8, 8)))
        else:
            file.write(b"PK\x03\x04")
    assert main([str(GOLDEN.parent / "vit-wide"), f"--inputs={path}", "--json"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {path} is not an array of numbers") and err.count("\n") == 1


def test_random_ids_beside_texts_are_refused():
    texts, drawn = (inputs.Inputs(np.zeros((1, 2)), None, "", kind) for kind in ("texts", "random"))
    sources = [inputs.Opened(name, None, None) for name in ("first", "second")]
    message = "second would be measured on random token ids, first on texts: give --tokenizer"
    is_refused(message, inputs.check_comparable, sources, [texts, drawn])
    inputs.check_comparable(sources, [drawn, drawn])
