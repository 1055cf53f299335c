"""Which tokens exist: masks of the content, masks that the model gets, and none."""

import pytest

pytest.importorskip("torch")

from rank_collapse.torch import watch
from rank_collapse.watch import torch_masks as masks
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


@pytest.mark.parametrize("move", [write_heads, write_views, join_parts])
def test_keys_are_hidden_where_masked_scores_are_written_elsewhere(move):
    def weigh(scores, mask):
        return move(scores.masked_fill(RIGHT[:, None, None] == 0, -torch.inf)).softmax(-1)

    attention = Attention(weigh)
    model = Stack(lambda self, x, mask: self.attentions[0](x), attention)
    row, watched = watch_step(model, pad(RIGHT))
    x, p = attention.kept
    assert row["residual_ratio"] == pytest.approx([compute_ratio(x, RIGHT)], 1e-4)
    entropy = compute_entropy(p, RIGHT)
    assert row["attention_entropy"] == pytest.approx([entropy], 1e-4), watched.describe()


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

    def body(self, x, given):
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


GIVEN = {
    "-100": small_bias(100.0),
    "-50": small_bias(50.0),
    "-10000": small_bias(1e4),
    "filled with -99": lambda s, m: s.masked_fill(m[:, None, None] == 0, -99.0).softmax(-1),
    "after the softmax": multiply,
    "of exponentials": multiply_exponentials,
}


@pytest.mark.parametrize("mask", [RIGHT, LEFT, RIGHT.bool()], ids=["right", "left", "bool"])
@pytest.mark.parametrize("weigh", GIVEN.values(), ids=GIVEN)
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


Tensor = torch.Tensor
SCORES, HIDES = torch.tensor([[0.5, -1.0, 2.0]]), torch.tensor([[0.0, -1e9, 0.0]])
ONE, OTHER = torch.tensor([[True, True, False]]), torch.tensor([[True, False, False]])


def read_masks(function, *args, **kwargs):
    """Returns (operand, which scores it keeps or None, side) of each mask of a call."""
    result = function(*args, **kwargs)
    result = args[0] if function is Tensor.__setitem__ else result
    read = masks.read_masks(function, args, kwargs, result)
    return [(m.operand, m.keep and m.keep().tolist(), m.name) for m in read]


SUMS = {"add": 1, "add_": 1, "sub": -1, "sub_": -1, "subtract": -1}


@pytest.mark.parametrize("name", SUMS)
def test_what_is_added_to_scores_or_subtracted_hides_them(name):
    assert masks._SUMS == SUMS
    mask = SUMS[name] * HIDES
    *_, (operand, keep, side) = read_masks(getattr(Tensor, name), SCORES.clone(), mask)
    assert operand is mask and keep == [[True, False, True]] and side == "allowed"
    assert read_masks(getattr(Tensor, name), SCORES.clone(), -mask) == []
    assert read_masks(getattr(Tensor, name), SCORES.clone(), 1.0) == []


def test_scores_that_are_added_to_a_mask_or_subtracted_from_a_number():
    ((operand, keep, _),) = read_masks(torch.add, HIDES, SCORES)
    assert operand is HIDES and keep == [[True, False, True]]
    ((operand, keep, _),) = read_masks(torch.sub, HIDES, SCORES)
    assert operand is HIDES and keep == [[True, False, True]]
    turned = -HIDES  # 1 − 1e9
    ((operand, keep, _),) = read_masks(Tensor.__rsub__, turned, 1.0)
    assert operand is turned and keep == [[True, False, True]]
    added = HIDES[None]
    a = torch.ones(1, 1, 2), torch.ones(1, 2, 3)
    ((operand, keep, _),) = read_masks(torch.baddbmm, added, *a)
    assert operand is added and keep == [[[True, False, True]]]


BOTH = ("logical_and", "logical_and_", "__and__", "__iand__", "bitwise_and", "bitwise_and_")
EITHER = ("logical_or", "logical_or_", "__or__", "__ior__", "bitwise_or", "bitwise_or_")
PRODUCTS = ("mul", "mul_", "multiply", "multiply_")


@pytest.mark.parametrize("name", BOTH + EITHER + PRODUCTS)
def test_a_key_is_left_where_both_say_so_or_hidden_where_either_does(name):
    pair = ONE.clone(), OTHER.clone()
    read = read_masks(getattr(Tensor, name), *pair)
    if name in EITHER:
        expected = [[[False, False, True]], [[False, True, True]]], "left out"
    else:
        expected = [[[True, True, False]], [[True, False, False]]], "allowed"
    for (operand, keep, side), tensor, kept in zip(read, pair, expected[0], strict=True):
        assert operand is tensor and side == expected[1]
        if not name.endswith("_") or operand is pair[1]:  # the first is changed in place
            assert keep == kept


def test_every_name_of_a_mask_is_tested():
    assert set(BOTH) == masks._BOTH and set(EITHER) == masks._EITHER
    assert set(PRODUCTS) == masks._FACTORS
    assert masks.SIDES == ("allowed", "left out") and masks.HIDDEN == -700


INVERSIONS = ("__invert__", "logical_not", "logical_not_", "bitwise_not", "bitwise_not_")


def test_what_exchanges_true_and_false():
    assert set(INVERSIONS) == masks._INVERSIONS
    for name in INVERSIONS:
        assert masks.inverts(getattr(Tensor, name), (ONE,))
    assert masks.inverts(Tensor.eq, (ONE, 0)) and masks.inverts(torch.eq, (ONE, 0))
    for function, args in (
        (Tensor.eq, (ONE, 1)),
        (Tensor.eq, (ONE, OTHER)),
        (Tensor.ne, (ONE, 0)),
        (Tensor.clone, (ONE,)),
    ):
        assert not masks.inverts(function, args)


def test_which_functions_take_at_most_a_shape_and_which_change_their_argument():
    for name in ("full", "zeros", "ones", "empty", "rand", "randn"):
        assert masks.makes_numbers(getattr(torch, name))
        assert masks.makes_numbers(getattr(torch, f"{name}_like"))
    for name in ("new_full", "new_zeros", "new_ones", "new_empty"):
        assert masks.makes_numbers(getattr(Tensor, name))
    assert masks.makes_numbers(torch.randint) and masks.makes_numbers(torch.randint_like)
    assert not masks.makes_numbers(torch.arange) and not masks.makes_numbers(Tensor.clone)
    for name in ("add", "sub", "mul", "and", "or", "xor"):
        assert masks.is_in_place(getattr(Tensor, f"__i{name}__"))
    assert masks.is_in_place(Tensor.mul_) and masks.is_in_place(Tensor.copy_)
    for function in (Tensor.mul, Tensor.__mul__, Tensor.__invert__, Tensor.__init__):
        assert not masks.is_in_place(function)


@pytest.mark.parametrize(
    ("value", "scores", "hides"),
    [
        (-torch.inf, SCORES, True),
        (-700.0, SCORES, True),
        (-699.0, SCORES, False),
        (torch.tensor(-1e4), SCORES, True),
        (0.0, SCORES, False),
        (0.0, SCORES.softmax(-1), True),  # among weights
        (1.0, SCORES.softmax(-1), False),
        (torch.tensor(float("nan")), SCORES, False),
    ],
)
def test_scores_that_are_filled_are_hidden_by_small_values(value, scores, hides):
    """By `masked_fill`, in both branches of `where`, and by assignment."""
    for function in (Tensor.masked_fill, Tensor.masked_fill_):
        read = read_masks(function, scores.clone(), OTHER, value)
        assert read == ([(OTHER, [[False, True, True]], "left out")] if hides else [])
    filled = value if isinstance(value, Tensor) else torch.tensor(value)
    if value != 0.0:  # zeros beside weights are hidden, weights beside zeros too
        read = read_masks(torch.where, ONE, scores, filled)
        assert read == ([(ONE, ONE.tolist(), "allowed")] if hides else [])
        read = read_masks(torch.where, ONE, filled, scores)
        assert read == ([(ONE, (~ONE).tolist(), "left out")] if hides else [])
    read = read_masks(Tensor.__setitem__, scores.clone(), OTHER, value)
    assert read == ([(OTHER, [[False, True, True]], "left out")] if hides else [])
    place = torch.tensor([0])
    read = read_masks(Tensor.__setitem__, scores.clone(), (0, place), value)
    assert read == ([(place, None, "allowed")] if hides else [])
    read = read_masks(Tensor.__setitem__, scores.clone(), (0, 0), value)
    assert read == ([(None, None, "allowed")] if hides else [])


def test_a_mask_of_rows_has_the_axes_of_scores():
    rows, scores = torch.tensor([True, False]), torch.zeros(2, 3)
    ((_, keep, _),) = read_masks(Tensor.__setitem__, scores, rows, -torch.inf)
    assert keep == [[False], [True]]


def test_a_factor_of_weights_hides_where_it_is_0():
    p, mask = torch.full((2, 3, 3), 1 / 3), torch.tensor([[1, 1, 0]])
    ((operand, keep, _),) = read_masks(torch.mul, p, mask)
    assert operand is mask and keep == [[True, True, False]]
    assert read_masks(torch.mul, p - 0.5, mask) == []  # scores
    assert read_masks(torch.mul, p, torch.ones(3)) == []  # a vector may be a scale
    assert read_masks(torch.mul, p, p) == []


def test_what_other_functions_do_with_scores_is_unknown():
    pad = F.pad
    assert read_masks(pad, SCORES, (0, 1), "constant", -torch.inf)[0] == (None, None, "allowed")
    assert read_masks(pad, SCORES, (0, 1), value=-1e9)[0] == (None, None, "allowed")
    for args in ((SCORES, (0, 1)), (SCORES, (0, 1), "constant", 1.0)):
        ((operand, keep, _),) = read_masks(pad, *args)
        assert operand is SCORES and keep is None
    ((operand, keep, _),) = read_masks(torch.cumsum, SCORES, -1)
    assert operand is SCORES and keep is None
    assert read_masks(torch.softmax, SCORES, -1) == read_masks(torch.mm, SCORES, SCORES.T) == []
