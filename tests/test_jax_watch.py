"""One call for Linen, NNX and Equinox: the scalars are those of `rc.monitor` on the same arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import rank_collapse as rc
from rank_collapse import jax_watch
from tests.support.closeness import assert_close

B, N, D, H, L = 2, 6, 8, 2, 3
X = jax.random.normal(jax.random.key(0), (B, N, D))
MASK = jnp.arange(N)[None] < jnp.array([N, 4])[:, None]
CAUSAL = nn.make_causal_mask(jnp.ones((B, N)))


class CausalAttention(nn.Module):
    """A module that is named like an attention; the attention inside of it is measured."""

    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(H, dropout_rate=0.5, name="inner")
        return attention(x, mask=CAUSAL, deterministic=False)


class Block(nn.Module):
    """A user's attention around Flax's, then an MLP; its output also suits a scan."""

    @nn.compact
    def __call__(self, x, _=None):
        read = nn.LayerNorm()(x)
        self.sow("intermediates", "read", read)
        x = x + CausalAttention()(read)
        return x + nn.Dense(D)(nn.gelu(x)), None


class Stack(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block) if self.remat else Block
        for _ in range(L):
            x, _ = block()(x)
        return x


RNGS = {"params": jax.random.key(1), "dropout": jax.random.key(2)}


def monitor_layers(reads, weights, **options):
    """Computes rc.monitor of each layer, and stacks the scalars."""
    scalars = [rc.monitor(x, p, **options) for x, p in zip(reads, weights, strict=True)]
    return jax.tree.map(lambda *values: jnp.stack(values), *scalars)


def check_scalars(actual, expected):
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


def compute_weights(attention, read, mask):
    """Computes attention weights [b, h, n, n] from Flax's parameters, by hand."""
    q, k = (
        jnp.einsum("bnd,dhk->bnhk", read, attention[name]["kernel"])
        + attention[name]["bias"][None, None]
        for name in ("query", "key")
    )
    scores = jnp.einsum("bnhk,bmhk->bhnm", q, k) / np.sqrt(D / H)
    return jax.nn.softmax(jnp.where(mask != 0, scores, -jnp.inf))


@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.full)])
def test_linen_in_jit_and_remat(remat):
    model = Stack(remat)
    variables = {"params": jax.jit(model.init)(RNGS, X)["params"]}
    run = jax.jit(lambda v: model.apply(v, X, mutable=["intermediates"], rngs=RNGS))
    out, state = run(variables)
    prefix = "CheckpointBlock" if remat else "Block"
    layers = [f"{prefix}_{i}" for i in range(L)]
    reads = [state["intermediates"][layer]["read"][0] for layer in layers]
    parameters = [variables["params"][layer]["CausalAttention_0"]["inner"] for layer in layers]
    weights = [compute_weights(p, x, CAUSAL) for p, x in zip(parameters, reads, strict=True)]

    @jax.jit
    def monitor_model(variables):
        measure = functools.partial(rc.monitor, mask=MASK)
        return jax_watch.linen_monitored(model, variables, X, rngs=RNGS, measure=measure)

    watched, scalars = monitor_model(variables)
    np.testing.assert_allclose(watched, out, rtol=1e-5, atol=1e-6)
    check_scalars(scalars, monitor_layers(reads, weights, mask=MASK))
    gradients = [
        jax.jit(jax.grad(lambda v, f=f: jnp.sum(f(v)[0] ** 2)))(variables)
        for f in (monitor_model, run)
    ]
    # Small entries are differences of large ones; those of the keys' biases are 0 but for rounding.
    rounding = 1e-6 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients))
    jax.tree.map(lambda a, b: assert_close(a, b, atol=rounding), *gradients)


@pytest.mark.full
def test_linen_scan_and_collections_of_ones_own():
    axes = {"params": 0, "intermediates": 0}
    split = {"params": True, "dropout": True}
    model = nn.scan(Block, variable_axes=axes, split_rngs=split, length=L)()
    variables = {"params": model.init(RNGS, X, None)["params"]}
    (out, _), state = model.apply(variables, X, None, mutable=["intermediates"], rngs=RNGS)
    reads = state["intermediates"]["read"][0]
    stacked = variables["params"]["CausalAttention_0"]["inner"]
    parameters = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(L)]
    weights = [compute_weights(p, x, CAUSAL) for p, x in zip(parameters, reads, strict=True)]
    ((watched, _), collections), scalars = jax_watch.linen_monitored(
        model, variables, X, None, rngs=RNGS, mutable=["batch_stats"]
    )
    np.testing.assert_allclose(watched, out, rtol=1e-6, atol=1e-6)
    assert "intermediates" not in collections
    check_scalars(scalars, monitor_layers(reads, weights))
    bare = nn.scan(Block, variable_axes={"params": 0}, split_rngs=split, length=L)()
    _, scalars = jax_watch.linen_monitored(bare, variables, X, None, rngs=RNGS)
    check_scalars(scalars, monitor_layers(reads, weights))


class ExampleBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.MultiHeadDotProductAttention(H, name="attention")(nn.LayerNorm()(x))


class VmappedStack(nn.Module):
    """Blocks that each take one example."""

    inner: bool

    @nn.compact
    def __call__(self, x):
        vmapped = nn.vmap(
            ExampleBlock,
            variable_axes={"params": None, "intermediates": 0},
            split_rngs={"params": False},
        )
        for i in range(L):
            x = (vmapped if self.inner else ExampleBlock)(name=f"block_{i}")(x)
        return x


def test_linen_examples_of_an_inner_vmap_are_a_batch_and_so_are_frames():
    variables = VmappedStack(False).init(jax.random.key(0), X)
    measure = functools.partial(rc.monitor, mask=MASK)
    scalars = [
        jax_watch.linen_monitored(VmappedStack(inner), variables, X, measure=measure)[1]
        for inner in (True, False)
    ]
    assert scalars[0]["batch_residual_ratio"].shape == (L,)
    check_scalars(*scalars)
    read = nn.LayerNorm(use_scale=False, use_bias=False).apply({}, X)
    first = rc.monitor(read, mask=MASK)["residual_ratio"]
    np.testing.assert_allclose(scalars[0]["residual_ratio"][0], first, rtol=1e-5)
    frames = jnp.stack([X, 2 * X[::-1]])  # tokens [2, b, n, d]
    block = {"params": variables["params"]["block_0"]["attention"]}
    attention = nn.MultiHeadDotProductAttention(H)
    _, scalars = jax_watch.linen_monitored(attention, block, frames)
    weights = compute_weights(block["params"], X, jnp.ones((1, 1, N, N)))
    want = rc.monitor(jnp.stack([X, 2 * X[::-1]]))["residual_ratio"]
    np.testing.assert_allclose(scalars["residual_ratio"], want, rtol=1e-5)
    _, scalars = jax_watch.linen_monitored(attention, block, frames[:1])
    entropy = rc.monitor(X, weights)["attention_entropy"]
    np.testing.assert_allclose(scalars["attention_entropy"], entropy, rtol=1e-5)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(H, D, decode=False, dropout_rate=0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(self.norm(x), mask=CAUSAL, deterministic=False)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(L)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.full)])
def test_nnx(jit):
    model, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    states, reads, weights = [X], [], []
    for layer in other.layers:
        reads.append(layer.norm(states[-1]))
        parameters = nnx.to_pure_dict(nnx.state(layer.attention, nnx.Param))
        weights.append(compute_weights(parameters, reads[-1], CAUSAL))
        states.append(layer(states[-1]))

    def monitor_model(model):
        return jax_watch.nnx_monitored(model, X)

    before = nnx.MultiHeadAttention.__call__
    out, scalars = (nnx.jit(monitor_model) if jit else monitor_model)(model)
    assert nnx.MultiHeadAttention.__call__ is before
    assert model.layers[0].attention.attention_fn is other.layers[0].attention.attention_fn
    np.testing.assert_allclose(out, states[-1], rtol=1e-6, atol=1e-6)
    check_scalars(scalars, monitor_layers(reads, weights))
    with pytest.raises(ValueError, match="no attention was measured"):
        jax_watch.nnx_monitored(model, X, select=lambda _: False)


def test_equinox_blocks_in_jit_and_vmap():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), L)

    class Network(eqx.Module):
        layers: list

        def __call__(self, x):
            for layer in self.layers:
                x = x + layer(x, x, x)
            return x

    model = Network([eqx.nn.MultiheadAttention(H, D, key=key) for key in keys])

    @eqx.filter_jit
    def monitor_batch(model, batch):
        def monitor_example(x):
            unit = functools.partial(rc.monitor, tokens="unit")
            return jax_watch.equinox_monitored(model, x, blocks=lambda m: m.layers, measure=unit)

        return jax.vmap(monitor_example)(batch)

    out, scalars = monitor_batch(model, X)
    for example in range(B):
        x, reads = X[example], []
        for layer in model.layers:
            reads.append(x)
            x = x + layer(x, x, x)
        np.testing.assert_allclose(out[example], x, rtol=1e-5, atol=1e-6)
        example_scalars = {name: values[example] for name, values in scalars.items()}
        check_scalars(example_scalars, monitor_layers(reads, [None] * L, tokens="unit"))


FULL = [pytest.param(how, marks=pytest.mark.full) for how in ("vmap", "jit", "stacked")]


@pytest.mark.parametrize("how", ["checkpoint", *FULL])
def test_equinox_transformations_inside(how):
    """Tokens, losses and gradients are those of the model without a measurement."""
    eqx = pytest.importorskip("equinox")

    class Layer(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        skip_gain: float

        def __call__(self, x):
            return self.skip_gain * x + self.attention(x, x, x)

    class Network(eqx.Module):
        layers: list | Layer

        def __call__(self, x):
            if how == "stacked":
                arrays, static = eqx.partition(self.layers, eqx.is_array)

                def step(x, layer):
                    return (jax.vmap(eqx.combine(layer, static))(x), None)

                return jax.lax.scan(step, x, arrays)[0]
            transform = {"checkpoint": eqx.filter_checkpoint, "jit": eqx.filter_jit}
            for layer in self.layers:
                assert layer.skip_gain == 0.5 and isinstance(layer, Layer)
                x = jax.vmap(transform.get(how, lambda f: f)(layer))(x)
            return x

    keys = jax.random.split(jax.random.key(0), L)
    layers = [Layer(eqx.nn.MultiheadAttention(H, D, key=key), 0.5) for key in keys]

    def stack(*leaves):
        return jnp.stack(leaves) if eqx.is_array(leaves[0]) else leaves[0]

    model = Network(jax.tree.map(stack, *layers) if how == "stacked" else layers)

    def compute_loss(model):
        return jnp.sum(model(X) ** 2), None

    def compute_monitored_loss(model):
        out, scalars = jax_watch.equinox_monitored(model, X, blocks=lambda m: m.layers)
        return jnp.sum(out**2), scalars

    steps = [
        eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))(model)
        for loss in (compute_monitored_loss, compute_loss)
    ]
    ((loss, scalars), gradients), ((expected_loss, _), expected) = steps
    assert loss == expected_loss
    arrays = [jax.tree.leaves(eqx.filter(g, eqx.is_array)) for g in (gradients, expected)]
    for a, b in zip(*arrays, strict=True):
        np.testing.assert_array_equal(a, b)
    x, reads = X, []
    for layer in layers:
        reads.append(np.asarray(x, np.float64))
        x = jax.vmap(layer)(x)
    check_scalars(scalars, monitor_layers(reads, [None] * L))
    ratios = [np.mean([compute_ratio(example) for example in read]) for read in reads]
    np.testing.assert_allclose(scalars["residual_ratio"], ratios, rtol=1e-5)
    np.testing.assert_array_equal(compute_monitored_loss(model)[0], compute_loss(model)[0])


def compute_ratio(x):
    """Computes the residual ratio by its definition."""
    norms = [a.sum(axis=0).max() * a.sum(axis=1).max() for a in np.abs([x - x.mean(axis=0), x])]
    return np.sqrt(norms[0] / norms[1])


def test_equinox_batches_and_losses_by_a_call():
    eqx = pytest.importorskip("equinox")
    model = Sequence([eqx.nn.MultiheadAttention(H, D, key=jax.random.key(i)) for i in range(L)])

    def call(model, x):
        return jax.vmap(model)(x)

    out, scalars = jax_watch.equinox_monitored(model, X, blocks=lambda m: m.layers, call=call)
    np.testing.assert_array_equal(out, call(model, X))
    x, reads = X, []
    for layer in model.layers:
        reads.append(x)
        x = jax.vmap(lambda x, layer=layer: layer(x, x, x))(x)
    check_scalars(scalars, monitor_layers(reads, [None] * L))


class Sequence:
    """A model of functions and modules, without a class of Equinox."""

    def __init__(self, layers):
        self.layers = layers

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x, x, x)
        return x


jax.tree_util.register_pytree_node(
    Sequence, lambda m: ((m.layers,), None), lambda _, children: Sequence(*children)
)


class VmappedModel(Model):
    def __call__(self, x):
        for layer in self.layers:
            x = nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))(layer, x)
        return x


class ExampleLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(H, D, decode=False, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(self.norm(x))


def build_examples(rngs):
    model = VmappedModel(rngs)
    model.layers = nnx.List([ExampleLayer(rngs) for _ in range(L)])
    return model


def test_nnx_inner_and_outer_vmap_and_frames():
    model = build_examples(nnx.Rngs(0))
    _, scalars = jax_watch.nnx_monitored(model, X)
    x, reads, weights = X, [], []
    for layer in model.layers:
        reads.append(layer.norm(x))
        parameters = nnx.to_pure_dict(nnx.state(layer.attention, nnx.Param))
        weights.append(compute_weights(parameters, reads[-1], jnp.ones((1, 1, N, N))))
        x = layer(x)
    check_scalars(scalars, monitor_layers(reads, weights))
    frames = jnp.stack([X, 2 * X[::-1]])  # tokens [2, b, n, d]
    _, scalars = jax_watch.nnx_monitored(model.layers[0].attention, frames)
    want = rc.monitor(frames)["residual_ratio"]
    np.testing.assert_allclose(scalars["residual_ratio"], [want], rtol=1e-5)
    seeds = nnx.vmap(build_examples)(nnx.Rngs(0).split(2))
    unit = functools.partial(rc.monitor, tokens="unit")
    monitored = functools.partial(jax_watch.nnx_monitored, measure=unit)
    _, scalars = nnx.vmap(monitored, in_axes=(0, None))(seeds, X)
    assert scalars["residual_ratio"].shape == (2, L)


def test_variables_of_nnx_change_as_without_a_measurement():
    model, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    for _ in range(2):  # keys of dropout are counted
        out, _ = jax_watch.nnx_monitored(model, X)
        np.testing.assert_array_equal(out, other(X))
    states = [nnx.to_pure_dict(nnx.state(m, nnx.RngCount)) for m in (model, other)]
    assert jax.tree.leaves(states[0]) == jax.tree.leaves(states[1])


def test_weights_of_nnx_are_causal_where_the_call_says_so_and_of_flax_alone():
    q = jax.random.normal(jax.random.key(0), (B, N, H, D // H))
    from flax.nnx.nn import attention as library

    record = jax_watch._Record()
    attend = record.keep_weights(library.dot_product_attention, library)
    attend(q, q, q, is_causal=True)
    masked = library.dot_product_attention_weights(q, q, mask=CAUSAL)
    np.testing.assert_allclose(record.weights, masked, rtol=1e-6)
    model = nnx.MultiHeadAttention(
        H, D, decode=False, rngs=nnx.Rngs(0), attention_fn=lambda q, k, v, **_: v
    )
    _, scalars = jax_watch.nnx_monitored(model, X)
    assert "attention_entropy" not in scalars and "residual_ratio" in scalars


def test_gradients_of_the_scalars_are_zero():
    model = nnx.MultiHeadAttention(H, D, decode=False, rngs=nnx.Rngs(0))

    def compute_scalars(model):
        _, scalars = jax_watch.nnx_monitored(model, X)
        return sum(jnp.sum(a) for a in scalars.values())

    gradients = nnx.grad(compute_scalars)(model)
    assert not any(np.any(a) for a in jax.tree.leaves(gradients))


def test_blocks_that_are_none_are_refused():
    eqx = pytest.importorskip("equinox")
    model = Sequence([eqx.nn.MultiheadAttention(H, D, key=jax.random.key(0))])
    for blocks, message in (
        (lambda m: [], "not a list of layers"),
        (lambda m: m.layers[0].query_proj.weight, "not a list of layers"),
        (lambda m: [m.layers[0].query_proj], "no attention was measured"),
    ):
        with pytest.raises(ValueError, match=message):
            jax_watch.equinox_monitored(model, X[0], blocks=blocks)
