"""Keys that content hides in a watch: they are tokens, alone and beside keys that a mask hides."""

import operator

import pytest

pytest.importorskip("torch")

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
    compute_ratio,
    join_parts,
    make_similar,
    pad,
    torch,
    watch_step,
    write_heads,
    write_views,
)


def keep_largest(scores, mask=None, count=2):
    least = scores.topk(count).values[..., -1:]
    return scores.masked_fill(scores < least, -1e9).softmax(-1)


def scatter_largest(scores, mask):
    values, places = scores.topk(2, -1)
    return torch.full_like(scores, -torch.inf).scatter(-1, places, values).softmax(-1)


def assign_small(scores, mask):
    scores = scores.clone()
    scores[scores < scores.mean(-1, keepdim=True)] = -torch.inf
    return scores.softmax(-1)


def keep_blocks(scores, mask):
    """Each query has the keys of one block of three, as in MoBA."""
    blocks = scores.unflatten(-1, (3, 3)).mean(-1)
    chosen = torch.zeros_like(blocks, dtype=torch.bool)
    chosen = chosen.scatter(-1, blocks.argmax(-1, keepdim=True), True)
    return torch.where(chosen.repeat_interleave(3, -1), scores, -torch.inf).softmax(-1)


def sparsemax(scores, mask=None):
    ordered, places = scores.sort(-1, descending=True).values, torch.arange(1, N + 1)
    sums = ordered.cumsum(-1) - 1
    count = (ordered * places > sums).sum(-1, keepdim=True)
    return (scores - sums.gather(-1, count - 1) / count).clamp(min=0)


def entmax(scores, mask=None):
    """Finds 1.5-entmax by bisection."""
    scores = scores / 2
    low = scores.amax(-1, keepdim=True) - 1
    high = low + 1 - N**-0.5
    for _ in range(40):
        middle = (low + high) / 2
        is_low = (scores - middle).clamp(min=0).square().sum(-1, keepdim=True) >= 1
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    p = (scores - low).clamp(min=0).square()
    return p / p.sum(-1, keepdim=True)


def drop_small(scores, mask):
    p = scores.softmax(-1)
    p = p * (p > 0.1)
    return p / p.sum(-1, keepdim=True)


def causal_sparsemax(scores, mask):
    return sparsemax(scores.masked_fill(~torch.ones(N, N).tril().bool(), -1e9))


CHOSEN = {
    "masked_fill": keep_largest,
    "scatter": scatter_largest,
    "assigned": assign_small,
    "blocks": keep_blocks,
    "sparsemax": sparsemax,
    "causal sparsemax": causal_sparsemax,
    "entmax": entmax,
    "threshold": lambda scores, mask: F.threshold(scores, 0.5, -1e9).softmax(-1),
}


@pytest.mark.parametrize("weigh", CHOSEN.values(), ids=CHOSEN)
def test_keys_that_content_hides_are_tokens(weigh):
    attention = make_similar()
    attention.weigh = weigh
    check_layers(Stack(lambda self, x, mask: self.attentions[0](x), attention), CLUSTERS)


def test_small_weights_that_are_dropped_are_of_tokens():
    """The weights are those before, as with dropout."""
    attention = make_similar()
    attention.weigh = drop_small
    row, _ = watch_step(Stack(lambda self, x, mask: self.attentions[0](x), attention), CLUSTERS)
    assert row["residual_ratio"] == pytest.approx([compute_ratio(CLUSTERS)], 1e-4)


@pytest.mark.parametrize("move", [write_heads, write_views, join_parts])
def test_keys_that_content_hides_are_tokens_where_scores_are_written_elsewhere(move):
    attention = make_similar()
    attention.weigh = lambda scores, mask: move(
        scores.masked_fill(scores < scores.topk(2).values[..., -1:], -1e9)
    ).softmax(-1)
    check_layers(Stack(lambda self, x, mask: self.attentions[0](x), attention), CLUSTERS)


def dot_by_index(q, k, v, mask):
    places = (q @ k.mT).topk(2, -1).indices
    chosen = torch.zeros(*q.shape[:2], N, N, dtype=torch.bool).scatter_(-1, places, True)
    return F.scaled_dot_product_attention(q, k, v, chosen & (mask[:, None, None] > 0))


def dot_by_bias(q, k, v, mask):
    scores = q @ k.mT
    bias = torch.zeros_like(scores).masked_fill(scores < scores.topk(2).values[..., -1:], -1e9)
    return F.scaled_dot_product_attention(
        q, k, v, bias + torch.where(mask[:, None, None] > 0, 0.0, -1e9)
    )


def dot_by_drops(q, k, v, mask):
    scores = q @ k.mT
    drops = (scores < scores.topk(2).values[..., -1:]) | (mask[:, None, None] == 0)
    return F.scaled_dot_product_attention(q, k, v, ~drops)


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("attend", [dot_by_index, dot_by_bias, dot_by_drops])
def test_padding_beside_keys_that_content_hides(attend, is_named):
    """Padding counts as hidden whether or not the model gets it by the name of a mask."""
    attention = make_similar()
    attention.attend = attend
    mask = RIGHT

    def body(self, x, mask_argument):
        return self.attentions[0](x, mask)

    model = Stack(body, attention)
    row, watched = watch_step(model, pad(mask), *((mask,) if is_named else ()))
    assert row["residual_ratio"] == pytest.approx([compute_ratio(pad(mask), mask)], 1e-4), watched


def fill_some(scores, some):
    drops = (scores < scores.mean(-1, keepdim=True)) & some
    return scores.masked_fill(drops, -torch.inf).softmax(-1)


def keep_others(scores, some):
    keeps = (scores >= scores.mean(-1, keepdim=True)) | ~some
    return torch.where(keeps, scores, -torch.inf).softmax(-1)


def assign_some(scores, some):
    scores = scores.clone()
    scores[(scores < scores.mean(-1, keepdim=True)) & some] = -torch.inf
    return scores.softmax(-1)


@pytest.mark.parametrize("weigh", [fill_some, keep_others, assign_some])
def test_a_mask_that_limits_which_keys_content_may_hide_hides_none(weigh):
    """Of some keys content drops those with small scores; every key remains a token."""
    torch.manual_seed(0)
    some = (RIGHT == 0)[:, None, None]
    attentions = [Attention(lambda scores, _: weigh(scores, some)) for _ in range(2)]
    check_layers(Stack(add_in_turn, *attentions))


JOINED = {
    "and": lambda keeps: keeps & EXISTS,
    "inverted or": lambda keeps: ~(~keeps | ~EXISTS),
    "equals 0": lambda keeps: ((~keeps).logical_or(~EXISTS)) == 0,
    "differs from 1": lambda keeps: (~keeps | ~EXISTS) != 1,
    "differs": lambda keeps: (~keeps | ~EXISTS) ^ True,
    "differs in place": lambda keeps: operator.ixor(~keeps | ~EXISTS, True),
    "product": lambda keeps: keeps * EXISTS,
    "inverted twice": lambda keeps: ~(keeps & EXISTS).logical_not(),
}
PUT = {
    "where": lambda scores, keeps: torch.where(keeps, scores, -1e9),
    "filled": lambda scores, keeps: scores.masked_fill(~keeps, -1e9),
    "added": lambda scores, keeps: scores + torch.where(keeps, 0.0, -1e9),
}


@pytest.mark.parametrize("put", PUT.values(), ids=PUT)
@pytest.mark.parametrize("join_masks", JOINED.values(), ids=JOINED)
def test_padding_joined_to_what_content_hides(join_masks, put):
    """However the two are joined, and the joined mask put on the scores: padding alone counts."""
    attention = make_similar()
    attention.weigh = lambda scores, _: put(
        scores, join_masks(scores >= scores.mean(-1, keepdim=True))
    ).softmax(-1)
    row, watched = watch_step(
        Stack(lambda self, x, mask: self.attentions[0](x), attention), pad(RIGHT)
    )
    assert row["residual_ratio"] == pytest.approx([compute_ratio(pad(RIGHT), RIGHT)], 1e-4), watched


def test_a_mask_of_blocks_is_not_the_joined_mask_of_their_keys():
    """A block that content and a mask leave in part is read whole, so all of its keys are tokens.

    The mask alone leaves keys in every block.
    """
    two_of_three = torch.arange(N) % 3 < 2

    def weigh(scores, _):
        joined = (scores >= scores.mean(-1, keepdim=True)) & two_of_three
        blocks = joined.unflatten(-1, (N // 3, 3)).any(-1)
        return scores.masked_fill(~blocks.repeat_interleave(3, -1), -1e9).softmax(-1)

    attention = make_similar()
    attention.weigh = weigh
    check_layers(Stack(lambda self, x, mask: self.attentions[0](x), attention), CLUSTERS)


def test_a_sink_is_a_token_that_exists():
    """If content decides which keys are hidden, the mask of the call says which is the first."""
    mask, kept = LEFT, []

    def weigh(scores, mask):
        bonus = 9.0 * (torch.arange(N) == mask.argmax(-1)[:, None])
        scores = scores + torch.where(mask > 0, bonus, -1e9)[:, None, None]
        kept.append(scatter_largest(scores, mask))
        return kept[-1]

    row, watched = watch_step(Stack(add_in_turn, Attention(weigh)), X, mask)
    columns = [
        p.detach()[:, m > 0].mean(1)[:, m.argmax()] for p, m in zip(kept[0], mask, strict=True)
    ]
    expected = (torch.stack(columns) > 0.3).float().mean().item()
    assert row["sink_rate"] == pytest.approx([expected]), watched
