"""The depth report against the same measures by hand in PyTorch, on models of transformers."""

import jax
import numpy as np
import pytest

import rank_collapse as rc
from tests.oracles import draws
from tests.support.closeness import assert_close, near
from tests.support.marks import full_but
from tests.support.refusals import each_is_refused

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

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
