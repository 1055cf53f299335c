"""Weights of other programs are converted without running their code."""

import json
import pickle

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
