"""Every pass over a network, as a function of parameters, inputs and a configuration."""

import numpy as np

import rank_collapse as rc
from tests.oracles import draws

N, D = 5, 8


PASSES = {
    "apply": rc.apply,
    "path_contributions": rc.path_contributions,
    "head_contributions": rc.head_contributions,
    "log_residual_profile": rc.log_residual_profile,
    "bound_report": rc.bound_report,
    "path_state": lambda p, x, c, **i: rc.paths.path_state(p, x, c, np.zeros(c.depth, int), **i),
    "path_set_states": lambda p, x, c, **i: rc.paths.path_set_states(
        p, x, c, np.zeros((1, 1, c.depth), int), **i
    ),
}


def san(**fields):
    config = rc.san(2, 4, D, **fields)
    return config, draws.parameters(config, 1, bias_scale=0.0)


def group_heads(params, groups):
    """Groups keys and values as a checkpoint stores them; also returns them repeated by head."""
    a = params.layers.attention
    few = {"w_k": a.w_k[:, :groups], "w_v": a.w_v[:, :groups]}
    group_of_head = np.arange(4) // (4 // groups)
    full = {name: w[:, group_of_head] for name, w in few.items()}
    few |= dict.fromkeys(("b_q", "b_k", "b_v", "b_o"))
    return [draws.changed(params, attention=fields) for fields in (few, full)]
