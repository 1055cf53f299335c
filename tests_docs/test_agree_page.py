"""The examples of docs/agree.md record what they say, and its commands run."""

import copy
import re
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.agree.comparison import compare_files
from rank_collapse.agree.recording import open_recording
from rank_collapse.command import main
from tests.support.folders import REPOSITORY
from tests_docs.test_commands import read_commands

PAGE = (REPOSITORY / "docs" / "agree.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs the example with a text, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run_block(text, **scope):
        (block,) = (block for block in BLOCKS if text in block)
        exec(compile(block, "agree.md", "exec"), scope)

    return run_block


def test_there_are_six_examples():
    assert len(BLOCKS) == 6


def test_a_model_of_torch_is_recorded(run):
    torch = pytest.importorskip("torch")
    from rank_collapse.torch import record

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).train()
    batch = {"src": torch.randn(2, 5, 8)}
    run('with record(model, "a.safetensors"):', model=model, batch=batch)
    recording = open_recording("a.safetensors")
    assert recording.num_layers == 3 and recording.shape == (2, 5, 8)
    states = [layer.before for layer in recording.read_layers()]
    states.append(list(recording.read_layers())[-1].after)
    np.savez("b.npz", residual=np.stack(states).astype("float32"))
    run('with record(model, "c.safetensors"', model=model.eval(), batch=batch, record=record)
    assert open_recording("c.safetensors").metadata["inputs"] == "b.npz"


def make_function():
    def model(x):
        for _ in range(2):
            with jax.named_scope("attention"):
                attention = jax.nn.softmax(x @ x.T) @ x
            x = x + attention
            with jax.named_scope("mlp"):
                mlp = jax.nn.gelu(x)
            x = x + mlp
        return x

    return model


def test_a_function_is_recorded(run):
    model, x = make_function(), np.ones((4, 6), "float32")
    run('rc.record_function(model, x, "c.safetensors", branches={', rc=rc, model=model, x=x)
    assert open_recording("c.safetensors").num_layers == 2


def test_a_function_takes_in_another_run(run):
    model, branches = make_function(), {"attention": "attention", "mlp": "mlp"}
    x = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")
    rc.record_function(model, x, "b.npz", branches=branches)
    run('branches=branches, inputs="b.npz"', rc=rc, model=model, x=x, branches=branches)
    assert open_recording("c.safetensors").metadata["inputs"] == "b.npz"
    assert compare_files("c.safetensors", "b.npz").agree


def test_a_network_takes_in_another_run(run):
    """As the page says it of `rc.paths.name_states`."""
    config = rc.transformer(depth=2, num_heads=2, d_model=8, norm_placement="pre")
    params = rc.init(jax.random.key(0), config)
    x = jax.random.normal(jax.random.key(1), (6, 8))
    rc.record(rc.apply(params, x, config), "b.npz")
    branches = {"attention": "attention", "mlp": "mlp"}
    model = rc.paths.name_states(params, config)
    run('branches=branches, inputs="b.npz"', rc=rc, model=model, x=x, branches=branches)
    answer = compare_files("c.safetensors", "b.npz")
    assert answer.agree and {row.part for row in answer.rows} == {"attention", "mlp", "layer"}


def test_a_trace_and_arrays_are_recorded(run):
    config = rc.transformer(depth=2, num_heads=2, d_model=8, norm_placement="pre")
    x = jax.random.normal(jax.random.key(1), (6, 8))
    trace = rc.apply(rc.init(jax.random.key(0), config), x, config)
    states, branches = np.asarray(trace.hidden), np.asarray(trace.layers.attention_branch)
    run("rc.record(", trace=trace, mask=np.ones(6), states=states, branches=branches)
    assert compare_files("b.safetensors", "b.npz").exit_code == 0


def test_a_loop_of_layers_is_recorded_by_numpy(run):
    torch = pytest.importorskip("torch")
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3)).requires_grad_(
        False
    )
    run("np.savez(", hidden=torch.randn(5, 8), model=model, np=np)
    assert open_recording("b.npz").num_layers == 3


# Sizes of the commands here; a page of published shapes takes minutes.
SMALLER = {"400": "2", "20": "1", "16": "1", "pythia-410m": None, "qwen2.5-0.5b": None}


def save_checkpoint(folder):
    """Write a small random Llama with a tokenizer of bytes, and return the model."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def run_command(words, monkeypatch):
    """Run a command of the page at smaller sizes, and return its exit code."""
    words = [w for w in words if w.startswith("--") or "=" not in w]
    words = [SMALLER.get(word, word) for word in words]
    program, *arguments = [word for word in words if word is not None]
    if program == "rank-collapse":
        return main(arguments)
    assert (program, arguments[0]) == ("python", "-m")
    monkeypatch.setattr(sys, "argv", arguments[1:])
    monkeypatch.delitem(sys.modules, arguments[1], raising=False)
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    return 0


@pytest.mark.full
def test_the_commands_run_in_a_folder_with_a_checkpoint(run, capsys, monkeypatch):
    """In the order of the page. The files of its examples are of the checkpoint."""
    torch = pytest.importorskip("torch")
    model = save_checkpoint(Path("FOLDER"))
    from rank_collapse.torch import record
    from tests_docs.agree_trained import BFLOAT16, read_shipped, record_folder

    tokens = read_shipped(Path("FOLDER"))
    ids, mask = map(torch.as_tensor, tokens)
    batch = {"input_ids": ids.long(), "attention_mask": mask.long()}
    run('with record(model, "a.safetensors"):', model=model, batch=batch)
    for name in ("b.safetensors", "b.npz"):
        record_folder(Path("FOLDER"), Path(name), tokens, BFLOAT16)
    scope = {"model": copy.deepcopy(model), "batch": batch, "record": record}
    run('with record(model, "c.safetensors"', **scope)
    commands = [words for words in read_commands(REPOSITORY / "docs" / "agree.md") if words]
    assert sum(words[0] == "rank-collapse" for words in commands) >= 5
    for words in commands:
        assert run_command(words, monkeypatch) == 0, words
        printed = capsys.readouterr().out
        if words[0] == "rank-collapse":
            assert printed.startswith("agree to "), (words, printed)
            assert all(Path(f"agree.{suffix}").exists() for suffix in ("html", "csv", "json"))
            for suffix in ("html", "csv", "json"):
                Path(f"agree.{suffix}").unlink()
    assert (Path("Q4_FOLDER") / "model.safetensors").exists()
