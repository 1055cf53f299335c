"""Residual designs: their published constants, N counted from the config, every pass over them."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.designs import count_branches
from rank_collapse.network.residual import Unprofiled, init_gains, layer_gains, scale_norm
from tests.oracles import draws, mp_network
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals

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
ONE_STACK = {12: (2.213364, 0.319472), 24: (2.632148, 0.268642)}
PAIRS = {
    (6, 6): (1.417938, 0.496989, 2.059767, 0.343295),
    (18, 18): (1.998746, 0.352571, 2.710806, 0.260847),
    (6, 3): (1.357822, 0.518993, 1.732051, 0.408248),
}


@pytest.mark.parametrize("depth", ONE_STACK)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_deepnorm_of_one_stack_is_as_published(depth, mask):
    config = rc.design(network(depth, mask=mask), "deepnorm")
    gains = config.skip_gain, config.init_gain
    assert_close(gains, ONE_STACK[depth], rtol=0, atol=5.1e-7)
    assert (config.norm_placement, config.init, config.mask) == ("post", "xavier", mask)


@pytest.mark.parametrize("depths", PAIRS)
def test_deepnorm_of_an_encoder_decoder_is_as_published(depths):
    decoder = network(depths[1], cross_attention=True, mask="causal")
    pair = rc.design(Pair(network(depths[0]), decoder), "deepnorm")
    gains = [g for part in (pair.encoder, pair.decoder) for g in (part.skip_gain, part.init_gain)]
    assert_close(gains, PAIRS[depths], rtol=0, atol=5.1e-7)


def test_admin_without_profiling_is_as_published():
    # λ² = (N + 1)/ln(N + 1) − 1 and N: of 18 layers with 36 branches, and their decoder with 54.
    config = network(18)
    np.testing.assert_allclose(rc.design(config, "admin_log").skip_gain ** 2, 9.2467, rtol=1e-5)
    assert_close(rc.design(config, "admin_const").skip_gain ** 2, 36)
    pair = rc.design(Pair(config, network(18, cross_attention=True)), "admin_const")
    squares = pair.encoder.skip_gain**2, pair.decoder.skip_gain**2
    assert_close(squares, (36, 54))


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


@pytest.mark.full
def test_the_initial_gain_is_that_of_values_outputs_and_mlps():
    # Xavier's variance 2/(fan-in + fan-out), over enough entries: five standard deviations of
    # the mean of their squares. One compilation for both gains.
    config = rc.transformer(30, 2, 24, d_qk=6, d_v=10, d_ff=96, mlp="swiglu", init="xavier")
    draw = jax.jit(lambda c: rc.init(jax.random.key(0), c, 1.3).layers)
    plain, gained = draw(config), draw(config.replace(init_gain=0.25))
    fans = {
        "w_q": (24, 12),
        "w_k": (24, 12),
        "w_v": (24, 20),
        "w_o": (20, 24),
        "w_in": (24, 96),
        "w_gate": (24, 96),
        "w_out": (96, 24),
    }
    for part in (plain.attention, plain.mlp):
        for name in fans:
            w = getattr(part, name, np.zeros(0))
            if w.size:
                variance = 1.3**2 * 2 / sum(fans[name])
                assert abs(np.var(w) / variance - 1) < 5 * np.sqrt(2 / w.size)
    for part, other in ((plain.attention, gained.attention), (plain.mlp, gained.mlp)):
        for name in fans.keys() & vars(part).keys():
            expected = getattr(part, name) * (1.0 if name in ("w_q", "w_k") else 0.25)
            np.testing.assert_allclose(getattr(other, name), expected, rtol=1e-6)


def test_gains_that_are_trained_start_as_published():
    def init_design(name, depth=16):
        config = rc.design(network(depth), name)
        return config, init_gains(config)["mlp_gains"]

    config, learned = init_design("rezero")
    assert config.norm_placement == "none" and learned.skip is None
    for learned_gains in (learned, init_design("skipinit")[1]):
        np.testing.assert_array_equal(learned_gains.branch, np.zeros(16))
    for depth, start in ((18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)):
        learned_gains = init_design("layerscale", depth)[1].branch
        np.testing.assert_allclose(learned_gains, np.full((depth, D), start), rtol=1e-6)
    config, learned = init_design("admin_const")
    assert_close(config.skip_gain * learned.skip, np.full((16, D), np.sqrt(32)))
    for name, gain, value in (
        ("admin_const", "skip_gain", np.sqrt(6)),
        ("layerscale", "branch_gain", 0.1),
        ("rezero", "branch_gain", 0.0),
    ):
        fixed_config = rc.design(network(), name, learned=False)
        assert getattr(fixed_config, gain) == value and not init_gains(fixed_config)
        assert not fixed_config.learned_per_feature
    unprofiled = rc.design(network(), "admin", learned=False)
    assert unprofiled == network(skip_gain=Unprofiled())
    gains = init_gains(network(learned_skip_gain=rc.Gains(attention=2.0, mlp=3.0)))
    skips = [gains[f"{kind}_gains"].skip for kind in ("attention", "mlp")]
    np.testing.assert_array_equal(skips, [[2, 2, 2], [3, 3, 3]])
    shared = network(layer_map=(0, 1, 0), learned_branch_gain=np.array([3.0, 5.0, 7.0]))
    np.testing.assert_array_equal(init_gains(shared)["mlp_gains"].branch, [3, 5])


PRE = {"norm_placement": "pre", "final_norm": True}
FIELDS = {  # of a network of 16 layers; what is not named is as in a plain residual network
    "post": {},
    "pre": PRE,
    "admin": {"skip_gain": Unprofiled(), "learned_skip_gain": 1.0, "learned_per_feature": True},
    "deepnorm": {"skip_gain": 32**0.25, "init_gain": 128**-0.25, "init": "xavier"},
    "rezero": {"norm_placement": "none", "learned_branch_gain": 0.0},
    "skipinit": {"norm_placement": "none", "learned_branch_gain": 0.0},
    "layerscale": PRE | {"learned_branch_gain": 0.1, "learned_per_feature": True},
    "sandwich": PRE | {"norm_placement": "sandwich"},
    "branch_norm": PRE | {"norm_placement": "branch"},
    "qk_norm": PRE | {"qk_norm": "head"},
    "depth_scaled": {"branch_gain": 0.25},
    "lambda_skip": {"learned_skip_gain": 1.0},
    "ngpt": {"norm_placement": "both", "skip_gain": 0.95, "branch_gain": 0.05}
    | {"norm": "rms", "qk_norm": "head"},
}
WITH_ANY = {  # fields that a design replaces
    "skip_gain": 3.0,
    "branch_gain": 3.0,
    "init_gain": 3.0,
    "norm_gain": 3.0,
    "learned_skip_gain": 3.0,
    "learned_branch_gain": 3.0,
    "learned_per_feature": True,
    "qk_norm": "width",
    "final_norm": True,
    "attention_skip": False,
    "mlp_skip": False,
    "cross_skip": False,
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_design_sets_its_fields_and_undoes_those_of_others(name):
    config = network(16, cross_attention=False)
    expected = config.replace(**FIELDS[name])
    assert rc.design(config, name) == expected
    assert rc.design(config.replace(**WITH_ANY), name) == expected


def test_each_placement_that_a_design_allows_has_the_final_norm_that_it_needs():
    for name, placements in (
        ("rezero", ("none", "pre", "post")),
        ("skipinit", ("none", "pre", "post")),
        ("layerscale", ("pre", "post")),
        ("qk_norm", ("pre", "branch")),
        ("depth_scaled", ("post", "pre", "none")),
        ("deepscalelm", ("pre", "post")),
    ):
        assert rc.network.DESIGNS[name].placements == placements
        for placement in placements:
            config = rc.design(network(), name, norm_placement=placement)
            chosen = config.norm_placement, config.final_norm
            assert chosen == (placement, placement in ("pre", "branch"))
    pair = rc.design(Pair(network(), network(cross_attention=True)), "qk_norm", learned=False)
    assert pair.encoder.qk_norm == pair.decoder.qk_norm == "head"


def test_layer_norms_are_scaled_by_their_layer():
    config = rc.design(network(4), "layernorm_scaling")
    assert_close(config.norm_gain, 1 / np.sqrt([1, 2, 3, 4]))
    assert config.norm_placement == "pre" and config.final_norm
    norm = scale_norm(None, jnp.float32(0.5), 3)
    np.testing.assert_array_equal(norm.gain, [0.5, 0.5, 0.5])
    assert norm.bias is None


def test_deepscalelm_keeps_tokens_of_variance_1_by_the_published_correlation():
    """The correlation of tokens of a ReLU network, layer by layer, from .221 at the start."""
    depth, r = 8, 0.221
    config = rc.design(rc.transformer(depth, 4, 128, mlp="relu"), "deepscalelm")
    square = 2 / depth
    assert np.isclose(config.skip_gain**2, 1 - square)
    gains = []
    for _ in range(depth):
        gains.append(np.sqrt(square / r))
        r = (1 - square) * r + square
        r = (1 - square) * r + square * (r + (np.sqrt(1 - r * r) - r * np.arccos(r)) / np.pi)
    assert_close(config.branch_gain.attention, gains)
    assert_close(config.branch_gain.cross, gains)
    assert np.isclose(config.branch_gain.mlp, np.sqrt(2 * square)) and config.init == "lecun"
    one = rc.design(rc.transformer(1, 4, 128, mlp="relu"), "deepscalelm")  # β² is at most 1
    assert one.skip_gain == 0 and np.isclose(one.branch_gain.mlp, np.sqrt(2))


def draw(config):
    """Draws parameters away from where they start, and tokens."""
    return draws.parameters(config, gain_scale=0.3), draws.tokens(N, D)


@pytest.mark.parametrize("name", rc.network.DESIGNS)
def test_a_design_is_its_equations(name):
    config = rc.design(network(), name)
    hash(config)  # decided by the config alone, it may be a static argument of jit
    if name == "admin":
        config = config.replace(skip_gain=1.7)  # as after profiling
    params, x = draw(config)
    expected = mp_network.states(params, x, config)[1]
    assert np.abs(expected).max() < 50
    output = jax.jit(rc.apply)(params, x, config).output
    np.testing.assert_allclose(output, expected, rtol=2e-5, atol=2e-5)


LEARNED = network(learned_branch_gain=0.5)
APPLY_LEARNED = lambda config: rc.apply(*draw(LEARNED), config)  # noqa: E731


@parametrize_refusals(
    [
        (lambda: rc.design(network(), "deepnrom"), "'deepnrom' is not one of .*'deepnorm'"),
        (
            lambda: rc.design(network(), "deepnorm", norm_placement="pre"),
            "design 'deepnorm' needs norm_placement='post', not 'pre'",
        ),
        (
            lambda: APPLY_LEARNED(network()),
            r"layers.\w+_gains.branch of shape \(3,\) has no place in the config",
        ),
        (
            lambda: APPLY_LEARNED(LEARNED.replace(learned_per_feature=True)),
            r"gains.branch is of shape \(3,\); .*\(3, 8\)",
        ),
        (
            lambda: APPLY_LEARNED(LEARNED.replace(learned_skip_gain=1.0)),
            r"layers.\w+_gains.skip is missing",
        ),
        (lambda: layer_gains(LEARNED, jnp.float32), r"learned_branch_gain is set: .* parameters"),
        (
            lambda: init_gains(network(learned_skip_gain=np.ones((1, D)))),
            "per feature, but learned_per_feature=False",
        ),
    ]
)
def test_what_does_not_fit_is_refused(arguments, message):
    is_refused(message, *arguments)


def test_an_mlp_that_is_cut_away_takes_its_gains_with_it():
    params, x = draw(LEARNED)
    config, params = rc.surgery.ablate(LEARNED, params, "SAN+skip")
    assert params.layers.mlp_gains is None
    assert np.isfinite(rc.apply(params, x, config).hidden).all()


def test_swept_gains_do_not_compile_anew():
    traced = []
    config = rc.design(network(), "layernorm_scaling").replace(
        learned_skip_gain=1.0, learned_branch_gain=1.0
    )
    params, x = draw(config)

    @jax.jit
    def output(config):
        traced.append(1)
        started = params.replace(layers=params.layers.replace(**init_gains(config)))
        return rc.apply(started, x, config).output

    swept = ("skip_gain", "branch_gain", "learned_skip_gain", "learned_branch_gain")
    outputs = [output(config)] + [output(config.replace(**{name: 0.4})) for name in swept]
    outputs.append(output(config.replace(norm_gain=tuple(g / 3 for g in config.norm_gain))))
    assert len(traced) == 1
    # 0.4 times a gain is the same whether it is learned or not; all else differs.
    np.testing.assert_allclose(outputs[1:3], outputs[3:5], rtol=1e-5, atol=1e-5)
    for a, b in itertools.combinations([outputs[k] for k in (0, 1, 2, 5)], 2):
        assert np.abs(a - b).max() > 0.05
