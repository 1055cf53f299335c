"""Rows of `rank-collapse check` of made-up profiles: over texts or over layers."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest

from rank_collapse.command import checked, main
from rank_collapse.command.checked import READ, WHOLE, Checked
from tests.support.closeness import assert_close


def test_layers_of_one_token_are_counted_over_layers_and_over_texts():
    """Flags are [texts, layers]: three layers in two of three texts."""
    flags = np.array([[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]], bool)
    position = np.array([[9, 5, 5, 9], [9, 9, 2, 2], [9, 9, 9, 9]])

    class Profile(dict):
        spiked = flags

    none = Profile(spike_token=position)
    none.spiked = np.zeros_like(flags)
    checked = SimpleNamespace(networks={WHOLE: Profile(spike_token=position), READ: none})
    (text,) = Checked.find_one_token_layers(checked).values()
    assert text == "1, 2, 3; largest entry at position 2, 5, in 2 of 3 texts"


@pytest.mark.full
def test_a_token_that_holds_the_residual_is_named(tmp_path):
    """The page, the table and the headline numbers say so."""
    transformers, torch = (pytest.importorskip(name) for name in ("transformers", "torch"))
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    with torch.no_grad():
        model.transformer.wte.weight[7] *= 1000
    model.save_pretrained(tmp_path / "gpt2")
    out = tmp_path / "page.html"
    texts = ("--ids=5,8,13,7,21,34,55,2", "--ids=3,1,4,9,15,16,7,25", "--ids=3,1,4,9,15,16,25,8")
    assert main([str(tmp_path / "gpt2"), *texts, "--out", str(out)]) == 0
    one_token = json.loads(out.with_suffix(".json").read_text())["one_token"]
    row = "Layers whose residual ratio is of one token, full model"
    where = "0, 1, 2; largest entry at position 3, 6, in 2 of 3 texts"
    assert one_token == {row: where} and f"{row}: {where}." in out.read_text("utf-8")
    rows = list(csv.DictReader(out.with_suffix(".csv").read_text().splitlines()))
    flags = [r for r in rows if r["measure"] == "spiked" and float(r["value"])]
    named = {(r["network"], r["text"]) for r in flags if r["network"] != "attention alone"}
    assert named == {(WHOLE, "0"), (WHOLE, "1")}


@pytest.mark.parametrize("causal", [False, True])
def test_equal_weights_are_what_entropies_are_compared_with(causal):
    """Equal weights are the softmax of zeros, here for texts of 3 and 5 tokens."""
    entropies, columns = [], []
    for n in (3, 5):
        weights = np.tri(n) if causal else np.ones((n, n))
        weights /= weights.sum(axis=1, keepdims=True)
        logs = np.log(np.where(weights > 0, weights, 1))
        entropies.append(-(weights * logs).sum(axis=1).mean())
        columns.append(weights[:, 0].mean())
    uniform = checked.uniform_attention(np.array([3, 5]), causal)
    assert_close(uniform, (np.mean(entropies), np.mean(columns)))
