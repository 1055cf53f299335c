"""What a layer reads, in passes and of traces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.measured.states import ProfilePass
from rank_collapse.network.passes import run_pass
from rank_collapse.pretrained import Group, InMemory, stream
from tests.oracles import draws
from tests.support.closeness import assert_close

N, D, LENGTH = 64, 128, 11.3


@pytest.mark.parametrize("tokens", ["raw", "read"])
def test_states_are_measured_as_layers_read_them_and_the_last_one_after_the_final_norm(tokens):
    config = rc.transformer(2, 2, 4, norm_placement="pre", final_norm=True)
    params, x, mask = draws.parameters(config), draws.normal(5, 4), np.arange(5) != 1
    profile_pass = ProfilePass(tokens=tokens)
    kept = run_pass(profile_pass, *prepare_inputs(params, x, config, mask=mask), config)
    trace = rc.apply(params, x, config, mask=mask, keep=("attention_input",))
    assert_close(kept["layers"]["x"], trace.hidden[:-1], atol=1e-6)
    assert_close(kept["last"]["x"], trace.hidden[-1], atol=1e-6)
    by_layer, last = (jax.device_get(kept[name]) for name in ("layers", "last"))
    np.testing.assert_array_equal(by_layer["mask"], [mask, mask])
    layers = [
        profile_pass.on_host(jax.tree.map(lambda a, l=l: a[l][None], by_layer)) for l in range(2)
    ]
    layers = {name: np.stack([one[name] for one in layers], axis=1) for name in layers[0]}
    last = jax.tree.map(lambda a: a[None], last)  # of one example
    profile = profile_pass.on_host({"layers": layers, "last": last})
    states = [*trace.kept["attention_input"], trace.output] if tokens == "read" else trace.hidden
    expected = rc.profile([np.asarray(state) for state in states], mask=mask)
    assert_close(profile["residual_ratio"][0], expected["residual_ratio"], rtol=1e-5)
    np.testing.assert_array_equal(profile.spiked[0], expected.spiked)
    np.testing.assert_array_equal(profile.rounding[0], expected.rounding)


def test_states_of_bfloat16_differ_by_its_rounding():
    """Their ratio of 0.003 is more than a rounding of float32, and less than 2⁻⁷."""
    x = np.array([[[1, 1], [1, 1.0078125]]])
    none = {"residual_ratio": np.zeros((1, 0)), "spiked": np.zeros((1, 0), bool)}
    for dtype in (jnp.bfloat16, np.float32):
        last = {"x": x.astype(dtype), "mask": None, "read": None}
        profile = ProfilePass().on_host({"layers": none, "last": last})
        assert 0.002 < profile["residual_ratio"][0, 0] < 2**-7
        assert profile.rounding[0, 0] == (dtype == jnp.bfloat16)


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
