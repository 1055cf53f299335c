"""Depth parametrisations: their table, the plain network at the base's shape, and what they do."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import rank_collapse as rc
from experiments.train.byte_networks import byte_model, text_bytes
from rank_collapse.scaling.depth_rules import parameter_group
from tests.oracles import draws
from tests.support.closeness import assert_close
from tests.support.marks import full_but
from tests.support.refusals import is_refused, parametrize_refusals

N, L = 4, 8  # m_N and m_L of NETWORK against BASE
BASE, NETWORK = byte_model(1, 8, 6), byte_model(L, 8 * N, 6)

# Table 1 of Dey et al. 2025 by hand: (deviation at the start, rate, decay, ε) of each group, with ε
# outside of blocks as the table has it, and as their code.
SQRT = 8**0.5
TABLE = {
    "sp": {"embedding": (1, 1, 1, 1), "matrix": (1, 1, 1, 1), "vector": (1, 1, 0, 1)},
    "mup": {
        "embedding": (1, 1, 1, 1),
        "matrix": (0.5, 1 / 4, 4, 1 / 4),
        "vector": (1, 1, 0, 1 / 4),
    },
    "half": {
        "embedding": (1, 1, 1, 1),
        "matrix": (0.5, 1 / 4 / SQRT, 4, 1 / 4 / SQRT),
        "vector": (1, 1 / SQRT, 0, 1 / 4 / SQRT),
    },
    "completep": {
        "embedding": (1, 1, 1, 1),
        "matrix": (0.5, 1 / 4, 4, 1 / 32),
        "vector": (1, 1, 0, 1 / 32),
    },
}
GAIN = {"sp": 1, "mup": 1, "half": 1 / SQRT, "completep": 1 / 8}
# The members of each group, by hand.
MEMBERS = {
    "embedding": ("embedding.tokens", "embedding.positions"),
    "matrix": ("layers.attention.w_q", "layers.attention.w_o", "layers.mlp.w_in"),
    "vector": ("layers.attention.b_v", "layers.mlp.b_out", "layers.mlp_norm.gain"),
    "final": ("final_norm.gain", "final_norm.bias"),
}


def name_leaves(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="."): np.asarray(a) for p, a in leaves}


def run_steps(optimizer, params, gradients):
    """Runs an optimizer: the updates of each step, {leaf: array}."""

    @jax.jit
    def run(params, gradients):
        state, steps = optimizer.init(params), []
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state, params)
            steps.append(updates)
        return steps

    return [name_leaves(updates) for updates in run(params, gradients)]


draw = jax.jit(lambda init, config: init(jax.random.key(3), config), static_argnums=(0, 1))


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("x64", full_but([False, True], True))
def test_the_factors_are_those_of_the_table(name, x64):
    """Factors of initial values, of gains, and of two steps of Adam, computed leaf by leaf."""
    with jax.enable_x64(True) if x64 else contextlib.nullcontext():
        rule = rc.depth_rule(name, BASE)
        plain, scaled = draw(rc.init, NETWORK), draw(rule.init, NETWORK)
        params = draws.parameters(NETWORK)
        gradients = [
            jax.tree.map(lambda a, s=s: 1e-6 * (np.asarray(a) + s), params) for s in (0.1, -0.3)
        ]
        updates = run_steps(rule.adamw(1e-2, NETWORK, weight_decay=0.1), params, gradients)
        rounding = 50 * jnp.finfo(params.layers.mlp.w_in.dtype).eps
        plain, scaled, values = map(name_leaves, (plain, scaled, params))
        gradients = [name_leaves(g) for g in gradients]
        for group, members in MEMBERS.items():
            deviation, rate, decay, eps = TABLE[name].get(group, (1, 1, 0, 1))
            for leaf in members:
                assert_close(scaled[leaf], deviation * plain[leaf], rtol=rounding)
                m = v = 0.0
                for step, (gradient, update) in enumerate(zip(gradients, updates, strict=True), 1):
                    g = np.asarray(gradient[leaf], np.float64)
                    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
                    root = np.sqrt(v / (1 - 0.95**step)) + eps * 1e-8
                    direction = m / (1 - 0.9**step) / root + decay * 0.1 * values[leaf]
                    # relative to the largest term: Adam's and the decay's may cancel
                    assert_close(
                        update[leaf], -rate * 1e-2 * direction, atol=1e-2 * rate * rounding * 4
                    )
    network = rule.network(NETWORK)
    assert np.isclose(network.branch_gain, GAIN[name])
    assert np.isclose(rule.logit_gain(NETWORK), 1.0 if name == "sp" else 1 / N)
    heads = 1.0 if name == "sp" else np.sqrt(N)
    assert np.isclose(network.temperature / NETWORK.temperature, heads)


@pytest.mark.full
def test_scales_of_initial_values_reach_the_draws():
    key, rule = jax.random.key(3), rc.depth_rule("mup", BASE)
    scales = {"weight_scale": 3.0, "bias_scale": 2.0}
    plain, scaled = rc.init(key, NETWORK, **scales), rule.init(key, NETWORK, **scales)
    plain, scaled = plain.layers.mlp, scaled.layers.mlp
    np.testing.assert_allclose(scaled.w_in, plain.w_in / 2, rtol=1e-6)
    np.testing.assert_array_equal(scaled.b_in, plain.b_in)
    assert plain.b_in.all()


def test_what_adamw_is_given_is_given_to_each_group(monkeypatch):
    calls = []
    monkeypatch.setattr(optax, "adamw", lambda *a, **k: calls.append((a, k)) or optax.identity())
    options = {"weight_decay": 0.3, "b1": 0.5, "b2": 0.6, "eps": 1e-4}
    rc.depth_rule("half", BASE).adamw(2.0, NETWORK, **options)
    assert len(calls) == 4
    for name, (arguments, keywords) in zip(("embedding", "matrix", "vector"), calls, strict=False):
        _, rate, decay, eps = TABLE["half"][name]
        assert_close(arguments, (2 * rate, 0.5, 0.6, 1e-4 * eps))
        assert_close(keywords["weight_decay"], 0.3 * decay)


def test_groups_are_by_name_inside_of_blocks_and_by_axes_outside():
    keys = jax.tree_util.DictKey, jax.tree_util.GetAttrKey
    for path, ndim, group in (
        (("layers", "attention", "w_q"), 4, "matrix"),
        (("layers", "attention", "b_q"), 3, "vector"),
        (("layers", "mlp_norm", "gain"), 2, "vector"),
        (("model", "layers", "mlp", "w_in"), 3, "matrix"),
        (("embedding", "tokens"), 2, "embedding"),
        (("embedding", "b_in"), 1, "final"),
        (("w_output",), 2, "embedding"),
    ):
        for key in keys:
            assert parameter_group(map(key, path), np.zeros((1,) * ndim)) == group


def test_the_eps_of_blocks_is_scaled():
    factors = rc.depth_rule("completep", BASE).factors(NETWORK)
    order = ("embedding", "final", "matrix", "vector")
    assert_close([factors[group].eps for group in order], (1, 1, 1 / 32, 1 / 32))


def test_layers_that_are_passed_again_count_as_loops():
    looped = NETWORK.replace(layer_map=(0, 1) * 4)  # twice as many layers, passed four times
    rule = rc.depth_rule("looped", BASE)
    assert np.isclose(rule.network(looped).branch_gain, 1 / (4 * 2**0.5))
    assert np.isclose(rule.factors(looped)["vector"].rate, 2**-0.5)
    for name, gain in (("completep", 1 / 8), ("half", 8**-0.5), ("mup", 1), ("sp", 1)):
        # m_L = 2 and m_R = 4, each to the power of the depth
        assert np.isclose(rc.depth_rule(name, BASE).network(looped).branch_gain, gain)
    # a base that is looped, too: of the same rows and loops, or of twice as many rows
    assert rc.depth_rule("looped", looped).multipliers(looped) == (1, 1, 1)
    wide = NETWORK.replace(d_model=16, layer_map=(0, 1, 2, 3) * 2)
    assert rc.depth_rule("looped", looped).multipliers(wide) == (1 / 2, 2, 1 / 2)
    gains = rc.Gains(attention=2.0, mlp=jnp.ones(L))
    scaled = rc.depth_rule("half", BASE).network(NETWORK.replace(branch_gain=gains)).branch_gain
    assert_close([scaled.attention, scaled.mlp[3]], [2 / SQRT, 1 / SQRT])


@pytest.mark.parametrize("name", full_but([*TABLE, "looped"], "completep", "looped"))
def test_at_the_base_every_rule_is_the_plain_network(name):
    rule = rc.depth_rule(name, NETWORK)
    plain, scaled = (name_leaves(draw(init, NETWORK)) for init in (rc.init, rule.init))
    assert all(np.array_equal(plain[leaf], scaled[leaf]) for leaf in plain)
    network = rule.network(NETWORK)
    assert (network.branch_gain, network.temperature) == (1.0, NETWORK.temperature)
    params = draws.parameters(NETWORK)
    decayed = jax.tree_util.tree_map_with_path(
        lambda path, a: path[-1].name.startswith(("w_", "tokens", "positions")), params
    )
    optimizer = optax.adamw(1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=decayed)
    gradients = [jax.tree.map(np.sin, params)]
    (one,), (other,) = (
        run_steps(o, params, gradients) for o in (rule.adamw(1e-2, NETWORK), optimizer)
    )
    assert all(np.array_equal(one[leaf], other[leaf]) for leaf in one)


def test_a_schedule_is_multiplied_by_the_factor_of_each_group():
    rule, params = rc.depth_rule("half", BASE), draws.parameters(NETWORK)
    gradients = [jax.tree.map(np.cos, params)] * 2
    scheduled = run_steps(rule.adamw(lambda t: 1e-2 / (t + 1), NETWORK), params, gradients)
    fixed = run_steps(rule.adamw(1e-2, NETWORK), params, gradients)
    for leaf in ("layers.mlp.w_in", "final_norm.gain"):
        np.testing.assert_allclose(scheduled[1][leaf], fixed[1][leaf] / 2, rtol=1e-5)


class Modules:
    """A module of torch: arrays for its parameters, some of them those of blocks."""

    def __init__(self, *parameters):
        self.arrays = parameters

    def parameters(self):
        return list(self.arrays)


def test_groups_of_a_module_have_the_values_of_the_table():
    table, matrix, vector, gain, other = (np.ones((2,) * k) for k in (2, 2, 1, 1, 3))
    model, blocks = Modules(table, matrix, vector, gain, other), Modules(matrix, vector, other)
    rule = rc.depth_rule("completep", BASE)
    groups = rule.groups(model, blocks, 1e-2, NETWORK, weight_decay=0.2, eps=1e-6)
    members = {"embedding": [table], "matrix": [matrix, other], "vector": [vector]}
    for group, (name, arrays) in zip(groups, [*members.items(), ("final", [gain])], strict=True):
        assert group["name"] == name and [id(p) for p in group["params"]] == list(map(id, arrays))
        deviation, rate, decay, eps = TABLE["completep"].get(name, (1, 1, 0, 1))
        values = group["init"], group["lr"], group["weight_decay"], group["eps"]
        assert_close(values, (deviation, 1e-2 * rate, 0.2 * decay, 1e-6 * eps))
    names = [g["name"] for g in rule.groups(Modules(matrix), Modules(matrix), 1e-2, NETWORK)]
    assert names == ["matrix"]  # no empty groups
    defaults = rule.groups(Modules(matrix), Modules(matrix), 1e-2, BASE)[0]
    assert (defaults["weight_decay"], defaults["eps"]) == (0.1, 1e-8)


@pytest.mark.full
def test_groups_of_torch():
    torch = pytest.importorskip("torch")
    rule = rc.depth_rule("completep", BASE)
    model = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(5, 32),
            "blocks": torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(L)),
            "norm": torch.nn.LayerNorm(32),
        }
    )
    groups = rule.groups(model, model["blocks"], 1e-2, NETWORK)
    torch.optim.AdamW(groups)
    assert [(g["name"], len(g["params"])) for g in groups] == [
        ("embedding", 1),
        ("matrix", L),
        ("vector", L),
        ("final", 2),
    ]
    for g in groups:
        deviation, rate, decay, eps = TABLE["completep"].get(g["name"], (1, 1, 0, 1))
        values = g["init"], g["lr"], g["weight_decay"], g["eps"]
        assert_close(values, (deviation, 1e-2 * rate, 0.1 * decay, 1e-8 * eps))


@parametrize_refusals(
    [
        (lambda: rc.depth_rule("complete", BASE), "depth rule 'complete' is not one of"),
        (lambda: rc.depth_rule(["mup"], BASE), "'mup'.* is not one of"),
        (lambda: rc.depth_rule("mup", None), "base is a NoneType"),
        (lambda: rc.depth_rule("mup", BASE).network(None), "config is a NoneType"),
        (
            lambda: rc.depth_rule("sp", BASE).init(None, NETWORK.replace(init="reference")),
            "init='reference'",
        ),
        (lambda: text_bytes("short", 64), "a text of 5 bytes"),
    ]
)
def test_mistakes_are_named(arguments, message):
    is_refused(message, *arguments)


POWERS = {"mup": 0.0, "half": -0.5, "completep": -1.0}


@pytest.mark.full
@pytest.mark.parametrize("name", full_but(POWERS, "half"))
def test_the_first_states_follow_the_law_of_independent_branches(name):
    """Var x_L = 2σ² + L m_L^(2·power) · 4dσ² E gelu(√d σ z)², of blocks with MLPs alone.

    By the power, |x_L| grows as √L, is constant, or falls to that of the embedding.
    """
    depth, d, sigma, power = 32, 64, 0.02, POWERS[name]
    config = byte_model(depth, d, 32)
    rule = rc.depth_rule(name, byte_model(2, d, 32))
    params = draw(rule.init, config)
    attention = params.layers.attention
    attention = attention.replace(w_o=np.zeros_like(attention.w_o))
    params = params.replace(layers=params.layers.replace(attention=attention))
    ids = np.random.default_rng(0).integers(0, 256, (8, 32))
    last = jax.jit(rc.network.apply_batch)(params, ids, rule.network(config)).hidden[-1]
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    z = np.sqrt(d) * sigma * nodes
    gelu = z * stats.norm.cdf(z)
    square = np.sum(weights * gelu**2) / np.sum(weights)
    law = 2 * sigma**2 + depth * (depth / 2) ** (2 * power) * 4 * d * sigma**2 * square
    # Each of L blocks draws d features anew, of relative variance 2; five standard deviations.
    assert abs(np.mean(np.square(last)) / law - 1) < 5 * np.sqrt(2 / (d * depth))


@pytest.mark.parametrize("width", [8, 96])
def test_scores_of_a_head_are_divided_by_its_width(width):
    """√k of dot products, times the temperature, by the rule that scales with width: k in all."""
    config = byte_model(2, width)
    network = rc.depth_rule("mup", byte_model(2, 256)).network(config)
    assert np.isclose(np.sqrt(config.qk_width) * network.temperature, config.qk_width)


RULE = rc.depth_rule("completep", BASE)
MODULE, OTHER = Modules(np.ones((2, 2))), Modules(np.ones((2, 2)))


@parametrize_refusals(
    [
        (lambda: RULE.groups(MODULE, OTHER, 1e-3, NETWORK), "blocks do not belong to this module"),
        (lambda: RULE.groups(MODULE, Modules(), 1e-3, NETWORK), "blocks do not belong to this mod"),
        (lambda: RULE.groups(MODULE, MODULE, float("nan"), NETWORK), "rate=nan"),
        (lambda: RULE.groups(MODULE, MODULE, float("inf"), NETWORK), "rate=inf"),
        (lambda: RULE.adamw(-1, NETWORK), "rate=-1"),
        (lambda: RULE.adamw(np.float32("nan"), NETWORK), "rate=nan"),
        (lambda: RULE.adamw(1e-3, NETWORK, weight_decay=-1), "weight_decay=-1"),
        (lambda: RULE.adamw("1e-3", NETWORK), "rate='1e-3'"),
        (lambda: RULE.adamw(1e-3, NETWORK, eps=float("nan")), "eps=nan"),
        (lambda: RULE.adamw(1e-3, NETWORK, b1=1.0), r"b1=1.0 is not in \[0, 1\)"),
        (lambda: RULE.groups(MODULE, MODULE, 1e-3, NETWORK, weight_decay=-1), "weight_decay=-1"),
        (lambda: RULE.adamw(1e-3, NETWORK, b2=1.5), r"b2=1.5 is not in \[0, 1\)"),
        (lambda: RULE.groups(MODULE, MODULE, 1e-3, NETWORK, eps=float("nan")), "eps=nan"),
    ]
)
def test_rates_and_blocks_that_do_not_fit(arguments, message):
    is_refused(message, *arguments)


@pytest.mark.parametrize("init", ["lecun", "xavier"])
def test_weights_of_a_variance_of_one_over_fan_in_start_as_they_are(init):
    for name in TABLE:
        factors = rc.depth_rule(name, BASE).factors(NETWORK.replace(init=init))
        assert factors["matrix"].init == 1
