"""The README's Python examples run, each once, and the files it links to exist."""

import functools
import re

import numpy as np
import pytest
from conftest import REPOSITORY

import rank_collapse as rc
from rank_collapse.measures.residuals import residual_ratio

TEXT = (REPOSITORY / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
MARKED = re.findall(r"<!-- test: ([\w ]+) -->\n```python\n(.*?)```", TEXT, re.DOTALL)


@functools.cache
def ran(block):
    """The names that an example defines."""
    for name in re.findall(r"^import (\w+)", block, re.MULTILINE):
        pytest.importorskip(name)
    scope = {}
    exec(compile(block, "README.md", "exec"), scope)
    return scope


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.strip().splitlines()[-1][:40])
def test_an_example_runs(block):
    ran(block)


def test_examples_for_checkpoints_flax_models_and_plain_jax():
    flax_model, plain, checkpoint = (ran(block) for name, block in MARKED if name == "models")
    assert checkpoint["trace"].hidden.shape == (13, 5, 768)
    assert not checkpoint["san_config"].attention_skip
    last = [float(residual_ratio(checkpoint[name].hidden[-1])) for name in ("trace", "san_trace")]
    assert last[1] < 1e-3 < last[0]
    assert len(flax_model["profile"]) == 3
    assert flax_model["ours"].w_q.shape == (4, 32, 8)
    assert plain["by_layer"].shape == (4,)
    assert np.all(np.diff(plain["by_layer"]) < 0)


def test_a_model_layer_by_layer():
    found = named("streaming")["found"]
    assert found["whole"]["sums"].by_length.shape == (1, 4, 5, 32)
    ratio = found["SAN"]["profile"]["residual_ratio"]
    assert ratio.shape == (1, 4) and np.all(np.diff(ratio[0]) < 0)


def named(name):
    (block,) = (block for mark, block in MARKED if mark == name)
    return ran(block)


def test_admin_keeps_apart_what_post_ln_makes_equal():
    scope = named("designs")
    cosines = [float(rc.token_cosine(scope[name].output)) for name in ("trace", "collapsed")]
    np.testing.assert_allclose(cosines, [0.81, 0.9999], atol=5e-3)
    output = rc.apply(scope["folded"], scope["batch"][0], scope["plain"]).output
    np.testing.assert_allclose(output, scope["trace"].output, rtol=1e-5, atol=1e-5)


def test_the_sweep_is_that_of_single_networks():
    scope = named("sweep")
    params, x, config = (scope[n] for n in ("params", "x", "config"))
    half = rc.apply(params, x, config.replace(skip_gain=0.5))
    assert scope["curves"].shape == (5, 13)
    np.testing.assert_allclose(
        scope["curves"][2], [residual_ratio(h) for h in half.hidden], rtol=1e-3
    )
    assert np.all(np.diff(scope["curves"][:, 3]) > 0)


def rms(x, gain):
    return gain * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)


def rotated(x):
    """Rotary positions [n, k] (Su et al. 2021): the pair (i, i + k/2) turns by n θ^(-2i/k)."""
    n, k = x.shape
    angle = np.arange(n)[:, None] * 10000.0 ** (-np.arange(0, k, 2) / k)
    a, b = x[:, : k // 2], x[:, k // 2 :]
    c, s = np.cos(angle), np.sin(angle)
    return np.concatenate([a * c - b * s, b * c + a * s], axis=1)


def test_the_network_by_hand_is_the_plain_one():
    """The README's weights through a forward pass of numpy, head by head, as Llama computes."""
    scope = named("by hand")
    x = np.asarray(scope["trace"].hidden[0], np.float64)
    n, share = len(x), scope["h"] // scope["g"]
    for w in scope["weights"]:
        y = rms(x, w["norm_1"])
        for head in range(scope["h"]):
            q, k = rotated(y @ w["q"][head]), rotated(y @ w["k"][head // share])
            scores = np.where(np.tri(n, dtype=bool), q @ k.T / np.sqrt(scope["k"]), -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            x = x + weights @ (y @ w["v"][head // share]) @ w["o"][head]
        y = rms(x, w["norm_2"])
        gate = y @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["up"])) @ w["down"]
    output = rms(x, 1.0)
    np.testing.assert_allclose(scope["trace"].output, output, atol=2e-4)


def test_the_encoder_decoder_is_its_halves():
    scope = named("encoder decoder")
    trace, lengths = scope["trace"], scope["lengths"]
    assert trace.logits.shape == (5, 13) and trace.decoder.cross_attention.shape == (2, 4, 5, 4)
    assert scope["target"].tolist() == [1, 5, 4, 8, 3] and scope["written"].shape == (5,)
    np.testing.assert_allclose(lengths.total, trace.decoder.output, rtol=1e-4, atol=1e-5)


def test_links_and_commands_exist():
    assert len(BLOCKS) >= 2
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (REPOSITORY / target).exists(), target
    for module in set(re.findall(r"python -m (experiments\.\w+)", TEXT)):
        assert (REPOSITORY / (module.replace(".", "/") + ".py")).exists(), module


def test_the_two_commands_set_everything_up():
    start = "python3 -m venv .venv && .venv/bin/pip install -r "
    assert start + "requirements.txt && .venv/bin/python -m experiments.reproduce" in TEXT
    assert start + "requirements-test.txt && .venv/bin/python -m pytest" in TEXT
