"""Measures use full float32 products."""

import jax
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.measured.influence import layer_influence, layer_removal
from rank_collapse.network.measured.updates import output_change
from rank_collapse.theory.expectation import expected_pass
from tests.oracles import draws
from tests.support.marks import full_but

N, D = 5, 8


CONFIG = rc.transformer(2, 2, D, d_ff=9)


SAN = rc.san(2, 2, D)


PATHS = np.zeros((1, 2, 2), int)


CLASSIFIER = (np.ones((D, 3), np.float32), np.zeros(3, np.float32))


MEASURES = {
    "apply": lambda p, x: rc.apply(p, x, CONFIG),
    "path_contributions": lambda p, x: rc.path_contributions(p, x, CONFIG).by_length,
    "head_contributions": lambda p, x: rc.head_contributions(p, x, CONFIG),
    "path_state": lambda p, x: rc.paths.path_state(p, x, CONFIG, PATHS[0, 0]),
    "path_set_states": lambda p, x: rc.paths.path_set_states(p, x, CONFIG, PATHS),
    "path_set_logits": lambda p, x: rc.paths.path_set_logits(p, x, CONFIG, PATHS, CLASSIFIER),
    "log_residual_profile": lambda p, x: rc.log_residual_profile(p, x, CONFIG),
    "bound_report": lambda p, x: (
        rc.bound_report(p.replace(layers=p.layers.replace(mlp=None)), x, SAN).layer.tightness
    ),
    "truncated": lambda p, x: rc.truncated(p, x, CONFIG, 1).output,
    "layer_influence": lambda p, x: layer_influence(p, x, CONFIG)["angle"],
    "layer_removal": lambda p, x: layer_removal(p, x, CONFIG)["error"],
    "output_change": lambda p, x: output_change(p, p, x, CONFIG),
    "monitor": lambda _, x: rc.monitor(x),
    "participation_ratio": lambda _, x: rc.participation_ratio(x),
    "shapley_values": lambda _, x: rc.shapley_values(x[:4], 2),
    "covariance_shares": lambda _, x: rc.paths.covariance_shares(x[None], x),
    "expected_pass": lambda p, x: expected_pass(p, x, CONFIG).shares,
    "profile": lambda _, x: rc.profile(x[None], measures="participation_ratio").measures,
}


def list_precisions(jaxpr):
    """Lists the precisions of all matrix products, also inside loops, branches and calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]
        for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from list_precisions(inner)


QUICK = ["apply", "participation_ratio", "path_contributions", "path_set_logits", "bound_report"]
QUICK += ["layer_influence", "layer_removal", "output_change"]


@pytest.mark.parametrize("name", full_but(MEASURES, *QUICK))
def test_every_product_of_a_measure_has_full_precision(name):
    params, x = draws.parameters(CONFIG), draws.normal(N, D)
    with jax.default_matmul_precision("bfloat16"):
        precisions = set(list_precisions(jax.make_jaxpr(MEASURES[name])(params, x).jaxpr))
    highest = (jax.lax.Precision.HIGHEST,) * 2
    if name == "apply":  # the caller's choice, as in training
        assert precisions and highest not in precisions
    else:
        assert precisions == {highest}
