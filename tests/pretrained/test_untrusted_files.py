"""Checkpoints of others: pickled code is refused, damage is a ValueError, every dtype is read."""

import importlib.util
import json
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest

from rank_collapse.pretrained.checkpoint import open_weights

with_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


@with_torch
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("function", ["os.system", "torch.hub.load"])
def test_pickled_code_is_refused_and_not_executed(tmp_path, monkeypatch, function, zipped):
    monkeypatch.chdir(tmp_path)
    module, _, name = function.rpartition(".")
    arguments = pickle.dumps(("touch executed",), protocol=2)[2:-1]
    call = pickle.PROTO + b"\x02" + f"c{module}\n{name}\n".encode() + arguments + b"R."
    path = tmp_path / "pytorch_model.bin"
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", call)
            archive.writestr("archive/byteorder", "little")
            archive.writestr("archive/version", "3\n")
    else:
        path.write_bytes(call)
    with pytest.raises(ValueError, match=path.name):
        open_weights(tmp_path)
    assert not (tmp_path / "executed").exists()


def write_safetensors(path, header, data=b"\0" * 32):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def make_entry(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("shard", ["../x", ""])
def test_an_index_names_files_of_its_folder(tmp_path, shard):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard, "b": "b.safetensors"}}))
    write_safetensors(tmp_path / "b.safetensors", {"b": make_entry(0, 32, [8])})
    with pytest.raises((ValueError, FileNotFoundError)):
        open_weights(tmp_path)


def test_a_dtype_that_numpy_lacks_is_named(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": make_entry(0, 32, [32], "F8_E4M3")})
    with pytest.raises(ValueError, match="F8_E4M3"):
        open_weights(tmp_path)


DTYPES = {
    "F64": "f8",
    "F32": "f4",
    "F16": "f2",
    "BF16": ml_dtypes.bfloat16,
    "I64": "i8",
    "I32": "i4",
    "I16": "i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}


@pytest.mark.parametrize("kind", DTYPES)
def test_every_dtype_is_read(tmp_path, kind):
    raw = np.arange(32, dtype=np.uint8) % 2
    want = raw.view(DTYPES[kind]).reshape(2, -1)
    header = {"a": make_entry(0, 32, want.shape, kind)}
    write_safetensors(tmp_path / "model.safetensors", header, raw.tobytes())
    weights = open_weights(tmp_path)
    assert weights.entries["a"].dtype == weights.read("a").dtype == want.dtype
    np.testing.assert_array_equal(weights.read("a"), want)
    np.testing.assert_array_equal(weights.read("a", slice(1, 2)), want[1:])
