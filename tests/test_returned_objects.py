"""Methods and properties of every object that the library returns, under vmap and stacking.

Classes are found by walking the package. One that is new, or a new method, fails
`test_every_method_is_listed` until it is in `CASES` or, with a reason, in `NOT_OF_ARRAYS`.
"""

import importlib
import inspect
import pkgutil

import draws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from path_examples import config_of

import rank_collapse as rc
from experiments.note import transformer_grammar as grammar
from rank_collapse import pretrained, struct
from rank_collapse.command import checkpoint
from rank_collapse.command.inputs import Inputs, Opened
from rank_collapse.network import inputs
from rank_collapse.network.attention import AttentionContext
from rank_collapse.network.edits import Edit
from rank_collapse.network.layers import MLPConfig
from rank_collapse.network.passes import Walked
from rank_collapse.network.positions import PositionConfig
from rank_collapse.network.residual import ResidualSpec
from rank_collapse.network.variants import Variant
from rank_collapse.network.walk import Layer
from rank_collapse.paths import chains, next_token
from rank_collapse.paths.channels import Channels, Layout
from rank_collapse.paths.contributions import LengthPass
from rank_collapse.paths.truncation import truncated
from rank_collapse.pretrained import lazy, masked_token, streaming
from rank_collapse.report.intervals import Interval
from rank_collapse.text import tokens
from rank_collapse.theory import expectation
from rank_collapse.theory.log_attention import HeadParts
from rank_collapse.theory.token_kernel import TokenKernel
from rank_collapse.training.depth_rules import DepthRule
from rank_collapse.training.tasks import examples, sequences

N, D, DEPTH = 5, 8, 3
CONFIG = config_of(mlp="gelu", attention_skip=True, mlp_skip=True, norm_placement="post")
CROSS = CONFIG.replace(cross_attention=True)
PRE = CONFIG.replace(norm_placement="pre", final_norm=True, windows=(1, 0, 2), position="rotary")


MARKS = ("_fields", "tree_flatten_with_keys")  # of pytrees that are no `Struct`


def trees():
    """All classes of the package that are pytrees."""
    for module in pkgutil.walk_packages(rc.__path__, "rank_collapse."):
        if module.name.endswith(("__main__", ".torch")):  # torch may be absent
            continue
        for value in vars(importlib.import_module(module.name)).values():
            of_kind = inspect.isclass(value) and value.__module__ == module.name
            if of_kind and (issubclass(value, struct.Struct) or any(map(vars(value).get, MARKS))):
                yield value


def methods_of(cls):
    """Methods and properties that users call, inherited ones of this package too."""
    own = [base for base in cls.__mro__ if base.__module__.startswith("rank_collapse.")]
    return sorted(
        name
        for base in own
        if base is not struct.Struct
        for name, value in vars(base).items()
        if inspect.isfunction(value) or isinstance(value, property)
        if name in ("__iter__", "__len__", "__call__") or name[0] != "_"
        if not name.startswith("tree_")
    )


HEAD_MASK = np.arange(2 * N * N).reshape(2, N, N) % 3 > 0


def run(measure, config=CONFIG, **options):
    params = draws.parameters(config)
    return lambda x: measure(params, x, config, **options)


def words_seen(x):
    seen = next_token.no_words(2, N)
    return next_token.add_words(
        seen, x[:, ::-1], 0, jnp.stack([x, x[::-1]]), jnp.eye(2), jnp.arange(N)
    )


def chain(x):
    weights, keep = jax.nn.softmax(x @ x.T)[None], jnp.ones(N, bool)
    return chains.longer_chain(weights, 0, chains.empty_chain(keep, x.dtype), keep)


def logits(contributions):
    return rc.logit_attribution(
        contributions, (jnp.cos(jnp.arange(24.0)).reshape(8, 3), jnp.ones(3))
    )


def seed(x):
    return jax.random.key(jnp.abs(1000 * x[0, 0]).astype(int))


PATHS = run(rc.path_contributions)
COUNTED = run(rc.path_contributions, count_mlps=True)
SIZES = expectation.update_sizes(CONFIG, 0.1)
EXPECTED = run(expectation.expected_pass, sizes=SIZES)
# {class: functions of an input [n, d] that give an object of it}
MAKERS = {
    # Of a decoder, so that its attention to the memory is there too.
    rc.Trace: (lambda x: run(rc.apply, CROSS, memory=x[:3], keep=("attention_input",))(x),),
    rc.Profile: (
        lambda x: rc.profile(jnp.stack([x, 2 + x, 4 * x, 4 + x])),
        run(rc.network.network_profile),
    ),
    rc.PathContributions: (
        PATHS,
        COUNTED,
        run(truncated, length=np.arange(DEPTH + 1)),
        lambda x: logits(COUNTED(x)),
        lambda x: run(rc.path_contributions, CROSS, memory=x[:3], count_mlps=True)(x),
    ),
    rc.paths.DirectContributions: (
        lambda x: logits(run(rc.direct_contributions)(x)),
        lambda x: run(rc.direct_contributions, CROSS, memory=x[:3])(x),
    ),
    next_token.NextToken: (words_seen,),
    chains.Chain: (chain,),
    # With a mask of each head and a window, of this input.
    AttentionContext: (
        lambda x: run(rc.apply, PRE, mask=HEAD_MASK | (x[None, :, :1] > 0))(x).context,
    ),
    inputs.PreparedInputs: (lambda x: run(inputs.prepare_inputs, mask=x[:, 0] > 0)(x)[1],),
    expectation.ExpectedTrace: (EXPECTED,),
    TokenKernel: (lambda x: EXPECTED(x).output,),
    grammar.Lexicon: (lambda x: grammar.make_lexicon(seed(x)),),
    sequences.SequencePairs: (lambda x: sequences.make_pairs(seed(x), 4, 5, 6),),
}
# How a method is called, or compared, where it is not a property or without arguments.
USES = {
    (rc.PathContributions, "__iter__"): tuple,
    (rc.Trace, "layer_axis"): lambda t: jnp.moveaxis(t.hidden, t.layer_axis, -3),
    (rc.Profile, "layer_axis"): lambda p: jnp.moveaxis(p["residual_ratio"], p.layer_axis, -1),
    (AttentionContext, "of_layer"): lambda c: c.of_layer(1, True),
    (TokenKernel, "plus"): lambda k: k.plus(2.0),
    (TokenKernel, "scaled"): lambda k: k.scaled(3.0),
    (sequences.SequencePairs, "first"): lambda pairs: pairs.first(2),
}
# {class or (class, method): why}
INSIDE = "lives inside a pass over one example and is not returned"
STATIC = "computed from what is static, or a value as the caller gave it"
ONE = "of one example or network: refuses or names what it is of, tested beside it"
NOT_OF_ARRAYS = {
    rc.TransformerConfig: STATIC,
    MLPConfig: STATIC,
    PositionConfig: STATIC,
    ResidualSpec: STATIC,
    Variant: STATIC,
    Layer: INSIDE,
    Edit: INSIDE,
    Channels: INSIDE,
    Layout: INSIDE,
    HeadParts: INSIDE,
    Walked: INSIDE,
    lazy.Stored: INSIDE,
    streaming._Part: INSIDE,
    tokens.Tokens: "arrays of the host; its method is that of its last axis",
    examples.Examples: "a data set, whose first axis is its examples, whatever they are",
    (AttentionContext, "of_heads"): "reads none of its arrays",
    checkpoint.Checked: "what a command prints about one checkpoint",
    Inputs: "what a command measures, of one checkpoint",
    Opened: "a checkpoint before it is measured",
    DepthRule: STATIC,
    Interval: "two numbers of the host",
    masked_token.MaskedHead: "weights of one model, which vmap maps over tokens",
    pretrained.Target: "two numbers and a tolerance of the host",
    (rc.Profile, "to_pandas"): ONE,
    (rc.Profile, "to_xarray"): ONE,
}
METHODS = [(cls, name) for cls in MAKERS for name in methods_of(cls)]
METHODS = [method for method in METHODS if method not in NOT_OF_ARRAYS]


def test_every_method_is_listed():
    """Of a class in `MAKERS` every method is called; other classes are here with a reason."""
    found = {(cls, name) for cls in trees() for name in methods_of(cls)}
    excused = {method for method in found if method[0] in NOT_OF_ARRAYS or method in NOT_OF_ARRAYS}
    assert found == excused | set(METHODS) and not excused & set(METHODS)
    assert {key if isinstance(key, tuple) else (key, None) for key in NOT_OF_ARRAYS} <= (
        excused | {(cls, None) for cls, _ in excused}
    )


X = np.random.default_rng(5).standard_normal((6, N, D)).astype(np.float32)


def used(found, method):
    cls, name = method
    if method in USES:
        return USES[method](found)
    value = getattr(cls, name)
    return value.fget(found) if isinstance(value, property) else value(found)


@pytest.mark.parametrize("cls", MAKERS, ids=lambda cls: cls.__name__)
def test_leading_axes_change_nothing(cls):
    """Of an object of one input each; and of all inputs at once: by vmap, of two axes, stacked."""
    methods = [method for method in METHODS if method[0] is cls]

    @jax.jit
    def everything(found):
        return {name: used(found, (cls, name)) for _, name in methods}

    for make in MAKERS[cls]:
        single = jax.jit(make)
        singles = [single(x) for x in X]
        each, once = [everything(one) for one in singles], jax.jit(jax.vmap(make))(X)
        several = {
            "vmap": once,
            "two axes": jax.tree.map(lambda a: a.reshape(2, 3, *a.shape[1:]), once),
            "stacked": jax.tree.map(lambda *a: np.stack(a), *singles),
        }
        for found in map(everything, several.values()):
            same(found, each)


def same(found, each):
    """A tree of arrays with one leading axis or two, and one tree for each of their places."""
    want = jax.tree.map(lambda *a: np.stack(a), *each)
    assert jax.tree.structure(found) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        a = a if np.ndim(a) else np.full(b.shape, a)  # a length, the same of all
        a, b = np.asarray(a, float), np.asarray(b, float)
        assert a.shape in (b.shape, (2, 3, *b.shape[1:]))
        finite = np.abs(b[np.isfinite(b)]).max(initial=0)
        np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-5, atol=1e-5 * finite)


@pytest.mark.parametrize("name", methods_of(rc.PathContributions))
def test_sums_whose_leading_axis_is_the_librarys_own(name):
    """Of several truncations, and of the examples of a stream."""
    method = (rc.PathContributions, name)
    config = CONFIG.replace(depth=2)
    params = draws.parameters(config)
    cut = [used(rc.truncated(params, X[0], config, k), method) for k in range(3)]
    several = rc.truncated(params, X[0], config, np.arange(3))
    same(used(several, method), cut)
    groups = {"whole": pretrained.Group((("sums", LengthPass()),))}
    found = pretrained.stream(pretrained.InMemory(params, config), {"x": X}, groups, chunk=4)
    each = [used(rc.path_contributions(params, x, config), method) for x in X]
    same(used(found["whole"]["sums"], method), each)
