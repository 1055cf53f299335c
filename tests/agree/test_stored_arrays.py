"""Arrays that are read part by part: both formats, orders in memory, and files that end early."""

import io
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from rank_collapse.agree.stored_arrays import (
    dump_safetensors,
    name_damage,
    open_npz,
    open_safetensors,
)
from tests.support.processes import python
from tests.support.refusals import is_refused

RNG = np.random.default_rng(5)
ARRAYS = {
    "a": RNG.normal(size=(3, 2, 4)),
    "half": RNG.normal(size=(2, 3)).astype(np.float16),
    "brain": RNG.normal(size=(4, 5)).astype(ml_dtypes.bfloat16),
    "columns": np.asfortranarray(RNG.normal(size=(3, 7))),
    "numbers": np.arange(6).reshape(3, 2),
    "other": np.zeros(2),
}
WANTED = [name for name in ARRAYS if name != "other"]


def write_npz(path):
    np.savez(path, **ARRAYS)
    return open_npz(path, WANTED)


def write_safetensors(path):
    save_file({name: np.ascontiguousarray(a) for name, a in ARRAYS.items()}, path, {"from": "me"})
    return open_safetensors(path, WANTED)


@pytest.mark.parametrize("write", [write_npz, write_safetensors])
def test_parts_along_the_first_axis_are_those_that_were_written(write, tmp_path):
    arrays, metadata, others = write(tmp_path / "file.npz")  # the name decides nothing
    assert arrays.keys() == set(WANTED) and others == ["other"]
    assert metadata == ({"from": "me"} if write is write_safetensors else {})
    for name, stored in arrays.items():
        assert (stored.shape, stored.dtype) == (ARRAYS[name].shape, ARRAYS[name].dtype)
        for _ in range(2):  # a second reading begins at the start again
            parts = list(stored.read_rows())
            assert [part.shape for part in parts] == [stored.shape[1:]] * stored.shape[0]
            np.testing.assert_array_equal(np.stack(parts), ARRAYS[name])


NAMES = ("torch", "inputs", "noise", "dtype", "branches", "jax", "model")
METADATA = {name: f"the “{name}”\n" for name in NAMES}


def test_two_processes_write_the_same_bytes():
    """The package writes its metadata in an order that is random in each process and file."""
    arrays = {name: np.ascontiguousarray(array) for name, array in ARRAYS.items()}
    first = dump_safetensors(arrays, METADATA)
    code = (
        "import sys; from tests.agree import test_stored_arrays as t; import numpy as np; "
        "arrays = {name: np.ascontiguousarray(a) for name, a in t.ARRAYS.items()}; "
        "sys.stdout.write(t.dump_safetensors(arrays, t.METADATA).hex())"
    )
    assert python("-c", code).stdout == first.hex()
    assert dump_safetensors(arrays, dict(reversed(METADATA.items()))) == first
    assert (8 + int.from_bytes(first[:8], "little")) % 8 == 0


@pytest.mark.parametrize("metadata", [METADATA, {}])
def test_what_is_dumped_is_read_again(metadata, tmp_path):
    arrays = {name: np.ascontiguousarray(array) for name, array in ARRAYS.items()}
    path = tmp_path / "file.safetensors"
    path.write_bytes(dump_safetensors(arrays, metadata))
    stored, read_metadata, others = open_safetensors(path, WANTED)
    assert read_metadata == metadata and others == ["other"] and stored.keys() == set(WANTED)
    for name, array in stored.items():
        np.testing.assert_array_equal(np.stack(list(array.read_rows())), arrays[name])


def test_a_file_that_ends_early_is_named(tmp_path):
    path = tmp_path / "cut.safetensors"
    arrays, _, _ = write_safetensors(path)
    path.write_bytes(path.read_bytes()[:-200])
    names = [name for name in WANTED if _ends_early(arrays[name])]
    assert names  # at least the last array of the file

    def read():
        with name_damage(path):
            list(arrays[names[0]].read_rows())

    is_refused(f"{path.name} is damaged: {names[0]} ends early", read)


def _ends_early(stored):
    try:
        list(stored.read_rows())
    except ValueError:
        return True
    return False


def test_any_error_of_reading_becomes_one_line_with_the_file(tmp_path):
    for error in (KeyError("x"), StopIteration(), OSError("disk"), ValueError("bad\nvalue")):

        def read(error=error):
            with name_damage(tmp_path / "f.npz"):
                raise error

        is_refused(r"f\.npz is damaged: [^\n]+$", read)


def test_the_second_version_of_numpys_format_is_read_and_the_third_refused(tmp_path):
    for version in ((1, 0), (2, 0), (3, 0)):
        buffer, path = io.BytesIO(), tmp_path / "v.npz"
        np.lib.format.write_array(buffer, ARRAYS["a"], version=version)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.npy", buffer.getvalue())
        if version == (3, 0):
            with pytest.raises(ValueError, match=r"^version \(3, 0\) of NumPy's format$"):
                open_npz(path, ["a"])
        else:
            rows = open_npz(path, ["a"])[0]["a"].read_rows()
            np.testing.assert_array_equal(np.stack(list(rows)), ARRAYS["a"])


def test_an_array_without_axes_and_a_file_without_metadata_are_opened(tmp_path):
    path = tmp_path / "s.safetensors"
    save_file({"a": np.full((), 2.0, np.float32), "b": np.ones((2, 3), np.float32)}, path)
    arrays, metadata, others = open_safetensors(path, ["a", "b"])
    assert arrays["a"].shape == () and metadata == {} and others == []
    np.testing.assert_array_equal(np.stack(list(arrays["b"].read_rows())), np.ones((2, 3)))


def test_two_bytes_without_a_type_alone_are_bfloat16(tmp_path):
    np.savez(tmp_path / "v.npz", a=np.zeros((2, 3), "V2"), b=np.zeros((2, 3), "V4"))
    arrays, _, _ = open_npz(tmp_path / "v.npz", ["a", "b"])
    assert (arrays["a"].dtype, arrays["b"].dtype) == (ml_dtypes.bfloat16, np.dtype("V4"))


def test_objects_are_refused(tmp_path):
    np.savez(tmp_path / "o.npz", a=np.array([None, {}], object))
    is_refused("a is not an array of numbers", open_npz, tmp_path / "o.npz", ["a"])
