"""What every pass refuses at once, with the value and what would fit; precision of measures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.input_checks import is_embedded
from rank_collapse.network.inputs import as_batch, at_least_float32, batch_size, prepare_inputs
from rank_collapse.theory.expectation import expected_pass
from tests.oracles import draws
from tests.support.closeness import near
from tests.support.marks import full_but
from tests.support.refusals import each_is_refused, is_refused, parametrize_refusals

N, D = 5, 8
X = draws.normal(N, D)
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


@pytest.mark.parametrize("name", PASSES)
def test_a_config_that_contradicts_the_parameters_is_refused_everywhere(name):
    config, params = san()
    each_is_refused(
        (
            lambda: PASSES[name](params, X, config.replace(num_heads=1)),
            r"w_q is of shape \(2, 4, 8, 2\); the config implies \(2, 1, 8, 8\)",
        ),
        (lambda: PASSES[name](params, X, config.replace(depth=3)), r"depth=3"),
    )


def test_what_contradicts():
    config = rc.transformer(2, 2, D, mlp="swiglu")
    params = draws.parameters(config)
    without = params.replace(layers=params.layers.replace(mlp_norm=None))
    grouped = draws.changed(params, attention={"w_k": params.layers.attention.w_k[:, :1]})
    for changed, fields, message in (
        (params, {"mlp": "relu"}, r"w_gate of shape .* is not in the config .*mlp='relu'"),
        (params, {"d_ff": 999}, "d_ff=999"),
        (without, {}, "mlp_norm.gain is missing"),
        (grouped, {}, r"w_k is of shape"),
        (
            group_heads(draws.parameters(rc.san(2, 4, D)), 2)[0],
            {"mlp": "none", "num_heads": 3, "d_qk": 2, "d_v": 2},
            "num_heads=3",
        ),
    ):
        is_refused(message, rc.apply, changed, X, config.replace(**fields))
    three = rc.san(2, 3, D, d_qk=2, d_v=2)  # of which two groups are no part
    params_of_three = draws.parameters(three)
    attention = params_of_three.layers.attention
    few = {name: getattr(attention, name)[:, :2] for name in ("w_k", "b_k", "w_v", "b_v")}
    pairs = draws.changed(params_of_three, attention=few)
    is_refused(r"[wb]_[kv] is of shape \(2, 2, ", rc.apply, pairs, X, three)
    # Ablations on the same weights leave parts unused.
    rc.apply(params, X, config.replace(mlp="none"))
    rc.apply(params, X, config.replace(norm_placement="none", attention_skip=False))


def group_heads(params, groups):
    """Groups keys and values as a checkpoint stores them; also returns them repeated by head."""
    a = params.layers.attention
    few = {"w_k": a.w_k[:, :groups], "w_v": a.w_v[:, :groups]}
    group_of_head = np.arange(4) // (4 // groups)
    full = {name: w[:, group_of_head] for name, w in few.items()}
    few |= dict.fromkeys(("b_q", "b_k", "b_v", "b_o"))
    return [draws.changed(params, attention=fields) for fields in (few, full)]


@pytest.mark.parametrize(
    "name", full_but(PASSES, "apply", "log_residual_profile", "path_set_states")
)
def test_grouped_keys_and_values_are_read_as_they_are_stored(name):
    config, params = san()
    stored, full = group_heads(params, 2)
    grouped_result, expected = (PASSES[name](p, X, config) for p in (stored, full))
    near(grouped_result, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["apply", "path_contributions", "log_residual_profile"])
def test_additive_masks_are_refused_and_other_forms_agree(name):
    config, params = san()
    causal = np.tri(N, dtype=bool)
    each_is_refused(
        (
            lambda: PASSES[name](params, X, config, mask=np.where(causal, 0.0, -1e9)),
            "additive masks go to bias=",
        ),
        (
            lambda: PASSES[name](params, X, config, mask=causal.astype(int) * 3),
            "values other than 0 and 1",
        ),
        (
            lambda: PASSES[name](params, X, config, mask=causal[:, :4]),
            r"mask of shape \(5, 4\) does not fit 5 tokens",
        ),
    )
    expected = PASSES[name](params, X, config, mask=jnp.asarray(causal))
    for form in (causal, causal.astype(int), causal.astype(int).tolist(), causal.tolist()):
        result = PASSES[name](params, X, config, mask=form)
        jax.tree.map(np.testing.assert_array_equal, result, expected)


TEXT = {"embedding": rc.EmbeddingConfig(vocab_size=11, d_embed=D)}


@parametrize_refusals(
    [
        (TEXT, {"x": jnp.array([3, 50])}, "token id 50 is not below vocab_size=11"),
        (TEXT, {"x": jnp.array([-1, 2])}, "token id -1 is not below vocab_size=11"),
        ({}, {"x": X, "memory": X}, "cross_attention=False"),
        ({}, {"x": X, "dropout_rate": 0.1}, r"dropout_rate=0.1 needs a dropout_key"),
        ({}, {"x": X, "dropout_key": 3, "dropout_rate": 0.1}, "dropout_key of shape"),
        ({}, {"x": None}, "x of type NoneType is not an array of numbers"),
        ({}, {"x": X, "bias": "causal"}, "bias of type str is not an array of numbers"),
        ({}, {"x": X, "dropout_rate": np.full(2, 0.1)}, r"dropout_rate=array\(\[0.1, 0.1\]\)"),
        ({}, {"x": X + 1j}, r"x of shape \(5, 8\) and dtype complex64"),
    ]
)
def test_inputs_of_no_use_and_token_ids_outside_the_vocabulary_are_refused(arguments, message):
    fields, inputs = arguments
    is_refused(message, lambda: rc.apply(san(**fields)[1], config=san(**fields)[0], **inputs))


TABLES = rc.EmbeddingConfig(
    vocab_size=11, d_embed=D, positions="learned", num_positions=9, num_segments=2
)
ONE = np.ones(1, int)


@parametrize_refusals(
    [
        ({"num_heads": 1}, {"bias": np.zeros((4, N, N))}, r"bias of shape \(4, 5, 5\)"),
        ({}, {"bias": np.tri(N, dtype=bool)}, "bias .* dtype bool .* mask="),
        ({"num_heads": 1}, {"mask": np.ones((4, N, N), bool)}, r"mask of shape \(4, 5, 5\)"),
        ({"position": "rotary"}, {"positions": ONE}, "positions .* each of 5 tokens"),
        ({"position": "relative_key"}, {"segments": ONE}, "segments .* each of 5 tokens"),
        ({"embedding": TABLES}, {"positions": ONE}, "positions .* each of 5 tokens"),
        ({"embedding": TABLES}, {"segments": ONE}, "segments .* each of 5 tokens"),
        ({"embedding": TABLES}, {"segments": np.full(N, 2)}, "segment 2 is not below num_segments"),
        ({"embedding": TABLES}, {"positions": np.full(N, 9)}, "position 9 is not below num_posit"),
        ({"embedding": TABLES}, {"positions": np.ones(N)}, "positions of dtype .* not integers"),
        ({"embedding": TABLES}, {"segments": np.ones(N)}, "segments of dtype .* not integers"),
        ({}, {"segments": np.ones(N, int)}, "segments are given, but this network does not use"),
        ({}, {"positions": np.ones(N, int)}, "positions are given, but this network does not use"),
        ({"cross_attention": True}, {}, "cross_attention=True needs a memory"),
        ({}, {"memory_mask": np.ones(N, bool)}, "cross_attention=False"),
        (
            {"cross_attention": True},
            {"memory": X[:3], "memory_mask": np.ones(4, bool)},
            r"memory_mask of shape \(4,\) does not fit 5 tokens and 3 keys",
        ),
        ({"cross_attention": True}, {"memory": X[:, 1:]}, r"memory of shape \(5, 7\)"),
        ({"cross_attention": True}, {"memory": X[:0]}, r"memory of shape \(0, 8\)"),
    ]
)
def test_what_would_be_broadcast_to_all_tokens_or_heads_is_refused(arguments, message):
    fields, inputs = arguments
    is_refused(message, lambda: apply_to_tokens(rc.san(2, 2, D).replace(**fields), inputs))


def apply_to_tokens(config, inputs):
    x = np.arange(N) if config.embedding else X
    return rc.apply(draws.parameters(config, 1), x, config, **inputs)


@parametrize_refusals(
    [
        (lambda: rc.apply(san()[1], san()[0], X), "config is a .*rray"),
        (lambda: rc.surgery.ablate(*san()[::-1], "SAN"), "config is a TransformerParams"),
        (lambda: rc.design(san()[1], "pre"), "config is a TransformerParams"),
        (lambda: rc.variant(san()[1], "sinks"), "config is a TransformerParams"),
    ]
)
def test_arguments_in_another_order_are_named(arguments, message):
    is_refused(message, *arguments)


def test_a_bias_of_all_heads_is_that_of_each():
    config, params = san()
    bias = draws.normal(N, N)
    for name in ("apply", "path_state"):
        one, each = (
            PASSES[name](params, X, config, bias=b) for b in (bias, bias[None].repeat(4, 0))
        )
        one, each = (getattr(result, "output", result) for result in (one, each))
        np.testing.assert_allclose(one, each, 1e-5, 1e-6)


def test_calls_outside_jit_compile_once(monkeypatch):
    config, params = san()
    traces, forward = [], rc.network.transformer.compute_layer
    monkeypatch.setattr(
        "rank_collapse.network.transformer.compute_layer",
        lambda *arguments, **options: traces.append(1) or forward(*arguments, **options),
    )
    for gain in (1.0, 0.5, 0.25):
        rc.apply(params, 2.0 * X[:, :], config.replace(skip_gain=gain, d_ff=77))
    assert len(traces) == 1


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
    "path_set_logits": lambda p, x: rc.paths.path_set_logits(p, CLASSIFIER, x, CONFIG, PATHS),
    "log_residual_profile": lambda p, x: rc.log_residual_profile(p, x, CONFIG),
    "bound_report": lambda p, x: (
        rc.bound_report(p.replace(layers=p.layers.replace(mlp=None)), x, SAN).layer.tightness
    ),
    "truncated": lambda p, x: rc.truncated(p, x, CONFIG, 1).output,
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


@pytest.mark.parametrize(
    "name", full_but(MEASURES, "apply", "path_contributions", "path_set_logits", "bound_report")
)
def test_every_product_of_a_measure_has_full_precision(name):
    params, x = draws.parameters(CONFIG), draws.normal(N, D)
    with jax.default_matmul_precision("bfloat16"):
        precisions = set(list_precisions(jax.make_jaxpr(MEASURES[name])(params, x).jaxpr))
    highest = (jax.lax.Precision.HIGHEST,) * 2
    if name == "apply":  # the caller's choice, as in training
        assert precisions and highest not in precisions
    else:
        assert precisions == {highest}


def test_parameters_of_numpy_in_float64_are_computed_in_float32():
    """There is no warning. Missing biases are zeros in the precision of the other parameters."""
    config = rc.transformer(2, 2, 4)
    params, x = rc.init(jax.random.key(0), config), draws.normal(3, 4)
    attention = params.layers.attention.replace(b_q=None, b_k=None, b_v=None, b_o=None)
    params = params.replace(layers=params.layers.replace(attention=attention))
    doubled = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    np.testing.assert_array_equal(
        rc.apply(doubled, x, config).output, rc.apply(params, x, config).output
    )


def test_lists_of_examples_are_padded_with_zeros_and_a_mask_says_which_tokens_exist():
    ids = [np.array([3, 4, 5]), np.array([6])]
    batch = as_batch({"x": ids, "segments": [[1, 1, 1], [1]], "memory": None})
    assert {name: a.tolist() for name, a in batch.items()} == {
        "x": [[3, 4, 5], [6, 0, 0]],
        "segments": [[1, 1, 1], [1, 0, 0]],
        "mask": [[True] * 3, [True, False, False]],
    }
    given = as_batch({"x": ids, "mask": [[True, False, True], [True]]})
    assert given["mask"].tolist() == [[True, False, True], [True, False, False]]
    states = as_batch({"x": [np.ones((2, 3)), np.ones((1, 3))]})["x"]
    assert states.shape == (2, 2, 3) and states[1, 1].tolist() == [0, 0, 0]
    assert as_batch({"x": [[1, 2], [3, 4]]}).keys() == {"x"} and batch_size({"x": X}) == N


@parametrize_refusals(
    [
        ({"x": [[1, 2]], "mask": np.ones((2, 2))}, "different lengths, or none: .*'mask': 2"),
        ({"segments": np.ones((2, 2))}, "or none: {'segments': 2}"),
        ({"x": np.ones((0, 2))}, "or none: {'x': 0}"),
        ({"x": 3}, "or none: {'x': None}"),
    ]
)
def test_batches_that_are_none_are_refused(arguments, message):
    is_refused(message, as_batch, *arguments)


def test_what_is_given_of_tokens_reaches_the_embedding_and_the_attention():
    config = rc.san(2, 2, D, embedding=TABLES, position="relative_key")
    params, ids = draws.parameters(config, 1), np.array([3, 1, 4, 1, 5])
    inputs = {
        "segments": np.array([0, 1, 1, 0, 1]),
        "positions": np.array([4, 2, 8, 0, 1]),
        "mask": np.arange(N) != 1,
        "bias": np.asarray(draws.normal(2, N, N)),
    }
    prepared = prepare_inputs(params, ids, config, **inputs)[1]
    p = jax.device_get(params.embedding)
    x = p.tokens[ids] + p.positions[inputs["positions"]] + p.segments[inputs["segments"]]
    x = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True) * p.norm.gain + p.norm.bias
    np.testing.assert_allclose(prepared.x, x, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(prepared.context.segments, inputs["segments"])
    np.testing.assert_array_equal(prepared.context.bias, inputs["bias"])
    np.testing.assert_array_equal(prepared.context.mask, inputs["mask"][None])
    np.testing.assert_array_equal(prepared.token_mask, inputs["mask"])


def test_measures_are_in_float32_at_least_and_a_mask_of_pairs_leaves_all_tokens():
    config, params = san()
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    exists = np.arange(N) != 2
    for mask, tokens in ((None, None), (exists, exists), (np.tri(N, dtype=bool), None)):
        inputs = prepare_inputs(half, X.astype(jnp.bfloat16), config, mask=mask)
        assert list_dtypes(inputs[0], inputs[1].x) == {jnp.bfloat16}
        full = at_least_float32(*inputs)
        assert list_dtypes(full[0], full[1].x) == {jnp.float32}
        expected = np.ones(N, bool) if tokens is None else tokens
        np.testing.assert_array_equal(inputs[1].existing_tokens, expected)
        assert (inputs[1].token_mask is None) == (tokens is None)


def list_dtypes(*trees):
    return {a.dtype.type for a in jax.tree.leaves(trees)}


def test_missing_biases_are_zeros_of_the_shape_and_precision_of_their_part():
    config = rc.transformer(2, 4, D, d_ff=6, mlp="swiglu", cross_attention=True)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), draws.parameters(config))
    shapes = {
        "attention": {"b_q": (2, 4, 2), "b_k": (2, 4, 2), "b_v": (2, 4, 2), "b_o": (2, D)},
        "cross": {"b_q": (2, 4, 2), "b_o": (2, D)},
        "mlp": {"b_in": (2, 6), "b_gate": (2, 6), "b_out": (2, D)},
    }
    missing = draws.changed(
        params, **{part: dict.fromkeys(names) for part, names in shapes.items()}
    )
    x = X.astype(jnp.bfloat16)
    layers = prepare_inputs(missing, x, config, memory=x)[0].layers
    assert list_dtypes(layers) == {jnp.bfloat16}
    for part, biases in shapes.items():
        for name, shape in biases.items():
            bias = getattr(getattr(layers, part), name)
            assert bias.shape == shape and not bias.any()
    np.testing.assert_array_equal(layers.cross.b_k, params.layers.cross.b_k)


@pytest.mark.parametrize(("d_input", "is_read"), [(8, True), (3, False)])
def test_vectors_of_the_models_width_are_states_unless_the_embedding_reads_such(d_input, is_read):
    embedding = rc.EmbeddingConfig(d_input=d_input, d_embed=8)
    config = rc.san(1, 2, 8, embedding=embedding)
    assert is_embedded(np.ones((2, 8)), config) == is_read
    assert is_embedded(np.ones((2, d_input)), config)
