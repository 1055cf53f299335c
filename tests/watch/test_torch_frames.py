"""The masks that a module was given: by name, in mappings, of two axes, and their two readings."""

import pytest

torch = pytest.importorskip("torch")

from rank_collapse.watch.torch_frames import Frame, list_sides  # noqa: E402

MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


class Module(torch.nn.Module):
    def forward(self, x, attention_mask=None, *, options=None):
        return x


def list_masks(*args, **kwargs):
    return Frame(0, Module(), "m", args, kwargs).masks


def test_masks_are_found_by_their_name_wherever_they_stand():
    x = torch.ones(2, 3)
    assert [name for name, _ in list_masks(x, MASK)] == ["attention_mask"]
    inner = {"key_padding_mask": MASK, "size": 3, "x": x, 0: MASK, ("mask", 1): x[0]}
    ((name, mask),) = list_masks(x, options=inner)
    assert name == "key_padding_mask" and mask is MASK
    for shape in ((1, 2, 3), (6,)):
        assert list_masks(x, MASK.reshape(shape)) == []


def test_of_a_call_that_does_not_fit_the_keywords_are_read():
    assert [name for name, _ in list_masks(1, 2, 3, pad=MASK)] == ["pad"]


def test_of_a_function_without_a_signature_the_keywords_are_read():
    module = Module()
    module.forward = {}.update
    frame = Frame(0, module, "m", (torch.ones(2),), {"pad": MASK, "x": MASK})
    assert [name for name, _ in frame.masks] == ["pad"]


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("mask", MASK),
        ("mask", MASK.bool()),
        ("mask", (MASK - 1) * 1e9),
        ("mask", MASK.float()),
        ("key_padding_mask", ~MASK.bool()),
        ("padding_mask", MASK),
        ("padding_mask", (MASK - 1) * 1e9),
    ],
    ids=["numbers", "booleans", "added", "floats", "padding", "named padding", "added padding"],
)
def test_the_likelier_reading_comes_first(name, mask):
    likely, other = list_sides(name, mask)
    assert likely.tolist() == MASK.bool().tolist() and other.tolist() == (~MASK.bool()).tolist()
