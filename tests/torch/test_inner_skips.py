"""Branches that contain their own skip connection are refused; networks without skips are not."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from rank_collapse.torch import path_lengths  # noqa: E402
from tests.oracles.small_torch_stack import HIDDEN, Attention, D  # noqa: E402


class Residual(Attention):
    """Adds its input itself, after a projection, and normalises the sum."""

    def __init__(self):
        super().__init__()
        self.out, self.norm = nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x):
        return self.norm(x + self.out(super().forward(x)))


class Pooling(nn.Module):
    """Subtracts its input, which a skip around it carries as well: a branch nevertheless."""

    def __init__(self):
        super().__init__()
        self.mix = Attention()

    def forward(self, x):
        return self.mix(x) - x


class Around(nn.Module):
    """A branch with a skip around it."""

    def __init__(self, branch):
        super().__init__()
        self.branch = branch

    def forward(self, x):
        return x + self.branch(x)


def two(make):
    torch.manual_seed(0)
    return nn.Sequential(make(), make()).double().eval()


def test_a_branch_that_adds_its_input_is_refused_with_the_module_inside():
    line = "branches: '0' contains its own skip in module '0' .*; match only what .* as '0.out'"
    with pytest.raises(ValueError, match=line):
        path_lengths(two(Residual), HIDDEN, branches=r"\d")


def test_each_axis_is_checked():
    """Here paths go past the branch of the first axis, and none past the second's."""
    torch.manual_seed(0)
    model = nn.Sequential(Around(Attention()), Residual()).double().eval()
    branches = {"first": r"0\.branch", "second": "1"}
    line = r"^branches\['second'\]: '1' contains its own skip in module '1' .* such as '1.out'"
    with pytest.raises(ValueError, match=line):
        path_lengths(model, HIDDEN, branches=branches)


def test_the_module_inside_has_the_paths():
    split = path_lengths(two(Residual), HIDDEN, branches=r"\d\.out")
    assert all(part.any() for part in split.by_length)


class Sum(Attention):
    """Adds two maps of its input, which is no skip."""

    def forward(self, x):
        return super().forward(x) + self.v(x)


@pytest.mark.parametrize("branch", [Attention, Sum])
def test_branches_without_any_skip_are_on_every_path(branch):
    split = path_lengths(two(branch), HIDDEN, branches=r"\d")
    assert not split.by_length[:2].any() and split.by_length[2].any()


def test_a_branch_that_some_paths_go_past_may_subtract_its_input():
    split = path_lengths(two(lambda: Around(Pooling())), HIDDEN, branches=r"\d\.branch")
    torch.testing.assert_close(split.by_length[0], HIDDEN)
    assert all(part.any() for part in split.by_length)


class Turned(Attention):
    """Adds its input and the same tokens in another order."""

    def forward(self, x):
        return x + x.flip(1)


class Half(Attention):
    """Hands on half of its input, and adds the other half to what it makes."""

    def forward(self, x):
        return torch.cat([(x + super().forward(x))[..., :4], x[..., 4:]], -1)


class Scaled(Attention):
    """Scales the sum, and turns its sign."""

    def forward(self, x):
        return -(0.5 * (x + super().forward(x)) / 3)


@pytest.mark.parametrize("branch", [Turned, Half, Scaled])
def test_a_skip_without_a_module_inside_is_refused_without_a_cure(branch):
    line = "branches: '0' contains its own skip in module '0' .*; match only what is added to the "
    with pytest.raises(ValueError, match=f"{line}skip$"):
        path_lengths(two(branch), HIDDEN, branches=r"\d")
