"""Heads against `transformers`, run here: of masked tokens, and of causal models in memory."""

import warnings

import numpy as np
import pytest

from tests.support.marks import full_but
from tests.support.refusals import is_refused

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.oracles import architectures

import jax

import rank_collapse as rc
from rank_collapse import pretrained
from rank_collapse.network.passes import OutputPass
from rank_collapse.paths.contributions import PathContributions
from rank_collapse.paths.truncation import TruncatedPass
from rank_collapse.pretrained import predictions
from tests.oracles.architecture_cases import ALBERT, LLAMA, SIZES, Case
from tests.support.closeness import assert_close

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
        text_means = nats[b][chosen[b]].mean(), right[b][chosen[b]].mean()
        for s in range(2):  # the whole network, and all of its paths with attention recomputed
            np.testing.assert_allclose((loss[b, s], share[b, s]), text_means, rtol=2e-5)
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
    opened = pretrained.open_checkpoint(tmp_path / "untied")
    is_refused("tie_word_embeddings=False of a bert model", lambda: opened.masked_head)
    source = pretrained.open_checkpoint(tmp_path / "gpt2")
    targets, chosen = pretrained.targets_of([[1, 2], [3, 0]], [[True, True], [True, False]])
    arguments = source.unembedding, np.zeros((2, 1, 2, 24)), targets, chosen
    is_refused("example 1 has no token to predict", pretrained.token_losses, *arguments)


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


def logits_by_hand(states, table, bias):
    """Computes c tanh(s (x Wᵀ + b)/c) at once over the vocabulary, for s = 0.7 and c = 3."""
    return 3 * np.tanh(0.7 * (np.asarray(states, float) @ table.T + bias) / 3)


def test_a_vocabulary_in_pieces_whose_last_one_is_smaller(monkeypatch):
    """Eleven words in pieces of four: every measure is the one over all words at once.

    The words of the largest logits are among the last three; padded words would have logits near 0,
    which are larger than all others.
    """
    monkeypatch.setattr(predictions, "WORDS", 4)
    rng = np.random.default_rng(0)
    table = rng.normal(size=(11, 6))
    bias = np.where(np.arange(11) >= 8, -1.0, -3.0)
    head = pretrained.Unembedding(np.float32(table), np.float32(bias), softcap=3.0, scale=0.7)
    states = 0.7 * rng.normal(size=(2, 3, 5, 6))
    ids = np.array([[10, 3, 8, 10, 9], [4, 9, 0, 7, 10]])
    mask = np.array([[True] * 5, [True, True, False, True, True]])

    pieces = list(predictions.read_pieces(head, np.float32))
    exist = np.concatenate([piece[3] for piece in pieces])
    assert [int(piece[0]) for piece in pieces] == [0, 4, 8] and exist.sum() == 11
    for index, whole in ((1, table), (2, bias)):
        values = np.concatenate([piece[index] for piece in pieces])
        assert len(values) == 12
        assert_close(values[exist], 0.7 * whole, rtol=1e-6)

    z = logits_by_hand(states, table, bias)
    nats = np.log(np.exp(z).sum(axis=-1))
    log_p = z - nats[..., None]
    targets, keep = pretrained.targets_of(ids, mask)
    np.testing.assert_array_equal(keep[1], [True, False, False, True, False])
    np.testing.assert_array_equal(targets[:, :-1], ids[:, 1:])

    def means(values, chosen):
        return [[row[chosen[b]].mean() for row in values[b]] for b in range(2)]

    losses = -np.take_along_axis(log_p, targets[:, None, :, None], axis=-1)[..., 0]
    tokens = z.argmax(axis=-1)
    assert np.unique(tokens // 4).size > 1 and (tokens >= 8).any()
    loss, same = predictions.mean_losses(head, np.float32(states), ids, mask)
    assert_close(loss, means(losses, keep), rtol=1e-5)
    assert_close(same, means(tokens == tokens[:, :1], keep))
    chosen = np.array([[True, False, True, False, False], [False, True, True, True, False]])
    loss, share = pretrained.token_losses(head, np.float32(states), targets, chosen)
    assert_close(loss, means(losses, chosen), rtol=1e-5)
    assert_close(share, means(tokens == targets[:, None], chosen))

    lens = predictions.lens_measures(
        head, np.float32(states[:, :2]), np.float32(states[:, 2]), mask
    )
    kl = np.sum(np.exp(log_p) * (log_p - log_p[:, 2:]), axis=-1)[:, :2]
    assert_close(lens["kl"], means(kl, mask), rtol=1e-4)
    top = np.argsort(-z, axis=-1)[..., :5]
    overlap = (top[..., :, None] == top[:, 2:, :, None, :]).any(axis=-1).mean(axis=-1)[:, :2]
    assert_close(lens["overlap"], means(overlap, mask), rtol=1e-6)

    by_length = np.stack([states[:, 0], states[:, 1]], axis=1)
    sums = PathContributions(by_length=np.float32(by_length), offset=np.float32(states[:, 2]))
    ours = predictions.losses_by_length(head, sums, ids, mask)
    totals = states.sum(axis=1), states[:, 0] + states[:, 2], states[:, 1] + states[:, 2]
    z = logits_by_hand(np.stack(totals, axis=1), table, bias)
    losses = np.log(np.exp(z).sum(axis=-1))
    losses -= np.take_along_axis(z, targets[:, None, :, None], axis=-1)[..., 0]
    full, first, second = np.transpose(means(losses, keep))
    same = np.array(means(z.argmax(axis=-1) == z.argmax(axis=-1)[:, :1], keep))
    expected = {
        "loss": full,
        "loss_up_to": np.stack([first, full], axis=1),
        "loss_without": np.stack([second, first], axis=1),
        "same_up_to": same[:, [1, 0]],
        "same_without": same[:, [2, 1]],
    }
    assert ours.keys() == expected.keys()
    for name, values in expected.items():
        assert_close(ours[name], values, rtol=1e-4, err_msg=name)
