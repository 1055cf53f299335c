"""Weights of other programs are converted without running their code."""

import json
import pickle
import struct

import numpy as np
import pytest

from experiments.trained import convert


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_of_torch_are_read_without_torch(zipped, tmp_path):
    """Slices, transposed and shared storages; both of torch's formats."""
    torch = pytest.importorskip("torch")
    values = torch.randn(4, 6)
    tensors = {"plain": values, "slice": values[1:3, ::2], "turned": values.T}
    tensors |= {"number": torch.tensor(3), "half": torch.randn(5).half(), "none": values[:0]}
    tensors |= {"double": torch.randn(3).double(), "flags": values > 0}
    tensors |= {"small": torch.arange(-3, 4).int(), "bytes": torch.arange(9).byte()}
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    arrays = convert.read_torch(path)
    assert arrays.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(arrays[name], tensor.numpy(), strict=True)


def test_no_pickled_code_is_executed(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    for call in (print, np.zeros, json.loads):
        for protocol in (0, 2, 4):
            path.write_bytes(pickle.dumps({"weight": Calls(call)}, protocol))
            with pytest.raises(pickle.UnpicklingError, match="is not a tensor"):
                convert.read_torch(path)
    path.write_bytes(b"ctorch\nload\n.")  # of torch itself, but no storage
    with pytest.raises(pickle.UnpicklingError, match=r"^torch\.load is not a tensor"):
        convert.read_torch(path)


class Calls:
    """Pickled as a call of a function."""

    def __init__(self, function):
        self.function = function

    def __reduce__(self):
        return self.function, ("1",)


def test_a_checkpoint_has_tensors_of_float32_as_transformers_reads_them(tmp_path):
    """Views of other arrays are copied in their order; the format of the file is named."""
    safetensors = pytest.importorskip("safetensors")
    values = np.arange(6.0).reshape(2, 3)
    tensors = {"turned": values.T, "half": values.astype(np.float16), "whole": values.astype(int)}
    convert.write_checkpoint(tmp_path, {"model_type": "bert"}, tensors)
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "bert"}
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert read.keys() == tensors.keys()
    for name, array in read.items():
        np.testing.assert_array_equal(array, tensors[name].astype(np.float32), strict=True)


def test_numbers_of_a_ctranslate2_file_have_the_types_of_its_library(tmp_path):
    """The types by their number in its file: float32, int8, int16, int32 and float16."""
    kinds = ("<f4", "i1", "<i2", "<i4", "<f2")
    content = struct.pack("<IH", 6, 2) + b"W\0" + struct.pack("<II", 3, len(kinds))
    for number, kind in enumerate(kinds):
        values = np.array([[1, -2, 3]], kind)
        content += struct.pack("<H", 3) + f"k{number}\0".encode()
        content += struct.pack("<BIIBI", 2, 1, 3, number, values.nbytes) + values.tobytes()
    (tmp_path / "model.bin").write_bytes(content)
    tensors = convert._ctranslate2(tmp_path / "model.bin")
    assert [array.dtype for array in tensors.values()] == [np.dtype(kind) for kind in kinds]
    assert {name: array.tolist() for name, array in tensors.items()} == {
        f"k{number}": [[1, -2, 3]] for number in range(5)
    }
