"""Names: of the hub, of folders, of published sizes with random weights."""

import shutil
import sys
import types
from fnmatch import fnmatch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse import pretrained
from rank_collapse.pretrained.loading import hub_folder, is_hub_name
from tests.oracles.bert_folder import BERT
from tests.support.folders import GOLDEN
from tests.support.refusals import is_refused


def test_random_like_bert():
    config, params = pretrained.random_like(BERT, jax.random.key(0))
    assert config.depth == 2 and params.layers.mlp.w_in.shape == (2, 32, 40)
    tokens = params.embedding.tokens
    assert not np.any(tokens[0]) and np.all(np.any(tokens[1:], axis=1))
    for leaf in (tokens[1:], params.layers.attention.w_q, params.layers.mlp.w_out):
        # The standard deviation of n normals has a relative error of 1/√(2n).
        assert abs(float(leaf.std()) / 0.02 - 1) < 5 / np.sqrt(2 * leaf.size)
    assert not np.any(params.layers.attention.b_q)
    assert np.all(params.layers.attention_norm.gain == 1)
    assert not np.array_equal(params.layers.attention.w_q[0], params.layers.attention.w_q[1])
    table = pretrained.open_random(BERT, jax.random.key(0)).outside.embedding.tokens
    rows = [7, 3, 299, 150]  # read before the whole table is drawn
    np.testing.assert_array_equal(table.rows(rows), tokens[np.array(rows)])
    _, again = pretrained.random_like(BERT, jax.random.key(0))
    _, other = pretrained.random_like(BERT, jax.random.key(1))
    np.testing.assert_array_equal(again.layers.mlp.w_in, params.layers.mlp.w_in)
    assert not np.array_equal(other.layers.mlp.w_in, params.layers.mlp.w_in)


def test_published_sizes():
    shapes = {
        name: pretrained.config_of(f"random:{name}")
        for name in ("bert-base-cased", "albert-base-v2", "xlnet-base-cased")
    }
    for name, config in shapes.items():
        assert (config.depth, config.num_heads, config.d_model) == (12, 12, 768)
        curves = pretrained.published_curves(pretrained.settings_of(f"random:{name}"), 12)
        assert set(curves) == {"init", "pretrained"}
    assert shapes["albert-base-v2"].num_rows == 1
    assert pretrained.published_curves(pretrained.settings_of(BERT), 2) == {}
    is_refused("bert-huge", pretrained.config_of, "bert-huge", error=FileNotFoundError)


READERS = {
    "settings_of": pretrained.settings_of,
    "load": pretrained.load,
    "open_checkpoint": pretrained.open_checkpoint,
    "random_like": lambda name: pretrained.random_like(name, jax.random.key(0)),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["bert-base-cased", "gpt2", "openai/gpt2"])
def test_a_plain_name_is_a_folder_everywhere(reader, name, tmp_path, monkeypatch):
    """A published name that is no folder names both others, and a folder of that name is read."""
    monkeypatch.chdir(tmp_path)
    drawn = "bert-base-cased" if name == "bert-base-cased" else "NAME"
    message = rf"{name} does not exist; hf:{name} is .*hub, random:{drawn} random weights"
    is_refused(message, READERS[reader], name, error=FileNotFoundError)
    shutil.copytree(GOLDEN / "bert", tmp_path / name)
    READERS[reader](name)
    assert pretrained.config_of(name).depth == pretrained.config_of(GOLDEN / "bert").depth


def test_random_weights_of_a_folder_or_a_name():
    """They are those of `random_like`, the first key, and say of themselves that they are."""
    folder = GOLDEN / "bert"
    source = f"random:{folder}"
    config, params = pretrained.load(source)
    expected_config, expected = pretrained.random_like(folder, jax.random.key(0))
    assert config == expected_config
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    opened = pretrained.open_checkpoint(source)
    assert opened.has_random_weights
    np.testing.assert_array_equal(opened.layer(1).mlp.w_in, expected.layers.mlp.w_in[1])
    for name in (folder, source):
        half = pretrained.open_checkpoint(name, dtype=jnp.bfloat16)
        assert {a.dtype for a in jax.tree.leaves(half.layer(0))} == {jnp.dtype("bfloat16")}
    drawn = pretrained.open_random(folder, jax.random.key(0), dtype=jnp.bfloat16)
    assert drawn.layer(0).mlp.w_in.dtype == jnp.bfloat16
    t5 = f"random:{GOLDEN / 't5-gated'}"
    assert pretrained.open_checkpoint(t5, part="decoder").settings["part"] == "decoder"
    options = {"key": jax.random.key(1), "part": "decoder"}
    opened = pretrained.open_random(GOLDEN / "t5-gated", **options)
    config, drawn_decoder = pretrained.random_like(GOLDEN / "t5-gated", **options)
    assert opened.config == config and config.mask == "causal" and config.cross_attention
    expected = drawn_decoder.layers.cross.w_k[1]
    np.testing.assert_array_equal(opened.layer(1).cross.w_k, expected)
    assert not pretrained.open_checkpoint(folder).has_random_weights
    is_refused("random: has no name", pretrained.load, "random:")
    is_refused(r"none does not exist", pretrained.load, "random:none", error=FileNotFoundError)


PYTHIA = "EleutherAI/pythia-70m@step1"


INSTEAD = "hf download EleutherAI/pythia-70m --revision step1 --local-dir pythia-70m"


def fake_hub(monkeypatch, download):
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_names_on_the_hub_without_the_package_and_without_internet(monkeypatch):
    assert is_hub_name("hf:gpt2") and not is_hub_name("gpt2") and not is_hub_name({"model_type": 1})
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    missing = f"huggingface_hub, which is not installed: pip.*{INSTEAD}"
    missing = missing.replace("pip.*", r"pip install huggingface_hub \(the extra 'hub'\); .*")
    is_refused(missing, pretrained.load, f"hf:{PYTHIA}", error=ImportError)

    def download(*_, **__):
        raise ConnectionError("no route\nto host")

    fake_hub(monkeypatch, download)
    offline = f"no route to host; give a folder.*{INSTEAD}"
    is_refused(offline, pretrained.settings_of, f"hf:{PYTHIA}", error=FileNotFoundError)


# Files of published models: what a tokenizer is read from, and weights in one file or in several.
BESIDE = ["config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt"]
BESIDE += ["vocab.json", "merges.txt", "special_tokens_map.json", "spiece.model"]
BESIDE += ["sentencepiece.bpe.model"]
SAFE = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
PICKLED = ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"]


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "README.md"])
def test_weights_in_the_safer_format_where_there_are_some(monkeypatch, tmp_path, file):
    requests = []

    def download(name, *, revision, allow_patterns):
        requests.append((name, revision, allow_patterns))
        if any(fnmatch(file, pattern) for pattern in allow_patterns):
            (tmp_path / file).touch()
        return str(tmp_path)

    fake_hub(monkeypatch, download)
    if file == "README.md":
        is_refused(
            r"hf:gpt2: there are none of model\.safe",
            hub_folder,
            "hf:gpt2",
            error=FileNotFoundError,
        )
    else:
        assert hub_folder("hf:gpt2") == tmp_path
    assert all(a[:2] == ("gpt2", None) for a in requests)
    for (*_, patterns), wanted in zip(requests, (SAFE, PICKLED), strict=False):
        others = PICKLED if wanted is SAFE else SAFE
        for name in (*BESIDE, *wanted):
            assert any(fnmatch(name, pattern) for pattern in patterns), name
        for name in ("flax_model.msgpack", "tf_model.h5", "README.md", *others):
            assert not any(fnmatch(name, pattern) for pattern in patterns), name
    assert len(requests) == (1 if file == "model.safetensors" else 2)
    requests.clear()
    if file != "README.md":
        assert hub_folder("hf:a/gpt2@v1") == tmp_path
        assert {a[:2] for a in requests} == {("a/gpt2", "v1")}


def test_the_architecture_of_a_model_of_the_hub_may_have_random_weights(monkeypatch):
    fake_hub(monkeypatch, lambda name, **_: str(GOLDEN / name))
    assert pretrained.config_of("random:hf:bert") == pretrained.config_of(GOLDEN / "bert")
