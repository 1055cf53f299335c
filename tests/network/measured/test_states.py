"""What a layer reads, in passes and of traces."""

import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.measured.states import ProfilePass
from rank_collapse.pretrained import Group, InMemory, stream
from tests.oracles import draws

N, D, LENGTH = 64, 128, 11.3


@pytest.mark.full
def test_what_a_layer_reads_in_passes_and_of_traces():
    """Pre-norm layers read N with their own gain; the last state and post-norm layers have no N."""
    for placement in ("pre", "post"):
        config = rc.transformer(2, 2, 4, norm_placement=placement, norm="rms")
        params, x = draws.parameters(config), draws.normal(N // 8, 4) * 3
        layers = params.layers.replace(
            attention_norm=rc.network.NormParams(gain=jnp.asarray([[1.0, 2, 3, 4], [4, 1, 1, 1]]))
        )
        params = params.replace(layers=layers)
        hidden = rc.apply(params, x, config).hidden
        norms = [lambda h: h] * 3
        if placement == "pre":
            norms = [
                lambda h, g=g: g * h / jnp.sqrt((h * h).mean(-1, keepdims=True))
                for g in layers.attention_norm.gain[:, None]
            ]
            norms.append(lambda h: h)
        options = {"measures": ("residual_ratio", "spike_norm"), "tokens": "read"}
        source, passes = InMemory(params, config), (("read", ProfilePass(**options)),)
        profile = stream(source, {"x": x[None]}, {"": Group(passes)})[""]["read"]
        want = rc.profile(hidden, norm=norms, **options)
        assert profile.measures.keys() == want.measures.keys()
        for name, value in want.measures.items():
            np.testing.assert_allclose(profile.measures[name][0], value, rtol=1e-5)
        np.testing.assert_array_equal(profile.spiked[0], want.spiked)
        without_spikes = rc.profile(hidden, norm=norms, exclude="spikes", threshold=1.2, **options)
        assert int(np.sum(without_spikes.left_out)) > 0
    one = rc.monitor(hidden[0], tokens="unit", exclude="spikes", threshold=1.2)
    chosen = rc.profile(hidden[:1], tokens="unit", exclude="spikes", threshold=1.2)
    assert float(one["residual_ratio"]) == pytest.approx(float(chosen["residual_ratio"][0]))
    assert float(one["left_out"]) == float(chosen.left_out[0])
