"""Path sums of a function, and a branch of one product."""

import jax
import pytest

import rank_collapse as rc
from tests.oracles.jax_layers import D, draw

W8 = draw(9, D, D)


def attn(x):
    with jax.named_scope("attn"):
        return x @ W8


def contributions(fn, x, branches, **options):
    return jax.jit(lambda x: rc.function_contributions(fn, x, branches=branches, **options))(x)


@pytest.fixture(autouse=True)
def ranks_of_others(request):
    """Other people's code adds arrays of different ranks; the library's own networks do not."""
    if "networks_of_the_library" in request.node.name:
        yield
    else:
        with jax.numpy_rank_promotion("allow"):
            yield
