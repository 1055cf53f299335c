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


def scan_model(x):
    step = jax.checkpoint(lambda h, w: (compute_layer(w, h)[0], None))
    return norm(jax.lax.scan(step, x, WEIGHTS)[0])


def loop_model(x):
    def step(i, h):
        return compute_layer(WEIGHTS[i], h)[0]

    return jax.lax.fori_loop(0, jnp.asarray(L), step, x)


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


@pytest.mark.parametrize(
    "model", [scan_model, loop_model, reversed_model, choosing_model, jax.jit(run_plain)]
)
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
    is_refused("an MLP; match the MLP as well", record, lambda x: run_plain(x).sum(), "att")
    is_refused("fn is int", record, 3)

    def with_skip(x):
        with jax.named_scope("att"):
            return x + attend(WEIGHTS[0], x)

    is_refused("the scope of a branch must not contain its skip", record, with_skip, "att")
    batched = jax.vmap(jax.vmap(run_plain))
    is_refused(r"must be \[tokens, width\]", record, batched, BOTH, X[None, None])
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda x: record(x=x))(X)
    assert not path.exists()


OTHER = X + 0.1 * jax.random.normal(jax.random.key(5), X.shape)


def list_layers(path):
    return list(open_recording(path).read_layers())


@pytest.fixture
def replay(tmp_path):
    """Return a function that records a model on X, where it takes in its run on other tokens."""

    def record_both(model, other=None, keep=None, branches=BOTH, **how):
        rc.record_function(other or model, OTHER, tmp_path / "b.npz", branches=branches)
        with np.load(tmp_path / "b.npz") as arrays:
            np.savez(tmp_path / "b.npz", **{name: arrays[name] for name in keep or arrays})
        options = {"branches": branches, "inputs": tmp_path / "b.npz"} | how
        rc.record_function(model, X, tmp_path / "c.safetensors", **options)
        return tmp_path / "c.safetensors", tmp_path / "b.npz"

    return record_both


def scale_skips(x, place="pre", factors=(1.5, 0.9), scale=1.0):
    """Branches read x and are added to a multiple of it: by numbers, by features, by a quotient."""
    x = scale * x
    for index, w in enumerate(WEIGHTS):
        for kind, factor in zip(("att", "mlp"), factors, strict=True):
            with jax.named_scope(kind):
                h = x if place == "post" else norm(x)
                branch = attend(w, h) if kind == "att" else jax.nn.gelu(h @ w[3]) @ w[4]
            skip = x / factor if index == 1 else factor * x
            x = skip + branch
            x = norm(x) * jnp.linspace(0.5, 2, D)[None] if place == "post" else x
    return x


FACTORS = {
    "numbers": ("pre", (1.5, 0.9)),
    "features": ("pre", (jnp.linspace(0.5, 1.5, D)[None], 0.9)),
    "DeepNorm": ("post", (1.7, 1.7)),
    "small": ("pre", (1.0, 1e-3)),
}
FACTORS["embedding"] = (*FACTORS["numbers"], 3.0)  # the stream is the scaled embedding

PLACES = ["pre", "post", "sandwich", "parallel"]
MODELS = {place: lambda x, place=place: run_plain(x, place) for place in PLACES}
MODELS |= {f"{p}, names": lambda x, p=p: run_plain(x, p, named=True) for p in PLACES}
MODELS |= {n: lambda x, f=f: scale_skips(x, *f) for n, f in FACTORS.items()}
MODELS |= {"scan": scan_model, "loop": loop_model, "jit": jax.jit(run_plain)}


@pytest.mark.parametrize("name", MODELS)
def test_the_branches_on_the_inputs_of_another_run_are_those_of_that_run(replay, name):
    replayed, other = map(list_layers, replay(MODELS[name]))
    start = FACTORS["embedding"][2] * X if name == "embedding" else X
    np.testing.assert_array_equal(replayed[0].before[0], start)  # its own, before it is replaced
    for a, b in zip(replayed, other, strict=True):
        for kind in b.branches:
            np.testing.assert_array_equal(a.branches[kind], b.branches[kind])
        if a is not replayed[-1]:
            np.testing.assert_array_equal(a.after, b.after)


def test_a_stream_in_another_dtype_than_the_branches(replay):
    """The branch reads bfloat16, the sum is float32: both are the other run's."""

    def model(x):
        for w in WEIGHTS:
            narrow = x.astype(jnp.bfloat16)
            with jax.named_scope("att"):
                branch = attend(w.astype(jnp.bfloat16), norm(narrow))
            x = narrow.astype(jnp.float32) + branch.astype(jnp.float32)
            with jax.named_scope("mlp"):
                branch = jax.nn.gelu(x @ w[3]) @ w[4]
            x = x + branch
        return x

    replayed, other = map(list_layers, replay(model))
    for a, b in zip(replayed, other, strict=True):
        np.testing.assert_array_equal(
            a.branches["attention_branch"], b.branches["attention_branch"]
        )
        np.testing.assert_array_equal(a.branches["mlp_branch"], b.branches["mlp_branch"])


@pytest.mark.parametrize("form", ["skip_gain", "deepnorm", "parallel", "learned"])
def test_a_network_with_gains_of_skips_is_replayed(tmp_path, form):
    """The other run is a trace: its hidden states, not multiples of them."""
    fields = {
        "skip_gain": {"norm_placement": "pre", "skip_gain": 0.9},
        "deepnorm": {"norm_placement": "post", "skip_gain": 1.68},
        "parallel": {"norm_placement": "pre", "skip_gain": 0.9, "parallel": True},
        "learned": {"norm_placement": "pre", "learned_skip_gain": 0.7, "learned_per_feature": True},
    }[form]
    config = rc.transformer(depth=3, num_heads=2, d_model=D, **fields)
    params = rc.init(jax.random.key(4), config)
    fn, branches = rc.paths.name_states(params, config), {"attention": "attention", "mlp": "mlp"}
    rc.record(rc.apply(params, OTHER, config), tmp_path / "b.npz")
    path = tmp_path / "c.safetensors"
    rc.record_function(fn, X, path, branches=branches, inputs=tmp_path / "b.npz")
    replayed, other = list_layers(path), list_layers(tmp_path / "b.npz")
    for a, b in zip(replayed, other, strict=True):
        for kind in b.branches:
            assert_close(a.branches[kind], b.branches[kind], atol=3e-6)
        if a is not replayed[-1]:
            assert_close(a.after, b.after, atol=3e-6)


def faulty_model(x):
    for index, w in enumerate(WEIGHTS):
        with jax.named_scope("att"):
            attention = attend(w, norm(x)) * (0.99 if index == 1 else 1)
        x = x + attention
        with jax.named_scope("mlp"):
            mlp = jax.nn.gelu(norm(x) @ w[3]) @ w[4]
        x = x + mlp
    return x


def test_a_fault_is_found_on_the_inputs_of_the_other_run(replay):
    answer = compare_files(*replay(run_plain, faulty_model))
    assert answer.first is None and "embeddings differ" in answer.sentence  # X and OTHER do
    rows = {(row.layer, row.part): row for row in answer.rows}
    assert_close(rows[1, "attention"].scale, -0.01, atol=1e-4)
    assert all(row.added < 1e-5 for place, row in rows.items() if place != (1, "attention"))


def test_of_states_alone_the_branches_are_its_own(replay):
    replayed, other = map(list_layers, replay(run_plain, keep=("residual",)))
    for index, (a, b) in enumerate(zip(replayed, other, strict=True)):
        _, attention, mlp = compute_layer(WEIGHTS[index], jnp.asarray(b.before[0], jnp.float32))
        assert_close(a.branches["attention_branch"][0], attention, atol=1e-5)
        assert_close(a.branches["mlp_branch"][0], mlp, atol=1e-5)


def test_noise_is_of_its_size(replay):
    """A branch that is its input shows the noise."""

    def model(x):
        with jax.named_scope("att"):
            branch = x * 1.0
        return x + branch

    rows = []
    for noise in (0.0, 1e-3):
        path, _ = replay(lambda x: model(model(x)), branches="att", noise=noise, seed=3)
        recording = open_recording(path)
        assert float(recording.metadata["noise"]) == noise
        rows.append([layer.branches["attention_branch"] for layer in recording.read_layers()])
    for still, noisy in zip(*rows, strict=True):
        change = (noisy - still) / still
        assert 0.7e-3 < change.std() < 1.4e-3 and abs(change.mean()) < 4e-4


def shift_skips(x, first=0):
    """Branches read x and are added to x + 1, from a layer on."""
    for index, w in enumerate(WEIGHTS):
        with jax.named_scope("att"):
            attention = attend(w, norm(x))
        x = (x + 1 if index >= first else x) + attention
        with jax.named_scope("mlp"):
            mlp = jax.nn.gelu(norm(x) @ w[3]) @ w[4]
        x = x + mlp
    return x


def test_what_cannot_take_in_other_inputs_is_one_line(replay, tmp_path):
    path, inputs = replay(run_plain)

    def record(model=run_plain, x=X, out=path, inputs=inputs):
        rc.record_function(model, x, out, branches=BOTH, inputs=inputs)

    is_refused("has to be a .safetensors file", record, out=tmp_path / "c.npz")
    is_refused("has 5 tokens, and the model computed 3", record, x=X[:3])
    more = jnp.concatenate([X, X])
    is_refused("5 tokens of width 8, and the model has 1 examples of 10", record, x=more)
    is_refused("has 3 layers, and the model has more", record, lambda x: run_plain(run_plain(x)))
    is_refused(
        "has 3 layers, and the model has 1", record, lambda x: compute_layer(WEIGHTS[0], x)[0]
    )
    is_refused("was recorded on another run's inputs", record, inputs=path)
    is_refused("reads another state", record, shift_skips)
    is_refused("reads another state besides", record, lambda x: shift_skips(x, 1))
