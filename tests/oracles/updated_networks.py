"""Small networks in which the effect of an update is measured."""

import rank_collapse as rc
from tests.oracles import draws

FIELDS = (
    {"norm_placement": "post", "skip_gain": 1.4, "branch_gain": 0.6},
    {"norm_placement": "sandwich", "mlp": "swiglu", "final_norm": True},
)


def make_network(fields):
    config = rc.transformer(3, 2, 8, d_ff=12, **fields)
    return draws.parameters(config), draws.tokens(5, 8), config
