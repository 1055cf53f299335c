"""record_function: what is recorded is what any JAX function computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import rank_collapse as rc
from rank_collapse.agree.comparison import compare_files
from rank_collapse.agree.recording import open_recording
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused

L, N, D = 3, 5, 8
X = jax.random.normal(jax.random.key(0), (N, D))
WEIGHTS = jax.random.normal(jax.random.key(1), (L, 5, D, D)) / np.sqrt(D)
BOTH = {"attention": "att", "mlp": "mlp"}


def norm(x):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def attend(w, h):
    scores = (h @ w[0]) @ (h @ w[1]).T / np.sqrt(D)
    return jax.nn.softmax(scores) @ (h @ w[2])


def compute_layer(w, x, place="pre", named=False):
    """Return (state after, attention, MLP) of a layer of a plain function."""

    def call(kind, f, h):
        if named:
            return checkpoint_name(f(h), kind)
        with jax.named_scope(kind):
            return f(h)

    def compute_mlp(h):
        return jax.nn.gelu(h @ w[3]) @ w[4]

    if place == "parallel":
        attention = call("att", lambda h: attend(w, h), norm(x))
        mlp = call("mlp", compute_mlp, norm(x))
        return x + (attention + mlp) * 0.5, 0.5 * attention, 0.5 * mlp
    h = x if place == "post" else norm(x)
    attention = call("att", lambda h: attend(w, h), h)
    attention = norm(attention) if place == "sandwich" else attention
    y = x + attention
    y = norm(y) if place == "post" else y
    mlp = call("mlp", compute_mlp, y if place == "post" else norm(y))
    mlp = (norm(mlp) if place == "sandwich" else mlp) * (0.7 if place == "sandwich" else 1)
    out = y + mlp
    return (norm(out) if place == "post" else out), attention, mlp


def run_plain(x, place="pre", named=False):
    for w in WEIGHTS:
        x = compute_layer(w, x, place, named)[0]
    return norm(x) if place != "post" else x


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


def scan_model(x):
    step = jax.checkpoint(lambda h, w: (compute_layer(w, h)[0], None))
    return norm(jax.lax.scan(step, x, WEIGHTS)[0])


def loop_model(x):
    def step(i, h):
        return compute_layer(WEIGHTS[i], h)[0]

    return jax.lax.fori_loop(0, jnp.asarray(L), step, x)


@pytest.mark.parametrize("model", [scan_model, loop_model, jax.jit(run_plain)])
def test_loops_and_jit_are_gone_through(tmp_path, model):
    rc.record_function(model, X, tmp_path / "a.safetensors", branches=BOTH)
    check(tmp_path / "a.safetensors", *expect(X))


def test_batches_and_token_ids(tmp_path):
    table, ids = jax.random.normal(jax.random.key(3), (11, D)), np.arange(10).reshape(2, 5)
    model = jax.vmap(lambda i: run_plain(table[i]))
    rc.record_function(model, ids, tmp_path / "a.npz", branches=BOTH, token_ids=ids)
    assert open_recording(tmp_path / "a.npz").shape == (2, 5, D)
    states, attention, mlps = zip(*(expect(table[i]) for i in ids), strict=True)
    check(
        tmp_path / "a.npz",
        *(np.stack([np.stack(p) for p in parts], axis=1) for parts in (states, attention, mlps)),
    )


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


def test_what_cannot_be_recorded_is_one_line(tmp_path):
    path = tmp_path / "a.npz"

    def record(model=run_plain, branches=BOTH, x=X):
        rc.record_function(model, x, path, branches=branches)

    is_refused("matches no scope or name", record, branches={"attention": "atten", "mlp": "mlp"})
    is_refused("a branch without a name", record, lambda x: run_plain(x).sum(), "att")
    is_refused("fn is int", record, 3)

    def with_skip(x):
        with jax.named_scope("att"):
            return x + attend(WEIGHTS[0], x)

    is_refused("is the skip in its scope", record, with_skip, "att")
    batched = jax.vmap(jax.vmap(run_plain))
    is_refused(r"not \[tokens, width\]", record, batched, BOTH, X[None, None])
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda x: record(x=x))(X)
    assert not path.exists()
