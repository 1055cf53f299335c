"""Inputs of the commands: images and features, token ids, and what is refused."""

import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.command import inputs, main, parse_flags
from rank_collapse.command.checked import WHOLE
from rank_collapse.command.checkpoint import measure_checkpoint
from rank_collapse.command.inputs import Inputs, Opened, open_source, read_inputs
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


@pytest.mark.parametrize("flag", ["--text=x", "--ids=1,2", "--token_ids=x", "--tokenizer=x"])
def test_text_does_not_fit_a_model_of_images_or_sound(flag):
    whisper = Opened("whisper", rc.pretrained.open_random(WHISPER, jax.random.key(0)), None)
    for opened, noun in (
        (whisper, "spectrograms"),
        (open_source(str(GOLDEN.parent / "vit-wide")), "images"),
    ):
        name = flag.partition("=")[0]
        message = f"{name} does not fit {opened.name}, which reads {noun}: give --inputs=FILE.npy"
        is_refused(message, read_inputs, parse_flags(["check", "x", flag]), opened)


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
    message = "first would be measured on random token ids, second on texts: give --tokenizer"
    is_refused(message, inputs.check_comparable, sources, [drawn, texts])
    inputs.check_comparable(sources, [drawn, drawn])
    inputs.check_comparable(sources, [texts, texts._replace(kind="ids")])


def open_made_up(settings=None, *, is_random=False, **embedding):
    """Opens a checkpoint that has nothing but settings and an embedding."""
    fields = {"d_input": None, "convolutions": None, "num_positions": 0, "vocab_size": 40}
    config = SimpleNamespace(embedding=SimpleNamespace(**fields | embedding))
    source = SimpleNamespace(config=config, settings=settings or {}, has_random_weights=is_random)
    return Opened("made-up", source, None)


def read(opened, *flags):
    return read_inputs(parse_flags(["check", "x", *flags]), opened)


@pytest.mark.parametrize("image_size", [4, (4, 6)])
def test_images_are_cut_into_patches(image_size, tmp_path):
    """Row by row, each with its channels last or first as the model reads them."""
    settings = {"image_size": image_size, "num_channels": 3, "patch_size": 2}
    opened = open_made_up(settings, d_input=12)
    height, width = (4, 4) if image_size == 4 else image_size
    drawn = read(opened)
    assert drawn.x.shape == (4, height * width // 4, 12) and drawn.mask is None
    assert drawn.description == (
        "Drawn inputs, standard normal: no image; --inputs=FILE.npy measures real ones."
    )
    assert abs(drawn.x.mean()) < 0.2 and abs(drawn.x.std() - 1) < 0.2 and drawn.kind == "arrays"
    np.testing.assert_array_equal(drawn.x, read(opened).x)
    images = np.random.default_rng(1).normal(size=(3, 3, height, width))
    np.save(tmp_path / "x.npy", images)
    for flags, count in (((), 3), (("--num_texts=2",), 2)):
        patches = read(opened, f"--inputs={tmp_path / 'x.npy'}", *flags)
        assert patches.description == f"The first {count} of {tmp_path / 'x.npy'}."
        assert patches.x.shape == (count, height * width // 4, 12)
        second = images[0, :, :2, 2:4].astype("float32")  # the patch to the right of the first
        np.testing.assert_array_equal(np.sort(patches.x[0, 1]), np.sort(second.ravel()))
    np.save(tmp_path / "y.npy", images[:, :, 1:])
    is_refused("are not", read, opened, f"--inputs={tmp_path / 'y.npy'}")


def test_features_are_read_in_both_orders(tmp_path):
    """[b, frames, bins], or [b, bins, frames] of the model's whole length."""
    opened = open_made_up(d_input=5, convolutions=(3, 3), num_positions=6)
    drawn = read(opened, "--num_texts=2")
    assert drawn.x.shape == (2, 12, 5) and "no spectrogram;" in drawn.description
    array = np.random.default_rng(1).normal(size=(2, 12, 5)).astype("float32")
    shapes = {"frames": array, "bins": array.swapaxes(1, 2), "short": array[:, :7]}
    for name, features in shapes.items():
        np.save(tmp_path / "x.npy", features)
        spectrograms = read(opened, f"--inputs={tmp_path / 'x.npy'}")
        np.testing.assert_array_equal(spectrograms.x, array[:, :7] if name == "short" else array)
        assert spectrograms.mask is None and spectrograms.description.startswith("The first 2 of ")
        line = "They have 7 frames. In transformers this model accepts only 12 frames and pads"
        assert (line in spectrograms.description) == (name == "short")
    np.save(tmp_path / "x.npy", np.concatenate([array, array], axis=1))  # more than the usual ones
    longer = read(opened, f"--inputs={tmp_path / 'x.npy'}")
    assert longer.x.shape == (2, 24, 5) and "They have" not in longer.description
    for wrong in (array[:, :7].swapaxes(1, 2), array[0], array[..., None]):
        np.save(tmp_path / "x.npy", wrong)
        is_refused(r"is not \[b, \*, 5\]", read, opened, f"--inputs={tmp_path / 'x.npy'}")
    with pytest.raises(OSError, match="none"):
        read(opened, f"--inputs={tmp_path / 'none.npy'}")


def test_ids_are_padded_and_described(tmp_path):
    opened = open_made_up(num_positions=8)
    texts = read(opened, "--ids=5,8,13", "--ids=7 6")
    assert texts.x.tolist() == [[5, 8, 13], [7, 6, 0]] and texts.kind == "ids"
    assert texts.mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert texts.description == "The ids of --ids." and texts.lengths.tolist() == [3, 2]
    assert texts.counts == "2 texts of 2 to 3 tokens"
    cut = read(opened, "--ids=5,8,13", "--ids=7 6", "--ids=1,2", "--max_tokens=2", "--num_texts=2")
    assert cut.x.tolist() == [[5, 8], [7, 6]] and cut.counts == "2 texts of 2 tokens"
    first = "The ids of --ids, the first 2 of 3 texts"
    assert cut.description == f"{first}, 1 of 2 cut to 2 tokens."
    (tmp_path / "ids.txt").write_text("1 2 3")
    alone = read(opened, f"--token_ids={tmp_path / 'ids.txt'}", "--num_texts=1")
    assert alone.description == f"The ids of {tmp_path / 'ids.txt'}."
    assert alone.counts == "1 text of 3 tokens"
    for flags, message in (
        (["--ids=1"], "text 0 has fewer than 2 tokens"),
        (["--ids=1,2,3", "--ids=4"], "text 1 has fewer than 2 tokens"),
        (
            ["--ids=1,2", f"--ids={','.join('123456789')}"],
            "text 1 has 9 tokens, but the model has 8 pos",
        ),
        (["--ids=1,2", "--tokenizer=x"], "--ids excludes --text and --tokenizer"),
        (["--ids=1,2", "--token_ids=x"], "and so does --token_ids"),
        (["--ids=1,2", "--inputs=x"], "--inputs=x does not fit made-up, which reads tokens"),
    ):
        is_refused(message, read, opened, *flags)
    uncut = read(open_made_up(), f"--ids={','.join(map(str, range(40)))},{','.join('1' * 30)}")
    assert uncut.x.shape == (1, 70) and uncut.description == "The ids of --ids."  # no limit


def test_without_a_tokenizer_ids_are_random_and_of_the_models_length(tmp_path):
    opened = open_made_up(num_positions=8)._replace(folder=tmp_path)
    drawn = read(opened)
    assert drawn.x.shape == (4, 8) and drawn.kind == "random" and drawn.mask.all()
    assert set(drawn.x.ravel()) <= set(range(40)) and len(set(drawn.x.ravel())) > 15
    assert drawn.description.startswith(f"Random token ids, since {tmp_path} has none of ")
    assert drawn.description.endswith("; --tokenizer=FOLDER or --ids=5,8,13.")
    assert read(opened, "--max_tokens=5", "--num_texts=3").x.shape == (3, 5)
    assert read(open_made_up()._replace(folder=tmp_path)).x.shape == (4, 64)
    (tmp_path / "text.txt").write_text("a b")
    for flag in (f"--text={tmp_path / 'text.txt'}", f"--tokenizer={tmp_path}"):
        is_refused("give --tokenizer=FOLDER or --ids=5,8,13", read, opened, flag)


def test_texts_of_a_drawn_checkpoint_have_a_vocabulary_of_their_own(tmp_path):
    opened = open_made_up(num_positions=6, vocab_size=400)
    shipped = read(opened, "--num_texts=2")
    assert shipped.x.shape == (2, 6) and shipped.kind == "texts"
    assert shipped.description.startswith("The shipped English text, “")
    assert "…”, by a vocabulary of the texts" in shipped.description
    (tmp_path / "text.txt").write_text("one two three\n\nfour five six seven eight\n\nnine ten")
    texts = read(opened, f"--text={tmp_path / 'text.txt'}", "--num_texts=2")
    about = f"{tmp_path / 'text.txt'}, the first 2 of 3 texts, “one two three …”, by a vocabulary"
    assert texts.description.startswith(about) and len(texts.x) == 2


def test_what_is_said_of_a_checkpoint_and_its_inputs():
    opened = open_made_up()
    assert (opened.half, opened.weights, opened.about) == ("", "of the checkpoint", "")
    both = open_made_up({"part": "decoder"}, is_random=True)
    assert both.half == "its decoder" and both.weights == "random weights"
    assert both.about == "random weights: its decoder: "
    assert open_made_up({"part": "encoder"}).about == "its encoder: "
    vectors = Inputs(np.zeros((1, 7, 3)), None, "", "arrays")
    assert vectors.lengths.tolist() == [7] and vectors.counts == "1 input of 7 vectors"
    assert vectors._replace(x=np.zeros((3, 7, 3))).counts == "3 inputs of 7 vectors"


@pytest.mark.parametrize(
    ("ids", "share", "ending", "warns"),
    [
        ([[3, 4, 5], [1, 6]], "20%", " The numbers describe the unknown token: give a", True),
        ([[3] * 9 + [1]], "10%", "", False),
        ([[3, 4]], "0%", "", False),
    ],
)
def test_unknown_tokens_are_a_share_of_all(ids, share, ending, warns, capsys):
    encoder = SimpleNamespace(unknown=1)
    text = inputs._describe_unknown(encoder, ids)
    assert text.startswith(f", {share} of them unknown to it.{ending}")
    assert text.endswith("it." if not warns else "that it knows, or --token_ids.")
    err = capsys.readouterr().err
    warning = f"warning: {share} of the tokens are unknown to the tokenizer\n"
    assert err == (warning if warns else "")
    assert inputs._describe_unknown(SimpleNamespace(unknown=None), ids) == "."
    assert inputs._describe_unknown(object(), ids) == "."


def test_native_messages_are_hidden_and_later_ones_are_not(capfd):
    """And no file stays open."""
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(ValueError, match="cause"), inputs.hide_native_errors():
        os.write(2, b"panic")
        raise ValueError("cause")
    os.write(2, b"later")
    assert capfd.readouterr().err == "later"
    assert len(os.listdir("/dev/fd")) == before


def test_the_folder_of_the_tokenizer_is_named(monkeypatch, tmp_path):
    opened = open_made_up(num_positions=6, vocab_size=400)
    texts = ["one two three", "four five"]
    tokenizer = inputs.encoders.trained_tokenizer(texts, 400)
    monkeypatch.setattr(inputs.encoders, "load_tokenizer", lambda folder, settings: tokenizer)
    description = read(opened, "--num_texts=2", f"--tokenizer={tmp_path}").description
    assert f"…”, by the tokenizer of {tmp_path}" in description


def test_texts_are_cut_after_they_are_encoded_and_keep_their_last_token(monkeypatch, tmp_path):
    """Token 2 closes a text; what is cut is counted before."""

    def encode(text):
        return [1, *(10 + len(word) for word in text.split()), 2]

    monkeypatch.setattr(inputs.encoders, "load_tokenizer", lambda folder, settings: encode)
    (tmp_path / "text.txt").write_text("a bb ccc dddd\n\na bb\n\nccc a bb dddd")
    flags = (f"--text={tmp_path / 'text.txt'}", f"--tokenizer={tmp_path}", "--max_tokens=4")
    texts = read(open_made_up(num_positions=6), *flags)
    assert texts.x.tolist() == [[1, 11, 12, 2], [1, 11, 12, 2], [1, 13, 11, 2]]
    tokenizer = f"“a bb ccc dddd …”, by the tokenizer of {tmp_path}"
    assert texts.description == f"{tmp_path / 'text.txt'}, {tokenizer}, 2 of 3 cut to 4 tokens."
    long = read(open_made_up(num_positions=5), *flags[:2])  # at most as many as the model takes
    assert long.x.tolist()[0] == [1, 11, 12, 13, 2] and long.mask.sum(axis=1).tolist() == [5, 4, 5]
    assert long.description.endswith(", 2 of 3 cut to 5 tokens.")


@pytest.mark.parametrize("kind", ["text", "ids", "images", "features"])
def test_what_is_said_of_inputs_has_no_control_character(kind, tmp_path):
    """Of a text, and of the name of a file."""
    path = tmp_path / "x\x1b[31m.npy"
    if kind in ("text", "ids"):
        path.write_text("red \x1b[31mhat\n\nblue coat" if kind == "text" else "1 2\n3 4")
        flag = f"--text={path}" if kind == "text" else f"--token_ids={path}"
        opened = open_made_up(num_positions=6, vocab_size=400)
    elif kind == "images":
        np.save(path, np.zeros((1, 3, 4, 4)))
        settings = {"image_size": 4, "num_channels": 3, "patch_size": 2}
        flag, opened = f"--inputs={path}", open_made_up(settings, d_input=12)
    else:
        np.save(path, np.zeros((1, 12, 5)))
        opened = open_made_up(d_input=5, convolutions=(3, 3), num_positions=6)
        flag = f"--inputs={path}"
    description = read(opened, flag).description
    assert "x\\x1b[31m.npy" in description and "\x1b" not in description
    assert kind != "text" or "“red \\x1b[31mhat …”" in description
