"""Arrays of every framework: their dtype, their masks, and what is no array of numbers."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures import arrays
from tests.support.refusals import is_refused, parametrize_refusals

RNG = np.random.default_rng(11)


X = RNG.normal(size=(2, 5, 3)) + 0.5


# −3 and 4 are the largest entries, of different tokens and features
SMALL = np.array([[1.0, -3.0, 0.0], [2.0, 0.0, 0.5], [0.5, 1.0, 4.0]])


def test_integers_and_low_precision_become_float32_and_float64_stays():
    for dtype in (np.int8, np.uint16, np.bool_, np.float16, ml_dtypes.bfloat16, np.float32):
        assert arrays.as_floats(np.ones((2, 2), dtype)).dtype == np.float32
        assert rc.residual_ratio(np.ones((2, 2), dtype)).dtype == np.float32
    assert arrays.as_floats([[1.0]]).dtype == np.float64
    assert arrays.as_floats((jnp.ones(2), [1.0, 2.0])).shape == (2, 2)  # JAX's among them
    assert isinstance(arrays.as_array([(jnp.ones(2),), (jnp.zeros(2),)]), jax.Array)
    message = "a tuple has arrays of different shapes .*: pad them, and pass mask="
    is_refused(message, arrays.as_array, (jnp.ones(2), jnp.ones(2), [1.0, 2.0, 3.0]))
    whole = (SMALL * 4).astype(np.int32)
    np.testing.assert_allclose(rc.residual_ratio(whole), rc.residual_ratio(SMALL), rtol=1e-6)


class Variable:
    """A variable of NNX, as far as measures see it."""

    def __jax_array__(self):
        return SMALL


def test_a_variable_is_its_value():
    assert rc.residual_ratio(Variable()) == rc.residual_ratio(SMALL)
    assert rc.composite_norm(SMALL.tolist()) == rc.composite_norm(SMALL)


@parametrize_refusals(
    [
        ([["a", "b"]], "a list is not an array of numbers"),
        ([[b"a"]], "not an array of numbers"),
        (np.array([[1, None]]), "a ndarray is not an array of numbers"),
        (np.zeros((2, 2), "m8[s]"), "not an array of numbers"),
        (np.zeros((2, 2), "M8[s]"), "not an array of numbers"),
        (np.zeros((2, 2), complex), "x of dtype complex128 is not real"),
        (((1.0, 2.0), (3.0,)), "a tuple has rows of different lengths: pad them, and pass mask="),
    ]
)
def test_what_are_no_numbers_is_refused(arguments, message):
    is_refused(message, arrays.as_array, *arguments)


def test_masks_are_booleans_or_0_and_1():
    for mask in ([1, 0], [1.0, 0.0], [True, False], np.uint8([1, 0]), jnp.array([1.0, 0.0])):
        booleans = arrays.as_bools(mask)
        assert booleans.dtype == bool and booleans.tolist() == [True, False]
    for zeros in ([0, 0], np.uint8([0, 0])):  # of integers all may be 0
        assert not arrays.as_bools(zeros).any()
    for wrong in ([2, 0], [-1, 0]):
        is_refused("m of dtype int64 has values other than 0 and 1", arrays.as_bools, wrong, "m")
    for wrong in ([0.5, 1.0], [0.0, 0.0], [-np.inf, 1.0], [np.nan, 1.0]):
        is_refused("m has dtype float64, but a mask is boolean", arrays.as_bools, wrong, "m")
    is_refused(r"mask='causal' is not an array: use config.replace", arrays.as_bools, "causal")
    for shape in ((2,), (3, 2), (1, 2, 5), ()):
        is_refused("does not fit tokens of", rc.residual_ratio, X, mask=np.ones(shape, bool))
    for traced in ([True, False], [1, 0]):
        booleans = jax.eval_shape(arrays.as_bools, jnp.asarray(traced))
        assert booleans.dtype == bool


def test_tensors_of_torch_on_the_host_have_their_values():
    """NumPy has no name for bfloat16 and the formats of eight bits, which become float32."""
    torch = pytest.importorskip("torch")
    for name in ("bfloat16", "float8_e5m2", "float8_e4m3fn", "float16", "float64", "int8", "bool"):
        tensor = torch.tensor([0.0, 1.0, 1.0]).to(getattr(torch, name)).requires_grad_(False)
        array = arrays.on_host(tensor)
        narrow = name.startswith(("bfloat", "float8"))
        assert array.dtype == ("float32" if narrow else name) and array.tolist() == [0, 1, 1]
        mask = arrays.as_bools(tensor)
        assert mask.dtype == torch.bool and mask.tolist() == [False, True, True]
    kept = torch.ones(2, requires_grad=True)
    assert arrays.on_host(kept).tolist() == [1, 1] and arrays.on_host(SMALL) is SMALL
    large = torch.tensor([0, 2, -1], dtype=torch.int64)  # as a mask any number but 0 exists
    assert arrays.as_bools(large).tolist() == [False, True, True]
    message = "m of dtype float32 has values other than 0 and 1|m has dtype float32, but a mask is"
    is_refused(message, arrays.as_bools, torch.tensor([0.5, 1.0]), "m")
    fitted = arrays.match_framework(torch.ones(2), np.array([True, False]))[1]
    assert isinstance(fitted, torch.Tensor) and fitted.tolist() == [True, False]


def test_additive_masks_of_torch_are_refused_in_every_float_format():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2):
        for additive in ([0.0, -np.inf], [0.0, 0.0], [0.5, 1.0]):
            with pytest.raises(ValueError, match="pass an additive mask as bias="):
                arrays.as_bools(torch.tensor(additive).to(dtype))


def test_a_mask_moves_to_the_device_of_the_tokens():
    """The device "meta" stands for an accelerator: its arrays have a shape alone."""
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 3, device="meta")
    for mask in (torch.tensor([True, False]), np.array([True, False])):
        tokens, moved = arrays.match_framework(x, mask)
        assert tokens is x and moved.device == x.device
        assert moved.shape == (2,) and moved.dtype == torch.bool
    assert arrays.host_values_or_none(x) is None


def test_arguments_by_name_are_arrays_like_the_others():
    """They decide on the framework, and are refused where they have no values."""
    torch = pytest.importorskip("torch")
    x = torch.tensor(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ratio = rc.participation_ratio(x=x.float())
    np.testing.assert_allclose(ratio, rc.participation_ratio(X), rtol=1e-5)
    mask = torch.ones(5, dtype=torch.bool, device="meta")
    is_refused("has no values", rc.residual_ratio, X, mask=mask)
    is_refused("has no values", rc.residual_ratio, x=[X[0], x[1].to("meta")])


def test_inside_of_torch_compile_a_measure_runs_between_the_graphs(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(
        torch.compiler, "disable", lambda function: lambda *a, **o: (function.__name__, a, o)
    )
    assert rc.residual_ratio(X, norm="max") == ("residual_ratio", (X,), {"norm": "max"})


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="there are no more digits")
def test_more_digits_than_those_of_float64_are_refused():
    message = "has more digits than float64: pass x.astype"
    is_refused(message, rc.residual_ratio, X.astype(np.longdouble))
    is_refused(message, arrays.as_array, np.longdouble(1))
