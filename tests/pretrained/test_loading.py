"""Checkpoint folders and names on the hub: golden states, what is refused and how, draws."""

import json
import os
import re
import shutil
import sys
import types
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rank_collapse import pretrained
from rank_collapse.pretrained import open_checkpoint
from rank_collapse.pretrained.checkpoint_files import open_weights
from tests.oracles.bert_folder import BERT
from tests.oracles.checkpoint_arrays import largest_difference, ours
from tests.support.closeness import assert_close
from tests.support.folders import GOLDEN
from tests.support.marks import full_but
from tests.support.refusals import each_is_refused, is_refused, parametrize_refusals


def change_config(folder, **entries):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))


def rewrite(folder, change):
    """Saves change(name, values) of every tensor."""
    path = folder / "model.safetensors"
    save_file({name: change(name, a) for name, a in load_file(path).items()}, path)


def read_layers(folder, **options):
    """Every layer of an open checkpoint."""
    source = open_checkpoint(folder, **options)
    return [source.layer(i) for i in range(source.config.depth)]


def unreadable(folder, *words, error=ValueError, **options):
    """Asserts that `load` refuses a folder, and that reading it layer by layer does."""
    words = "".join(f"(?=.*{re.escape(word)})" for word in words)
    calls = [partial(call, folder, **options) for call in (pretrained.load, read_layers)]
    each_is_refused(*((call, words) for call in calls), error=error)


def test_missing_folder_config_and_weights(folder):
    unreadable(folder / "none", "none", "does not exist", error=FileNotFoundError)
    file = folder / "model.safetensors"
    unreadable(file, "model.safetensors is a file; a checkpoint is", error=NotADirectoryError)
    (folder / "model.safetensors").unlink()
    unreadable(folder, "holds none of model.safetensors", error=FileNotFoundError)
    (folder / "config.json").unlink()
    unreadable(folder, "config.json does not exist", error=FileNotFoundError)


def test_what_is_no_checkpoint_of_ours_is_said_to_be(folder, tmp_path):
    for file, words in (("adapter_config.json", "merge_and_unload"), ("x.gguf", "gguf_file=")):
        other = Path(shutil.copytree(folder, tmp_path / file.replace(".", "-")))
        (other / file).write_text("{}")
        if file == "x.gguf":
            (other / "config.json").unlink()
        unreadable(other, words)
    unreadable(tmp_path / "x-gguf" / "x.gguf", "converted", error=NotADirectoryError)
    named = types.SimpleNamespace(to_dict=lambda: BERT)
    unreadable(types.SimpleNamespace(config=named, state_dict=dict, peft_config={}), "merge")
    change_config(folder, quantization_config={"quant_method": "gptq"})
    unreadable(folder, "gptq", "delete the entry")
    (folder / "config.json").write_text("{}")
    unreadable(folder, "no model_type")


def test_a_head_alone_is_the_table_of_tied_embeddings(tmp_path):
    copy = shutil.copytree(GOLDEN / "qwen2", tmp_path / "qwen2")
    change_config(copy, tie_word_embeddings=True)
    wanted = pretrained.load(copy)
    path = copy / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("lm_head.weight", None)
    table = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    save_file({"lm_head.weight": tensors.pop(table)} | tensors, path)
    loaded = pretrained.load(copy)
    assert loaded[0] == wanted[0]
    jax.tree.map(np.testing.assert_array_equal, loaded[1], wanted[1])
    change_config(copy, tie_word_embeddings=False)
    unreadable(copy, "embed_tokens.weight")


def test_config_that_is_no_json_or_unknown(folder):
    change_config(folder, model_type="bart")
    unreadable(folder, "model_type='bart'", "roberta")
    (folder / "config.json").write_text("{")
    unreadable(folder, "config.json is not JSON")
    (folder / "config.json").write_text("[]")
    unreadable(folder, "holds a list")


@pytest.mark.parametrize("keep", [4, 100, 0.5, 0.999])
def test_truncated_safetensors(folder, keep):
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[: int(keep * len(raw)) if isinstance(keep, float) else keep])
    unreadable(folder, "model.safetensors", "cut short")


def test_a_file_that_changes_while_it_is_read_is_one_line(folder):
    """Pages of a mapped file that are cut off end the process; a new file in its place does not."""
    path = folder / "model.safetensors"
    weights, content = open_weights(folder), path.read_bytes()
    first, second = weights.names[:2]
    expected = weights.read(first)
    new_path = path.with_name("new")
    new_path.write_bytes(content[:100])
    new_path.replace(path)
    np.testing.assert_array_equal(weights.read(first), expected)
    path.write_bytes(content)
    weights = open_weights(folder)
    os.truncate(path, len(content) // 2)
    is_refused("model.safetensors is cut short, or was changed", weights.read, second)


@pytest.mark.parametrize("name", ["bert-untied", "bert-legacy"])
@pytest.mark.parametrize("keep", [0.02, 0.5, 0.97])
def test_truncated_torch_file(tmp_path, name, keep):
    pytest.importorskip("torch")
    folder = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
    path = folder / "pytorch_model.bin"
    raw = path.read_bytes()
    path.write_bytes(raw[: int(keep * len(raw))])
    unreadable(folder, "pytorch_model.bin")


def test_missing_tensor_and_shard(folder):
    name = "encoder.layer.1.output.dense.weight"

    tensors = load_file(folder / "model.safetensors")
    save_file(
        {k: v for k, v in tensors.items() if not k.endswith(name)}, folder / "model.safetensors"
    )
    unreadable(folder, name, "is missing")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    unreadable(folder, "model-00001-of-00002.safetensors", "missing", error=FileNotFoundError)
    for content in ('{"weight_map": {"a": 3}}', '{"weight_map": ["a"]}', "{}"):
        (folder / "model.safetensors.index.json").write_text(content)
        unreadable(folder, "model.safetensors.index.json", "no weight_map with file names")


def test_no_tensor_of_the_family(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "gpt2-head", tmp_path / "gpt2"))
    shutil.copy(GOLDEN / "bert" / "config.json", folder)
    unreadable(folder, "embeddings.word_embeddings.weight", "is missing")


def test_groups_of_layers_that_only_the_file_has_are_refused(tmp_path):
    """ALBERT counts groups, and the layers of a group."""
    copy = Path(shutil.copytree(GOLDEN / "albert-groups", tmp_path / "albert"))
    change_config(copy, num_hidden_groups=1)
    unreadable(copy, "albert_layer_groups.1.* exist", "implies 1 layer")
    change_config(copy, num_hidden_groups=2, inner_group_num=1)
    unreadable(copy, "albert_layer_groups.0.albert_layers.1.* exist", "implies 1 layer")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"intermediate_size": 30}, ("intermediate.dense.weight", "(28, 24)", "(30, 24)")),
        ({"vocab_size": 41}, ("word_embeddings.weight", "(40, 24)", "(41, 24)")),
        ({"num_hidden_layers": 1}, ("encoder.layer.1.", "1 layer")),
        ({"num_hidden_layers": 3}, ("encoder.layer.2.", "is missing")),
        ({"hidden_act": "snake"}, ("activation 'snake'",)),
        ({"num_attention_heads": 5}, ("num_heads=5 does not divide d_model=24",)),
        ({"position_embedding_type": "relative_key"}, ("relative_key", "not supported")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantised by 'gptq'",)),
        ({"quantization_config": "int8"}, ("quantised by 'int8'",)),
    ],
)
def test_config_that_contradicts_the_weights(folder, entries, words):
    change_config(folder, **entries)
    unreadable(folder, *words)


def test_an_unsupported_network_is_refused_before_weights_are_opened(folder):
    (folder / "model.safetensors").unlink()
    change_config(folder, hidden_act="snake")
    unreadable(folder, "activation 'snake'")


def test_values_that_are_not_finite(folder):
    end = "layer.0.attention.self.key.weight"
    rewrite(folder, lambda name, a: np.nan * a if name.endswith(end) else a)
    is_refused(r"self\.key\.weight.*not finite", pretrained.load, folder)


def test_parts_and_dtypes(folder):
    unreadable(folder, "part='decoder'", part="decoder")
    unreadable(folder, "float64", "jax_enable_x64", dtype=jnp.float64)
    _, params = pretrained.load(folder, dtype=jnp.bfloat16)
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}


def test_bfloat16_file_is_read_in_float32(folder):
    _, before = pretrained.load(folder)
    rewrite(folder, lambda name, a: a.astype(ml_dtypes.bfloat16))
    _, after = pretrained.load(folder)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert b.dtype == jnp.float32
        assert_close(a, b, rtol=2**-8)


def test_a_tensor_is_read_from_the_shard_that_the_index_names(tmp_path):
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "1.safetensors")
    save_file({"a": np.ones(3, np.float32), "b": np.ones(2)}, tmp_path / "2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    assert not open_weights(tmp_path).read("a").any() and open_weights(tmp_path).names == ["a", "b"]
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "1.safetensors"}}))
    elsewhere = r"tensor 'b' of .*index.json is not in 1.safetensors"
    is_refused(elsewhere, open_weights, tmp_path)


def test_weights_of_whole_numbers_are_said_to_be_quantised(folder):
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    name = next(n for n in header if n.endswith("layer.1.output.dense.weight"))
    header[name]["dtype"] = "I32"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    is_refused(r"has dtype int32; a quantised checkpoint", read_layers, folder)


@pytest.mark.full
@pytest.mark.parametrize(
    ("package", "words"), [("torch", "save_file"), ("safetensors", "pip install safetensors")]
)
def test_files_whose_package_is_not_installed(monkeypatch, tmp_path, package, words):
    """The message on a .bin file says how to convert it, and that command does it."""
    name = {"torch": "bert-untied", "safetensors": "bert"}[package]
    folder = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, package, None)
        with pytest.raises((ValueError, ImportError), match="not installed") as caught:
            open_weights(folder)
        assert package in str(caught.value) and words in str(caught.value)
    if package == "torch":
        pytest.importorskip("torch")
        _, before = pretrained.load(folder)
        command = str(caught.value).partition('python -c "')[2].removesuffix('"')
        monkeypatch.chdir(folder)
        exec(command)
        assert open_weights(folder).file == "model.safetensors"
        jax.tree.map(np.testing.assert_array_equal, before, pretrained.load(folder)[1])


def test_formats_hold_the_same_numbers(tmp_path):
    """A strided (transposed) view in a torch file is read as torch would."""
    torch = pytest.importorskip("torch")
    w = torch.arange(12.0).reshape(3, 4)
    for modern in (True, False):
        torch.save(
            {"a": w.T, "b": w[1:, ::2], "c": w.to(torch.bfloat16), "d": torch.tensor(2.5)},
            tmp_path / "pytorch_model.bin",
            _use_new_zipfile_serialization=modern,
        )
        weights = open_weights(tmp_path)
        np.testing.assert_array_equal(weights.read("a"), w.T.numpy())
        np.testing.assert_array_equal(weights.read("b"), w[1:, ::2].numpy())
        np.testing.assert_array_equal(weights.read("c").astype(np.float32), w.numpy())
        assert weights.read("d").shape == () and float(weights.read("d")) == 2.5


@parametrize_refusals(
    [
        (call, config, "a Net is not a checkpoint folder, a config")
        for call in (pretrained.load, open_checkpoint, pretrained.settings_of)
        for config in (None, {"n_layer": 2})
    ]
)
def test_a_model_that_is_none_of_transformers_is_named(arguments, message):
    call, config = arguments
    is_refused(message, lambda: call(type("Net", (), {"state_dict": dict, "config": config})()))


FOLDERS = sorted(f.name for f in GOLDEN.iterdir() if (f / "expected.npz").exists())


def test_golden_folders_exist():
    families = {"bert", "roberta", "albert", "xlnet", "distilbert", "t5", "gpt2", "vit", "llama"}
    assert families <= {name.split("-")[0] for name in FOLDERS}


@pytest.mark.full
@pytest.mark.parametrize("name", full_but(FOLDERS, "bert", "llama-grouped", "vit-wide"))
def test_hidden_states_and_attentions(name, optimized):
    if list((GOLDEN / name).glob("*.bin")):
        pytest.importorskip("torch")
    with np.load(GOLDEN / name / "expected.npz") as file:
        stored = dict(file)
    arguments = {k[3:]: v for k, v in stored.items() if k.startswith("in/")}
    expected = {k[4:]: v for k, v in stored.items() if k.startswith("out/")}
    worst = largest_difference(ours(GOLDEN / name, arguments), expected, arguments)
    assert max(worst.values()) < 1e-5, worst
