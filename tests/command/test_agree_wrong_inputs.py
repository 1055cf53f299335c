"""Sixty damaged or unequal recordings: each is one line on standard error, and exit code 2."""

import json
import os
import pickle
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from rank_collapse.agree.recording import write_recording
from rank_collapse.command import main

DRAW = np.random.default_rng(0)
N, D, L = 5, 6, 3
ARRAYS = {
    "residual": DRAW.normal(size=(L + 1, N, D)).astype("float32"),
    "attention_branch": DRAW.normal(size=(L, N, D)).astype("float32"),
    "mlp_branch": DRAW.normal(size=(L, N, D)).astype("float32"),
    "mask": np.ones(N, "uint8"),
    "token_ids": np.arange(N),
    "logits": DRAW.normal(size=(N, 7)).astype("float32"),
}


def save(**changed):
    """Return a function that writes a.npz with other arrays; None leaves one out."""
    arrays = {name: a for name, a in (ARRAYS | changed).items() if a is not None}
    return lambda folder: np.savez(folder / "a.npz", **arrays)


def alone(residual, **others):
    """The same with a residual and few other arrays."""
    return lambda folder: np.savez(folder / "a.npz", residual=residual, **others)


def spoil(name, index, value):
    array = ARRAYS[name].copy()
    array[index] = value
    return save(**{name: array})


def put_bytes(data, name="a.npz"):
    return lambda folder: (folder / name).write_bytes(data)


def write_whole(folder, suffix):
    write_recording(folder / f"a{suffix}", ARRAYS)
    return folder / f"a{suffix}"


def cut(suffix, share):
    def make(folder):
        path = write_whole(folder, suffix)
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])

    return make


def flip(suffix, place):
    def make(folder):
        path = write_whole(folder, suffix)
        data = bytearray(path.read_bytes())
        data[place if isinstance(place, int) else int(place * len(data))] ^= 0xFF
        path.write_bytes(data)

    return make


def put_member(data, name="residual.npy"):
    def make(folder):
        with zipfile.ZipFile(folder / "a.npz", "w") as archive:
            archive.writestr(name, data)

    return make


def put_header(header, size=0):
    """Write a.safetensors with a header, and a hole of so many bytes behind it."""

    def make(folder):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        with open(folder / "a.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + size)

    return make


def describe(shape, dtype="F32", size=4):
    return {
        "residual": {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [0, int(np.prod(shape)) * size],
        }
    }


def put_header_of_npy(shape, dtype="<f4"):
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def large_and_nan(folder):
    """A sparse file of 3 GB whose second state has a NaN."""
    shape = (193, 1024, 4096)
    put_header(describe(shape), 4 * int(np.prod(shape)))(folder)
    with open(folder / "a.safetensors", "r+b") as file:
        start = 8 + struct.unpack("<Q", file.read(8))[0]
        file.seek(start + 4 * 1024 * 4096 + 40)
        file.write(struct.pack("<f", np.nan))


LARGE = (193, 1024, 4096)
MASK = np.array([1, 1, 1, 1, 0], "uint8")
R = ARRAYS["residual"]
# {what is wrong: (what writes a.npz or a.safetensors, words of the line)}; b.npz is right.
CASES = {
    "no residual": (save(residual=None), "no array 'residual'"),
    "another name": (lambda f: np.savez(f / "a.npz", hidden_states=R), "hidden_states"),
    "no array": (lambda f: np.savez(f / "a.npz"), "no array 'residual'"),
    "one axis": (alone(R[0, 0]), "residual has shape"),
    "two axes": (alone(R[0]), "residual has shape"),
    "five axes": (alone(R[None, None]), "residual has shape"),
    "no axis": (alone(np.float32(1)), "residual has shape"),
    "zero layers": (alone(R[:1]), "no layer"),
    "no state": (alone(R[:0]), "no layer|axis of length 0"),
    "zero tokens": (alone(R[:, :0]), "axis of length 0"),
    "zero width": (alone(R[..., :0]), "axis of length 0"),
    "zero examples": (alone(R[:, None][:, :0]), "axis of length 0"),
    "whole numbers": (alone(np.ones((L + 1, N, D), int)), "residual has dtype int64"),
    "booleans": (alone(np.ones((L + 1, N, D), bool)), "residual has dtype bool"),
    "complex numbers": (alone(R + 0j), "residual has dtype complex64"),
    "text": (alone(np.full((L + 1, N, D), "x")), "residual has dtype <U1"),
    "dates": (alone(np.zeros((L + 1, N, D), "datetime64[s]")), "residual has dtype datetime64"),
    "objects": (alone(np.full((L + 1, N, D), None)), "not an array of numbers"),
    "a structure": (alone(np.zeros((L + 1, N), [("a", "f4"), ("b", "f4")])), "residual"),
    "fewer layers": (alone(R[:-1]), "a.npz has 2 layers, b.npz 3"),
    "more layers": (alone(np.concatenate([R, R[-1:]])), "a.npz has 4 layers, b.npz 3"),
    "fewer tokens": (alone(R[:, :-1]), "has 4 tokens in a.npz and 5"),
    "more tokens": (alone(np.concatenate([R, R], axis=1)), "has 10 tokens in a.npz and 5"),
    "narrower": (alone(R[..., :-1]), "the width is 5 in a.npz and 6"),
    "more examples": (alone(np.stack([R, R], axis=1)), "a.npz has 2 examples, b.npz 1"),
    "axes in another order": (alone(R.transpose(1, 0, 2)), "layers"),
    "another mask": (save(mask=MASK), "has 4 tokens in a.npz and 5"),
    "mask of another length": (save(mask=np.ones(4)), "mask has shape"),
    "mask of floats": (save(mask=np.full(N, 0.5)), "mask has other values"),
    "mask of -inf": (save(mask=np.r_[np.zeros(4), -np.inf]), "mask"),
    "empty mask": (save(mask=np.zeros(N)), "no token that exists"),
    "square mask": (save(mask=np.ones((N, N))), "mask has shape"),
    "other tokens": (save(token_ids=np.arange(N)[::-1]), "the inputs differ: token 0"),
    "ids of another length": (save(token_ids=np.arange(N + 1)), "token_ids has shape"),
    "branch of fewer layers": (save(mlp_branch=ARRAYS["mlp_branch"][:2]), "mlp_branch has shape"),
    "branch with a layer more": (save(attention_branch=R), "attention_branch has shape"),
    "branch of whole numbers": (
        save(mlp_branch=np.ones((L, N, D), int)),
        "mlp_branch has dtype int64",
    ),
    "logits of other tokens": (save(logits=np.ones((N - 1, 7), "f4")), "logits has shape"),
    "logits of whole numbers": (save(logits=np.ones((N, 7), int)), "logits has dtype int64"),
    "another vocabulary": (save(logits=np.ones((N, 8), "f4")), "logits have 8 and 7 entries"),
    "NaN at the start": (spoil("residual", (0, 1, 2), np.nan), "before layer 0 has a NaN"),
    "NaN at the end": (spoil("residual", (L, 1, 2), np.nan), "after layer 2 has a NaN"),
    "an infinity": (spoil("residual", (1, 0, 0), -np.inf), "after layer 0 has a NaN or an inf"),
    "NaN in a branch": (spoil("mlp_branch", (2, 0, 0), np.nan), "mlp_branch of layer 2 has a NaN"),
    "NaN in the logits": (spoil("logits", (0, 0), np.nan), "logits has a NaN"),
    "empty file": (put_bytes(b""), "damaged"),
    "text file": (put_bytes(b"no archive\n" * 9), "damaged"),
    "a pickle": (put_bytes(pickle.dumps(ARRAYS)), "damaged"),
    "a pickle in the archive": (put_member(pickle.dumps(R)), "a.npz is damaged"),
    "an .npy file": (put_bytes(put_header_of_npy(R.shape) + R.tobytes()), "damaged"),
    "archive cut in half": (cut(".npz", 0.5), "damaged"),
    "archive without its end": (cut(".npz", 0.98), "damaged"),
    "changed byte of an archive": (flip(".npz", 0.1), "damaged"),
    "array that ends early": (put_member(put_header_of_npy((4, 5, 6)) + b"\0" * 99), "ends early"),
    "array of a huge shape": (put_member(put_header_of_npy((4, 10**9, 10**9))), "the width is"),
    "array of a negative shape": (put_member(put_header_of_npy((4, -5, 6))), "axis of length -5"),
    "header of another kind": (put_member(b"\x93NUMPY\x09\x00" + b"\0" * 90), "version"),
    "header of nonsense": (
        put_member(b"\x93NUMPY\x01\x00\x10\x00" + b"(" * 16),
        "a.npz is damaged",
    ),
    "safetensors: empty": (put_bytes(b"", "a.safetensors"), "damaged"),
    "safetensors: cut": (cut(".safetensors", 0.5), "damaged"),
    "safetensors: changed byte": (flip(".safetensors", 20), "damaged|no array"),
    "safetensors: no JSON": (put_header(b"{nonsense"), "damaged"),
    "safetensors: too short": (put_header(describe((4, 5, 6)), 99), "damaged"),
    "safetensors: unknown type": (put_header(describe((4, 5, 6), "F31"), 480), "damaged"),
    "safetensors: whole numbers": (
        put_header(describe((4, 5, 6), "I32"), 480),
        "residual has dtype int",
    ),
    "safetensors: 8 bits": (put_header(describe((4, 5, 6), "F8_E4M3", 1), 120), "residual is|dama"),
    "3 GB, cut": (put_header(describe(LARGE), 4 * int(np.prod(LARGE)) - 1), "damaged"),
    "3 GB of another width": (put_header(describe(LARGE), 4 * int(np.prod(LARGE))), "layers|width"),
}


def test_there_are_sixty():
    assert len(CASES) >= 60


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", ["first", "second"])
def test_each_is_one_line(tmp_path, monkeypatch, capsys, name, place):
    make, words = CASES[name]
    make(tmp_path)
    np.savez(tmp_path / "b.npz", **ARRAYS)
    monkeypatch.chdir(tmp_path)
    (path,) = (p for p in os.listdir(tmp_path) if p.startswith("a."))
    pair = [path, "b.npz"] if place == "first" else ["b.npz", path]
    code = main(["agree", *pair, "--json"])
    printed = capsys.readouterr()
    assert code == 2 and printed.out == "" and printed.err.count("\n") == 1
    assert path in printed.err or "logits have" in printed.err
    if place == "first":
        assert any(word in printed.err for word in words.split("|")), printed.err


def test_a_large_file_is_read_up_to_its_damage(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    large_and_nan(tmp_path)
    assert main(["agree", "a.safetensors", "a.safetensors", "--json"]) == 2
    error = capsys.readouterr().err
    assert "after layer 0 has a NaN" in error and error.count("\n") == 1


def test_spikes_alone_are_judged(tmp_path, monkeypatch, capsys):
    """A recording of nothing but large tokens: they are the usual ones."""
    monkeypatch.chdir(tmp_path)
    arrays = {"residual": 1e30 * R}
    np.savez("a.npz", **arrays)
    arrays["residual"] = arrays["residual"] * np.float32(1 + 1e-7)
    np.savez("b.npz", **arrays)
    assert main(["agree", "a.npz", "b.npz", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["agree"]


@pytest.mark.full
def test_a_large_pair_is_streamed(tmp_path, monkeypatch, capsys):
    """Of 97 states of two files a few are in memory."""
    monkeypatch.chdir(tmp_path)
    shape = (97, 512, 4096)
    put_header(describe(shape), 4 * int(np.prod(shape)))(tmp_path)
    os.link("a.safetensors", "b.safetensors")
    tracemalloc.start()
    assert main(["agree", "a.safetensors", "b.safetensors", "--json"]) == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "same numbers" in json.loads(capsys.readouterr().out)["sentence"]
    assert peak < 30 * 8 * 512 * 4096
