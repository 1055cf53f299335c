"""`rc.profile` of hidden states as every framework gives them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from tests.oracles import draws
from tests.support.closeness import near
from tests.support.marks import full_but
from tests.support.refusals import each_is_refused, is_refused, parametrize_refusals

L, B, N, D = 3, 2, 5, 4
HIDDEN = np.random.default_rng(0).normal(size=(L, B, N, D)).astype(np.float32)
KEEP = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def measure_one_by_one(measure, keep=None):
    return [
        [measure(HIDDEN[l, b] if keep is None else HIDDEN[l, b][keep[b] == 1]) for b in range(B)]
        for l in range(L)
    ]


def test_batches_layers_lists_and_masks():
    want = measure_one_by_one(rc.token_cosine)
    arrays = (HIDDEN, jnp.asarray(HIDDEN), HIDDEN.swapaxes(0, 1))
    cases = [(hidden, {"batch_axis": axis}) for hidden, axis in zip(arrays, (1, 1, 0), strict=True)]
    cases += [(list(HIDDEN), {}), (tuple(jnp.asarray(HIDDEN)), {})]
    for hidden, axis in cases:
        profile = rc.profile(hidden, measures="token_cosine", **axis)
        assert list(profile.measures) == ["token_cosine"]
        np.testing.assert_allclose(profile["token_cosine"], want, rtol=1e-5)
    single = rc.profile(HIDDEN[:, 0], measures=["residual_ratio", "effective_rank"])
    np.testing.assert_allclose(
        single["effective_rank"][1], rc.effective_rank(HIDDEN[1, 0]), rtol=1e-5
    )
    is_refused(
        r"'residual_ratio'.*profile\['residual_ratio'\], profile\['effective_rank'\]",
        lambda: single.residual_ratio,
        error=AttributeError,
    )
    assert rc.profile(HIDDEN[:, 0], measures=()).measures == {}  # no measure is not the default
    masked = rc.profile(list(HIDDEN), mask=KEEP)["residual_ratio"]
    np.testing.assert_allclose(masked, measure_one_by_one(rc.residual_ratio, KEEP), rtol=1e-5)
    low = rc.profile([*jnp.asarray(HIDDEN, jnp.bfloat16)])["residual_ratio"]
    np.testing.assert_allclose(low, measure_one_by_one(rc.residual_ratio), rtol=3e-2)


def test_one_token_gives_nan_where_a_measure_needs_two():
    names = ("token_cosine", "residual_ratio", "bulk_ratio", "effective_rank")
    one = HIDDEN[:, 0, :1]
    for measure in (rc.profile, jax.jit(rc.profile, static_argnames="measures")):
        profile = measure(one, measures=names)
        for name in names[:3]:
            assert np.isnan(profile[name]).all() and profile[name].shape == (L,), name
        np.testing.assert_allclose(profile["effective_rank"], 1, rtol=1e-5)


def test_hidden_states_of_transformers():
    torch = pytest.importorskip("torch")
    hidden = tuple(torch.tensor(h, requires_grad=True) for h in HIDDEN)
    profile = rc.profile(hidden)
    ratios = profile["residual_ratio"].detach()
    np.testing.assert_allclose(ratios, measure_one_by_one(rc.residual_ratio), rtol=1e-6)
    (line,) = rc.plot(profile).axes[0].get_lines()
    np.testing.assert_allclose(line.get_ydata(), ratios.mean(axis=1), rtol=1e-6)


WEIGHTS = np.random.default_rng(0).dirichlet(np.ones(N), (L, B, 3, N)).astype(np.float32)


@parametrize_refusals(
    [
        (lambda: rc.profile(HIDDEN[:, 0] + 1j), "complex64 is not real"),
        (lambda: rc.profile(np.ma.array(HIDDEN[:, 0], mask=HIDDEN[:, 0] > 0)), "MaskedArray"),
        (lambda: rc.profile((None,) * 3, measures="sink_rate"), "attn_implementation"),
        (lambda: rc.profile(HIDDEN[:, 0], key_mask=KEEP[1]), "key_mask= applies to attention"),
    ]
)
def test_what_is_no_array_of_its_kind_is_refused(arguments, message):
    is_refused(message, *arguments)


def test_the_first_key_is_the_first_that_exists():
    exists = np.arange(N) > 0
    weights = WEIGHTS * exists
    weights /= weights.sum(axis=-1, keepdims=True)
    measures = ("first_column", "sink_rate")
    profile = rc.profile(weights, measures=measures, key_mask=exists, batch_axis=1)
    first = weights[..., 1].mean(axis=-1)  # over queries
    np.testing.assert_allclose(profile["first_column"], first.mean(axis=-1), rtol=1e-5)
    np.testing.assert_allclose(profile["sink_rate"], (first > 0.3).mean(axis=-1), rtol=1e-5)


def test_weights_of_torch_that_are_no_distributions_are_refused():
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)  # drops all weights of a row, so that its sum differs from 1 by 1
    dropped = torch.nn.functional.dropout(torch.tensor(WEIGHTS[0]), 0.5)
    is_refused("pass weights after the softmax", rc.attention_entropy, dropped)
    vmapped = torch.func.vmap(rc.attention_entropy)(torch.tensor(WEIGHTS[0]))
    np.testing.assert_allclose(vmapped, rc.attention_entropy(WEIGHTS[0]), rtol=1e-5)


@pytest.mark.full
def test_leading_axes_are_a_batch():
    """Of known values and in jit, with a mask for each example or one for all."""
    x = HIDDEN.copy()
    for measure in (rc.residual_ratio, rc.token_cosine, rc.stable_rank, rc.rank_one_ratio):
        for fn in (measure, jax.jit(measure)):
            values = fn(x, mask=np.broadcast_to(KEEP, (L, B, N)) == 1)
            np.testing.assert_allclose(values, measure_one_by_one(measure, KEEP), rtol=1e-5)
            one_mask = [measure(h[0], mask=KEEP[1]) for h in x]
            np.testing.assert_allclose(fn(x[:, 0], mask=KEEP[1]), one_mask, rtol=1e-5)
    assert rc.residual(x).shape == x.shape


@parametrize_refusals(
    [
        (HIDDEN, {"measures": "colour"}, "'colour' is not one of"),
        (HIDDEN[0, 0], {}, r"\(5, 4\) are not \[l, n, d\] or \[l, b, n, d\]"),
        (HIDDEN[:0, 0], {}, r"\(0, 5, 4\) are not \[l, n, d\]"),
        (np.zeros((3, 5, 4), "datetime64[s]"), {}, "is not an array of numbers"),
        ([HIDDEN[0, 0], HIDDEN[0, 0, :3]], {}, "different shapes"),
        ([*HIDDEN], {"mask": np.full((2, 4), 0.5)}, "pass an additive mask as bias="),
        ([*HIDDEN], {"mask": np.ones((2, 4), int)}, r"mask of shape \(2, 4\) does not fit"),
        (
            HIDDEN,
            {},
            r"batch_axis=None does not fit hidden states of shape \(3, 2, 5, 4\): it is 1 for",
        ),
        (
            HIDDEN[0],
            {"batch_axis": 0},
            r"batch_axis=0 does not fit hidden states of shape \(2, 5, 4\)",
        ),
        ({"logits": 0}, {}, "hidden states are a dict with logits: pass"),
        (np.mean, {}, "a _ArrayFunctionDispatcher is not an array of numbers: pass hidden states"),
        ("gpt2", {}, "a str is not an array of numbers: pass hidden states"),
    ]
)
def test_bad_input_is_named(arguments, message):
    hidden, options = arguments
    is_refused(message, lambda: rc.profile(hidden, **options))


def make_network():
    config = rc.transformer(B - 1, 2, D, embedding=rc.EmbeddingConfig(vocab_size=9, d_embed=D))
    config = config.replace(norm_placement="pre", final_norm=True)
    ids = np.random.default_rng(2).integers(0, 9, (B, N))
    return draws.parameters(config), ids, config


@pytest.mark.full
@pytest.mark.parametrize("jitted", [False, True])
def test_a_trace_of_a_batch_knows_its_axes(jitted):
    """There are as many examples as states, b = L + 1, so that shapes say nothing."""
    params, ids, config = make_network()
    singles = [rc.apply(params, i, config, mask=k) for i, k in zip(ids, KEEP == 1, strict=True)]
    want = np.array(
        [rc.profile(t, mask=k)["residual_ratio"] for t, k in zip(singles, KEEP, strict=True)]
    ).T
    assert want.shape == (B, B) and np.abs(want - want.T).max() > 1e-3
    run = lambda i, k: rc.network.apply_batch(params, i, config, mask=k)  # noqa: E731
    by_vmap = lambda i, k: jax.vmap(lambda i, k: rc.apply(params, i, config, mask=k))(i, k)  # noqa: E731
    for fn, axis in ((run, 0), (by_vmap, 1)):
        trace = (jax.jit(fn) if jitted else fn)(ids, KEEP == 1)
        assert trace.layer_axis == axis
        ratios = rc.profile(trace, mask=KEEP)["residual_ratio"]
        np.testing.assert_allclose(ratios, want, rtol=1e-5)
        states = np.moveaxis(trace.hidden_states, axis, 0)
        np.testing.assert_array_equal(states[-1], trace.output)
        np.testing.assert_array_equal(states[:-1], np.moveaxis(trace.hidden, axis, 0)[:-1])
    first = run(ids, KEEP == 1)
    assert first.attention.shape == (B - 1, B, 2, N, N)
    np.testing.assert_allclose(first.hidden[:, 1], singles[1].hidden, rtol=1e-5, atol=1e-6)


def test_a_batch_is_dropped_example_by_example_and_its_mistakes_are_named():
    params, ids, config = make_network()
    twice = np.stack([ids[0], ids[0]])
    a, b = rc.network.apply_batch(
        params, twice, config, dropout_key=jax.random.key(1), dropout_rate=0.5
    ).output
    assert np.abs(a - b).max() > 1e-3
    for inputs, message in (
        ({"x": ids + 3}, "token id [0-9]+ is not below vocab_size=9"),
        ({"x": ids, "mask": KEEP[:1]}, "inputs have different lengths"),
        ({"x": ids, "mask": 2 * KEEP}, "values other than 0 and 1"),
        ({"x": ids * 1.0}, "token ids of dtype float32 are not integers"),
        ({"x": ids, "segments": 0 * ids}, "segments are given, but this network does not use them"),
        ({"x": ids, "positions": 0 * ids}, "positions are given, but this network does not"),
        ({"x": ids, "dropout_rate": 2.0}, r"dropout_rate=2.0 is not in \[0, 1\]"),
    ):
        is_refused(message, rc.network.apply_batch, params, config=config, **inputs)
    is_refused(
        r"use config.replace\(mask='causal'\)", rc.apply, params, ids[0], config, mask="causal"
    )


def test_a_profile_as_tables_and_figure():
    """Of one example and of a batch; traced, it is a pytree."""
    double = HIDDEN.astype(np.float64)
    double[2] = double[2, :, :1] + 1e-9 * double[2]  # below the last digit of float32
    double[1] = double[1, :, :1] + 1e-3 * double[1]  # below that of bfloat16
    hidden = double.astype(np.float32)
    profile = rc.profile([*hidden], measures=("token_cosine", "residual_ratio"))
    np.testing.assert_array_equal(profile.rounding, [[False] * B, [False] * B, [True] * B])
    low = rc.profile([*jnp.asarray(hidden, jnp.bfloat16)])
    np.testing.assert_array_equal(low.rounding[:, 0], [False, True, True])
    assert not np.any(rc.profile(double[:, 0]).rounding)
    both = ("residual_ratio", "token_cosine")
    traced = jax.jit(lambda h: rc.profile(h, measures=both, batch_axis=1))(hidden)
    np.testing.assert_array_equal(traced.rounding, profile.rounding)
    lists = [np.asarray(layer).tolist() for layer in double[:, 0]]
    assert rc.profile(lists).rounding.shape == (len(lists),)
    examples = [np.asarray(a) for a in np.swapaxes(double, 0, 1)]
    assert rc.profile(examples, batch_axis=0).rounding.shape == double.shape[:2]
    assert {*traced.measures} == {*both} and isinstance(traced, rc.Profile)
    cosine = rc.profile(hidden, measures="token_cosine", batch_axis=1)
    assert cosine.rounding is None and list(cosine.measures) == ["token_cosine"]
    assert len(rc.plot(cosine).axes[0].patches) == 0

    axes = rc.plot(profile).axes
    assert [ax.get_ylabel() for ax in axes] == ["token cosine", "residual ratio"]
    line = axes[1].get_lines()[0]
    np.testing.assert_allclose(line.get_ydata(), profile["residual_ratio"].mean(axis=1), rtol=1e-6)
    assert axes[1].get_yscale() == "log" and len(axes[1].patches) == 1  # the layer of rounding
    pytest.importorskip("pandas"), pytest.importorskip("xarray")
    table = profile.to_pandas()
    assert list(table.index.names) == ["layer", "example"]
    assert table.loc[(2, 1), "rounding"] and not table.loc[(1, 0), "rounding"]
    np.testing.assert_array_equal(table["token_cosine"].unstack(), profile["token_cosine"])
    single = rc.profile(hidden[:, 0]).to_pandas()
    assert single.index.name == "layer" and list(single) == ["residual_ratio", "rounding", "spiked"]
    assert list(cosine.to_pandas()) == ["token_cosine"]
    data = profile.to_xarray()
    assert data["residual_ratio"].dims == ("layer", "example")
    np.testing.assert_array_equal(data["token_cosine"].sel(layer=1), profile["token_cosine"][1])
    deeper = jax.tree.map(lambda a: a[None], profile)
    each_is_refused((deeper.to_pandas, r"a profile of shape \(1, 3, 2\) is not \[l\] or"))


def test_layers_are_the_first_axis_of_a_profile():
    """vmap over examples, with their axis second, gives the batch's profile, a pytree."""
    by_example, batch = HIDDEN.swapaxes(0, 1), rc.profile(HIDDEN, batch_axis=1)
    several = [
        jax.vmap(rc.profile, out_axes=1)(by_example),
        jax.tree.map(lambda *a: jnp.stack(a, axis=1), *map(rc.profile, by_example)),
    ]
    for profile in several:
        assert isinstance(profile, rc.Profile)
        near(profile._asdict(), batch._asdict(), rtol=1e-6)
        curve = rc.plot(profile).axes[0].get_lines()[0].get_ydata()
        np.testing.assert_allclose(curve, batch["residual_ratio"].mean(axis=1), rtol=1e-6)


@pytest.mark.parametrize("measured", full_but(["profile", "monitor"], "profile"))
def test_tokens_over_devices_are_gathered(measured):
    """Inside shard_map all shards measure the gathered tokens, as `docs/measures.md` says."""
    spec, auto = jax.sharding.PartitionSpec, jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("tokens",), axis_types=(auto,))
    x = np.concatenate([HIDDEN[:, 0], HIDDEN[:, 1, :3]], axis=1)  # eight tokens of three layers
    keep = np.arange(8) != 5
    weights = np.full((L, 2, 8, 8), 1 / 8, np.float32)

    def measure_layers(x, keep, weights, **options):
        if measured == "profile":
            return rc.profile(x, measures="token_cosine", mask=keep, **options).measures
        return rc.monitor(x, weights, mask=keep, **options)

    def gather_and_measure(x, keep, weights):
        x, weights = (jax.lax.all_gather(a, "tokens", axis=-2, tiled=True) for a in (x, weights))
        return measure_layers(x, jax.lax.all_gather(keep, "tokens", tiled=True), weights)

    rows = (spec(None, "tokens"), spec("tokens"), spec(None, None, "tokens"))
    run = jax.shard_map(
        gather_and_measure, mesh=mesh, in_specs=rows, out_specs=spec(), check_vma=False
    )
    near(jax.jit(run)(x, keep, weights), measure_layers(x, keep, weights), rtol=1e-5)
