"""The four variants: by their definition, and against surgeries on `transformers` models."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse import pretrained
from rank_collapse.network import surgery
from rank_collapse.network.layers import apply_norm, get_activation
from rank_collapse.network.parameters import complete_params
from tests.oracles import draws, mp_network
from tests.oracles.checkpoint_arrays import hidden_states, largest_difference, traces
from tests.support.closeness import assert_close
from tests.support.marks import full_but
from tests.support.refusals import is_refused, parametrize_refusals

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        from tests.oracles import architectures
    except ImportError:
        architectures = None

needs_torch = pytest.mark.skipif(architectures is None, reason="torch is not installed")
CONFIG = rc.transformer(2, 2, 12, d_ff=20, mlp="gelu_tanh")
attend = jax.jit(lambda p, x: rc.network.multi_head_attention(p, x, x)[0])
normalise, phi = jax.jit(apply_norm), jax.jit(get_activation(CONFIG.mlp).fn)
PUBLISHED = [(v, "published") for v in surgery.ABLATIONS]


@pytest.mark.parametrize(("variant", "reading"), [*PUBLISHED, ("SAN+MLP", "text")])
@pytest.mark.parametrize("family", full_but(["bert", "albert"], "albert"))
def test_variants_by_hand(variant, reading, family):
    params, x = draws.parameters(CONFIG), draws.tokens(5, 12)
    config, cut = surgery.ablate(CONFIG.replace(family=family), params, variant, reading)
    trace, params, x = jax.device_get((rc.apply(cut, x, config), params, x))
    for l in range(2):
        p = jax.tree.map(lambda a, l=l: a[l], params.layers)
        branch = np.asarray(attend(p.attention, x))
        skip = variant in ("SAN+skip", "Transformer")
        x = np.asarray(normalise(p.attention_norm, branch + x if skip else branch))
        if variant in ("SAN+MLP", "Transformer"):
            z = np.asarray(phi(x @ p.mlp.w_in + p.mlp.b_in)) @ p.mlp.w_out + p.mlp.b_out
            x = np.asarray(normalise(p.mlp_norm, z if reading == "text" else z + x))
        elif family == "albert":
            x = np.asarray(normalise(p.mlp_norm, phi(x) + x))
        assert_close(trace.hidden[l + 1], x, atol=2e-5)


SMALL = {
    "vocab_size": 40,
    "num_hidden_layers": 2,
    "hidden_size": 12,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
}
T5 = {"vocab_size": 40, "d_model": 12, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 2}
GPT2 = {"vocab_size": 40, "n_embd": 12, "n_layer": 2, "n_head": 2, "n_positions": 16}
DECODERS = {
    "gpt2": GPT2 | {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
    "t5": T5 | {"model_type": "t5", "feed_forward_proj": "gated-gelu"},
    "llama": SMALL | {"model_type": "llama", "num_key_value_heads": 1, "rope_theta": 30.0},
    "bert": SMALL | {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
}
NO_SKIP = {"attention_skip": False, "cross_skip": False}
CUTS = {
    ("SAN", "published"): NO_SKIP | {"mlp": "none"},
    ("SAN+MLP", "published"): NO_SKIP,
    ("SAN+MLP", "text"): NO_SKIP | {"mlp_skip": False},
    ("SAN+skip", "text"): {"mlp": "none"},
}


@pytest.mark.full
@pytest.mark.parametrize("name", full_but(DECODERS, "t5"))
def test_decoders_by_hand(name, x64):
    part = "decoder" if name == "t5" else None
    key = jax.random.key(0)
    config, params = pretrained.random_like(DECODERS[name], key, part=part, dtype=jnp.float64)
    leaves, tree = jax.tree.flatten(params)
    # Away from the symmetric start: no gain is 1, no bias 0, no attention uniform.
    leaves = [
        jax.device_put(np.asarray(a) + 0.4 * np.asarray(draws.normal(*a.shape, seed=i)))
        for i, a in enumerate(leaves)
    ]
    params = jax.tree.unflatten(tree, leaves)
    memory = draws.normal(4, 12) if config.cross_attention else None
    ids = jnp.array([3, 17, 5, 9, 30, 5])
    outputs = []
    for (variant, reading), fields in CUTS.items():
        cut, weights = surgery.ablate(config, params, variant, reading)
        trace = rc.apply(weights, ids, cut, memory=memory)
        start = np.asarray(trace.hidden[0])
        full_params = complete_params(params, config)  # biases that there are not as zeros
        expected, _ = mp_network.states(full_params, start, config.replace(**fields), memory)
        assert_close(trace.hidden, expected, rtol=0, atol=1e-10)
        outputs.append(expected[-1])
    # The variants differ, so that no one of them passes for another.
    assert min(np.abs(a - b).max() for a, b in itertools.combinations(outputs, 2)) > 0.1


GATED = rc.transformer(1, 2, 12, mlp="swiglu")


@parametrize_refusals(
    [
        (lambda p: surgery.ablate(CONFIG, p, "san"), "'san' is not one of"),
        (
            lambda p: surgery.ablate(CONFIG, p, "SAN", "paper"),
            "'paper' is not one of",
        ),
        (lambda p: surgery.ablate(rc.san(2, 2, 12), p, "SAN"), "mlp='none'"),
        (
            lambda p: surgery.ablate(CONFIG.replace(attention_skip=False), p, "SAN+skip"),
            "attention_skip=False, mlp_skip=True",
        ),
        (lambda p: surgery.ablate(CONFIG.replace(mlp_skip=False), p, "SAN"), "mlp_skip=False"),
        (lambda p: surgery.identity_maps(GATED, draws.parameters(GATED)), "gated"),
    ]
)
def test_refusals(arguments, message):
    (call,) = arguments
    is_refused(message, lambda: call(draws.parameters(CONFIG)))


class OnlyBranch:
    """Makes LayerNorm(branch + input) a LayerNorm(branch): the skip is cut where they meet."""

    def __init__(self, dense, layer_norm):
        self.branch = None
        dense.register_forward_hook(self.keep)
        layer_norm.register_forward_pre_hook(self.replace)

    def keep(self, module, inputs, output):
        self.branch = output

    def replace(self, module, inputs):
        return (self.branch,)


def cut_torch(model, variant, reading):
    """The same surgery on a transformers model, in place."""
    kind = model.config.model_type
    base = architectures.base(model)
    no_skip = variant in ("SAN", "SAN+MLP")
    no_mlp = variant in ("SAN", "SAN+skip")
    identity = architectures.torch.nn.Identity
    if kind == "bert":
        for layer in base.encoder.layer:
            if no_skip:
                OnlyBranch(layer.attention.output.dense, layer.attention.output.LayerNorm)
            if no_mlp:
                layer.feed_forward_chunk = lambda a: a
            elif reading == "text" and variant == "SAN+MLP":
                OnlyBranch(layer.output.dense, layer.output.LayerNorm)
    elif kind == "albert":
        for group in base.encoder.albert_layer_groups:
            for layer in group.albert_layers:
                if no_skip:
                    OnlyBranch(layer.attention.dense, layer.attention.LayerNorm)
                if no_mlp and reading == "published":
                    layer.ffn, layer.ffn_output = identity(), identity()
                elif no_mlp:
                    layer.ff_chunk = lambda a: 0 * a
                    layer.full_layer_layer_norm = identity()
    else:  # xlnet
        for layer in base.layer:
            if no_skip:
                post = layer.rel_attn.post_attention
                layer.rel_attn.post_attention = lambda h, a, post=post: post(h, a, residual=False)
            if no_mlp:
                layer.ff = identity()


CASES = [(n, v, "published") for n in ("bert", "albert", "xlnet") for v in surgery.ABLATIONS[:3]]
CASES += [("bert", "SAN+MLP", "text"), ("albert", "SAN", "text"), ("albert", "SAN+skip", "text")]
USUAL = (("bert", "SAN+MLP", "text"), ("albert", "SAN", "published"), ("xlnet", "SAN", "published"))


@needs_torch
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("case", full_but(CASES, *USUAL), ids=" ".join)
def test_surgery_on_transformers(case, tmp_path):
    name, variant, reading = case
    model = architectures.build(architectures.CASES[name])
    architectures.save(model, tmp_path)
    arguments = architectures.inputs(model)
    config, params = pretrained.load(tmp_path)
    assert config.family == name
    cut, weights = surgery.ablate(config, params, variant, reading)
    trace = traces(cut, weights, arguments)
    cut_arrays = {"hidden": hidden_states(trace, cut), "attention": np.asarray(trace.attention)}
    cut_torch(model, variant, reading)
    expected = architectures.run(model, arguments)
    expected = {k: expected[k] for k in cut_arrays}
    worst = largest_difference(cut_arrays, expected, arguments)
    assert max(worst.values()) < 1e-5, worst
    full_states = hidden_states(traces(config, params, arguments), config)
    assert float(jnp.max(jnp.abs(full_states - cut_arrays["hidden"]))) > 1e-2


def test_an_ablation_changes_the_config_and_the_parts_of_the_weights_that_it_names():
    fields = {"cross_attention": True, "norm_placement": "sandwich", "learned_branch_gain": 0.5}
    full = CONFIG.replace(**fields, num_experts=2, d_shared=4)
    params = draws.parameters(full)
    mlp = {"mlp": "none", "mlp_skip": False, "num_experts": 0, "d_shared": 0}
    no_skip = {"attention_skip": False, "cross_skip": False}
    for family, name, reading, expected in (
        (None, "Transformer", "published", {}),
        (None, "Transformer", "text", {}),
        (None, "SAN", "published", no_skip | mlp),
        (None, "SAN", "text", no_skip | mlp),
        (None, "SAN+skip", "published", mlp),
        (None, "SAN+MLP", "published", no_skip),
        (None, "SAN+MLP", "text", no_skip | {"mlp_skip": False}),
        ("albert", "SAN", "text", no_skip | mlp),
        ("albert", "SAN+skip", "text", mlp),
        ("albert", "SAN+MLP", "published", no_skip),
        ("albert", "SAN", "published", no_skip | {"d_ff": 12}),
        ("albert", "SAN+skip", "published", {"d_ff": 12}),
    ):
        config = full.replace(family=family)
        cut, weights = surgery.ablate(config, params, name, reading)
        assert cut == config.replace(**expected)
        parts = {n: getattr(weights.layers, n) for n in vars(weights.layers) if n.startswith("mlp")}
        if expected.get("mlp") == "none":
            assert set(parts.values()) == {None}
        elif "d_ff" not in expected:
            assert weights is params
    left = full.replace(cross_skip=False)
    assert not surgery.ablate(left, params, "SAN+skip")[0].cross_skip


def test_identity_maps_have_the_precision_of_the_other_weights():
    config = rc.transformer(3, 1, 2, layer_map=(0, 1, 0))
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.bfloat16), draws.parameters(config))
    mlp = surgery.identity_maps(config, params)[1].layers.mlp
    assert {a.dtype for a in jax.tree.leaves(mlp)} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(mlp.w_in.astype(float), [np.eye(2)] * 2)
    np.testing.assert_array_equal(mlp.w_out.astype(float), [np.eye(2)] * 2)
    assert mlp.b_in.shape == mlp.b_out.shape == (2, 2) and not mlp.b_in.any()


def test_variants_that_differ():
    names = ["SAN", "SAN+MLP", "SAN+skip", "Transformer"]
    published = [(name, "published") for name in names]
    for family in (None, "bert", "xlnet"):
        assert surgery.list_ablations(family) == [*published, ("SAN+MLP", "text")]
    texts = [(name, "text") for name in names[:3]]
    assert surgery.list_ablations("albert") == published + texts
    assert ("SAN+MLP", "text") in surgery.list_ablations("bert")
    assert ("SAN", "text") in surgery.list_ablations("albert")
    assert ("SAN", "text") not in surgery.list_ablations("xlnet")
