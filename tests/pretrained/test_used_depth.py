"""The depth report against the same measures by hand in PyTorch, on models of transformers."""

import re
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.pretrained import used_depth
from rank_collapse.pretrained.report import compute_length_laws
from rank_collapse.pretrained.used_depth import (
    DepthReport,
    DepthUsed,
    PathLength,
    _open_source,
    depth_used,
    describe_missing_head,
)
from tests.oracles import draws
from tests.support.closeness import assert_close, near
from tests.support.marks import full_but
from tests.support.refusals import each_is_refused, is_refused

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

GOLDEN = Path(__file__).parents[1] / "golden"
L, V = 3, 97
SIZES = {"hidden_size": 32, "num_hidden_layers": L, "num_attention_heads": 4, "vocab_size": V}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
MODELS = {
    "GPT2": {"n_embd": 32, "n_layer": L, "n_head": 4, "vocab_size": V, "n_positions": 16},
    "Llama": {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2},
    "Gemma2": {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
}


# The measures that `depth_report` describes.
DESCRIBED = """
lens_kl lens_overlap frozen_kl frozen_overlap attention_cosine mlp_cosine layer_cosine
attention_ratio mlp_ratio attention_share block_influence angle last_angle error cosine later
later_most loss_without residual_ratio token_cosine effective_rank read_residual_ratio
read_token_cosine read_effective_rank spike_norm spike_share first_column entropy loss_up_to
same_up_to path_size
"""


class ByHand:
    """One model of transformers, its states and the inputs and outputs of its blocks' parts."""

    def __init__(self, kind, folder):
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**MODELS[kind], **SPECIAL)
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval().double()
        for p in self.model.parameters():
            p.data.add_(0.1 * torch.randn_like(p))
        self.model.save_pretrained(folder)
        inner = self.model.transformer if kind == "GPT2" else self.model.model
        self.blocks = inner.h if kind == "GPT2" else inner.layers
        self.norm = inner.ln_f if kind == "GPT2" else inner.norm

    def states(self, ids, without=None):
        """X^0 .. X^L before the final norm; block `without` passes its input on."""
        states, hooks = [], []

        def keep(block, args, kwargs, output, index):
            x = args[0] if args else kwargs["hidden_states"]
            hidden = output[0] if isinstance(output, tuple) else output
            if index == without:
                hidden = x
            states.append(hidden) if states else states.extend([x, hidden])
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        for index, block in enumerate(self.blocks):
            hook = lambda *a, i=index: keep(*a, i)  # noqa: E731
            hooks.append(block.register_forward_hook(hook, with_kwargs=True))
        self.logits_of_model = self.model(ids, use_cache=False).logits
        for hook in hooks:
            hook.remove()
        return torch.stack(states, dim=1)

    def logits(self, states):
        z = self.model.lm_head(self.norm(states))
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return z if cap is None else cap * torch.tanh(z / cap)

    def loss(self, logits, ids):
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
        ).mean(dim=1)


@pytest.fixture(scope="module", params=full_but(MODELS, "Llama"))
def depth_case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    by_hand = ByHand(request.param, folder)
    ids = np.random.default_rng(0).integers(3, V, (2, 9))
    done = []
    options = {"chunk": 1, "done": lambda state: done.append((state.layers, len(state.hidden)))}
    report = rc.depth_report(rc.pretrained.open_checkpoint(folder), ids, **options)
    assert done == [(1, 2), (2, 2), (3, 2)]  # after each layer, of two texts
    with torch.no_grad():
        yield report, by_hand, torch.tensor(ids), folder


def test_the_lens_and_what_is_lost_without_a_layer(depth_case):
    report, by_hand, ids, _ = depth_case
    assert set(DESCRIBED.split()) <= report.measures.keys()
    states = by_hand.states(ids)
    logits = by_hand.logits(states)
    torch.testing.assert_close(logits[:, -1], by_hand.logits_of_model)
    log_p = torch.log_softmax(logits, -1)
    kl = torch.sum(log_p.exp() * (log_p - log_p[:, -1:]), -1).mean(-1)
    assert_close(report.measures["lens_kl"], kl, atol=1e-5)
    top = logits.topk(5).indices
    overlap = (top[..., :, None] == top[:, -1:, :, None, :]).any(-1).double().mean((-1, -2))
    assert_close(report.measures["lens_overlap"], overlap, atol=1e-6)
    for s in range(L):
        other = by_hand.states(ids, without=s)
        loss = by_hand.loss(by_hand.logits(other)[:, -1], ids)
        assert_close(report.measures["loss_without"][:, s], loss, atol=1e-5)
        y, without = (by_hand.norm(a)[:, -1] for a in (states, other))
        error = torch.linalg.norm(without - y, dim=(-2, -1)) / torch.linalg.norm(y, dim=(-2, -1))
        assert_close(report.measures["error"][:, s], error, atol=1e-5)
        change, less = states.diff(dim=1), other.diff(dim=1)
        later = torch.linalg.norm(less - change, dim=(-2, -1)) / torch.linalg.norm(
            change, dim=(-2, -1)
        )
        np.testing.assert_allclose(report.measures["later"][:, s, s + 1 :], later[:, s + 1 :], 1e-4)
    cosine = torch.cosine_similarity(states.diff(dim=1), states[:, :-1], dim=-1).mean(-1)
    assert_close(report.measures["layer_cosine"], cosine, atol=1e-5)
    full_loss = by_hand.loss(logits[:, -1], ids)
    assert_close(report.measures["loss_up_to"][:, -1], full_loss, atol=1e-5)


def test_tokens_are_measured_raw_and_as_the_next_layer_reads_them(depth_case):
    report, by_hand, ids, _ = depth_case
    states = by_hand.states(ids)
    norms = [b.ln_1 if hasattr(b, "ln_1") else b.input_layernorm for b in by_hand.blocks]
    reads = [norm(x) for norm, x in zip([*norms, by_hand.norm], states.unbind(1), strict=True)]
    for prefix, tokens in (("", states.unbind(1)), ("read_", reads)):
        expected = np.stack([rc.residual_ratio(x.numpy()) for x in tokens], axis=1)
        np.testing.assert_allclose(report.measures[f"{prefix}residual_ratio"], expected, rtol=1e-4)
    lengths = torch.linalg.norm(states, dim=-1).square()
    share = lengths.max(-1).values / lengths.sum(-1)
    np.testing.assert_allclose(report.measures["spike_share"], share, rtol=1e-4)


def test_a_frozen_lens_divides_by_the_last_state(depth_case):
    """By the statistics of the last state, so that X^l − X^L is a linear part of the logits."""
    report, by_hand, ids, _ = depth_case
    states = by_hand.states(ids)
    centred = states - (states.mean(-1, keepdim=True) if hasattr(by_hand.norm, "bias") else 0)
    last = centred[:, -1:]
    size = torch.sqrt(last.square().mean(-1, keepdim=True) + 1e-6)
    normed_last = by_hand.norm(states)[:, -1:]
    bias = getattr(by_hand.norm, "bias", 0)
    gain = torch.where(last.abs() > 1e-3, (normed_last - bias) * size / last, torch.nan)
    gain = gain.nanmean(dim=(0, 1, 2))  # the norm's own, whatever the family calls it
    z = by_hand.model.lm_head(centred / size * gain + bias)
    cap = getattr(by_hand.model.config, "final_logit_softcapping", None)
    log_p = torch.log_softmax(z if cap is None else cap * torch.tanh(z / cap), -1)
    log_q = torch.log_softmax(by_hand.logits(states)[:, -1:], -1)
    kl = torch.sum(log_p.exp() * (log_p - log_q), -1).mean(-1)
    assert_close(report.measures["frozen_kl"], kl, atol=2e-4)


def test_a_checkpoint_without_a_head_for_the_next_token_is_refused():
    source = rc.pretrained.open_checkpoint(GOLDEN / "bert")
    message = r"^the model \(bert\) has no head that predicts the next token.*masked tokens$"
    with pytest.raises(ValueError, match=message):
        rc.depth_report(source, [[5, 8, 13]])


def test_a_head_for_masked_tokens_is_named_where_there_is_one():
    for head, end in ((None, "needs one$"), (("a", "b"), "one; its head predicts masked tokens$")):
        family = types.SimpleNamespace(masked_head=head)
        source = types.SimpleNamespace(family=family, settings={"model_type": "vit"})
        text = describe_missing_head(source, "it")
        assert re.search(rf"^it \(vit\) has no head that predicts the next token.* {end}", text)


def test_what_is_read_of_a_network_in_memory():
    """Its own table of tokens, unless another is given; a network without tokens has none."""
    config = rc.transformer(2, 2, 8, embedding=rc.EmbeddingConfig(vocab_size=7, d_embed=8))
    params = draws.parameters(config)
    source, head = _open_source(params, config, None)
    assert source.config is config and head.table is params.embedding.tokens
    assert (head.bias, head.softcap, head.scale) == (None, None, 1.0)
    other = rc.pretrained.Unembedding(np.ones((7, 8)))
    assert _open_source(params, config, other)[1] is other
    opened = rc.pretrained.open_checkpoint(GOLDEN / "llama-grouped")
    assert _open_source(opened, None, other) == (opened, other)
    assert _open_source(opened, None, None)[1].table.shape == (40, 24)  # its own
    plain = rc.transformer(2, 2, 8)
    message = "the network has no unembedding: it is not a language model"
    is_refused(message, _open_source, draws.parameters(plain), plain, None)
    ids = [[3, 1], [4]]
    is_refused("text 1 has fewer than 2 tokens", rc.depth_report, params, ids, config)
    for nothing in ([], None):
        is_refused("ids hold no text", rc.depth_report, params, nothing, config)


def test_padded_texts_are_measured_over_the_tokens_that_exist(monkeypatch):
    """Every measure gets the mask; the lenses come in the order in which `LensPass` stacks them."""
    rng, (b, depth, n, d, heads) = np.random.default_rng(0), (2, 2, 4, 6, 2)
    config = rc.transformer(depth, heads, d, embedding=rc.EmbeddingConfig(vocab_size=7, d_embed=d))
    head = rc.pretrained.Unembedding(np.ones((7, d)))
    sums = types.SimpleNamespace(by_length=rng.normal(size=(b, depth + 1, n, d)))
    names = ("residual_ratio", "token_cosine", "effective_rank")
    by_layer = {name: rng.uniform(0.1, 1, (b, depth)) for name in ("error", "attention_share")}
    angles = {n: np.ones((b, depth + 1, depth + 1)) - np.eye(3) for n in ("angle", "last_angle")}
    outputs = {"output": rng.normal(size=(b, n, d)), "outputs": rng.normal(size=(b, depth, n, d))}
    measured = {
        "states": types.SimpleNamespace(measures={"spike_norm": rng.normal(size=(b, depth + 1))}),
        "read": {name: rng.normal(size=(b, depth + 1)) for name in names},
        "attention": {k: rng.normal(size=(b, depth, heads)) for k in ("first_column", "entropy")},
        "influence": by_layer | angles | {"attention_cosine": np.ones((b, depth))},
        "lens": rng.normal(size=(b, 2, depth + 1, n, d)),
        "sums": sums,
    }
    calls = []

    def note(name, result):
        def measure(*arguments):
            calls.append((name, *arguments))
            return result(*arguments)

        monkeypatch.setattr(used_depth, name, measure)

    def stream(source, inputs, groups, *, chunk, done):
        mask = inputs["mask"]
        calls.append(
            ("stream", inputs["x"].tolist(), mask if mask is None else mask.tolist(), chunk)
        )
        return {"": measured | {"removal": dict(outputs)}}

    length_measures = {n: rng.uniform(1, 2, (b, depth + 1)) for n in ("loss_up_to", "same_up_to")}
    monkeypatch.setattr(used_depth, "stream", stream)
    note("losses_by_length", lambda *_: length_measures | {"loss": np.ones(b)})
    note("mean_losses", lambda *_: (np.full((b, depth), 2.0), np.full((b, depth), 3.0)))
    kl = np.arange(3.0) * np.ones((b, 1))
    note("lens_measures", lambda _, states, *__: {"kl": kl + states[0, 0, 0, 0], "overlap": kl})
    ids, padded = [[3, 1, 4, 1], [5, 2]], [[3, 1, 4, 1], [5, 2, 0, 0]]
    mask = [[True] * 4, [True, True, False, False]]
    params = draws.parameters(config)
    report = rc.depth_report(params, ids, config, unembedding=head, chunk=3)

    assert calls[0] == ("stream", padded, mask, 3)
    by_name = {name: [call[1:] for call in calls if call[0] == name] for name, *_ in calls[1:]}
    ((table, got_sums, x, exists),) = by_name["losses_by_length"]
    assert (table, got_sums, x.tolist(), exists.tolist()) == (head, sums, padded, mask)
    ((table, states, x, exists),) = by_name["mean_losses"]
    assert table is head and states is outputs["outputs"]
    assert (x.tolist(), exists.tolist()) == (padded, mask)
    for index, (table, states, output, exists) in enumerate(by_name["lens_measures"]):
        np.testing.assert_array_equal(states, measured["lens"][:, index])
        assert table is head and output is outputs["output"] and exists.tolist() == mask

    measures = report.measures
    for index, name in enumerate(("lens_kl", "frozen_kl")):
        assert_close(measures[name], kl + measured["lens"][0, index, 0, 0, 0])
    for text, length in enumerate((4, 2)):
        for k in range(depth + 1):
            size = np.sqrt((sums.by_length[text, k, :length] ** 2).sum())
            assert measures["path_size"][text, k] == pytest.approx(size)
    for name, values in measured["attention"].items():
        assert_close(measures[name], values.sum(axis=2) / heads)
    for name in names:
        np.testing.assert_array_equal(measures[f"read_{name}"], measured["read"][name])
    assert_close(measures["loss_without"], np.full((b, depth), 2.0))
    assert not {"output", "outputs"} & measures.keys()
    laws = compute_length_laws(heads, by_layer["attention_share"], measures["path_size"])
    assert report.length_laws.keys() == laws.keys()
    for name, law in laws.items():
        assert_close(report.length_laws[name], law)
    calls.clear()
    same = rc.depth_report(
        params, np.array(padded), config, mask=np.array(mask), unembedding=head, chunk=3
    )
    assert calls[0] == ("stream", padded, mask, 3) and str(same) == str(report)
    calls.clear()
    rc.depth_report(params, ids[0], config, unembedding=head)
    assert calls[0] == ("stream", [ids[0]], None, 8)  # one text, all of whose tokens exist
    assert calls[-1][-1].tolist() == [[True] * 4]


def test_a_report_in_words_says_where_its_definitions_disagree(monkeypatch):
    def make_report(layers):
        used = {
            name: DepthUsed(number, f"what {name} is", "someone")
            for name, number in zip(("one", "second"), layers, strict=True)
        }
        lengths = {"paths, loss": PathLength(2, "least k", "someone else")}
        lengths["token"] = PathLength(11, "least of another", "a third")
        measures = {"error": np.array([[0.5, 1.0], [0.25, 0.0]]), "angle": np.zeros((2, 3, 3))}
        laws = {"counted": np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])}
        laws["measured"] = np.array([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
        return DepthReport(measures, used, lengths, laws)

    assert str(make_report((2, 1))).split("\n") == [
        "depth used, of 2 layers:",
        "  one             2  what one is (someone)",
        "  second          1  what second is (someone)",
        "heads on a path, of 2 at most:",
        "  paths, loss     2  least k (someone else)",
        "  token          11  least of another (a third)",
        "  mean length: counted 1.5, measured 0.8",
        "The definitions disagree: 1 by “second”, 2 by “one”.",
    ]
    drawn = []
    monkeypatch.setattr("rank_collapse.report.depth.depth_figure", lambda *a: drawn.append(a))
    report = make_report((2, 1))
    report.figure()
    assert drawn == [(report.measures, report.length_laws, 2)]  # that of the loss
    single = str(make_report((None, 1)))
    assert "  one          none  what one is" in single and "disagree" not in single
    columns = make_report((1, 1)).by_layer()
    assert list(columns) == ["error"]
    np.testing.assert_array_equal(columns["error"], [np.nan, 0.375, 0.5])


@pytest.mark.full
@pytest.mark.parametrize("depth_case", full_but(MODELS, "Gemma2"), indirect=True)
def test_a_network_in_memory_gives_the_same(depth_case):
    report, _, ids, folder = depth_case
    config, params = rc.pretrained.load(folder)
    head = rc.pretrained.open_checkpoint(folder).unembedding
    other = rc.depth_report(params, ids.numpy(), config, unembedding=head)
    near(other.measures, report.measures, atol=1e-5)
    assert (other.used, other.lengths) == (report.used, report.lengths)
    assert "The definitions disagree" in str(other) or len(set(other.used.values())) == 1
    assert sum(ax.get_visible() for ax in other.figure().axes) == 11  # ten panels, a colour bar


def test_each_definition_has_a_measure_of_its_own():
    """Twelve layers; every measure settles at another layer, so that no definition reads a
    measure of another. The threshold is passed by the mean of two texts, and not by each."""

    def settles(at, before, after, length=13):
        """[2, length], whose means change at an index."""
        mean = np.where(np.arange(length) < at, before, after)
        return np.stack([0.5 * mean, 1.5 * mean])

    def turns(at):
        """[2, 13, 13] of states that keep their direction from a layer on."""
        place = np.minimum(np.arange(13), at)
        angle = 0.11 * np.abs(np.subtract.outer(place, place))  # one layer turns too far
        return np.stack([angle, angle])

    measures = {
        "error": np.ones((2, 12)),
        "lens_kl": settles(1, 3.0, 0.29),  # below 0.1 of the largest
        "lens_overlap": settles(2, 0.2, 0.21),  # above 0.2
        "attention_cosine": settles(3, -0.5, 0.9, 12),
        "mlp_cosine": settles(5, -0.5, 0.1, 12),  # with −0.5 it is above 0 from the fourth on
        "layer_cosine": settles(3, -0.5, 0.0, 12),
        "loss_without": settles(4, 2.03, 2.01, 12),  # within 0.01 of 2
        "last_angle": turns(5),
        "angle": turns(6),
        "loss_up_to": settles(7, 1.97, 1.99),
        "same_up_to": settles(8, 0.98, 0.99),
    }
    used, lengths = depth_used(measures, np.array([1.0, 3.0]))
    for name, words in {  # the thresholds of each definition, and whose it is
        "lens, KL": ("KL below 0.1 of", "Hu et al. 2025"),
        "lens, top 5": ("overlap above 0.2$", "Hu et al. 2025"),
        "cosine": ("opposing the stream to amplifying it", "Hu et al. 2025"),
        "single layers": ("without which the loss changes by over 1%$", "^Men et al. 2024"),
        "blocks, last token": ("last token by at most 0.1 π$", "^Gromov et al. 2024"),
        "blocks": ("mean over tokens", "Gromov et al. 2024"),
        "paths, loss": ("least k .* loss within 1%$", "Dong et al. 2021"),
        "paths, token": ("least k .* 99% of the next tokens$", "Dong et al. 2021"),
    }.items():
        for text, pattern in zip((used | lengths)[name][1:], words, strict=True):
            assert re.search(pattern, text), name
    assert {name: one[0] for name, one in (used | lengths).items()} == {
        "lens, KL": 1,
        "lens, top 5": 2,
        "cosine": 3,
        "single layers": 4,
        "blocks, last token": 5,
        "blocks": 6,
        "paths, loss": 7,
        "paths, token": 8,
    }
    # The last layer is none that the lens reaches; a stream that branches never oppose has no turn;
    # of several turns the last counts, and a layer without an MLP has two cosines.
    late = {"lens_kl": settles(11, 3.0, 0.1), "lens_overlap": settles(11, 0.1, 0.9)}
    used, _ = depth_used(measures | late, np.array([2.0]))
    assert (used["lens, KL"].layers, used["lens, top 5"].layers) == (None, None)
    always = {f"{kind}_cosine": np.ones((2, 12)) for kind in ("attention", "mlp", "layer")}
    assert depth_used(measures | always, np.array([2.0]))[0]["cosine"].layers is None
    twice = {"attention_cosine": np.where(np.isin(np.arange(12), [0, 8]), -1.0, 0.2)[None]}
    attention_alone = {n: v for n, v in measures.items() if not n.endswith("_cosine")} | twice
    assert depth_used(attention_alone, np.array([2.0]))[0]["cosine"].layers == 9


@pytest.mark.full
@pytest.mark.parametrize("depth_case", full_but(MODELS, "Gemma2"), indirect=True)
def test_texts_of_different_lengths_are_measured_as_each_alone(depth_case):
    report, _, ids, folder = depth_case
    source, short = rc.pretrained.open_checkpoint(folder), ids[1, :6].tolist()
    both = rc.depth_report(source, [ids[0].tolist(), short])
    first, second = (jax.tree.map(lambda a, i=i: a[i], both.measures) for i in (0, 1))
    single = rc.depth_report(source, short).measures
    near(second, {name: values[0] for name, values in single.items()}, atol=2e-5)
    want = {name: report.measures[name][0] for name in ("lens_kl", "loss_without", "loss_up_to")}
    near(first, want, atol=2e-5)
    config = rc.transformer(2, 2, 8)
    each_is_refused(
        (lambda: rc.depth_report(source, []), "ids hold no text"),
        (lambda: rc.depth_report(source, [short, [5]]), "text 1 has fewer than 2 tokens"),
        (
            lambda: rc.depth_report(draws.parameters(config), np.zeros((1, 4)), config),
            "no unembedding",
        ),
    )
