"""A small model of PyTorch, where torch is installed."""

import pytest


@pytest.fixture
def model():
    """A model of `small_torch_stack` with the weights of one seed."""
    from tests.oracles.small_torch_stack import Model, torch

    torch.manual_seed(0)
    return Model()
