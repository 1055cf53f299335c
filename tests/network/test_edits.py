"""Edits against the same change made in the parameters, in the trace and in sums of paths."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.edits import (
    EditPoints,
    carry_channels,
    edit_point_shapes,
    trace_edits,
)
from tests.oracles import draws
from tests.oracles.path_examples import DEPTH, HEADS, config_of, example
from tests.support.closeness import assert_close
from tests.support.refusals import each_is_refused, is_refused

CONFIG = config_of(mlp="gelu", norm_placement="post", attention_skip=True, mlp_skip=True)
LAYER = 1


def test_edit_points_have_the_shapes_of_what_is_computed_there():
    config = config_of(d_qk=3, d_v=2, mlp="relu", cross_attention=True)
    h, n, m, d = HEADS, 5, 4, config.d_model
    state = {"after_attention": (n, d), "after_cross": (n, d), "residual": (n, d)}
    branches = {f"{kind}_{end}": (n, d) for kind in config.kinds for end in ("input", "branch")}
    shapes = {"q": (h, n, 3), "k": (h, n, 3), "v": (h, n, 2), "head_output": (h, n, d)}
    shapes |= {"scores": (h, n, n), "weights": (h, n, n), "mlp_hidden": (n, 11)}
    shapes |= {"cross_q": (h, n, 3), "cross_k": (h, m, 3), "cross_v": (h, m, 2)}
    shapes |= {
        "cross_scores": (h, n, m),
        "cross_weights": (h, n, m),
        "cross_head_output": (h, n, d),
    }
    assert edit_point_shapes(config, n, m) == shapes | branches | state
    alone = edit_point_shapes(config_of(mix=lambda q, k, v, context: v), n)
    names = {"q", "k", "v", "weights", "head_output", "attention_input", "attention_branch"}
    assert alone.keys() == names | {"after_attention", "residual"}


def test_an_edit_point_edits_and_keeps_the_values_of_its_name():
    edits = {"cross_q": lambda value, layer: value + layer, "v": lambda value, layer: 0}
    points = EditPoints(edits, 3, ("cross_q", "cross_k"), "cross_")
    assert [points(name, 10) for name in ("q", "k", "v")] == [13, 10, 10]
    assert points.saved == {"cross_q": 13, "cross_k": 10} and points.unedited == {"cross_q": 10}
    used = [(points.has_edit(name), points.is_used(name)) for name in ("q", "k", "v")]
    assert used == [(True, True), (False, True), (False, False)]
    assert not EditPoints().is_used("q")


def test_edits_are_compiled_apart_where_they_compute_another_thing():
    """By their text, whatever arrays they refer to; those are arguments."""

    def find_program(fn):
        return jax.tree.structure(trace_edits({"q": fn}, CONFIG, 5, 1, jnp.float32))

    array, other = jnp.arange(3.0), jnp.arange(3.0) + 1
    twice, again = (find_program(lambda v, layer: v * 2.0) for _ in range(2))
    assert twice == again and hash(twice) == hash(again)
    assert twice != find_program(lambda v, layer: v * 3.0)
    one, same = (find_program(lambda v, layer, a=a: v + a.sum()) for a in (array, other))
    assert one == same != twice


def test_channels_carry_the_linear_part_of_an_edit_and_share_its_constant_part():
    """They sum to the edited value: of x² at v that is 2v c + (v² − 2v v) on the shares."""
    c = jnp.array([[1.0, 2.0], [3.0, -1.0]])
    value, shares = c.sum(axis=0), jnp.array([0.25, 0.75])
    for edit, expected in (
        (lambda v: 0 * v, 0 * c),
        (lambda v: 3 * v, 3 * c),
        (lambda v: 0 * v + 8, 8 * shares[:, None] * jnp.ones((1, 2))),
        (jnp.square, 2 * value[None] * c - shares[:, None] * jnp.square(value)[None]),
    ):
        carried = carry_channels(edit, value, c, shares)
        np.testing.assert_allclose(carried, expected, rtol=1e-6)
        np.testing.assert_allclose(carried.sum(axis=0), edit(value), rtol=1e-6)
    one = carry_channels(lambda v: v + 1, value, c[:1], jnp.ones(1))
    assert_close(one, c[:1] + 1)


ABLATED = {  # the place, the layer, and the parameters that make it 0
    "q": (0, "attention", ("w_q", "b_q")),
    "mlp_hidden": (0, "mlp", ("w_out",)),
    "scores": (1, "attention", ("w_k", "b_k")),
    "mlp_branch": (1, "mlp", ("w_out", "b_out")),
    "v": (2, "attention", ("w_v", "b_v")),
    "attention_branch": (3, "attention", ("w_o", "b_o")),
}


def edit_layer(place, change):
    """Makes an edit of one layer."""
    return lambda value, layer: jnp.where(layer == place, change(value), value)


ABLATION = {name: edit_layer(l, lambda value: 0 * value) for name, (l, *_) in ABLATED.items()}


@pytest.mark.full
def test_an_ablation_is_that_of_the_parameters(x64):
    config = CONFIG.replace(depth=4)
    params, x, _ = example(config)
    layers = params.layers
    for layer, part, fields in ABLATED.values():
        part_params = getattr(layers, part)
        part_params = part_params.replace(
            **{f: draws.with_value(getattr(part_params, f), layer, 0) for f in fields}
        )
        layers = layers.replace(**{part: part_params})
    changed = params.replace(layers=layers)
    trace, expected = rc.apply(params, x, config, edit=ABLATION), rc.apply(changed, x, config)
    assert_close(trace.hidden, expected.hidden, atol=1e-12)
    assert not np.allclose(trace.output, rc.apply(params, x, config).output)
    contributions = rc.path_contributions(params, x, config, edit=ABLATION)
    expected = rc.path_contributions(changed, x, config)
    assert_close(contributions.by_length, expected.by_length, atol=1e-12)
    assert_close(contributions.offset, expected.offset, atol=1e-12)


def test_an_edit_of_the_values_of_a_memory_is_that_of_their_bias(x64):
    config = config_of(depth=2, cross_attention=True)
    params, x, extra = example(config)
    shape = (HEADS, len(extra["memory"]), config.v_width)
    assert shape[1] not in (1, len(x))
    added = np.arange(HEADS)[:, None, None] + np.ones(shape)
    cross = params.layers.cross.replace(b_v=params.layers.cross.b_v + added[None, :, 0])
    changed = params.replace(layers=params.layers.replace(cross=cross))
    edit = {"cross_v": lambda value, layer: value + added}
    edited = rc.apply(params, x, config, edit=edit, **extra).hidden
    assert_close(edited, rc.apply(changed, x, config, **extra).hidden, atol=1e-12)


def make_edit(name):
    """Makes an edit that differs by place and layer."""
    size = {"weights": 0.5, "cross_weights": 0.25, "scores": 2.0}.get(name, 0.1)
    return lambda value, layer: value + size * jnp.sin(value + len(name) + layer)


def test_sums_of_paths_pass_the_edits_of_states_and_branches(x64):
    config = config_of(
        depth=2, mlp="relu", cross_attention=True, attention_skip=True, mlp_skip=True
    )
    params, x, extra = example(config)
    kinds = ("attention", "cross", "mlp")
    names = [f"{kind}_{place}" for kind in kinds for place in ("input", "branch")] + ["residual"]
    edit = {name: make_edit(name) for name in names}
    contributions = rc.path_contributions(params, x, config, edit=edit, **extra)
    expected = rc.apply(params, x, config, edit=edit, **extra).output
    assert_close(contributions.total, expected, atol=1e-10)


@pytest.mark.full
def test_sums_of_paths_hold_with_any_edit(x64):
    config = config_of(
        mlp="swiglu",
        norm_placement="pre",
        cross_attention=True,
        attention_skip=True,
        mlp_skip=True,
        final_norm=True,
    )
    params, x, extra = example(config)
    edit = {name: make_edit(name) for name in edit_point_shapes(config)}
    assert len(edit) == 22
    expected = rc.apply(params, x, config, edit=edit, **extra).output
    assert np.abs(expected - rc.apply(params, x, config, **extra).output).max() > 0.1
    contributions = rc.path_contributions(params, x, config, edit=edit, **extra)
    assert_close(contributions.output, expected, atol=1e-10)
    assert_close(contributions.total, expected, atol=1e-10)
    direct = rc.direct_contributions(params, x, config, edit=edit, **extra)
    assert_close(direct.total, expected, atol=1e-10)
    is_refused(
        "head_contributions does not cover an edit of 'head_out",
        rc.head_contributions,
        params,
        x,
        config,
        edit=edit,
        **extra,
    )
    edit = {name: fn for name, fn in edit.items() if not name.endswith("head_output")}

    def total(gain):
        return rc.path_contributions(params, x, config, head_gain=gain, edit=edit, **extra).total

    expected = jnp.moveaxis(jax.jit(jax.jacfwd(total))(jnp.ones((DEPTH, HEADS))), (0, 1), (2, 3))
    contributions = rc.head_contributions(params, x, config, edit=edit, **extra)
    assert_close(contributions, expected, atol=1e-10)


@pytest.mark.full
def test_what_an_edit_refers_to_is_traced_and_never_stale(x64, caplog):
    params, x, _ = example(CONFIG)
    factor = 1.0

    def patch_residual(states):
        return rc.apply(params, x, CONFIG, edit={"residual": edit_layer(LAYER, lambda _: states)})

    runs = [rc.apply(params, tokens, CONFIG) for tokens in (x[::-1] * 2, x + 1)]
    outputs = [patch_residual(runs[0].hidden[LAYER + 1]).output]
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        outputs.append(patch_residual(runs[1].hidden[LAYER + 1]).output)
    assert not [m for m in caplog.messages if "_apply" in m]
    assert_close(outputs, [run.output for run in runs])
    edit = {"mlp_branch": lambda value, layer: factor * value}
    before = rc.apply(params, x, CONFIG, edit=edit).output
    factor = 0.0
    after = rc.apply(params, x, CONFIG, edit=edit).output
    ablated_output = rc.apply(params, x, CONFIG, edit={"mlp_branch": lambda v, l: 0 * v}).output
    assert_close(after, ablated_output)
    assert np.abs(after - before).max() > 0.1
    # Nothing of the text before the patch is left on paths: all of it is the offset.
    edit = {"residual": edit_layer(LAYER, lambda _: runs[0].hidden[LAYER + 1])}
    contributions = rc.path_contributions(params, x, CONFIG, edit=edit)
    assert_close(contributions.offset, contributions.output, atol=1e-12)
    assert_close(contributions.by_length, 0, atol=1e-12)


@pytest.mark.full
def test_edited_weights_do_not_look_into_the_future(x64):
    config = CONFIG.replace(mask="causal")
    params, x, _ = example(config)
    edit = {"weights": lambda value, layer: value + 0.2}

    def first(x):
        return rc.apply(params, x, config, edit=edit).output[0].sum()

    gradient = jax.grad(first)(x)
    assert np.abs(gradient[0]).max() > 0 and not np.any(gradient[1:])


@pytest.mark.full
def test_what_is_kept_is_what_a_layer_computes(x64):
    params, x, _ = example(CONFIG)
    names = tuple(edit_point_shapes(CONFIG))
    trace = rc.apply(params, x, CONFIG, keep=names)
    saved, layer_stack = trace.kept, params.layers
    assert {*saved} == {*names}
    scores = jnp.einsum("lhnk,lhmk->lhnm", saved["q"], saved["k"]) / np.sqrt(saved["q"].shape[-1])
    assert_close(saved["scores"], scores)
    assert_close(saved["weights"], jax.nn.softmax(scores))
    np.testing.assert_array_equal(saved["weights"], trace.attention)
    heads = jnp.einsum(
        "lhnm,lhmv,lhvd->lhnd", saved["weights"], saved["v"], layer_stack.attention.w_o
    )
    assert_close(saved["head_output"], heads)
    branch = heads.sum(axis=1) + layer_stack.attention.b_o[:, None]
    assert_close(saved["attention_branch"], branch, atol=1e-12)
    mlp = (
        jnp.einsum("lnf,lfd->lnd", saved["mlp_hidden"], layer_stack.mlp.w_out)
        + layer_stack.mlp.b_out[:, None]
    )
    assert_close(saved["mlp_branch"], mlp, atol=1e-12)
    np.testing.assert_array_equal(saved["residual"], trace.hidden[1:])
    assert rc.apply(params, x, CONFIG).kept is None


def test_what_is_refused():
    params, x, _ = example(CONFIG)
    bend = {"residual": make_edit("residual")}
    for edit, message in (
        (
            {"atention": make_edit("")},
            r"'atention' is not one of \('q', 'k', 'v', 'scores'",
        ),
        ({"cross_q": make_edit("")}, "edit point 'cross_q' is not one of"),
        (
            {"scores": lambda value, layer: None},
            r"'scores' returned NoneType for a value of shape \(2,",
        ),
        ({"residual": lambda v, l: v[:, 0]}, r"returned \(5,\) for a value of shape \(5, 8\)"),
        ({"q": lambda v, layer: 0 * v if layer == 3 else v}, r"use jnp.where\(layer == 3"),
        ({"q": lambda v, layer: np.tanh(v)}, "a function of numpy"),
        ({"q": lambda v, layer: [1.0, 2.0][layer] * v}, r"use jnp.where\(layer == 3"),
        ({"q": lambda v, layer: jnp.fft.fft(v)}, "of real numbers"),
        ({"q": 3}, "edit of 'q', 3, is not a function"),
        (lambda layer, name, value: value, "is not a dictionary {name: function"),
    ):
        is_refused(message, rc.apply, params, x, CONFIG, edit=edit)
    each_is_refused(
        (
            lambda: rc.paths.path_state(params, x, CONFIG, np.zeros(DEPTH, int), edit=bend),
            "a set of recomputed paths does not cover an edit of 'residual'",
        ),
        (
            lambda: rc.log_residual_profile(params, x, CONFIG, edit=bend),
            "a residual in logarithms does not cover an edit of 'residual'",
        ),
        (lambda: rc.apply(params, x, CONFIG, keep=("heads",)), "edit point 'heads' is not one of"),
        (
            lambda: rc.network.multi_head_attention(
                params.layers.attention, x, x, edit={"hidden": make_edit("")}
            ),
            "edit point 'hidden' is not one of",
        ),
    )


def test_an_edit_refers_to_the_values_of_its_call():
    """JAX keeps what it traced for a function; the function may refer to another value by now."""
    config, factor = rc.san(1, 2, 4), 2.0

    def scale(value, layer):
        return factor * value

    value, results = jnp.ones((2, 3, 3)), []
    for factor in (2.0, 5.0):  # noqa: B007  `scale` reads it
        edits = trace_edits({"weights": scale}, config, 3, 3, jnp.float32)
        results.append(float(np.unique(edits["weights"](value, 0))[0]))
    assert results == [2.0, 5.0]


def test_an_edit_computes_in_the_dtype_of_its_pass_and_keeps_that_of_the_value():
    """Of a value of bfloat16, in which 1 + 2⁻⁹ is 1."""
    config = rc.san(1, 2, 4)
    for fn, expected in ((lambda v, layer: v + 2**-9 - 1, 2**-9), (lambda v, layer: v > 0, 1)):
        edit = trace_edits({"weights": fn}, config, 3, 3, jnp.float32)["weights"]
        edited = edit(jnp.ones((2, 3, 3), jnp.bfloat16), 0)
        assert edited.dtype == jnp.bfloat16 and np.all(edited == expected)
