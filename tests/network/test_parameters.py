"""Initial values of every parameter: their deviations by rule, and that no two share a key.

Normal numbers are replaced by ones, which then show the deviation, or by their key.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network import encoder_decoder
from rank_collapse.network.embedding import init_embedding
from rank_collapse.network.parameters import init_block
from tests.oracles import draws
from tests.support.closeness import near
from tests.support.refusals import each_is_refused, is_refused

H, G, D, K, V, F, E = 4, 2, 24, 6, 10, 96, 3
CONFIG = rc.TransformerConfig(
    depth=2,
    num_heads=H,
    num_kv_heads=G,
    d_model=D,
    d_qk=K,
    d_v=V,
    d_ff=F,
    mlp="swiglu",
    num_experts=E,
    d_shared=36,
    cross_attention=True,
    score="additive",
    position="relative_key",
    norm_placement="sandwich",
    init_gain=0.25,
)
FANS = {  # (inputs, outputs) of each linear map
    "w_q": (D, H * K),
    "w_k": (D, G * K),
    "w_v": (D, G * V),
    "w_o": (H * V, D),
    "v_score": (K, 1),
    "w_r": (D, H * K),
    "segment": (K, K),
    "w_in": (D, F),
    "w_gate": (D, F),
    "w_out": (F, D),
    "w_router": (D, E),
    "w_shared": (D, 1),
}
RULES = {
    "lecun": lambda fan_in, _: fan_in**-0.5,
    "xavier": lambda *fans: (2 / sum(fans)) ** 0.5,
    "bert": lambda *_: 0.02,
    "reference": lambda *_: 0.02,
}


@pytest.fixture
def draw_ones(monkeypatch):
    def uniform(key, shape, minval, maxval):
        return jnp.linspace(minval, maxval, np.prod(shape)).reshape(shape)

    monkeypatch.setattr(jax.random, "normal", lambda key, shape: jnp.ones(shape))
    monkeypatch.setattr(jax.random, "uniform", uniform)


@pytest.fixture
def draw_keys(monkeypatch):
    def normal(key, shape):
        words = (jax.random.key_data(key) % 10007).astype(jnp.float32)
        return jnp.broadcast_to(1 + words[0] + words[1] / 10007, shape)

    monkeypatch.setattr(jax.random, "normal", normal)


def list_values(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): a for path, a in leaves}


@pytest.mark.parametrize("rule", RULES)
def test_weights_have_the_deviation_of_their_rule(rule, draw_ones):
    block = init_block(jax.random.key(0), CONFIG.replace(init=rule), 3.0, 0.5)
    values, seen = list_values(block), set()
    for name, array in values.items():
        part, field = name.split(".")[0], name.split(".")[-1]
        if "norm" in part:
            expected = float(field == "gain")
        elif field.startswith("b_"):
            expected = 0.5
        else:
            is_scaled = part == "mlp" or field in ("w_v", "w_o")
            expected = RULES[rule](*FANS[field]) * (0.25 if is_scaled else 1)
            expected *= 1 if field == "v_score" else 3
            seen.add(field)
        if rule == "reference" and field in ("w_v", "w_o"):  # uniform(±1/√fan-in)
            bound = 0.25 * 3 / np.sqrt(FANS[field][0])
            np.testing.assert_allclose([array.min(), array.max()], [-bound, bound], rtol=1e-6)
        else:
            np.testing.assert_allclose(array, expected, rtol=1e-6, err_msg=name)
    assert seen == FANS.keys() and {"cross.w_q", "mlp.b_gate", "attention.b_o"} < values.keys()


def test_what_is_outside_of_the_layers_has_its_deviation(draw_ones):
    table = rc.EmbeddingConfig(vocab_size=5, d_embed=D)
    config = rc.san(2, H, D, position="relative_bias", num_buckets=6, embedding=table)
    params = rc.init(jax.random.key(0), config.replace(final_norm=True))
    np.testing.assert_allclose(params.position_bias, np.full((6, H), D**-0.5), rtol=1e-6)
    np.testing.assert_allclose(params.embedding.tokens, np.full((5, D), 0.02), rtol=1e-6)
    assert np.all(params.final_norm.gain == 1) and not params.final_norm.bias.any()
    assert not params.layers.attention.b_q.any()  # no biases but where they are asked for
    config = rc.san(2, H, D)
    params = jax.eval_shape(lambda: rc.init(jax.random.key(0), config))
    assert (params.final_norm, params.embedding, params.position_bias) == (None, None, None)


def test_norms_are_where_the_placement_has_them():
    """Those of the branch's input or of the sum, and those of the branch's output."""
    kinds = ("attention", "cross", "mlp")
    for placement, has_norm, has_branch_norm in (
        ("none", False, False),
        ("pre", True, False),
        ("post", True, False),
        ("sandwich", True, True),
        ("branch", False, True),
        ("both", True, True),
    ):
        for norm in ("layer", "rms"):
            config = CONFIG.replace(norm_placement=placement, norm=norm)
            block = jax.eval_shape(lambda c=config: init_block(jax.random.key(0), c))
            for kind in kinds:
                norms = [getattr(block, f"{kind}{name}_norm") for name in ("", "_branch")]
                assert [n is not None for n in norms] == [has_norm, has_branch_norm]
                for params in filter(None, norms):
                    assert params.gain.shape == (D,) and (params.bias is None) == (norm == "rms")


def test_gains_of_queries_and_keys_are_one_for_each_feature_that_they_multiply():
    for kind, q_shape, k_shape in (("head", (K,), (K,)), ("width", (H, K), (G, K))):
        block = init_block(jax.random.key(0), rc.san(1, H, D, qk_norm=kind, d_qk=K, num_kv_heads=G))
        assert block.attention.q_norm.shape == q_shape and block.attention.k_norm.shape == k_shape
        assert np.all(block.attention.q_norm == 1) and np.all(block.attention.k_norm == 1)
    assert block.attention.w_v.shape == (G, D, 6) and block.attention.w_q.shape == (H, D, K)


def find_equal(tree):
    """Finds pairs of arrays whose random numbers came from one key, leaving out constants."""
    values = {name: np.ravel(a)[0] for name, a in list_values(tree).items()}
    drawn = {name: v for name, v in values.items() if v not in (0, 1)}
    assert len(drawn) > 3
    return [pair for pair in itertools.combinations(drawn, 2) if drawn[pair[0]] == drawn[pair[1]]]


def test_no_two_parameters_share_a_key(draw_keys):
    # 50 keeps weights apart from biases; v_score is not multiplied by it
    block = init_block(jax.random.key(0), CONFIG.replace(init="bert", init_gain=1.0), 50.0, 1.0)
    parts = [part.replace(v_score=None) for part in (block.attention, block.cross)]
    assert find_equal([*parts, block.mlp]) == []
    table = rc.EmbeddingConfig(d_input=5, d_embed=8, projection="after_norm", class_token=True)
    table = table.replace(positions="learned", num_positions=3, num_segments=2, num_registers=2)
    params = init_embedding(jax.random.key(0), table.replace(hidden_layer=True), 6)
    assert find_equal(params) == []


def test_halves_of_an_encoder_decoder_have_keys_of_their_own(draw_keys):
    tokens = rc.EmbeddingConfig(vocab_size=5, d_embed=8, norm=False)
    half = rc.san(1, 2, 8, embedding=tokens, init="bert")
    config = rc.network.EncoderDecoderConfig(
        half, half.replace(mask="causal", cross_attention=True), shared_embedding=True
    )
    key = jax.random.key(0)
    params, scaled = (encoder_decoder.init(key, config, *scales) for scales in ((), (3.0, 2.0)))
    encoder, decoder = params.encoder.layers.attention, params.decoder.layers.attention
    assert encoder.w_q[0, 0, 0, 0] != decoder.w_q[0, 0, 0, 0]
    for name in ("encoder", "decoder"):
        plain, other = (getattr(p, name).layers.attention for p in (params, scaled))
        np.testing.assert_allclose(other.w_q, 3 * plain.w_q, rtol=1e-6)
        assert not plain.b_q.any() and other.b_q.all()
    np.testing.assert_array_equal(scaled.w_output, params.w_output)
    assert params.w_output.shape == (8, 5) and not params.b_output.any()
    assert params.decoder.embedding.tokens is None
    np.testing.assert_array_equal(
        encoder_decoder.decoder_params(params, config).embedding.tokens,
        params.encoder.embedding.tokens,
    )


def test_the_output_of_an_encoder_decoder_has_a_deviation_of_a_fiftieth(draw_ones):
    tokens = rc.EmbeddingConfig(vocab_size=5, d_embed=8, norm=False)
    half = rc.san(1, 2, 8, embedding=tokens, mask="causal", cross_attention=True)
    config = rc.network.EncoderDecoderConfig(half.replace(cross_attention=False), half)
    params = encoder_decoder.init(jax.random.key(0), config, 7.0)
    np.testing.assert_allclose(params.w_output, np.full((8, 5), 0.02), rtol=1e-6)
    np.testing.assert_allclose(params.decoder.embedding.tokens, np.full((5, 8), 0.02), rtol=1e-6)
    config = config.replace(tied_output=True)
    tied = jax.eval_shape(lambda: encoder_decoder.init(jax.random.key(0), config))
    assert tied.w_output is None and tied.b_output is None


def test_an_embedding_has_the_tables_that_its_config_says(draw_ones):
    fields = {"class_token": True, "num_registers": 2, "num_segments": 3}
    fields |= {"positions": "learned", "num_positions": 7}
    for config, shapes in (
        (
            rc.EmbeddingConfig(vocab_size=5, d_embed=4, projection="before_norm", **fields),
            {"tokens": (5, 4), "positions": (7, 4), "segments": (3, 4), "class_token": (4,)}
            | {"registers": (2, 4), "w_project": (4, 6)},
        ),
        (
            rc.EmbeddingConfig(d_input=3, d_embed=4, hidden_layer=True, projection="after_norm"),
            {"w_in": (3, 4), "w_hidden": (4, 4), "w_project": (4, 6)},
        ),
        (
            rc.EmbeddingConfig(d_input=3, d_embed=6, convolutions=True, norm=False),
            {"w_in": (3, 3, 6), "w_hidden": (3, 6, 6)},
        ),
        (rc.EmbeddingConfig(d_input=3, d_embed=6, positions="sinusoidal"), {"w_in": (3, 6)}),
    ):
        params = init_embedding(jax.random.key(0), config, 6)
        values = list_values(params)
        drawn = {
            name: a.shape for name, a in values.items() if np.all(a != 0) and "gain" not in name
        }
        assert drawn == shapes
        for name in shapes:
            np.testing.assert_allclose(values[name], 0.02, rtol=1e-6)
        assert (params.norm is not None) == config.norm
        if config.norm:
            width = {"after_norm": 4}.get(config.projection, 6)
            assert params.norm.gain.shape == params.norm.bias.shape == (width,)
            assert np.all(params.norm.gain == 1) and not params.norm.bias.any()


def test_layers_that_share_parameters_are_read_through_the_map():
    config = rc.san(4, 1, 2, layer_map=(1, 0, 0, 1))
    params = jax.eval_shape(lambda: rc.init(jax.random.key(0), config))
    params = jax.tree.map(lambda a: jnp.arange(2.0).reshape(-1, *[1] * (a.ndim - 1)), params)
    rows = [rc.network.layer_params(params, config, l).attention.w_q.item() for l in range(-4, 4)]
    assert rows == [1, 0, 0, 1] * 2
    is_refused("layer=4 does not exist", rc.network.layer_params, params, config, 4)
    is_refused("layer=-5 does not exist", rc.network.layer_params, params, config, -5)


@pytest.mark.full
def test_parameters_of_numpy_are_read_by_traced_indices():
    """A function that is compiled refers to them as constants."""
    tables = {"vocab_size": 7, "num_positions": 5, "num_segments": 2}
    table = rc.EmbeddingConfig(d_embed=4, positions="learned", **tables)
    config = rc.san(3, 2, 4, position="relative_bias", layer_map=(1, 0, 1), embedding=table)
    params = jax.tree.map(np.asarray, draws.parameters(config))
    copied = jax.tree.map(jnp.asarray, params)
    inputs = {"x": np.array([3, 0, 6, 3]), "segments": np.array([0, 0, 1, 1])}
    compute = jax.jit(lambda inputs: rc.apply(params, config=config, **inputs).hidden)
    near(compute(inputs), rc.apply(copied, config=config, **inputs).hidden, rtol=1e-6)
    select = jax.jit(lambda layer: rc.network.layer_params(params, config, layer))
    for layer in range(3):
        near(select(layer), rc.network.layer_params(copied, config, layer))


def test_no_two_parameters_of_a_layer_are_drawn_alike():
    """One head as wide as the tokens, so that matrices, and biases, have equally many entries."""
    config = rc.TransformerConfig(1, 1, 6, d_ff=6, mlp="swiglu", cross_attention=True)
    leaves = jax.tree.leaves(init_block(jax.random.key(0), config, 1.0, 1.0))
    units = {tuple(np.round(np.ravel(a) / np.linalg.norm(a), 4)) for a in map(np.asarray, leaves)}
    assert len(units) == len(leaves)


def test_a_layer_that_is_not_there_has_no_parameters():
    config = rc.san(3, 2, 4)
    params = draws.parameters(config)
    each_is_refused(
        (
            lambda: rc.network.layer_params(params, config, 3),
            "layer=3 does not exist in a network of depth=3",
        ),
        (
            lambda: rc.network.layer_params(params, config, -4),
            "layer=-4 does not exist in a network of depth=3",
        ),
    )
    last = rc.network.layer_params(params, config, -1)
    np.testing.assert_array_equal(last.attention.w_q, params.layers.attention.w_q[2])
