"""Numbers of rows pass through operators exactly."""

import pytest

pytest.importorskip("torch")

from rank_collapse.watch import torch_followers
from tests.oracles.torch_models import torch


def test_row_numbers_pass_complex_views_exactly():
    """The numbers are beyond 2^24, where float32 has only even ones."""
    numbers = torch.tensor([2**24 + 1, 2**24 + 3])
    for function in (torch.view_as_complex, torch.view_as_real):
        numbers = torch_followers.move_followers(function, ((numbers,), {}), 0)
    assert numbers.tolist() == [2**24 + 1, 2**24 + 3]
