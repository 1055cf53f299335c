"""Heads against `transformers`, run here: of masked tokens, and of causal models in memory."""

import warnings

import numpy as np
import pytest

from tests.support.marks import full_but

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.oracles import architectures

import jax

import rank_collapse as rc
from rank_collapse import pretrained
from rank_collapse.network.passes import OutputPass
from rank_collapse.paths.truncation import TruncatedPass
from tests.oracles.architecture_cases import ALBERT, LLAMA, SIZES, Case

HEADS = {
    "bert": Case("BertForMaskedLM", SIZES | {"hidden_act": "relu", "layer_norm_eps": 1e-3}),
    "albert": Case("AlbertForMaskedLM", ALBERT),
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("name", full_but(HEADS, "bert"))
def test_losses_and_tokens_are_those_of_transformers(name, tmp_path):
    model = architectures.build(HEADS[name])
    architectures.save(model, tmp_path)
    arguments = architectures.inputs(model)
    ids, mask = arguments["input_ids"], arguments["attention_mask"].astype(bool)
    chosen = mask & (np.arange(ids.shape[1]) % 3 == 1)
    with torch.no_grad():
        logits = model(**{n: torch.from_numpy(a) for n, a in arguments.items()}).logits
    log_p = torch.log_softmax(logits.double(), dim=-1).numpy()
    # A target that the head itself would name, so that the share of right ones is not 0
    targets = np.where(np.arange(ids.shape[1]) % 2 == 0, log_p.argmax(axis=-1), ids)
    nats = -np.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    right = log_p.argmax(axis=-1) == targets

    source = pretrained.open_checkpoint(tmp_path)
    depth = source.config.depth
    passes = (
        ("output", OutputPass()),
        ("longest", TruncatedPass(depth)),
        ("short", TruncatedPass(0)),
    )
    groups = {"": pretrained.Group(passes)}
    outputs = pretrained.stream(source, {"x": ids, "mask": mask}, groups)[""]
    head = source.masked_head
    states = head.read(np.stack([outputs["output"], outputs["longest"]], axis=1))
    loss, share = pretrained.token_losses(head.unembedding, states, targets, chosen)
    for b in range(2):
        of_text = nats[b][chosen[b]].mean(), right[b][chosen[b]].mean()
        for s in range(2):  # the whole network, and all of its paths with attention recomputed
            np.testing.assert_allclose((loss[b, s], share[b, s]), of_text, rtol=2e-5)
    assert 0 < right[chosen].mean() < 1
    config, params = pretrained.load(tmp_path)
    for k, streamed in (0, outputs["short"]), (depth, outputs["longest"]):
        truncate = jax.jit(lambda x, m, k=k: run_truncated(params, x, config, k, m))
        np.testing.assert_allclose(
            streamed[1][mask[1]], truncate(ids[1], mask[1])[mask[1]], rtol=1e-4, atol=1e-5
        )


def run_truncated(params, x, config, k, mask):
    """Runs the function in memory: it has channels of all lengths and empties those beyond k."""
    return rc.truncated(params, x, config, k, mask=mask).output


def test_networks_without_such_a_head_and_what_is_refused(tmp_path):
    for name, case in {
        "bare": Case("BertModel", SIZES),
        "gpt2": architectures.CASES["gpt2"],
    }.items():
        architectures.save(architectures.build(case), tmp_path / name)
        assert pretrained.open_checkpoint(tmp_path / name).masked_head is None
    untied = Case("BertForMaskedLM", SIZES | {"tie_word_embeddings": False})
    architectures.save(architectures.build(untied), tmp_path / "untied")
    with pytest.raises(ValueError, match="tie_word_embeddings=False of a bert model"):
        _ = pretrained.open_checkpoint(tmp_path / "untied").masked_head
    source = pretrained.open_checkpoint(tmp_path / "gpt2")
    targets, chosen = pretrained.targets_of([[1, 2], [3, 0]], [[True, True], [True, False]])
    with pytest.raises(ValueError, match="example 1 has no token to predict"):
        pretrained.token_losses(source.unembedding, np.zeros((2, 1, 2, 24)), targets, chosen)


CAUSAL = architectures.CASES | architectures.FORMS | {"llama": Case("LlamaForCausalLM", LLAMA)}


@pytest.mark.parametrize("name", full_but(["gpt_neox", "gptj", "llama"], "gptj"))
def test_logits_of_models_in_memory_are_theirs(name):
    model = architectures.build(CAUSAL[name])
    config, params = pretrained.load(model)
    head = pretrained.open_checkpoint(model).unembedding
    table = np.concatenate([rows for _, rows in head.table.chunks(16)])
    ids = np.array([3, 1, 4, 1, 5])
    logits = np.asarray(rc.apply(params, ids, config).output) @ table.T
    logits = logits if head.bias is None else logits + head.bias
    with torch.no_grad():
        expected = model(torch.tensor(ids[None])).logits[0].numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
