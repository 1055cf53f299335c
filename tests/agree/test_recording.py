"""Recordings: what is written is read, layer by layer; every other file is one line."""

import json
import os
import struct
import tracemalloc
import zipfile
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from rank_collapse.agree.recording import NAMES, open_recording, record, write_recording
from tests.support.refusals import is_refused

DRAW = np.random.default_rng(0)
ARRAYS = {
    "residual": DRAW.normal(size=(4, 5, 6)).astype("float32"),
    "attention_branch": DRAW.normal(size=(3, 5, 6)).astype("float32"),
    "mlp_branch": DRAW.normal(size=(3, 5, 6)).astype("float32"),
    "mask": np.array([1, 1, 1, 1, 0], "uint8"),
    "token_ids": np.arange(5),
    "logits": DRAW.normal(size=(5, 7)).astype("float32"),
}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_what_is_written_is_read(tmp_path, suffix, dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    arrays = {n: a.astype(kind) if a.dtype.kind == "f" else a for n, a in ARRAYS.items()}
    write_recording(tmp_path / f"a{suffix}", arrays, {"dtype": dtype})
    recording = open_recording(tmp_path / f"a{suffix}")
    assert (recording.num_layers, recording.shape) == (3, (1, 5, 6))
    assert recording.metadata == ({"dtype": dtype} if suffix == ".safetensors" else {})
    exists = arrays["mask"].astype(bool)[:, None]
    for index, layer in enumerate(recording.read_layers()):
        expected = np.where(exists, arrays["residual"].astype(float), 0)
        np.testing.assert_array_equal(layer.before[0], expected[index])
        np.testing.assert_array_equal(layer.after[0], expected[index + 1])
        for name in ("attention_branch", "mlp_branch"):
            branch = np.where(exists, arrays[name].astype(float), 0)[index]
            np.testing.assert_array_equal(layer.branches[name][0], branch)
    np.testing.assert_array_equal(recording.read_mask()[0], arrays["mask"])
    np.testing.assert_array_equal(recording.read_token_ids()[0], arrays["token_ids"])
    np.testing.assert_array_equal(recording.read_logits()[0], arrays["logits"].astype("float32"))


def test_numpy_alone_writes_one(tmp_path):
    """Compressed too; arrays of other names are nobody's business."""
    np.savez_compressed(tmp_path / "a.npz", residual=ARRAYS["residual"], other=np.ones(3))
    recording = open_recording(tmp_path / "a.npz")
    assert recording.arrays.keys() == {"residual"} and recording.read_mask().all()
    layers = list(recording.read_layers())
    np.testing.assert_array_equal(layers[-1].after[0], ARRAYS["residual"][-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_order_in_memory_is_no_matter(tmp_path, dtype):
    rows = ARRAYS["residual"].astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    np.savez(tmp_path / "c.npz", residual=rows)
    np.savez(tmp_path / "f.npz", residual=np.asfortranarray(rows))
    with zipfile.ZipFile(tmp_path / "f.npz") as archive:
        assert b"'fortran_order': True" in archive.read("residual.npy")
    for c, f in zip(read_all(tmp_path / "c.npz"), read_all(tmp_path / "f.npz"), strict=True):
        np.testing.assert_array_equal(c.after, f.after)


def test_other_arrays_are_named(tmp_path):
    np.savez(tmp_path / "a.npz", residual=ARRAYS["residual"], attention_output=np.ones(3))
    assert open_recording(tmp_path / "a.npz").ignored == ("attention_output",)
    np.savez(tmp_path / "b.npz", hidden_states=ARRAYS["residual"])
    is_refused("hidden_states", open_recording, tmp_path / "b.npz")


def test_a_batch_has_an_axis_more(tmp_path):
    residual = DRAW.normal(size=(3, 2, 5, 6))
    record({"residual": residual}, tmp_path / "a.npz", mask=np.ones((2, 5), "uint8"))
    recording = open_recording(tmp_path / "a.npz")
    assert recording.shape == (2, 5, 6)
    np.testing.assert_array_equal(next(recording.read_layers()).before, residual[0])


def test_a_trace_is_recorded(tmp_path):
    import rank_collapse as rc
    from tests.oracles import draws

    config = rc.transformer(depth=2, num_heads=2, d_model=8, norm_placement="pre")
    x = DRAW.normal(size=(5, 8)).astype("float32")
    trace = rc.apply(draws.parameters(config), x, config)
    rc.record(trace, tmp_path / "a.safetensors", token_ids=np.arange(5))
    layers = list(open_recording(tmp_path / "a.safetensors").read_layers())
    for index, layer in enumerate(layers):
        np.testing.assert_array_equal(layer.before[0], trace.hidden[index])
        summed = layer.before + layer.branches["attention_branch"] + layer.branches["mlp_branch"]
        np.testing.assert_allclose(summed, layer.after, rtol=1e-5, atol=1e-5)


def test_what_a_trace_or_a_call_does_not_have_is_left_out(tmp_path):
    """As the MLPs of a network of attention alone."""
    branches = SimpleNamespace(attention_branch=ARRAYS["attention_branch"], mlp_branch=None)
    trace = SimpleNamespace(hidden=ARRAYS["residual"], layers=branches)
    record(trace, tmp_path / "a.npz", mask=None, token_ids=ARRAYS["token_ids"], logits=None)
    with np.load(tmp_path / "a.npz") as stored:
        assert sorted(stored.files) == ["attention_branch", "residual", "token_ids"]
        for name in stored.files:
            np.testing.assert_array_equal(stored[name], ARRAYS[name])


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_one_layer_is_in_memory(tmp_path, suffix):
    residual = np.zeros((33, 256, 128), "float32")
    write_recording(tmp_path / f"a{suffix}", {"residual": residual})
    recording = open_recording(tmp_path / f"a{suffix}")
    tracemalloc.start()
    for _ in recording.read_layers():
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * residual[0].nbytes


def with_arrays(**changed):
    arrays = {name: a for name, a in (ARRAYS | changed).items() if a is not None}
    return lambda path: np.savez(path, **arrays)


def with_nan(name, index):
    array = ARRAYS[name].copy()
    array[index] = np.nan
    return with_arrays(**{name: array})


WRONG = {
    "no array 'residual'": with_arrays(residual=None),
    r"residual has shape \[5, 6\]": with_arrays(residual=ARRAYS["residual"][0]),
    "residual has no layer": with_arrays(
        residual=ARRAYS["residual"][:1], attention_branch=None, mlp_branch=None
    ),
    "axis of length 0": with_arrays(residual=np.zeros((4, 0, 6))),
    r"attention_branch has shape \[2, 5, 6\], not \[3, 5, 6\]": with_arrays(
        attention_branch=ARRAYS["attention_branch"][:2]
    ),
    r"mask has shape \[4\]": with_arrays(mask=np.ones(4)),
    "mask has other values": with_arrays(mask=np.arange(5)),
    "mask has no token": with_arrays(mask=np.zeros(5)),
    r"token_ids has shape": with_arrays(token_ids=np.arange(6)),
    r"logits has shape": with_arrays(logits=np.ones((4, 7))),
    "residual has dtype int64": with_arrays(residual=np.ones((4, 5, 6), int)),
    "residual has dtype complex128": with_arrays(residual=np.ones((4, 5, 6), complex)),
    "residual before layer 0 has a NaN": with_nan("residual", (0, 1, 2)),
    "residual after layer 1 has a NaN": with_nan("residual", (2, 1, 2)),
    "mlp_branch of layer 2 has a NaN": with_nan("mlp_branch", (2, 0, 0)),
    "residual is not an array of numbers": with_arrays(residual=np.full((4, 5, 6), None)),
}


def read_all(path):
    recording = open_recording(path)
    recording.read_mask()
    return list(recording.read_layers())


@pytest.mark.parametrize("words", WRONG)
def test_arrays_that_do_not_fit_are_refused(tmp_path, words):
    WRONG[words](tmp_path / "a.npz")
    is_refused(words, read_all, tmp_path / "a.npz")


def test_a_nan_where_no_token_exists_is_no_matter(tmp_path):
    with_nan("residual", (2, 4, 0))(tmp_path / "a.npz")
    assert len(read_all(tmp_path / "a.npz")) == 3


def write_text(path):
    path.write_text("no archive")


def write_empty(path):
    path.write_bytes(b"")


def cut(path):
    write_recording(path, ARRAYS)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    write_recording(path, ARRAYS)
    data = bytearray(path.read_bytes())
    data[len(data) // 3 if path.suffix == ".npz" else 60] ^= 0xFF  # safetensors has no checksum
    path.write_bytes(data)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("damage", [write_text, write_empty, cut, flip])
def test_a_damaged_file_is_one_line(tmp_path, suffix, damage):
    path = tmp_path / f"a{suffix}"
    damage(path)
    is_refused(str(path), read_all, path)


def test_an_array_that_ends_early_is_one_line(tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        np.save(tmp_path / "r.npy", ARRAYS["residual"])
        archive.writestr("residual.npy", (tmp_path / "r.npy").read_bytes()[:-40])
    is_refused("ends early", read_all, path)


def test_what_is_no_recording_is_one_line(tmp_path):
    is_refused("does not exist", open_recording, tmp_path / "none.npz")
    is_refused("is not a file", open_recording, tmp_path)
    (tmp_path / "a.txt").write_text("x")
    is_refused("neither .npz nor .safetensors", open_recording, tmp_path / "a.txt")
    is_refused("neither .npz nor", write_recording, tmp_path / "a.txt", ARRAYS)
    os.mkfifo(tmp_path / "pipe.npz")
    is_refused("is not a file", open_recording, tmp_path / "pipe.npz")


def test_a_header_that_asks_for_more_than_there_is(tmp_path):
    header = json.dumps(
        {"residual": {"dtype": "F32", "shape": [4, 5, 6], "data_offsets": [0, 10**12]}}
    ).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    is_refused("is damaged", open_recording, tmp_path / "a.safetensors")


def test_the_names_are_those_of_the_page():
    assert set(NAMES) == {*ARRAYS}
