"""Masks that functions of torch put on scores and weights: which keys each leaves."""

import pytest

torch = pytest.importorskip("torch")

from rank_collapse.watch import torch_masks as masks  # noqa: E402

F = torch.nn.functional
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
    pair, function = (ONE.clone(), OTHER.clone()), getattr(Tensor, name)
    read = read_masks(function, *pair)
    if name in EITHER:
        expected = [[[False, False, True]], [[False, True, True]]], "left out"
    else:
        expected = [[[True, True, False]], [[True, False, False]]], "allowed"
    for (operand, keep, side), tensor, kept in zip(read, pair, expected[0], strict=True):
        assert operand is tensor and side == expected[1]
        if operand is pair[1] or not masks.is_in_place(function):  # which changes the first
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
    for function in (Tensor.eq, Tensor.eq_, Tensor.__eq__, torch.eq):  # `mask == 0` is the third
        assert masks.inverts(function, (ONE, 0)) and masks.inverts(function, (ONE, False))
    for function, args in (
        (Tensor.eq, (ONE, 1)),
        (Tensor.eq, (ONE, OTHER)),
        (Tensor.eq, (ONE, torch.tensor(1))),
        (Tensor.clone, (ONE,)),
    ):
        assert not masks.inverts(function, args)
    assert masks.inverts(Tensor.eq, (ONE, torch.tensor(0)))


INEQUALITIES = ("ne", "ne_", "__ne__", "not_equal", "not_equal_")
DISJUNCTIONS = ("bitwise_xor", "bitwise_xor_", "logical_xor", "logical_xor_")
DISJUNCTIONS += ("__xor__", "__rxor__", "__ixor__")


@pytest.mark.parametrize("name", INEQUALITIES + DISJUNCTIONS)
def test_what_differs_from_1_is_exchanged(name):
    """By the function's own numbers, for 0, 1 and a mask in the place of the other argument."""
    assert set(INEQUALITIES) == masks._INEQUALITIES and set(DISJUNCTIONS) == masks._DISJUNCTIONS
    function = getattr(Tensor, name)
    for other in (False, True, torch.tensor(False), torch.tensor(True)):
        if name.startswith("logical") and not isinstance(other, Tensor):
            continue  # takes tensors alone
        is_inverse = torch.equal(function(ONE.clone(), other).bool(), ~ONE)
        assert is_inverse == bool(other) and masks.inverts(function, (ONE, other)) is is_inverse
    assert not masks.inverts(function, (ONE, OTHER))


def test_functions_of_torch_have_the_names_of_methods():
    whole = ONE.int()
    for function, args in (
        (torch.ne, (whole, 1)),
        (torch.not_equal, (whole, 1.0)),
        (torch.bitwise_xor, (whole, 1)),
        (torch.bitwise_xor, (True, ONE)),
        (torch.logical_xor, (ONE, torch.tensor(True))),
    ):
        assert torch.equal(function(*args).bool(), ~ONE) and masks.inverts(function, args)
    assert not masks.inverts(torch.ne, (whole, 0)) and not masks.inverts(torch.ne, (whole, 2))


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
    places = place, torch.tensor([2])
    for index in (places, (0, place), place):
        read = read_masks(Tensor.__setitem__, scores.repeat(2, 1), index, value)
        operands = places if index is places else (place,)
        assert read == ([(operand, None, "allowed") for operand in operands] if hides else [])
    read = read_masks(Tensor.__setitem__, scores.clone(), (0, 0), value)
    assert read == ([(None, None, "allowed")] if hides else [])


def test_of_written_tensors_the_largest_number_decides_if_there_is_one():
    written = torch.tensor([[-1e9, 1.0, -1e9]])
    assert read_masks(torch.where, ONE, SCORES, written) == []
    assert read_masks(torch.where, ONE, written, SCORES) == []
    below = written - 2
    assert read_masks(torch.where, ONE, SCORES, below - 1e9)[0][0] is ONE
    assert read_masks(Tensor.__setitem__, SCORES.clone(), slice(0, 0), torch.empty(0, 3)) == []
    turned = torch.ones(2, 3, dtype=torch.complex64)
    assert read_masks(Tensor.__setitem__, turned, 0, -1e9 * turned[1]) == []


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
    rows, _ = torch.where(ONE)  # the places of what is true
    (mask,) = masks.read_masks(torch.where, (ONE,), {}, rows)
    assert mask == (ONE, None, "allowed")
    ((operand, keep, _),) = read_masks(torch.cumsum, SCORES, -1)
    assert operand is SCORES and keep is None
    assert read_masks(torch.softmax, SCORES, -1) == read_masks(torch.mm, SCORES, SCORES.T) == []
