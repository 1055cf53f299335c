"""Which tokens exist in a watch: masks of the content, masks that the model gets, and none."""

import operator

import pytest

pytest.importorskip("torch")

from rank_collapse.torch import watch
from tests.oracles.measured_layers import (
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
    nn,
    pad,
    torch,
    watch_step,
)

CLUSTERS = (5 * torch.eye(16)[:3])[None, [0] * 3 + [1] * 3 + [2] * 3] + 0.01 * X


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


def make_similar():
    """Makes an attention whose tokens attend to those that are alike."""
    attention = Attention()
    for part in (attention.q, attention.k):
        nn.init.eye_(part.weight)
        nn.init.zeros_(part.bias)
    return attention


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


def write_heads(scores):
    written = torch.empty_like(scores)
    written[:, 0], written[:, 1] = scores[:, 0], scores[:, 1]
    return written


def write_views(scores):
    written = torch.zeros_like(scores)
    written[..., :4].copy_(scores[..., :4])
    written[..., 4:].copy_(scores[..., 4:])
    return written


def join_parts(scores):
    return torch.cat([scores[..., :4], scores[..., 4:]], dim=-1)


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


EXISTS = RIGHT[:, None, None] > 0
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
