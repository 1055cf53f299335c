"""Residual designs: their published constants, N counted from the config, every pass over them."""

import dataclasses

import jax
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.designs import count_branches

L, H, N, D = 3, 2, 5, 8


@dataclasses.dataclass(frozen=True)
class Pair:
    encoder: rc.TransformerConfig
    decoder: rc.TransformerConfig


def network(depth=L, **fields):
    return rc.transformer(depth, H, D, **({"mlp": "tanh", "d_ff": 7} | fields))


def test_branches_are_counted_from_the_config():
    assert count_branches(network(5)) == 10
    assert count_branches(network(5, mlp="none")) == 5
    assert count_branches(network(5, cross_attention=True)) == 15
    assert count_branches(network(5, layer_map=(0,) * 5)) == 10


# The published formulas of α and β (Wang et al. 2022, table of figure 2) at 12 and 24 layers, and
# at 6 + 6, 18 + 18 and 6 + 3, to six places.
ALONE = {12: (2.213364, 0.319472), 24: (2.632148, 0.268642)}
PAIRS = {
    (6, 6): (1.417938, 0.496989, 2.059767, 0.343295),
    (18, 18): (1.998746, 0.352571, 2.710806, 0.260847),
    (6, 3): (1.357822, 0.518993, 1.732051, 0.408248),
}


@pytest.mark.parametrize("depth", ALONE)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_deepnorm_of_one_stack_is_as_published(depth, mask):
    config = rc.design(network(depth, mask=mask), "deepnorm")
    found = config.skip_gain, config.init_gain
    np.testing.assert_allclose(found, ALONE[depth], rtol=0, atol=5.1e-7)
    assert (config.norm_placement, config.init, config.mask) == ("post", "xavier", mask)


@pytest.mark.parametrize("depths", PAIRS)
def test_deepnorm_of_an_encoder_decoder_is_as_published(depths):
    decoder = network(depths[1], cross_attention=True, mask="causal")
    pair = rc.design(Pair(network(depths[0]), decoder), "deepnorm")
    found = [g for part in (pair.encoder, pair.decoder) for g in (part.skip_gain, part.init_gain)]
    np.testing.assert_allclose(found, PAIRS[depths], rtol=0, atol=5.1e-7)


def test_admin_without_profiling_is_as_published():
    # λ² = (N + 1)/ln(N + 1) − 1 and N: of 18 layers with 36 branches, and their decoder with 54.
    config = network(18)
    np.testing.assert_allclose(rc.design(config, "admin_log").skip_gain ** 2, 9.2467, rtol=1e-5)
    np.testing.assert_allclose(rc.design(config, "admin_const").skip_gain ** 2, 36)
    pair = rc.design(Pair(config, network(18, cross_attention=True)), "admin_const")
    squares = pair.encoder.skip_gain**2, pair.decoder.skip_gain**2
    np.testing.assert_allclose(squares, (36, 54))


def test_depth_scaled_divides_branches_by_the_root_of_the_layers():
    config = rc.design(network(16), "depth_scaled")
    assert (config.branch_gain, config.skip_gain, config.norm_placement) == (0.25, 1.0, "post")
    config = rc.design(network(16), "depth_scaled", norm_placement="pre")
    assert config.norm_placement == "pre" and config.final_norm


def test_a_design_does_not_keep_the_gains_of_another():
    config = network(4)
    again = rc.design(rc.design(config, "deepnorm"), "post")
    assert again == config.replace(init="xavier")  # `init` is the user's where no paper names one
    pre = rc.design(config, "pre")
    assert pre.final_norm and not rc.design(pre, "admin_log").final_norm
    san = rc.design(rc.san(4, H, D), "post")
    assert san.attention_skip and not san.mlp_skip


def test_what_does_not_fit_is_refused_in_one_line():
    for options, message in (
        ({"name": "deepnrom"}, "design 'deepnrom' is not one of .*'deepnorm'"),
        (
            {"name": "deepnorm", "norm_placement": "pre"},
            "design 'deepnorm' does not fit norm_placement='pre', but 'post'",
        ),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            rc.design(network(), **options)
        assert "\n" not in str(caught.value)


def test_the_initial_gain_is_that_of_values_outputs_and_mlps():
    for fields in ({}, {"mlp": "swiglu", "cross_attention": True}):
        config = network(**fields)
        plain = rc.init(jax.random.key(0), config, 1.3).layers
        gained = jax.jit(lambda c: rc.init(jax.random.key(0), c, 1.3))(
            config.replace(init_gain=0.25)
        ).layers
        names = ["attention"] + ["cross"] * config.cross_attention
        for name in names:
            one, other = getattr(plain, name), getattr(gained, name)
            for w in ("w_q", "w_k", "w_v", "w_o"):
                factor = 0.25 if w in ("w_v", "w_o") else 1.0
                np.testing.assert_allclose(getattr(other, w), factor * getattr(one, w), rtol=1e-6)
        for w in ("w_in", "w_out") + ("w_gate",) * (config.mlp == "swiglu"):
            scaled = 0.25 * getattr(plain.mlp, w)
            np.testing.assert_allclose(getattr(gained.mlp, w), scaled, rtol=1e-6)


def test_xavier_has_the_variance_of_both_widths():
    config = rc.transformer(40, 2, 24, d_qk=6, d_v=10, d_ff=96, init="xavier")
    layers = rc.init(jax.random.key(0), config).layers
    for w, fans in (
        (layers.attention.w_q, (24, 12)),
        (layers.attention.w_v, (24, 20)),
        (layers.attention.w_o, (20, 24)),
        (layers.mlp.w_in, (24, 96)),
        (layers.mlp.w_out, (96, 24)),
    ):
        # The mean of w.size squares of variance 2 σ⁴: five of its standard deviations.
        assert abs(np.var(w) * sum(fans) / 2 - 1) < 5 * np.sqrt(2 / w.size)
