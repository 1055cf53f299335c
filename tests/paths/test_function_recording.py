"""record_function: what is recorded is what any JAX function computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.agree.comparison import compare_files
from rank_collapse.agree.recording import open_recording
from tests.oracles import draws
from tests.oracles.plain_layers import (
    BOTH,
    FACTORS,
    WEIGHTS,
    D,
    L,
    X,
    attend,
    compute_layer,
    loop_model,
    norm,
    run_plain,
    scale_skips,
    scan_model,
)
from tests.support.closeness import assert_close


def expect(x, place="pre"):
    states, attention, mlps = [x], [], []
    for w in WEIGHTS:
        x, a, m = compute_layer(w, x, place)
        states.append(x), attention.append(a), mlps.append(m)
    return states, attention, mlps


def check(path, states, attention, mlps, atol=1e-5):
    layers = list(open_recording(path).read_layers())
    assert len(layers) == len(attention)
    for index, layer in enumerate(layers):
        pairs = [(layer.before, states[index]), (layer.after, states[index + 1])]
        pairs += [(layer.branches["attention_branch"], attention[index])]
        pairs += [(layer.branches["mlp_branch"], mlps[index])]
        for recorded, wanted in pairs:
            assert_close(recorded.reshape(wanted.shape), wanted, atol=atol)


@pytest.mark.parametrize("place", ["pre", "post", "sandwich", "parallel"])
@pytest.mark.parametrize("named", [False, True], ids=["scopes", "names"])
def test_a_plain_function(tmp_path, place, named):
    rc.record_function(
        lambda x: run_plain(x, place, named), X, tmp_path / "a.safetensors", branches=BOTH
    )
    check(tmp_path / "a.safetensors", *expect(X, place))


@pytest.mark.parametrize("name", ["numbers", "features", "DeepNorm", "small", "embedding"])
def test_a_factor_of_a_skip_is_no_part_of_the_state(tmp_path, name):
    place, factors, *scale = FACTORS[name]
    path = tmp_path / "a.safetensors"
    rc.record_function(lambda x: scale_skips(x, *FACTORS[name]), X, path, branches=BOTH)
    states, branches = [scale[0] * X if scale else X], ([], [])
    for index, w in enumerate(WEIGHTS):
        x = states[-1]
        for kind, factor in enumerate(factors):
            h = x if place == "post" else norm(x)
            branches[kind].append(jax.nn.gelu(h @ w[3]) @ w[4] if kind else attend(w, h))
            x = (x / factor if index == 1 else factor * x) + branches[kind][-1]
            x = norm(x) * jnp.linspace(0.5, 2, D)[None] if place == "post" else x
        states.append(x)
    check(path, states, *branches)


def test_a_scaled_skip_that_is_rounded_is_no_part_of_the_state(tmp_path):
    """Each state is that before the factor, also where the product is cast to another dtype."""
    states = [X]
    for _ in range(3):
        states.append(states[-1] / 2 + np.tanh(states[-1]))

    def model(x):
        for _ in range(3):
            with jax.named_scope("att"):
                branch = jnp.tanh(x)
            x = (x / 2).astype(jnp.bfloat16).astype(x.dtype) + branch
        return x

    rc.record_function(model, X, tmp_path / "a.npz", branches="att")
    recorded = np.load(tmp_path / "a.npz")["residual"]
    assert_close(recorded, np.stack(states).reshape(recorded.shape), atol=0.02)


def reversed_model(x):
    """The last weights first; each step returns its state as well, and the first state is read."""

    def step(h, w):
        return compute_layer(w, h)[0], h

    last, states = jax.lax.scan(step, x, WEIGHTS[::-1], reverse=True)
    return norm(last) + 0 * states.sum(0)


def choosing_model(x):
    """The layer is the one that is chosen: of two, and of three by an index beyond them."""
    layers = [lambda h, w=w: compute_layer(w, h)[0] for w in WEIGHTS]
    x = jax.lax.cond(x[0, 0] < 99, layers[0], layers[2], x)
    x = jax.lax.switch(jnp.asarray(1) + 0 * jnp.int32(x[0, 0]), layers, x)
    return norm(jax.lax.switch(jnp.asarray(7) + 0 * jnp.int32(x[0, 0]), layers, x))


def counting_model(x):
    """The condition of the loop and its step each read an array from outside."""
    limit = L + 0 * x[0, 0].astype(jnp.int32)

    def step(carry):
        i, h = carry
        return i + 1, compute_layer(WEIGHTS[i], h)[0]

    return jax.lax.while_loop(lambda carry: carry[0] < limit, step, (0, x))[1]


def splitting_model(x):
    """Queries, keys and values are one product, which is split."""
    for w in WEIGHTS:
        with jax.named_scope("att"):
            q, k, v = jnp.split(norm(x) @ jnp.concatenate(w[:3], axis=1), 3, axis=1)
            attention = jax.nn.softmax(q @ k.T / np.sqrt(D)) @ v
        x = x + attention
        with jax.named_scope("mlp"):
            mlp = jax.nn.gelu(norm(x) @ w[3]) @ w[4]
        x = x + mlp
    return norm(x)


@pytest.mark.parametrize(
    "model",
    [
        scan_model,
        loop_model,
        counting_model,
        reversed_model,
        choosing_model,
        splitting_model,
        jax.jit(run_plain),
    ],
)
def test_loops_and_jit_are_gone_through(tmp_path, model):
    rc.record_function(model, X, tmp_path / "a.safetensors", branches=BOTH)
    check(tmp_path / "a.safetensors", *expect(X))


@pytest.mark.full
def test_batches_and_token_ids(tmp_path):
    table, ids = draws.normal(11, D), np.arange(10).reshape(2, 5)
    model = jax.vmap(lambda i: run_plain(table[i]))
    rc.record_function(model, ids, tmp_path / "a.npz", branches=BOTH, token_ids=ids, mask=None)
    with np.load(tmp_path / "a.npz") as arrays:
        assert "mask" not in arrays
        np.testing.assert_array_equal(arrays["token_ids"], ids)
    assert open_recording(tmp_path / "a.npz").shape == (2, 5, D)
    states, attention, mlps = zip(*(expect(table[i]) for i in ids), strict=True)
    check(
        tmp_path / "a.npz",
        *(np.stack([np.stack(p) for p in parts], axis=1) for parts in (states, attention, mlps)),
    )


def test_further_outputs_are_left_out_and_further_arrays_written(tmp_path):
    path, ids, logits = tmp_path / "a.npz", jnp.arange(5), draws.normal(5, 7).tolist()
    arrays = {"token_ids": ids, "logits": logits}
    model = lambda x: (run_plain(x, "post"), 3 * x)  # noqa: E731
    rc.record_function(model, X, path, branches=BOTH, **arrays)
    check(path, *expect(X, "post"))
    replayed = tmp_path / "b.safetensors"  # of its own inputs: the same
    rc.record_function(model, X, replayed, branches=BOTH, inputs=path, **arrays)
    check(replayed, *expect(X, "post"))
    recordings = open_recording(path), open_recording(replayed)
    # the logits of a stream that is replaced are no run's
    assert [sorted(r.arrays) for r in recordings] == [
        ["attention_branch", "logits", "mlp_branch", "residual", "token_ids"],
        ["attention_branch", "mlp_branch", "residual", "token_ids"],
    ]
    described = {"branches": str(BOTH), "jax": jax.__version__, "inputs": "a.npz"}
    assert recordings[1].metadata.items() >= described.items()
    with np.load(path) as saved:
        np.testing.assert_array_equal(saved["token_ids"], ids)
        assert_close(saved["logits"], logits, atol=1e-6)


def test_of_one_layer_the_state_is_the_sum_and_not_the_normed_output(tmp_path):
    """A constant of a branch that is added outside is no branch."""

    def model(x):
        with jax.named_scope("att"):
            attention, table = attend(WEIGHTS[0], x), jnp.cos(jnp.arange(1.0 * D))[None]
        return norm((x + table) + attention)[:, :3]  # such as logits

    rc.record_function(model, X, tmp_path / "a.npz", branches="att")
    (layer,) = open_recording(tmp_path / "a.npz").read_layers()
    before, attention = X + np.cos(np.arange(D))[None], attend(WEIGHTS[0], X)
    assert_close(layer.before[0], before, atol=1e-5)
    assert_close(layer.branches["attention_branch"][0], attention, atol=1e-5)
    assert_close(layer.after[0], before + attention, atol=1e-5)


def test_bfloat16_is_kept_and_agrees(tmp_path):
    def model(x):
        global_weights = WEIGHTS.astype(x.dtype)
        for w in global_weights:
            x = compute_layer(w, x)[0]
        return x

    for name, dtype in (("a", jnp.float32), ("b", jnp.bfloat16)):
        rc.record_function(model, X.astype(dtype), tmp_path / f"{name}.safetensors", branches=BOTH)
    answer = compare_files(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert answer.rounding.name == "bfloat16" and answer.agree


@pytest.mark.full
def test_equinox(tmp_path):
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        att: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __init__(self, key):
            first, second = jax.random.split(key)
            self.att = eqx.nn.MultiheadAttention(2, D, key=first)
            self.norm = eqx.nn.LayerNorm(D)
            self.mlp = eqx.nn.MLP(D, D, 2 * D, 1, key=second)

        def __call__(self, x):
            h = jax.vmap(self.norm)(x)
            x = x + self.att(h, h, h)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norm)(x))

    blocks = [Block(key) for key in jax.random.split(jax.random.key(2), L)]

    def model(x):
        for block in blocks:
            x = block(x)
        return x

    patterns = {"attention": r"eqx\.nn\.MultiheadAttention", "mlp": r"eqx\.nn\.MLP"}
    rc.record_function(model, X, tmp_path / "a.safetensors", branches=patterns)
    states, attention, mlps, x = [X], [], [], X
    for block in blocks:
        h = jax.vmap(block.norm)(x)
        attention.append(block.att(h, h, h))
        mlps.append(jax.vmap(block.mlp)(jax.vmap(block.norm)(x + attention[-1])))
        x = block(x)
        states.append(x)
    check(tmp_path / "a.safetensors", states, attention, mlps)


@pytest.mark.full
@pytest.mark.parametrize("scanned", [False, True])
def test_linen(tmp_path, scanned):
    nn = pytest.importorskip("flax.linen")

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(D)(nn.silu(nn.Dense(2 * D)(x)))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.LayerNorm(name="n1")(x)
            attention = nn.MultiHeadDotProductAttention(num_heads=2, name="att")(h)
            mlp = Mlp(name="mlp")(nn.RMSNorm(name="n2")(x + attention))
            self.sow("parts", "all", (attention, mlp, x + attention + mlp))
            return x + attention + mlp

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            if scanned:
                loop = nn.scan(
                    lambda m, c, _: (m(c), None),
                    variable_axes={"params": 0, "parts": 0},
                    split_rngs={"params": True},
                    length=L,
                )
                return loop(nn.remat(Block)(), x, None)[0]
            for _ in range(L):
                x = Block()(x)
            return nn.LayerNorm()(x)

    model = Model()
    params = {"params": model.init(jax.random.key(0), X)["params"]}
    rc.record_function(lambda x: model.apply(params, x), X, tmp_path / "a.npz", branches=BOTH)
    parts = jax.tree.leaves(model.apply(params, X, mutable="parts")[1])
    attention, mlps, after = (
        (parts[k] for k in range(3))
        if scanned
        else ([parts[3 * i + k] for i in range(L)] for k in range(3))
    )
    check(tmp_path / "a.npz", [X, *after], attention, mlps)


@pytest.mark.parametrize(
    "scale", [lambda a: a @ WEIGHTS[0, 0], lambda a: (WEIGHTS[0, 0].T @ a.T).T, lambda a: 0.7 * a]
)
def test_a_linear_map_of_a_sum_of_branches_maps_each(tmp_path, scale):
    """The sum may be either argument of the map."""

    def model(x):
        with jax.named_scope("att"):
            a = jnp.tanh(x)
        with jax.named_scope("mlp"):
            m = jnp.sin(x)
        return x + scale(a + m)

    rc.record_function(model, X, tmp_path / "a.npz", branches=BOTH)
    parts = [scale(jnp.tanh(X))], [scale(jnp.sin(X))]
    check(tmp_path / "a.npz", [X, model(X)], *parts)
