import jax
import jax.numpy as jnp
import numpy as np
import pytest
from path_examples import chain_effects, length_effects, over_batch

import rank_collapse as rc
from rank_collapse.measures.residuals import effective_rank, residual_ratio, token_cosine

CONFIG = rc.transformer(3, 2, 8, d_ff=12)
LENGTHS = (6, 4, 5)


@pytest.fixture(scope="module")
def batch():
    params = rc.init(jax.random.key(0), CONFIG, bias_scale=0.3)
    x = np.array(jax.random.normal(jax.random.key(1), (3, 6, 8)))
    mask = np.arange(6)[None, :] < np.array(LENGTHS)[:, None]
    return params, {"x": x, "mask": mask}


def test_profiles_of_padded_texts_are_those_of_the_texts_alone(batch):
    params, inputs = batch
    measures = ("residual_ratio", "token_cosine", "effective_rank")
    found = over_batch(rc.network_profile, params, CONFIG, inputs, measures=measures)
    for i, n in enumerate(LENGTHS):
        hidden = rc.apply(params, inputs["x"][i, :n], CONFIG).hidden
        for measure, value in zip(
            measures, (residual_ratio, token_cosine, effective_rank), strict=True
        ):
            expected = [float(value(h)) for h in hidden]
            np.testing.assert_allclose(found[measure][i], expected, rtol=2e-5)
    alone = rc.network_profile(params, inputs["x"][0], CONFIG)["residual_ratio"]
    np.testing.assert_allclose(found["residual_ratio"][0], alone, rtol=1e-5)


def test_length_effects_leave_padding_out(batch):
    params, inputs = batch
    found = over_batch(length_effects, params, CONFIG, inputs)
    assert np.all(found["error"] < 1e-5)
    np.testing.assert_allclose(found["cosine_up_to"][:, -1], 1.0, atol=1e-5)
    n = LENGTHS[1]
    alone = length_effects(params, jnp.asarray(inputs["x"][1, :n]), CONFIG)
    for name, value in alone.items():
        np.testing.assert_allclose(found[name][1], value, rtol=1e-3, atol=2e-6, err_msg=name)


def plain_composite(a):
    return np.sqrt(np.abs(a).sum(axis=0).max() * np.abs(a).sum(axis=1).max())


@pytest.mark.slow
def test_chain_effects(batch):
    params, inputs = batch
    found = over_batch(chain_effects, params, CONFIG, inputs, num_paths=4)
    assert found["chain_residual"].shape == (3, 3, 4)
    n = LENGTHS[1]
    alone = chain_effects(params, inputs["x"][1, :n], CONFIG, num_paths=4)
    for name, value in alone.items():
        np.testing.assert_allclose(found[name][1], value, rtol=1e-4, atol=1e-6, err_msg=name)
    # The first text is not padded: its chains, multiplied out.
    attention = np.asarray(rc.apply(params, inputs["x"][0], CONFIG).attention, np.float64)
    paths = rc.sample_path_sets(jax.random.key(0), range(1, 4), 1, 4, 3, 2)[:, 0]
    for k, p in np.ndindex(3, 4):
        product = np.eye(6)
        for weights, head in zip(attention, paths[k, p], strict=True):
            product = (weights[head] if head < 2 else np.eye(6)) @ product
        u, s, v = np.linalg.svd(product)
        size = plain_composite(product)
        for name, rest in (
            ("chain_residual", product - product.mean(axis=0)),
            ("chain_rank_one", product - s[0] * np.outer(u[:, 0], v[0])),
        ):
            expected = plain_composite(rest) / size
            np.testing.assert_allclose(found[name][0, k, p], expected, rtol=1e-4, err_msg=name)
