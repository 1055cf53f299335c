"""Masks in a watch: which tokens exist by masks that the model gets, biases, and places alone."""

import pytest

pytest.importorskip("torch")

from rank_collapse.torch import watch
from tests.oracles.measured_layers import (
    CLUSTERS,
    EXISTS,
    LEFT,
    RIGHT,
    Attention,
    F,
    N,
    Stack,
    X,
    add_in_turn,
    check_layers,
    compute_entropy,
    compute_ratio,
    join_parts,
    make_similar,
    nn,
    pad,
    torch,
    watch_step,
    write_heads,
    write_views,
)


def check_right_padding(attention):
    """Compares with the tokens and weights of an attention that alone hides the padding."""
    model = Stack(lambda self, x, mask: self.attentions[0](x), attention)
    row, watched = watch_step(model, pad(RIGHT))
    x, p = attention.kept
    assert row["residual_ratio"] == pytest.approx([compute_ratio(x, RIGHT)], 1e-4)
    entropy = compute_entropy(p, RIGHT)
    assert row["attention_entropy"] == pytest.approx([entropy], 1e-4), watched.describe()


@pytest.mark.parametrize("move", [write_heads, write_views, join_parts])
def test_keys_are_hidden_where_masked_scores_are_written_elsewhere(move):
    def weigh(scores, mask):
        return move(scores.masked_fill(RIGHT[:, None, None] == 0, -torch.inf)).softmax(-1)

    attention = Attention(weigh)
    check_right_padding(attention)


def small_bias(size):
    return lambda scores, mask: (scores - size * (1 - mask[:, None, None])).softmax(-1)


def multiply(scores, mask):
    p = scores.softmax(-1) * mask[:, None, None]
    return p / p.sum(-1, keepdim=True)


def multiply_exponentials(scores, mask):
    size = scores.exp() * mask[:, None, None]
    return size / size.sum(-1, keepdim=True)


MASKINGS = {
    "-100": small_bias(100.0),
    "-50": small_bias(50.0),
    "-10000": small_bias(1e4),
    "filled with -99": lambda s, m: s.masked_fill(m[:, None, None] == 0, -99.0).softmax(-1),
    "after the softmax": multiply,
    "of exponentials": multiply_exponentials,
}


@pytest.mark.parametrize("mask", [RIGHT, LEFT, RIGHT.bool()], ids=["right", "left", "bool"])
@pytest.mark.parametrize("weigh", MASKINGS.values(), ids=MASKINGS)
def test_a_mask_that_the_model_gets_counts(weigh, mask):
    torch.manual_seed(0)
    attention = Attention(lambda scores, m: weigh(scores, m.long()))
    watched = check_layers(Stack(add_in_turn, attention), pad(mask), mask)
    assert "attention reads tokens" not in watched.describe()


@pytest.mark.parametrize("mask", [RIGHT, LEFT.bool()], ids=["right", "left, bool"])
def test_a_mask_that_attention_forgets_counts_and_is_said_once(mask, caplog):
    torch.manual_seed(0)
    watched = check_layers(Stack(add_in_turn, Attention(), Attention()), pad(mask), mask)
    text = "attention reads tokens that the argument mask leaves out"
    assert watched.describe().count(text) == 2 and caplog.text.count(text) == 1


@pytest.mark.parametrize("name", ["loss_mask", "bool_masked_pos", "global_attention_mask"])
def test_other_masks_do_not_count(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention()

        def forward(self, x, **masks):
            return self.attention(x).square().mean()

    model = Model()
    watched = watch(model, 1)
    model(X, **{name: RIGHT}).backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    assert watched.rows[0]["residual_ratio"] == pytest.approx([compute_ratio(X)], 1e-4)


def make_bias(query):
    """Returns a bias that tokens decide, as a forget gate: what is far away counts less."""
    gates = F.logsigmoid(query.mean(-1)).cumsum(-1)
    return gates[..., :, None] - gates[..., None, :]


BIASES = {
    "filled": lambda bias, keeps: bias.masked_fill(~keeps, -torch.inf),
    "where": lambda bias, keeps: torch.where(keeps, bias, -1e9),
    "added": lambda bias, keeps: bias + torch.where(keeps, 0.0, -1e9),
}
ATTEND = {
    "kernel": lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias),
    "written out": lambda q, k, v, bias: (q @ k.mT * 8**-0.5 + bias).softmax(-1) @ v,
}


@pytest.mark.parametrize("put", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("attend", ATTEND.values(), ids=ATTEND)
def test_a_mask_inside_a_bias_that_tokens_decide(put, attend):
    """The mask hides padding, though the bias around it depends on content."""
    keeps, kept = EXISTS & torch.ones(N, N).tril().bool(), []

    def see(query, key, value, _):
        bias = put(make_bias(query), keeps)
        kept.append((query @ key.mT * 8**-0.5 + bias).softmax(-1).detach())
        return attend(query, key, value, bias)

    attention = Attention(attend=see)
    model = Stack(lambda self, x, mask: self.attentions[0](x), attention)
    row, watched = watch_step(model, pad(RIGHT))
    assert row["residual_ratio"] == pytest.approx([compute_ratio(pad(RIGHT), RIGHT)], 1e-4), watched
    assert row["attention_entropy"] == pytest.approx([compute_entropy(kept[0], RIGHT)], 1e-4)


@pytest.mark.parametrize("attend", ATTEND.values(), ids=ATTEND)
def test_a_factor_of_a_bias_hides_no_keys(attend):
    """A bias of 0 leaves the score of its key as it is."""
    keeps, kept = (EXISTS & torch.ones(N, N).tril().bool()).float(), []

    def see(query, key, value, _):
        bias = make_bias(query).exp() * keeps
        kept.append((query @ key.mT * 8**-0.5 + bias).softmax(-1).detach())
        return attend(query, key, value, bias)

    model = Stack(lambda self, x, mask: self.attentions[0](x), Attention(attend=see))
    row, watched = watch_step(model, X)
    assert row["residual_ratio"] == pytest.approx([compute_ratio(X)], 1e-4), watched
    assert row["attention_entropy"] == pytest.approx([compute_entropy(kept[0])], 1e-4)


@pytest.mark.parametrize("mask", [LEFT, RIGHT], ids=["left", "right"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_that_attends_to_itself_alone_is_no_document(mask, is_causal):
    """Many models let padding attend to itself, because a row without keys would give NaN."""
    pairs = (mask[:, None] & mask[:, :, None]).bool()
    keeps = (pairs.tril() if is_causal else pairs) | torch.eye(N).bool()
    kept = []

    def weigh(scores, _):
        kept.append(scores.masked_fill(~keeps[:, None], -torch.inf).softmax(-1))
        return kept[-1]

    model = Stack(lambda self, x, mask: self.attentions[0](x), Attention(weigh))
    row, watched = watch_step(model, X)
    expected = compute_entropy(kept[0].detach(), mask)
    assert row["attention_entropy"] == pytest.approx([expected], 1e-4), watched
    assert row["residual_ratio"] == pytest.approx([compute_ratio(X, mask)], 1e-4)


def test_keys_are_hidden_by_a_function_of_a_mask_that_is_not_read():
    """The keys with a weight above 0 count as those that the mask leaves."""
    bound = torch.where(RIGHT[:, None, None] > 0, torch.inf, -torch.inf)
    attention = Attention(lambda scores, mask: torch.minimum(scores, bound).softmax(-1))
    check_right_padding(attention)

    def weigh(scores, mask):
        p = torch.minimum(scores, bound).sigmoid()
        return p / p.sum(-1, keepdim=True)

    check_right_padding(Attention(weigh))


def change_in_place(scores):
    return scores.mul_(1.0)


def change_a_view(scores):
    scores[..., 1:].mul_(1.0)
    return scores


@pytest.mark.parametrize("change", [change_in_place, change_a_view])
def test_what_is_said_of_masks_stays_where_scores_are_changed_in_place(change):
    """Of one that is not read, and of one that content decides beside one that it does not."""
    bound = torch.where(RIGHT[:, None, None] > 0, torch.inf, -torch.inf)
    check_right_padding(
        Attention(lambda scores, _: change(torch.minimum(scores, bound)).softmax(-1))
    )

    def keep_largest_but_the_last(scores, _):
        scores = scores.masked_fill(torch.ones(N, N).triu(1) > 0, -torch.inf)
        least = scores.topk(2).values[..., -1:]
        return change(scores.masked_fill(scores < least, -torch.inf)).softmax(-1)

    attention = make_similar()
    attention.weigh = keep_largest_but_the_last
    check_layers(Stack(lambda self, x, mask: self.attentions[0](x), attention), CLUSTERS)


def pad_scores(scores):
    return F.pad(scores[..., :-1], (0, 1), value=-1e9)


def assign_last(scores):
    scores = scores.clone()
    scores[..., -1] = -1e9
    return scores


def assign_place(scores):
    scores = scores.clone()
    scores[..., torch.tensor([N - 1])] = -1e9
    return scores


@pytest.mark.parametrize("hide", [pad_scores, assign_last, assign_place])
def test_the_last_key_is_hidden_without_a_mask(hide):
    """By a number at its place; in a bias that tokens decide, such a number is no mask."""
    mask = (torch.arange(N) < N - 1)[None].expand(len(X), N).long()
    attention = Attention(lambda scores, _: hide(scores).softmax(-1))
    row, watched = watch_step(Stack(lambda self, x, _: self.attentions[0](x), attention), X)
    x, p = attention.kept
    assert row["residual_ratio"] == pytest.approx([compute_ratio(x, mask)], 1e-4), watched
    assert row["attention_entropy"] == pytest.approx([compute_entropy(p, mask)], 1e-4)

    def attend(q, k, v, _):
        return F.scaled_dot_product_attention(q, k, v, hide(make_bias(q)))

    row, watched = watch_step(
        Stack(lambda self, x, _: self.attentions[0](x), Attention(attend=attend)), X
    )
    assert len(row["attention_entropy"]) == 1 and "Error" not in watched.describe()
