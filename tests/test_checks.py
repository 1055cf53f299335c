"""Checks of arguments: what is refused, and that traced numbers pass."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.checks import check_choice, check_numbers, check_whole, find_nearest
from tests.oracles import draws
from tests.support.refusals import is_refused


@pytest.mark.parametrize(
    "interval, value",
    [
        ("[0, 1)", 1),
        ("[0, 1)", -0.5),
        ("(0, 1]", 0.0),
        ("[0, inf)", float("inf")),
        ("[-inf, inf]", float("nan")),
        ("[0, 1]", np.array([0.5, np.nan])),
        ("[0, 1]", jnp.float32(1.5)),
        ("[0, 1]", np.array(["a"])),
        ("[0, inf]", "0.5"),
        ("[0, inf]", None),
        ("[0, inf]", [0.5]),
        ("[0, inf]", 1j),
    ],
)
def test_a_number_outside_of_an_interval_is_refused(interval, value):
    is_refused(r"rate=.* is not in [\[(]", lambda: check_numbers(interval, arrays=True, rate=value))


def test_of_an_array_the_first_number_outside_is_named():
    for values, first in (([0.5, 3.0, -1.0], "3.0"), ([[0.5, -1.0], [3.0, 0.2]], "-1.0")):
        with pytest.raises(ValueError, match=rf"^rate={first} is not in \[0, 1\]$"):
            check_numbers("[0, 1]", arrays=True, rate=np.array(values))


def test_a_number_of_torch_with_a_gradient_is_not_checked():
    """As a traced one; one without a gradient is."""
    torch = pytest.importorskip("torch")
    check_numbers("[0, 1]", rate=torch.tensor(2.0, requires_grad=True))
    with pytest.raises(ValueError, match=r"rate=2.0 is not in"):
        check_numbers("[0, 1]", rate=torch.tensor(2.0))


def test_an_array_is_refused_where_a_number_belongs():
    hidden = np.ones((2, 4, 3))
    options = {"exclude": "spikes", "threshold": np.full(4, 3.0)}
    is_refused(r"threshold=array\(\[3", rc.profile, hidden, **options)


def test_numbers_of_every_kind_are_taken():
    bfloat = ml_dtypes.bfloat16(0.5)
    numbers = (0, True, 0.5, np.float32(1), np.ones((2, 3)), jnp.zeros(2), bfloat, np.zeros(0))
    for value in numbers:
        check_numbers("[0, 1]", arrays=True, rate=value)


@pytest.mark.parametrize("value", [0, 4, 1.0, 1.5, True, "2", None, [2], np.float32(2), np.ones(2)])
def test_what_is_no_whole_number_is_refused(value):
    is_refused("depth=.* is not a whole number from 1 to 3", check_whole, "depth", value, 1, 3)


def test_whole_numbers_become_those_of_python():
    for value in (2, np.int8(2), np.array(2), jnp.int32(2)):
        whole, depth = check_whole("depth", value, 1), rc.san(value, 1, 4).depth
        assert type(whole) is type(depth) is int and whole == depth == 2


def test_traced_numbers_are_not_checked():
    """Values that are swept stay traced, so that no call compiles anew."""
    x, p = jnp.ones((3, 4)), jnp.eye(3)[None]

    @jax.jit
    def measure(x, p, value):
        chosen = rc.monitor(x, p, sink=value, exclude="spikes", threshold=value)
        return chosen["left_out"], rc.sink_rate(p, sink=value)

    for value in (0.3, 0.5, 2.0):
        measure(x, p, value)
    assert measure._cache_size() == 1
    both = jax.vmap(lambda value: rc.measures.saturated_share(p, value))(jnp.array([0.5, 1.5]))
    np.testing.assert_array_equal(both.ravel(), [1, 0])


@pytest.mark.full
def test_a_traced_threshold_of_arrays_in_memory():
    """Those are measured by NumPy where nothing is traced."""
    x = jnp.eye(3, 4) * jnp.array([[1.0], [1.0], [9.0]])
    count = jax.vmap(lambda t: rc.monitor(x, exclude="spikes", threshold=t)["left_out"])
    np.testing.assert_array_equal(count(jnp.array([0.5, 5.0, 10.0])), [3, 1, 0])


def test_sizes_and_scales_are_named():
    config = rc.san(2, 1, 4)
    for name, value in (("vocab_size", 2.5), ("num_positions", -1), ("d_embed", 0), ("scale", "2")):
        fields = {"vocab_size": 5} | {name: value}
        is_refused(f"{name}=.* is not", lambda fields=fields: rc.EmbeddingConfig(**fields))
    for name, value in (("weight_scale", "2"), ("bias_scale", None), ("weight_scale", np.nan)):
        is_refused(f"{name}=", rc.init, jax.random.key(0), config, **{name: value})
    call = (draws.parameters(config), np.ones((3, 4)), config)
    for value in (-1, 1.5):
        is_refused(f"replicas={value}", rc.log_residual_profile, *call, replicas=value)


def test_at_most_three_names_that_resemble_a_value_are_given_in_their_order():
    names = ("taken", "make", "taken_1", "tokens", "bake", 3)
    assert find_nearest("taken_2", names) == ["taken", "taken_1", "tokens"]
    assert find_nearest("nothing", names) == []
    message = r"place 'mkae' is not one of \('make', 'b'\) of this; nearest: 'make'$"
    is_refused(message, check_choice, "place 'mkae'", "mkae", ("make", "b"), " of this")


@pytest.mark.parametrize("value", ["1", None, [1.0, None]])
def test_numbers_of_a_network_are_named(value):
    config = rc.san(2, 1, 4)
    call = (draws.parameters(config), np.ones((3, 4)))
    is_refused(
        "config.*temperature.* is not a number", rc.apply, *call, config.replace(temperature=value)
    )
    is_refused("mix=3 is not a function", rc.apply, *call, config.replace(mix=3))
    sigmoid = rc.variant(config, "sigmoid", bias="1")
    is_refused("config.normalise.*='1' is not a number", rc.apply, *call, sigmoid)
