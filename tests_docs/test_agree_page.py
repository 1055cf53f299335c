"""The examples of docs/agree.md record what they say."""

import re

import jax
import numpy as np
import pytest
from two_processes import REPOSITORY

import rank_collapse as rc
from rank_collapse.agree.comparison import compare_files
from rank_collapse.agree.recording import open_recording

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


def test_there_are_three_examples():
    assert len(BLOCKS) == 3


def test_a_model_of_torch_is_recorded(run):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).train()
    run("with record(", model=model, batch={"src": torch.randn(2, 5, 8)})
    recording = open_recording("a.safetensors")
    assert recording.num_layers == 3 and recording.shape == (2, 5, 8)


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
