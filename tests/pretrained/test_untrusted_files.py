"""Checkpoints of a stranger: whatever they say, one ValueError, and no foreign memory read."""

import json
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rank_collapse import pretrained
from rank_collapse.pretrained.checkpoint import Checkpoint, safetensors_entries

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FOLDERS = {json.loads((f / "config.json").read_text())["model_type"]: f for f in GOLDEN.glob("*/")}
ODD = (None, -1, 0, 10**9, 1.5, float("nan"), "x", [], [1, 2], {}, True)


def one_line(call):
    """What `call` returns, or the ValueError's message, which must be one line."""
    try:
        return call()
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
        return error


class _Storage:
    """Pickles as torch writes a storage: a persistent id."""

    def __init__(self, count):
        self.id = ("storage", _Global("torch", "FloatStorage"), "0", "cpu", count)


class _Global:
    """Pickles to the name of something in a module that need not exist here."""

    def __init__(self, module, name):
        self.module, self.name = module, name


class _Pickler(pickle._Pickler):
    def persistent_id(self, obj):
        return obj.id if isinstance(obj, _Storage) else None

    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, _Global):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, _View):
            self.save(_Global("torch._utils", "_rebuild_tensor_v2"))
            self.save(obj.arguments)
            self.write(pickle.REDUCE)
        else:
            super().save(obj, save_persistent_id)


class _View:
    def __init__(self, *arguments):
        self.arguments = arguments


def torch_file(folder, start, shape, strides, data=b"\0" * 64, claimed=16):
    """A pytorch_model.bin with one float32 tensor "w" of these numbers."""
    path = folder / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("archive/data.pkl", "w") as file:
            view = _View(_Storage(claimed), start, shape, strides, False, {})
            _Pickler(file, protocol=2).dump({"w": view})
        archive.writestr("archive/data/0", data)
    return path


def test_a_torch_file_written_here_is_read(tmp_path):
    values = np.arange(16, dtype=np.float32)
    torch_file(tmp_path, 1, (3, 2), (4, 2), values.tobytes())
    np.testing.assert_array_equal(Checkpoint(tmp_path).read("w"), [[1, 3], [5, 7], [9, 11]])


@pytest.mark.parametrize(
    ("start", "shape", "strides", "message"),
    [
        (0, (2, 2), (100, -99), "-99 is no offset, size or stride"),  # last index 1, between far
        (8, (3, 3), (-5, 6), "-5 is no"),
        (-1, (2,), (1,), "-1 is no"),
        (0, (-2, -2), (1, 1), "-2 is no"),
        (0, (2.0,), (1,), "2.0 is no"),
        (True, (2,), (1,), "True is no"),
        (0, (2, 2), (1,), "something else"),
        (0, (16, 2), (1, 1), "reaches beyond its data"),
        (0, (17,), (1,), "reaches beyond its data"),
        (17, (0,), (1,), "reaches beyond its data"),
        (0, (10**9, 10**9), (0, 0), "has only 1 values"),
        (0, (4, 4), (1, 1), "has only 7 values"),
    ],
)
def test_a_view_that_leaves_its_storage_or_repeats_it_is_refused(
    tmp_path, start, shape, strides, message
):
    torch_file(tmp_path, start, shape, strides)
    found = one_line(lambda: Checkpoint(tmp_path).read("w"))
    assert isinstance(found, ValueError) and message in str(found)


INTEGERS = st.integers(-3, 20)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_views_read_what_lies_in_their_storage(tmp_path_factory, data):
    shape = data.draw(st.lists(INTEGERS, max_size=3))
    strides = data.draw(st.lists(INTEGERS, min_size=len(shape), max_size=len(shape)))
    start = data.draw(INTEGERS)
    folder = tmp_path_factory.mktemp("views")
    values = np.arange(1, 17, dtype=np.float32)
    torch_file(folder, start, tuple(shape), tuple(strides), values.tobytes())
    found = one_line(lambda: Checkpoint(folder).read("w"))
    if isinstance(found, ValueError):
        return
    places = start + sum(
        (np.arange(n).reshape(-1, *[1] * (len(shape) - 1 - i)) * s)
        for i, (n, s) in enumerate(zip(shape, strides, strict=True))
    )
    np.testing.assert_array_equal(found, values[places] if found.size else found)


def test_a_compressed_pickle_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
    assert "data.pkl is compressed" in str(one_line(lambda: Checkpoint(tmp_path)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_torch_file_is_one_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "pytorch_model.bin"
    name = data.draw(st.sampled_from(["bert-legacy", "bert-untied"]))
    raw = bytearray((GOLDEN / name / path.name).read_bytes())
    # Most damage lies in the pickles, at the file's beginning, or in the directory at its end.
    places = st.one_of(st.integers(0, 3000), st.integers(len(raw) - 3000, len(raw) - 1))
    for place in data.draw(st.lists(places, min_size=1, max_size=4)):
        raw[place] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    found = one_line(lambda: Checkpoint(path.parent))
    for tensor in [] if isinstance(found, ValueError) else found.names:
        one_line(lambda tensor=tensor: found.read(tensor))


def safetensors(path, header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 32)
    return path


def span(begin=0, end=16, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": span(-16, 0)}, "header is not that of"),
        ({"a": span(16, 0, [-4])}, "header is not that of"),
        ({"a": span(0, 16.0)}, "header is not that of"),
        ({"a": span(0, 16, [4.0])}, "header is not that of"),
        ({"a": span(0, 4, [True])}, "header is not that of"),
        ({"a": span(dtype=["F32"])}, "header is not that of"),
        ({"a": span() | {"data_offsets": [0, 16, 32]}}, "header is not that of"),
        ({"a": span(), "b": span(12, 28)}, "'b' begins within the tensor before it"),
        ({"a": span(24, 40)}, "cut short: tensor 'a'"),
        ({"a": span(0, 12)}, "of shape (4,) has 12 bytes"),
        (b"[" * 100_000, "header is not that of"),
        (b'{"a": ' + b"9" * 5000 + b"}", "header is not that of"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, message):
    path = safetensors(tmp_path / "model.safetensors", header)
    found = one_line(lambda: safetensors_entries(path))
    assert isinstance(found, ValueError) and message in str(found)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-40, 40), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner)),
    max_leaves=4,
)
FIELDS = {"dtype": st.sampled_from(["F32", "I8", "BF16"]), "shape": st.lists(INTEGERS, max_size=3)}
FIELDS |= {"data_offsets": st.lists(st.integers(-8, 40), min_size=2, max_size=2)}
SPANS = st.fixed_dictionaries({name: st.one_of(kind, JSON) for name, kind in FIELDS.items()})


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.text(max_size=2), st.one_of(SPANS, JSON), max_size=3))
def test_headers_are_believed_only_within_the_file(tmp_path_factory, header):
    path = safetensors(tmp_path_factory.mktemp("headers") / "model.safetensors", header)
    found = one_line(lambda: safetensors_entries(path))
    if isinstance(found, ValueError):
        return
    size = path.stat().st_size
    for entry in found.values():
        count = int(np.prod(entry.shape)) * np.dtype(entry.dtype).itemsize
        assert size - 32 <= entry.offset and entry.offset + count <= size


@pytest.mark.parametrize("shard", [1.5, ["a"], {}, None, "../x", ""])
def test_an_index_names_files_of_its_folder(tmp_path, shard):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard, "b": "b.safetensors"}}))
    safetensors(tmp_path / "b.safetensors", {"b": span()})
    with pytest.raises((ValueError, FileNotFoundError), match=r"index\.json"):
        Checkpoint(tmp_path)
    index.write_text('{"weight_map": ' + "[" * 100_000)
    assert "is not JSON" in str(one_line(lambda: Checkpoint(tmp_path)))


@pytest.mark.parametrize("model_type", sorted(FOLDERS))
def test_an_odd_entry_of_a_config_is_one_line(tmp_path, model_type):
    folder = shutil.copytree(FOLDERS[model_type], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for name in pretrained.families.FAMILIES[model_type].defaults:
        for value in ODD:
            (folder / "config.json").write_text(json.dumps(config | {name: value}))
            one_line(lambda: pretrained.load(folder))


@pytest.mark.parametrize("value", ODD)
def test_a_model_type_or_an_activation_of_another_type(value):
    assert isinstance(one_line(lambda: pretrained.config_of({"model_type": value})), ValueError)
    if value is not None:  # null is the default
        odd = {"model_type": "bert", "hidden_act": value}
        assert repr(value) in str(one_line(lambda: pretrained.config_of(odd)))


@pytest.mark.parametrize("model_type", sorted(FOLDERS))
def test_a_depth_beyond_the_files_builds_nothing(tmp_path, model_type, monkeypatch):
    monkeypatch.setattr(np, "empty", None)  # what stacks of layers are made with
    folder = shutil.copytree(FOLDERS[model_type], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    names = {"num_hidden_layers", "num_layers", "n_layer", "n_layers"}
    (name,) = names & pretrained.families.FAMILIES[model_type].defaults.keys()
    refused = {10**9: f"{name}=1000000000 is not between 1 and 10000"}
    if model_type != "albert":  # which runs through the layers that it has
        refused |= {10_000: "but config.json implies 10000 layers"}
    if "layer_types" in config:  # one for each layer, compared first
        refused[10_000] = f"layer_types has 2 entries for {name}=10000"
    for depth, message in refused.items():
        (folder / "config.json").write_text(json.dumps(config | {name: depth}))
        assert message in str(one_line(lambda: pretrained.load(folder)))


def test_albert_does_not_repeat_its_layers_without_end():
    settings = {"model_type": "albert", "num_hidden_layers": 10_000, "inner_group_num": 10_000}
    found = str(one_line(lambda: pretrained.config_of(settings)))
    assert "num_hidden_layers=10000 times inner_group_num=10000" in found
