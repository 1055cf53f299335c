"""Folders of other programs are named, with the command that converts them."""

import json
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.command import main
from rank_collapse.command.folders import check_folder
from tests.support.folders import REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden" / "bert"
KINDS = {
    "zero_to_fp32.py": "a checkpoint of DeepSpeed, in parts",
    "ckpt.pt": "a checkpoint of nanoGPT",
    "flax_model.msgpack": "a checkpoint of Flax",
    "tf_model.h5": "a checkpoint of TensorFlow",
}
FILES = {
    "zero_to_fp32.py": "{0}/zero_to_fp32.py {0} {0} --safe_serialization",
    "ckpt.pt": "save_pretrained('{0}/converted')",
    "flax_model.msgpack": "from_pretrained('{0}', from_flax=True)",
    "tf_model.h5": "from_pretrained('{0}', from_tf=True)",
}


@pytest.mark.parametrize("name", FILES)
def test_another_programs_folder_names_the_command_that_converts_it(name, tmp_path, capsys):
    (tmp_path / name).write_text("")
    assert main(["check", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert FILES[name].format(tmp_path) in err
    assert err.startswith(f"error: {tmp_path} is {KINDS[name]}; convert it: ")
    file = tmp_path / name  # the file itself
    assert main(["check", str(file)]) == 2
    err = capsys.readouterr().err
    assert FILES[name].format(tmp_path) in err
    assert err.startswith(f"error: {file} is {KINDS[name]}; convert it: ")


def test_the_checkpoint_in_a_folder_is_named(tmp_path, capsys):
    for step in (900, 1000):
        shutil.copytree(GOLDEN, tmp_path / "run" / f"checkpoint-{step}")
    (tmp_path / "run" / "checkpoint-best").mkdir()
    shutil.copytree(GOLDEN, tmp_path / "sentences" / "0_Transformer")
    (tmp_path / "sentences" / "modules.json").write_text("[]")
    pooling = tmp_path / "sentences" / "1_Pooling"
    pooling.mkdir()
    (pooling / "config.json").write_text(json.dumps({"word_embedding_dimension": 8}))
    other = tmp_path / "run" / "settings"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (other / "checkpoint-7").mkdir()
    named = {
        "run/settings": ("the run of a Trainer", "run/settings/checkpoint-7"),
        "run": ("the run of a Trainer", "run/checkpoint-1000"),
        "sentences": ("a model of sentence-transformers", "sentences/0_Transformer"),
        "sentences/1_Pooling": (
            "a layer of sentence-transformers without attention",
            "sentences",
        ),
    }
    for folder, (kind, checkpoint) in named.items():
        assert main(["check", str(tmp_path / folder)]) == 2
        err, path = capsys.readouterr().err, tmp_path / folder
        assert err == f"error: {path} is {kind}: rank-collapse check {tmp_path / checkpoint}\n"


def test_names_with_spaces_are_quoted_in_the_commands(tmp_path, capsys):
    """The command of the message is the words of a shell."""
    run, parts = tmp_path / "my run", tmp_path / "in parts"
    shutil.copytree(GOLDEN, run / "checkpoint-10")
    parts.mkdir()
    (parts / "zero_to_fp32.py").write_text("")
    words = {
        run: ["rank-collapse", "check", str(run / "checkpoint-10")],
        parts: ["python", f"{parts}/zero_to_fp32.py", *2 * [str(parts)], "--safe_serialization"],
    }
    for folder, expected in words.items():
        assert main(["check", str(folder)]) == 2
        command = capsys.readouterr().err.removeprefix(f"error: {folder}").split(": ", 1)[1]
        assert shlex.split(command) == expected


def test_a_checkpoint_that_a_trainer_saved_at_the_top_is_read(tmp_path):
    """The last weights lie next to the folders of the steps."""
    shutil.copytree(GOLDEN, tmp_path / "run")
    shutil.copytree(GOLDEN, tmp_path / "run" / "checkpoint-10")
    check_folder(tmp_path / "run")


def nanogpt(config, weights, ids):
    """Computes the logits of nanoGPT's model.py in NumPy."""
    from scipy.special import erf

    def norm(x, name):
        x = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
        return x * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0)

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    x = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][: len(ids)]
    for layer in range(config["n_layer"]):
        name = f"transformer.h.{layer}"
        qkv = linear(norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn")
        heads = np.reshape(qkv, (len(ids), 3, config["n_head"], -1)).transpose(1, 2, 0, 3)
        q, k, v = heads
        scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        mixing = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixing /= mixing.sum(axis=-1, keepdims=True)
        x = x + linear((mixing @ v).transpose(1, 0, 2).reshape(x.shape), f"{name}.attn.c_proj")
        inner = linear(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc")
        inner = inner * (1 + erf(inner / np.sqrt(2))) / 2
        x = x + linear(inner, f"{name}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ weights["lm_head.weight"].T


@pytest.mark.full
def test_the_command_for_nanogpt_keeps_its_logits(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    config = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 12, "vocab_size": 30}
    config |= {"bias": True, "dropout": 0.0}
    rng = np.random.default_rng(0)
    sizes = {"ln_1": (8,), "attn.c_attn": (24, 8), "attn.c_proj": (8, 8), "ln_2": (8,)}
    sizes |= {"mlp.c_fc": (32, 8), "mlp.c_proj": (8, 32)}
    shapes = {f"transformer.h.{i}.{name}": s for i in range(2) for name, s in sizes.items()}
    shapes["transformer.ln_f"] = (8,)
    weights = {f"{name}.weight": rng.normal(size=s) for name, s in shapes.items()}
    weights |= {f"{n}.bias": rng.normal(size=s[:1]) for n, s in shapes.items()}
    weights["transformer.wpe.weight"] = rng.normal(size=(12, 8))
    weights["transformer.wte.weight"] = weights["lm_head.weight"] = rng.normal(size=(30, 8))
    state = {"_orig_mod." + name: torch.from_numpy(a).float() for name, a in weights.items()}
    torch.save({"model": state, "model_args": config, "iter_num": 3}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match="nanoGPT") as raised:
        check_folder(tmp_path / "ckpt.pt")
    _, command = str(raised.value).split("convert it: python ")
    subprocess.run(f"{sys.executable} {command}", shell=True, check=True)
    ids = rng.integers(30, size=9)
    source = rc.pretrained.open_checkpoint(tmp_path / "converted")
    loaded_config, params = rc.pretrained.load(tmp_path / "converted")
    output = np.asarray(rc.apply(params, ids, loaded_config).output, np.float64)
    logits = output @ weights["lm_head.weight"].T
    assert source.is_causal_lm
    np.testing.assert_allclose(logits, nanogpt(config, weights, ids), rtol=1e-3, atol=1e-4)
