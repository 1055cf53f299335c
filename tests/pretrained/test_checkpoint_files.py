"""Checkpoints of others: pickled code is refused, damage is a ValueError, every dtype is read."""

import importlib.util
import json
import os
import pickle
import sys
import zipfile
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from rank_collapse.pretrained.checkpoint_files import (
    convert_tensor,
    live_model,
    open_weights,
    read_config,
    wrap_torch_tensors,
)
from tests.support.refusals import is_refused

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


@pytest.fixture
def indexed(tmp_path):
    """Makes a folder with a shard, beside a file outside; returns what writes its index."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(tmp_path / "outside.safetensors", {"a": make_entry(0, 32, [8])})
    write_safetensors(folder / "b.safetensors", {"b": make_entry(0, 32, [8])})

    def write_index(shard):
        names = {"weight_map": {"a": shard, "b": "b.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(names))
        return folder

    return write_index


OUTSIDE = ["../outside.safetensors", "{0}/outside.safetensors", "x/../../outside.safetensors"]


@pytest.mark.parametrize("shard", [*OUTSIDE, "../absent", "/absent", "..", "b.safetensors/.."])
def test_an_index_that_names_files_outside_of_its_folder_is_refused(indexed, tmp_path, shard):
    """Whether the file exists or not, so that nothing is said of what else there is."""
    with pytest.raises(ValueError, match="which is outside of its folder") as caught:
        open_weights(indexed(shard.format(tmp_path)))
    assert "index.json names" in str(caught.value)


@pytest.mark.parametrize("shard", ["", ".", "absent", "a\0b"])
def test_a_file_that_an_index_names_and_that_is_none_is_missing(indexed, shard):
    with pytest.raises(FileNotFoundError, match=r"named by .* is missing"):
        open_weights(indexed(shard))


@pytest.mark.parametrize("shard", ["b.safetensors", "./b.safetensors", "inner/a.safetensors"])
def test_an_index_names_files_of_its_folder(indexed, shard):
    folder = indexed(shard)
    (folder / "inner").mkdir()
    write_safetensors(folder / "inner" / "a.safetensors", {"a": make_entry(0, 32, [8])})
    (folder / "b.safetensors").unlink()
    both = {"a": make_entry(0, 16, [4]), "b": make_entry(16, 32, [4])}
    write_safetensors(folder / "b.safetensors", both)
    assert open_weights(folder).read("a").size in (4, 8)


def list_kinds():
    import torch

    x = torch.eye(4)
    return {
        "not dense .sparse_coo": x.to_sparse(),
        "not dense .sparse_csr": x.to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "on the device 'meta'": x.to("meta"),
        "of dtype float8_e4m3fn": x.to(torch.float8_e4m3fn),
    }


@with_torch
@pytest.mark.filterwarnings("ignore")  # of torch, that it may change some of these
@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_tensor_without_an_array_is_named(tmp_path, kind, in_memory):
    import torch

    message, tensor = [*list_kinds().items()][kind]
    path = tmp_path / "pytorch_model.bin"
    with pytest.raises(ValueError, match=f"{path}: tensor 'odd' is {message}"):
        if in_memory:
            wrap_torch_tensors(path, {"plain": torch.ones(2), "odd": tensor})
        else:
            torch.save({"plain": torch.ones(2), "odd": tensor}, path)
            open_weights(tmp_path)


@with_torch
def test_a_training_state_holds_the_tensors_of_its_model(tmp_path):
    """Of Lightning, or of torch's tutorials; what is no tensor, or has no name, is left out."""
    import torch

    tensors = {"a": torch.arange(3.0), "step": 7, 5: torch.ones(2)}
    path = tmp_path / "pytorch_model.bin"
    for content in (
        tensors,
        {"state_dict": tensors, "optimizer": {"b": torch.ones(4)}},
        {"model_state_dict": tensors, "b": torch.ones(4)},
        {"state_dict": {"model_state_dict": tensors}},
    ):
        torch.save(content, path)
        weights = open_weights(tmp_path)
        assert list(weights.entries) == ["a"]
        np.testing.assert_array_equal(weights.read("a"), [0, 1, 2])
    torch.save({"a": torch.ones(2), "state_dict": 3}, path)
    assert list(open_weights(tmp_path).entries) == ["a"]
    torch.save([torch.ones(2)], path)
    is_refused(
        "pytorch_model.bin holds a list, not a dictionary of tensors", open_weights, tmp_path
    )


def test_a_torch_file_needs_torch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    message = r"needs torch, which is not installed \(pip install torch\)"
    is_refused(message, open_weights, tmp_path)


def test_a_dtype_that_numpy_lacks_is_named(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": make_entry(0, 32, [32], "F8_E4M3")})
    with pytest.raises(ValueError, match="F8_E4M3"):
        open_weights(tmp_path)


@with_torch
def test_a_tensor_of_a_dtype_that_numpy_lacks_is_refused():
    import torch

    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        message = f"unsupported dtype {str(kind)[6:]}, as in a quantised checkpoint"
        is_refused(message, convert_tensor, torch.ones(2).to(kind))
    wide = torch.tensor([1.0, 2.5], dtype=torch.bfloat16)
    assert (
        convert_tensor(wide).tolist() == [1, 2.5]
        and convert_tensor(wide).dtype == ml_dtypes.bfloat16
    )
    assert convert_tensor(torch.ones(2, requires_grad=True)).tolist() == [1, 1]
    is_refused("a tensor is on the device 'meta'", convert_tensor, torch.ones(2, device="meta"))


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


@pytest.mark.parametrize(
    ("dtype", "size", "end"),
    [
        ("F8_E4M3", 4, ", of a quantised checkpoint"),
        ("F6_E2M3", 3, ", of a quantised checkpoint"),
        ("F4", 2, ", of a quantised checkpoint"),
        ("C64", 32, ""),
    ],
)
def test_a_dtype_of_safetensors_that_is_not_read_is_named(tmp_path, dtype, size, end):
    header = {"odd": make_entry(0, size, [4], dtype)}
    write_safetensors(tmp_path / "model.safetensors", header, b"\0" * size)
    message = f"tensor 'odd' has the unsupported dtype {dtype}{end}$"
    with pytest.raises(ValueError, match=message):
        open_weights(tmp_path)


@with_torch
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64", "int8", "int64"])
def test_a_tensor_of_a_model_has_its_dtype(name):
    import torch

    stored = wrap_torch_tensors("a model", {"w": torch.arange(3).to(getattr(torch, name))})["w"]
    array = stored.read(...)
    assert stored.dtype == name and array.dtype == name


@pytest.mark.parametrize("kind", ["F64", "F32", "F16", "BF16"])
def test_a_number_that_is_not_finite_is_refused_in_every_dtype(tmp_path, kind):
    raw = np.array([1.0, np.nan]).astype(DTYPES[kind]).tobytes()
    header = {"a": make_entry(0, len(raw), [2], kind)}
    write_safetensors(tmp_path / "model.safetensors", header, raw)
    weights = open_weights(tmp_path)
    is_refused("tensor 'a' holds values that are not finite", weights.read, "a")
    assert weights.read("a", slice(0, 1)) == 1
    assert np.isnan(weights.read("a", finite=False).astype(float)).tolist() == [False, True]


def test_a_file_that_was_written_again_is_refused_and_one_that_is_gone_is_read(tmp_path):
    """Also if it has as many bytes as before; the mapped file exists without its name."""
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": make_entry(0, 32, [8])})
    weights = open_weights(tmp_path)
    os.utime(path, ns=(0, 0))
    is_refused("is cut short, or was changed after it was opened", weights.read, "a")
    weights = open_weights(tmp_path)
    path.unlink()
    assert weights.read("a").tolist() == [0] * 8


def test_the_first_of_several_weight_files_is_read(tmp_path):
    """Files of safetensors come before pickled ones, one file before an index."""
    write_safetensors(tmp_path / "1.safetensors", {"a": make_entry(0, 32, [8])})
    index = json.dumps({"weight_map": {"a": "1.safetensors"}})
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert open_weights(tmp_path).file == "model.safetensors.index.json"
    write_safetensors(tmp_path / "model.safetensors", {"a": make_entry(0, 32, [8])})
    assert open_weights(tmp_path).file == "model.safetensors"


def test_a_file_of_gguf_beside_a_config_is_no_matter(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert read_config(tmp_path) == {"model_type": "bert"}
    line = "config.json is a file; a checkpoint is the folder it is in$"
    is_refused(line, read_config, tmp_path / "config.json", error=NotADirectoryError)


@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapter_of_a_model_in_memory_is_refused(has_config):
    """By its config, or by the names of its tensors alone."""
    tensor = SimpleNamespace(dtype="torch.float32", layout="torch.strided", shape=(2,))
    tensor.device = SimpleNamespace(type="cpu")
    name = "q.weight" if has_config else "q.lora_A.default.weight"
    model = SimpleNamespace(state_dict=lambda: {name: tensor})
    if has_config:
        model.peft_config = {}
    is_refused("has an adapter of peft, which is not measured", live_model, model)
    model = SimpleNamespace(state_dict=lambda: {"q.weight": tensor})
    assert live_model(model).names == ["q.weight"]
