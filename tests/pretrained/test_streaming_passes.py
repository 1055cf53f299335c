"""Every pass read layer by layer: on networks of many fields it is the pass in memory."""

import jax
import pytest

from experiments.trained.chains import ChainPass
from rank_collapse import pretrained
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.measured.influence import InfluencePass
from rank_collapse.network.passes import OutputPass, States, run_pass
from rank_collapse.paths.contributions import LengthPass
from rank_collapse.paths.truncation import TruncatedPass
from rank_collapse.theory.logdomain import LogPass
from rank_collapse.theory.reports import BoundPass
from tests.oracles.field_cases import network
from tests.support.closeness import assert_close

STREAMED = {
    "states": States(),
    "output": OutputPass(),
    "lengths": LengthPass(),
    "truncation": TruncatedPass(1),
    "chains": ChainPass(1),
    "influence": InfluencePass(),
    "logarithms": LogPass(),
    "bounds": BoundPass(),
}


# Cases that depend on the number of a layer, or on what is outside of the layers.
BY_LAYER = (
    "mlp_skip, norm_placement post",
    "norm_placement sandwich, first_norm",
    "learned gains, windows",
    "cross_attention",
)


@pytest.mark.full
@pytest.mark.parametrize("case", BY_LAYER)
def test_a_network_read_layer_by_layer_is_the_one_in_memory(case):
    """Streams every pass that covers the network, and compares with the passes in memory."""
    params, x, config, extra = network(case)
    with jax.enable_x64(True):
        passes = [(n, p) for n, p in STREAMED.items() if p.covers.refusal(config) is None]
        inputs = jax.tree.map(lambda a: a[None], {"x": x} | extra)
        source, groups = pretrained.InMemory(params, config), {"": pretrained.Group(tuple(passes))}
        streamed_results = pretrained.stream(source, inputs, groups)[""]
        complete, prepared = prepare_inputs(params, x, config, **extra)
        for name, network_pass in passes:
            expected = jax.jit(run_pass, static_argnums=(0,))(
                network_pass, complete, prepared, config
            )
            for a, b in zip(
                jax.tree.leaves(streamed_results[name]), jax.tree.leaves(expected), strict=True
            ):
                assert_close(a[0], b, rtol=1e-9, atol=1e-12, err_msg=name)
        refused = [p for p in STREAMED.values() if p.covers.refusal(config) is not None]
        for network_pass in refused[:1]:
            with pytest.raises(ValueError, match="does not cover"):
                pretrained.stream(source, inputs, {"": pretrained.Group((("", network_pass),))})
