"""Every public function of arrays, with its defaults, of every framework and dtype.

The names are read from the interfaces (`__init__.pyi`), so that a new function cannot be forgotten:
it stands in `CALLS`, or in `OTHERS` with the reason why it takes no arrays of all frameworks.
"""

import ast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse import measures
from rank_collapse.theory import expected_pass
from tests.support.closeness import assert_close
from tests.support.folders import REPOSITORY

RNG = np.random.default_rng(0)
L, B, H, N, D = 3, 2, 2, 5, 4
TOKENS = RNG.normal(size=(L, B, N, D)) + 0.5
WEIGHTS = RNG.dirichlet(np.ones(N), (L, B, H, N))
SHARES = RNG.uniform(size=(L, B, 4))
MASK = jnp.arange(N) < N - 1
QUERIES = RNG.normal(size=(L, B, H, N, D))
DECADES = -np.array([0.0, 1.0, 2.5, 3.0]) * np.ones((L, B, 1))

TOKEN_NAMES = (
    "bulk_ratio", "residual", "residual_ratio", "composite_norm", "matrix_norm", "effective_rank",
    "effective_rank_share", "matrix_entropy", "participation_ratio", "rank_one_ratio",
    "stable_rank", "stable_rank_bound", "token_cosine", "spike_entry", "spike_feature",
    "spike_norm", "spike_share", "spike_token", "residual_spike",
)  # fmt: skip
WEIGHT_NAMES = (
    "attention_entropy", "first_column", "largest_column", "largest_weight", "saturated_share",
    "sink_rate", "largest_logit",
)  # fmt: skip
# {name: (function of one array with two leading axes, the array)}
CALLS = {name: (getattr(measures, name), TOKENS) for name in TOKEN_NAMES}
CALLS |= {name: (getattr(measures, name), WEIGHTS) for name in WEIGHT_NAMES}
CALLS |= {
    "attention_rows": (lambda q: rc.attention_rows(q, q, layout="hnk"), QUERIES),
    "path_length_law": (rc.path_length_law, SHARES),
    "local_rate": (rc.local_rate, DECADES),
}
# Of one array without leading axes, which has the layers first
WHOLE = {
    "profile": (lambda x: dict(rc.profile(x).measures), TOKENS[:, 0]),
    "profile of a batch": (lambda x: dict(rc.profile(x, batch_axis=1).measures), TOKENS),
    "profile of weights": (lambda p: dict(rc.profile(p).measures), WEIGHTS[:, 0]),
    "profile of a list": (lambda x: dict(rc.profile(list(x)).measures), TOKENS),
    "monitor": (lambda x: rc.monitor(x), TOKENS[0]),
    "rollout": (rc.rollout, WEIGHTS[:, 0]),
    "rollout of a list": (lambda p: rc.rollout(list(p)), WEIGHTS[:, :1]),
    "rollout by length": (lambda p: rc.rollout(p, by_length=True), WEIGHTS[:, 0]),
}
# Lists of Python's numbers
LISTS = {
    "spikes": (lambda x: rc.spikes(x, threshold=2.0), TOKENS[:, 0]),
    "spikes of a list": (lambda x: rc.spikes(tuple(x), threshold=2.0), TOKENS[:, :1]),
    "duplicates": (rc.duplicates, TOKENS[0, 0][[0, 1, 0, 2]]),
    "duplicates of a batch of one": (rc.duplicates, TOKENS[0, :1][:, [0, 1, 0, 2]]),
}
OTHERS = {
    "take parameters, tokens and a configuration of our networks, in JAX": (
        "apply", "init", "monitored", "path_contributions", "direct_contributions",
        "head_contributions", "branch_shares", "loop_report", "truncated", "log_residual_profile",
        "bound_report", "transverse_exponents", "path_set_logits", "path_set_states", "path_state",
        "depth_report",
    ),
    "take functions of JAX": (
        "function_contributions", "transport", "transport_ranks", "name_states",
    ),
    "write a file": ("record", "record_function"),
    "are of JAX, for what these give": (
        "logit_attribution", "shapley_values", "coalition_values", "covariance_shares",
        "sample_path", "sample_path_sets", "monitor_gradients",
    ),
    "take numbers, names or functions": (
        "count_paths", "collapse_law", "san", "san_mlp", "san_skip", "transformer", "design",
        "variant", "depth_rule", "coord_check", "plot", "surgery",
    ),
}  # fmt: skip

CONVERTERS = {
    "numpy": lambda a, dtype: a.astype(getattr(np, dtype, None) or ml_dtypes.bfloat16),
    "jax": lambda a, dtype: jnp.asarray(a, dtype),
    "torch": lambda a, dtype: pytest.importorskip("torch").tensor(a, dtype=_torch_dtype(dtype)),
}
FRAMEWORKS = pytest.mark.parametrize("framework", CONVERTERS)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])


def _torch_dtype(name):
    return getattr(pytest.importorskip("torch"), name)


def list_public_functions():
    """Lists the functions that the interfaces of the package, the measures and paths name."""
    names = set()
    for package in ("", "measures/", "paths/"):
        path = REPOSITORY / "rank_collapse" / f"{package}__init__.pyi"
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {alias.asname for alias in node.names}
    return {name for name in names if not name[0].isupper()}


def test_every_public_function_has_a_case():
    cases = {name.partition(" of ")[0].partition(" by ")[0] for name in (*CALLS, *WHOLE, *LISTS)}
    others = {name for names in OTHERS.values() for name in names}
    assert cases | others == list_public_functions()
    assert not cases & others


def round_values(a, framework, dtype):
    """Rounds to a dtype, and returns the framework's array and NumPy's float64 of the same."""
    array = CONVERTERS[framework](a, dtype)
    values = array.double().numpy() if framework == "torch" else np.asarray(array, np.float64)
    return array, values


def check_kind(value, framework, dtype):
    kinds = {"numpy": (np.ndarray, np.generic), "jax": jax.Array}
    if framework == "torch":
        kinds["torch"] = pytest.importorskip("torch").Tensor
    assert isinstance(value, kinds[framework])
    assert str(value.dtype).endswith("float64" if dtype == "float64" else "float32")


@FRAMEWORKS
@DTYPES
@pytest.mark.parametrize("name", [*CALLS, *WHOLE])
def test_framework_dtype_and_value(name, framework, dtype, request):
    """Equal to float64 of NumPy, one example after the other."""
    if framework == "jax" and dtype == "float64":
        request.getfixturevalue("x64")
    function, a = (CALLS | WHOLE)[name]
    array, values = round_values(a, framework, dtype)
    if name in WHOLE:
        expected = function(values)
    else:
        places = np.ndindex(L, B)
        single = [function(values[place]) for place in places]
        stack = lambda *leaves: np.reshape(np.stack(leaves), (L, B, *np.shape(leaves[0])))  # noqa: E731
        expected = jax.tree.map(stack, *single)
    actual = function(array)
    rtol = 1e-9 if dtype == "float64" else 1e-4
    assert isinstance(actual, dict) == isinstance(expected, dict)
    actual, expected = (v if isinstance(v, dict) else {name: v} for v in (actual, expected))
    assert actual.keys() == expected.keys()
    for key, value in actual.items():
        check_kind(value, framework, dtype)
        assert_close(np.asarray(value), expected[key], rtol=rtol, atol=1e-6)


@FRAMEWORKS
@DTYPES
@pytest.mark.parametrize("name", LISTS)
def test_lists(name, framework, dtype, request):
    if framework == "jax" and dtype == "float64":
        request.getfixturevalue("x64")
    function, a = LISTS[name]
    array, values = round_values(a, framework, dtype)
    actual, expected = function(array), function(values)
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.fixture
def strict_promotion():
    """JAX without implicit promotion of dtypes, for one test."""
    with jax.numpy_dtype_promotion("strict"):
        yield


QUICK = ("attention_entropy", "stable_rank_bound", "rollout", "path_length_law", "local_rate")
FULL = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.full)
    for name in (*CALLS, *WHOLE)
]


@pytest.mark.parametrize("name", FULL)
def test_strict_promotion(name, strict_promotion):
    function, a = (CALLS | WHOLE)[name]
    a = jnp.asarray(a, jnp.float32)
    jax.jit(function)(a)
    masked = {
        "profile": lambda x: rc.profile(x, mask=MASK).measures,
        "monitor": lambda x: rc.monitor(x, mask=MASK, exclude="spikes"),
        "attention_rows": lambda q: rc.attention_rows(q, q, layout="hnk", mask=MASK, soft_cap=3),
    }
    if name in masked or name in (*TOKEN_NAMES, *WEIGHT_NAMES):
        jax.jit(masked.get(name, lambda x: function(x, mask=MASK)))(a)


@pytest.mark.full
def test_networks_under_strict_promotion(strict_promotion):
    x, config = jnp.asarray(TOKENS[0, 0], jnp.float32), rc.transformer(2, 2, D)
    params = rc.init(jax.random.key(0), config)
    rc.log_residual_profile(params, x, config, mask=MASK)
    rc.bound_report(params, x, config, mask=MASK)
    expected_pass(params, x, config, mask=MASK)
    rc.collapse_law(0.5, 4, jnp.ones(3), jnp.ones(3), score_variance=0.5)


def make_unreadable(kind, a):
    """Makes an array of torch, JAX or NumPy whose numbers no measure can read."""
    if kind in ("deleted", "keys"):
        if kind == "keys":
            return jax.random.split(jax.random.key(0), a.shape)
        array = jnp.array(a)
        array.delete()
        return array
    if kind == "longdouble":
        return a.astype(np.longdouble)
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.tensor(a, dtype=torch.float32)
    if kind == "fake":
        with FakeTensorMode():
            return torch.empty(a.shape)
    return {
        "meta": lambda: x.to("meta"),
        "nested": lambda: torch.nested.nested_tensor([x[0], x[0]]),
        "sparse": lambda: x.to_sparse(),
        "quantised": lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "mkldnn": lambda: x.to_mkldnn(),
    }[kind]()


UNREADABLE = {
    "meta": "on meta, of Tensor, has no values",
    "fake": "of FakeTensor, has no values",
    "nested": "to_padded_tensor",
    "sparse": r"layout sparse_coo .* x\.to_dense",
    "quantised": r"x\.dequantize",
    "mkldnn": r"x\.to_dense",
    "deleted": "deleted or donated",
    "keys": "holds random keys",
    "longdouble": "more digits than float64",
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_arrays_without_numbers_are_refused_in_one_sentence(kind):
    for name, (function, a) in (CALLS | WHOLE | LISTS).items():
        if "list" in name:
            continue
        with pytest.raises(ValueError, match=UNREADABLE[kind]) as caught:
            function(make_unreadable(kind, a[:, 0, 0] if kind == "mkldnn" and a.ndim > 4 else a))
        assert len(str(caught.value).splitlines()[0]) < 200, name
    x = [make_unreadable(kind, TOKENS[0, 0]) for _ in range(3)]
    with pytest.raises(ValueError, match=UNREADABLE[kind]):
        rc.profile(x)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_masks_of_few_bits_and_without_values():
    torch = pytest.importorskip("torch")
    x, mask = TOKENS[0, 0], np.array([1, 1, 1, 1, 0])
    expected = rc.residual_ratio(x, mask=mask)
    for few in (
        mask.astype(ml_dtypes.bfloat16), jnp.asarray(mask, jnp.bfloat16),
        torch.tensor(mask).bfloat16(), torch.tensor(mask).half(),
    ):  # fmt: skip
        np.testing.assert_allclose(rc.residual_ratio(x, mask=few), expected, rtol=1e-5)
    with pytest.raises(ValueError, match="has no values"):
        rc.residual_ratio(torch.tensor(x), mask=torch.tensor(mask).to("meta"))


SCALES = pytest.mark.parametrize("scale", [1e25, 1e-25])


@SCALES
@FRAMEWORKS
def test_no_square_overflows_or_vanishes(scale, framework):
    """In float32, whose squares of 1e25 are infinite and of 1e-25 are 0."""
    convert = CONVERTERS[framework]
    x = convert(scale * TOKENS[0, 0], "float32")
    for name in TOKEN_NAMES:
        function, _ = CALLS[name]
        factor = scale if name in ("residual", "composite_norm", "matrix_norm") else 1
        expected = np.asarray(function(TOKENS[0, 0])) * factor
        np.testing.assert_allclose(np.asarray(function(x)), expected, rtol=1e-4, err_msg=name)
    assert rc.duplicates(x) == []
    assert rc.duplicates(convert(scale * TOKENS[0, 0][[0, 1, 0]], "float32")) == [[0, 2]]
    wide = convert(np.concatenate([TOKENS[0, 0], scale * TOKENS[0, 0][:1]]), "float32")
    assert rc.duplicates(wide) == []
    lengths = np.linalg.norm(np.concatenate([TOKENS[0, 0], scale * TOKENS[0, 0][:1]]), axis=1)
    want = lengths.max() / np.median(lengths)
    np.testing.assert_allclose(np.asarray(rc.measures.spike_norm(wide)), want, rtol=1e-4)


@SCALES
def test_gradients_that_are_tiny_or_huge(scale):
    gradients = {"query": jnp.float32(scale) * jnp.arange(1, 4), "b.query": jnp.float32([scale])}
    norm = rc.monitor_gradients(gradients)["query_gradient"]
    np.testing.assert_allclose(norm, np.sqrt(15) * scale, rtol=1e-6)
    stacked = {"query": jnp.float32([[scale, scale], [1, 0], [0, 0]])}
    norms = rc.monitor_gradients(stacked, layer_axis=0)["query_gradient"]
    np.testing.assert_allclose(norms, [np.sqrt(2) * scale, 1, 0], rtol=1e-6)
