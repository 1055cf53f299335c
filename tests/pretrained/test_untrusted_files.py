"""Checkpoints of a stranger: whatever they say, one ValueError, and no foreign memory read."""

import importlib.util
import json
import pickle
import shutil
import tarfile
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from refusals import is_refused

from rank_collapse import pretrained
from rank_collapse.pretrained.checkpoint import open_weights

with_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
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


def archive_of(path, pickled, *, method=zipfile.ZIP_STORED):
    """A file of `torch.save` with this pickle in it."""
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")


@with_torch
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("function", ["os.system", "torch.hub.load"])
def test_pickled_code_is_refused_and_not_executed(tmp_path, monkeypatch, function, zipped):
    monkeypatch.chdir(tmp_path)
    module, _, name = function.rpartition(".")
    arguments = pickle.dumps(("touch executed",), protocol=2)[2:-1]
    call = pickle.PROTO + b"\x02" + f"c{module}\n{name}\n".encode() + arguments + b"R."
    path = tmp_path / "pytorch_model.bin"
    archive_of(path, call) if zipped else path.write_bytes(call)
    assert isinstance(one_line(lambda: open_weights(tmp_path)), ValueError)
    assert not (tmp_path / "executed").exists()


@with_torch
def test_a_torch_file_of_other_things_than_tensors(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    archive_of(path, pickle.dumps([1, 2], protocol=2))
    assert "holds a list, not" in str(one_line(lambda: open_weights(tmp_path)))
    archive_of(path, pickle.dumps({"a": 1, ("b", 2): "c"}, protocol=2))
    assert open_weights(tmp_path).names == []
    archive_of(path, b"\x80\x02" + 100_000 * b"]" + 100_000 * b"a" + b".")
    assert isinstance(one_line(lambda: open_weights(tmp_path)), ValueError)
    with tarfile.open(path, "w") as tar:  # the format before the first with pickles alone
        tar.addfile(tarfile.TarInfo("storages"))
    assert "not a readable torch file" in str(one_line(lambda: open_weights(tmp_path)))


@with_torch
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
    found = one_line(lambda: open_weights(path.parent))
    for tensor in [] if isinstance(found, ValueError) else found.names:
        one_line(lambda tensor=tensor: found.read(tensor))


def safetensors(path, header, data=b"\0" * 32):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def span(begin=0, end=16, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": span(-16, 0)},
        {"a": span(16, 0, [-4])},
        {"a": span(0, 16.0)},
        {"a": span(0, 16, [4.0])},
        {"a": span(0, 4, [True])},
        {"a": span(dtype=["F32"])},
        {"a": span() | {"data_offsets": [0, 16, 32]}},
        {"a": span(), "b": span(12, 28)},
        {"a": span(24, 40)},
        {"a": span(0, 12)},
        {"a": span(0, 32, [2**62, 2])},
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' * 100_000,
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header):
    safetensors(tmp_path / "model.safetensors", header)
    found = one_line(lambda: open_weights(tmp_path))
    assert isinstance(found, ValueError) and "not a safetensors file" in str(found)


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "F4"])
def test_a_quantised_dtype_is_named(tmp_path, kind):
    safetensors(
        tmp_path / "model.safetensors", {"a": span(0, 32, (64 if kind == "F4" else 32,), kind)}
    )
    assert f"unsupported dtype {kind}: a quantised" in str(one_line(lambda: open_weights(tmp_path)))


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
    header = {"a": span(0, 32, want.shape, kind)}
    safetensors(tmp_path / "model.safetensors", header, raw.tobytes())
    found = open_weights(tmp_path)
    assert found.entries["a"].dtype == found.read("a").dtype == want.dtype
    np.testing.assert_array_equal(found.read("a"), want)
    np.testing.assert_array_equal(found.read("a", slice(1, 2)), want[1:])


@pytest.mark.parametrize("shard", [1.5, ["a"], {}, None, "../x", ""])
def test_an_index_names_files_of_its_folder(tmp_path, shard):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard, "b": "b.safetensors"}}))
    safetensors(tmp_path / "b.safetensors", {"b": span(0, 32, (8,))})
    is_refused(r"index\.json", open_weights, tmp_path, error=(ValueError, FileNotFoundError))
    index.write_text('{"weight_map": ' + "[" * 100_000)
    assert "is not JSON" in str(one_line(lambda: open_weights(tmp_path)))


@pytest.mark.parametrize("model_type", pretrained.FAMILIES)
def test_an_odd_entry_of_a_config_is_one_line(model_type):
    """Of the network alone: one odd value for each entry, all of them in turn."""
    for i, name in enumerate(pretrained.FAMILIES[model_type].defaults):
        given = {"model_type": model_type, name: ODD[i % len(ODD)]}
        one_line(lambda given=given: pretrained.config_of(given))


@pytest.mark.full
@pytest.mark.parametrize("model_type", sorted(FOLDERS))
def test_an_odd_entry_beside_weights_is_one_line(tmp_path, model_type):
    folder = shutil.copytree(FOLDERS[model_type], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    if list(folder.glob("*.bin")):
        pytest.importorskip("torch")
    for name in pretrained.FAMILIES[model_type].defaults:
        for value in ODD:
            (folder / "config.json").write_text(json.dumps(config | {name: value}))
            one_line(lambda: pretrained.load(folder))


@pytest.mark.parametrize("model_type", pretrained.FAMILIES)
def test_numbers_of_wrong_size_or_sign_are_named(model_type):
    """Each number of each family: beyond what an index or a float32 holds, below its least."""
    family = pretrained.FAMILIES[model_type]
    kinds = {name: set(entry.kinds) & {int, float} for name, entry in family.schema.items()}
    for name in (name for name, kind in kinds.items() if kind):
        for value in (2**31, 2**40, -2, 1e39):
            if (value == -2 and name == "layerscale_value") or (value > 0 and float in kinds[name]):
                continue
            given = {"model_type": model_type, name: value}
            found = str(one_line(lambda given=given: pretrained.settings_of(given)))
            assert found.startswith(f"{name}={value!r} is not"), found
        if kinds[name] == {float}:
            given = {"model_type": model_type, name: 1e39}
            found = str(one_line(lambda given=given: pretrained.settings_of(given)))
            assert found.startswith(f"{name}=1e+39 is not between"), found


@pytest.mark.parametrize("model_type", pretrained.FAMILIES)
def test_no_family_has_layers_without_end(model_type):
    """By whatever entry they are counted: the one of the table, and any that changes the depth."""
    family, most = pretrained.FAMILIES[model_type], 10_000
    base = {"model_type": model_type}
    for part in family.parts or (None,):
        usual = pretrained.config_of(base, part).depth
        counted = {family.reads["depth"]}
        for name, entry in family.schema.items():
            if entry.kinds != (int,):
                continue
            given = base | {name: 5}
            found = one_line(lambda g=given, part=part: pretrained.config_of(g, part))
            if not isinstance(found, ValueError) and found.depth != usual:
                counted.add(name)
        for name in counted:
            for value in (10**9, most + 1, 0):
                given = base | {name: value}
                found = str(one_line(lambda g=given, part=part: pretrained.config_of(g, part)))
                assert found.startswith(f"{name}={value} is not between 1 and {most}"), found


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
    name = pretrained.FAMILIES[model_type].reads["depth"]
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
