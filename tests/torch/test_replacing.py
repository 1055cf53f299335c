"""Tensors in the place of others: in each kind of output, once, with the type kept."""

from collections import OrderedDict, namedtuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rank_collapse.torch.replacing import convert_array, replace_tensor  # noqa: E402

OLD, NEW, OTHER = (torch.full((2,), float(i)) for i in range(3))
Named = namedtuple("Named", "a b")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (OLD, NEW),
        (OTHER, OTHER),
        ((OLD, OTHER), (NEW, OTHER)),
        ([OTHER, OLD], [OTHER, NEW]),
        (Named(OTHER, OLD), Named(OTHER, NEW)),
        ({"x": OLD, "y": 3}, {"x": NEW, "y": 3}),
        (OrderedDict(x=OLD), OrderedDict(x=NEW)),
        (None, None),
    ],
    ids=["tensor", "another", "tuple", "list", "named tuple", "dict", "mapping", "none"],
)
def test_the_tensor_itself_is_replaced(values, expected):
    changed = replace_tensor(values, OLD, NEW)
    assert type(changed) is type(expected)
    items = changed.values() if isinstance(changed, dict) else changed
    wanted = expected.values() if isinstance(expected, dict) else expected
    if isinstance(expected, torch.Tensor) or expected is None:
        assert changed is expected
    else:
        assert all(a is b for a, b in zip(items, wanted, strict=True))


def test_an_equal_tensor_is_another():
    assert replace_tensor((OLD.clone(),), OLD, NEW)[0] is not NEW


def test_an_array_gets_shape_and_dtype():
    like = torch.zeros((2, 2), dtype=torch.bfloat16)
    converted = convert_array(np.arange(4.0)[::-1], like)
    assert converted.dtype == torch.bfloat16 and converted.tolist() == [[3, 2], [1, 0]]
