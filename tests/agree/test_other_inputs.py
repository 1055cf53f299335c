"""The stream of another run as inputs: its tokens call by call, its noise, and what is refused."""

import numpy as np
import pytest

from rank_collapse.agree.other_inputs import OtherInputs
from rank_collapse.agree.recording import write_recording
from tests.support.refusals import is_refused

B, N, D, L = 2, 6, 4, 3
RNG = np.random.default_rng(0)
ARRAYS = {
    "residual": RNG.normal(size=(L + 1, B, N, D)).astype("float32"),
    "attention_branch": RNG.normal(size=(L, B, N, D)).astype("float32"),
    "mask": (np.arange(N) < np.array([[6], [4]])).astype("uint8"),
}


@pytest.fixture
def path(tmp_path):
    write_recording(tmp_path / "a.safetensors", ARRAYS)
    return tmp_path / "a.safetensors"


def take(path, **options):
    return OtherInputs(path, **options, out="b.safetensors")


def test_calls_take_their_tokens_in_turn(path):
    exists = ARRAYS["mask"][..., None]
    others = take(path)
    others.begin_call()  # a call that ends before the first layer takes no tokens
    for start, count in ((0, 1), (1, 3), (4, 2)):
        others.begin_call()
        tokens = slice(start, start + count)
        for layer in range(L):
            state = others.take_state(layer, (B, count, D))
            np.testing.assert_array_equal(state, (ARRAYS["residual"][layer] * exists)[:, tokens])
            branch = others.take_branch(layer, "attention_branch")
            expected = (ARRAYS["attention_branch"][layer] * exists)[:, tokens]
            np.testing.assert_array_equal(branch, expected)
            assert others.take_branch(layer, "mlp_branch") is None
    others.check_complete(L, ARRAYS["mask"].astype(bool))
    others.check_complete(L, None)
    assert others.describe() == {"inputs": "a.safetensors", "noise": "0.0"}


def test_one_example_may_have_no_axis(tmp_path):
    arrays = {"residual": ARRAYS["residual"][:, 0]}
    write_recording(tmp_path / "a.safetensors", arrays)
    others = take(tmp_path / "a.safetensors")
    others.begin_call()
    np.testing.assert_array_equal(others.take_state(1, (N, D))[0], arrays["residual"][1])


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_noise_is_relative_to_every_number(tmp_path, dtype):
    """Of a state, and of the state after the attention where the branch is taken."""
    arrays = {n: a.astype(dtype) for n, a in ARRAYS.items() if n != "mask"}
    arrays = {n: np.tile(a, (1, 1, 40, 1)) for n, a in arrays.items()}
    write_recording(tmp_path / "a.safetensors", arrays)
    others = take(tmp_path / "a.safetensors", noise=0.125, seed=3)
    again, other = (take(tmp_path / "a.safetensors", noise=0.125, seed=s) for s in (3, 4))
    shape = (B, 40 * N, D)
    for inputs in (others, again, other):
        inputs.begin_call()
    state, same, different = (inputs.take_state(1, shape) for inputs in (others, again, other))
    assert state.dtype == ("float64" if dtype == "float64" else "float32")
    np.testing.assert_array_equal(state, same)
    assert not np.array_equal(state, different)
    x = arrays["residual"][1].astype(float)
    relative = (state - x) / x
    assert relative.std() == pytest.approx(0.125, rel=0.1) and abs(relative.mean()) < 0.02
    branch = others.take_branch(1, "attention_branch")
    b = arrays["attention_branch"][1].astype(float)
    assert ((branch - b) / (x + b)).std() == pytest.approx(0.125, rel=0.1)
    assert others.describe() == {"inputs": "a.safetensors", "noise": "0.125"}


def test_what_does_not_fit_is_refused(path):
    is_refused("b.npz has to be a .safetensors file", OtherInputs, path, out="b.npz")
    for noise in (-0.1, 1.0, float("nan")):
        is_refused(f"noise={noise} is not from 0 to 1", take, path, noise=noise)
    replay = path.with_name("replay.safetensors")
    write_recording(replay, ARRAYS, {"inputs": "c"})
    is_refused("was recorded on another run's inputs", take, replay)
    others = take(path)
    others.begin_call()
    is_refused("has 3 layers, and the model has more", others.take_state, 3, (B, N, D))
    for shape, words in (
        ((1, N, D), "the model has 1 example of 6 or more tokens of width 4"),
        ((B, N, 5), "the model has 2 examples of 6 or more tokens of width 5"),
        ((B, N + 1, D), "the model has 2 examples of 7 or more tokens of width 4"),
    ):
        is_refused(
            f"has 2 examples of 6 tokens of width 4, and {words}", others.take_state, 0, shape
        )
    others.take_state(0, (B, 5, D))
    is_refused("has 3 layers, and the model has 2", others.check_complete, 2, None)
    is_refused("has 6 tokens, and the model computed 5", others.check_complete, L, None)
    others.begin_call()
    others.take_state(0, (B, 1, D))
    wrong = np.ones((B, N), bool)
    is_refused("has another mask than the model", others.check_complete, L, wrong)
