"""Differences of sublayers, token by token, and the dtypes of recordings."""

import math

import ml_dtypes
import numpy as np
import pytest

from rank_collapse.agree.differences import (
    Rounding,
    bound_sizes,
    compare_layer,
    compare_on_remainders,
    compare_sums,
    find_dtype,
    find_rounding,
)
from rank_collapse.agree.recording import Layer, open_recording, write_recording
from rank_collapse.agree.replay import Pair
from tests.support.closeness import assert_close

B, N, D = 2, 7, 6
MASK = np.arange(N) < np.array([[7], [5]])
COARSE = Rounding(2.0**-8, 2.0**-9, "bfloat16")
RNG = np.random.default_rng(0)


def draw(size=1.0):
    return size * RNG.normal(size=(B, N, D))


def make_pair(*branches, gains=None, inputs=False):
    """Makes a layer in two runs: states that differ by a hundredth, branches by a thirtieth."""
    x, end = draw(), draw(1.5)
    terms = {name: draw(0.5) for name in branches}
    other = {name: a + draw(0.02) for name, a in terms.items()}
    runs = Layer(4, x, end, terms), Layer(4, x + draw(0.01), end + draw(0.03), other)
    taken = Layer(4, runs[1].before, draw(), {n: draw(0.5) for n in branches}) if inputs else None
    return Pair(*runs, taken, gains or {})


def length(vector):
    return math.sqrt(sum(float(v) ** 2 for v in vector))


def expect(x, y, a, b, *, floor, mixes=False, ends=None, rounding=COARSE):
    """Computes (error_in, added, predicted) of each token that exists, one by one."""
    tokens = [k for k in np.ndindex(B, N) if MASK[k]]

    def size(array, k):
        return max(length(array[k]), 0.1 * np.median([length(array[j]) for j in tokens]))

    error_in = {k: length(y[k] - x[k]) / size(x, k) for k in tokens}
    mean = math.sqrt(sum(e**2 for e in error_in.values()) / len(tokens))
    columns = np.full((3, B, N), np.nan)
    for k in tokens:
        comes_in = max(error_in[k], mean) if mixes else error_in[k]
        square = (1.5 * comes_in) ** 2 + (floor[k] if np.ndim(floor) else floor) ** 2
        if ends is not None:
            square += (0.4 * rounding.stream * ends(k) / size(a, k)) ** 2
        columns[(slice(None), *k)] = error_in[k], length(b[k] - a[k]) / size(a, k), square**0.5
    return columns


def check(difference, part, expected):
    assert (difference.layer, difference.part) == (4, part)
    for name, column in zip(("error_in", "added", "predicted"), expected, strict=True):
        assert_close(getattr(difference, name), column, rtol=1e-6)
    assert not difference.spikes.any()


def test_both_branches_are_compared_with_what_comes_in():
    pair = make_pair("attention_branch", "mlp_branch")
    (x, y), unit = (pair.first.before, pair.second.before), COARSE.products
    a, c, b, d = (
        pair.first.branches["attention_branch"], pair.second.branches["attention_branch"],
        pair.first.branches["mlp_branch"], pair.second.branches["mlp_branch"],
    )  # fmt: skip
    attention, mlp = compare_layer(pair, MASK, COARSE)
    check(attention, "attention", expect(x, y, a, c, floor=2 * unit, mixes=True))
    check(mlp, "mlp", expect(x + a, y + c, b, d, floor=2 * unit))
    total = compare_sums(pair, MASK, COARSE)
    states = pair.first.after, pair.second.after
    expected = expect(
        x + a + b, y + c + d, *states, floor=3 * unit, ends=lambda k: 2 * length(states[0][k])
    )
    check(total, "layer", expected)
    assert total.is_sum and not mlp.is_sum and total.states == states


def test_states_alone_are_compared_by_what_the_layer_changes():
    pair = make_pair()
    (x, y), (after, other) = (
        (pair.first.before, pair.second.before),
        (pair.first.after, pair.second.after),
    )
    (layer,) = compare_layer(pair, MASK, COARSE)
    expected = expect(
        x, y, after - x, other - y, floor=3 * COARSE.products, mixes=True,
        ends=lambda k: length(x[k]) + length(after[k]),
    )  # fmt: skip
    check(layer, "layer", expected)
    assert compare_sums(pair, MASK, COARSE) is None


def test_beside_one_branch_the_remainder_of_the_layer_is_compared():
    unit = COARSE.products
    pair = make_pair("attention_branch")
    x, y = pair.first.before, pair.second.before
    a, c = (layer.branches["attention_branch"] for layer in pair[:2])
    after, other = pair.first.after, pair.second.after
    attention, layer = compare_layer(pair, MASK, COARSE)
    check(attention, "attention", expect(x, y, a, c, floor=2 * unit, mixes=True))
    x, y = x + a, y + c
    expected = expect(
        x, y, after - x, other - y, floor=3 * unit,
        ends=lambda k: length(x[k]) + length(after[k]),
    )  # fmt: skip
    check(layer, "layer", expected)

    pair = make_pair("mlp_branch")
    x, y = pair.first.before, pair.second.before
    a, c = (layer.branches["mlp_branch"] for layer in pair[:2])
    after, other = pair.first.after, pair.second.after
    layer, mlp = compare_layer(pair, MASK, COARSE)
    expected = expect(
        x, y, after - a - x, other - c - y, floor=3 * unit, mixes=True,
        ends=lambda k: length(x[k]) + length(after[k]),
    )  # fmt: skip
    check(layer, "layer", expected)
    check(mlp, "mlp", expect(after - a, other - c, a, c, floor=2 * unit))
    assert compare_sums(pair, MASK, COARSE) is None


@pytest.mark.parametrize("name", ["attention_branch", "mlp_branch"])
@pytest.mark.parametrize("run", [0, 1])
def test_a_branch_of_one_run_alone_is_not_compared(name, run):
    """Then the remainder of the layer is, as where neither run has the branch."""
    pair = make_pair("attention_branch", "mlp_branch")

    def drop(layer):
        return layer._replace(branches={n: a for n, a in layer.branches.items() if n != name})

    runs = [drop(layer) if index == run else layer for index, layer in enumerate(pair[:2])]
    some = [*compare_layer(pair._replace(first=runs[0], second=runs[1]), MASK, COARSE)]
    neither = [
        *compare_layer(pair._replace(first=drop(pair[0]), second=drop(pair[1])), MASK, COARSE)
    ]
    assert [one.part for one in some] == [one.part for one in neither]
    for one, other in zip(some, neither, strict=True):
        check(one, other.part, (other.error_in, other.added, other.predicted))
    assert compare_sums(pair._replace(first=runs[0], second=runs[1]), MASK, COARSE) is None


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("part", ["attention", "mlp"])
def test_the_remainder_of_a_layer_comes_in_with_the_input_of_its_branch(part, inputs):
    """If it is rounding in one run alone: of all tokens that exist but few."""
    pair = make_pair("attention_branch", "mlp_branch", inputs=inputs)
    a, c = (layer.branches[f"{part}_branch"] for layer in pair[:2])
    # Of three terms, of which the least is 2 in size: just below four roundings, and just above.
    unit = np.eye(D)[0] * 4 * COARSE.products
    ends = []
    for layer, far in ((pair.first, 0.99), (pair.second, 9.0)):
        terms = (pair.inputs or layer).branches.values()
        sizes = sum(np.linalg.norm(z, axis=-1) for z in (layer.before, *terms))
        shift = far * sizes[..., None] * unit
        shift[~MASK] *= 1000
        ends.append(layer.before + sum(terms) + shift)
    pair = pair._replace(
        first=pair.first._replace(after=ends[0]), second=pair.second._replace(after=ends[1])
    )
    starts = []
    for layer in pair[:2]:
        terms = (pair.inputs or layer).branches
        start = layer.before if part == "attention" else layer.before + terms["attention_branch"]
        starts.append(start + layer.after - layer.before - sum(terms.values()))
    difference = compare_on_remainders(pair, part, MASK, COARSE)
    floor = 2 * COARSE.products
    expected = expect(*starts, a, c, floor=floor, mixes=part == "attention")
    check(difference, part, expected)
    after = ends[0].copy()
    after[0, 0] += 1.0  # one of twelve tokens is too many
    far = pair._replace(first=pair.first._replace(after=after))
    assert compare_on_remainders(far, part, MASK, COARSE) is None
    turned = pair._replace(first=pair.second, second=pair.first)
    assert compare_on_remainders(turned, part, MASK, COARSE) is not None
    for runs in (pair[:1] * 2, pair[1:2] * 2):  # both, and neither
        same = pair._replace(first=runs[0], second=runs[1])
        assert compare_on_remainders(same, part, MASK, COARSE) is None
    fine = Rounding(2.0**-10, COARSE.products, "float32")  # the stream is the coarser
    check(compare_on_remainders(pair, part, MASK, fine), part, expect(
        *starts, a, c, floor=2 * fine.compute_unit(D), mixes=part == "attention"
    ))  # fmt: skip
    finer = Rounding(2.0**-10, 2.0**-10, "float32")
    assert compare_on_remainders(pair, part, MASK, finer) is None
    without = pair.first._replace(branches={f"{part}_branch": a})
    for lacking in (pair._replace(first=without), turned._replace(second=without)):
        assert compare_on_remainders(lacking, part, MASK, COARSE) is None


@pytest.mark.parametrize("both", [False, True])
def test_measured_gains_say_how_much_rounding_is_amplified(both):
    gains = {f"{part}_branch": RNG.uniform(1, 9, (B, N)) for part in ("attention", "mlp")}
    pair = make_pair(*gains, gains=gains, inputs=True)
    rounding = COARSE._replace(both=both)
    x, y = pair.first.before, pair.second.before
    taken = pair.inputs.branches["attention_branch"]  # which both runs add to their stream
    starts = {"attention": (x, y), "mlp": (x + taken, y + taken)}
    for difference, factor in zip(compare_layer(pair, MASK, rounding), (0.95, 0.85), strict=True):
        part = difference.part
        a, c = (layer.branches[f"{part}_branch"] for layer in pair[:2])
        size = np.linalg.norm(a, axis=-1)
        size = np.maximum(size, 0.1 * np.median(size[MASK]))
        unit = COARSE.products * (math.sqrt(2) if both else 1)
        floor = factor * unit * np.sqrt((gains[f"{part}_branch"] / size) ** 2 + 1)
        expected = expect(*starts[part], a, c, floor=floor, mixes=part == "attention")
        check(difference, part, expected)
    total = compare_sums(pair, MASK, rounding)
    both_add = sum(pair.inputs.branches.values())
    expected = expect(
        x + both_add, y + both_add, pair.first.after, pair.second.after,
        floor=3 * COARSE.products, ends=lambda k: 2 * length(pair.first.after[k]),
    )  # fmt: skip
    check(total, "layer", expected)


def test_sums_of_products_are_rounded_in_float32_too():
    for name, size, factor in (
        ("float64", 2.0**-53, 3.0), ("float32", 2.0**-24, 3.0), ("float16", 2.0**-11, 1.0),
        ("bfloat16", 2.0**-8, 1.0),
    ):  # fmt: skip
        assert Rounding(size, size, name).compute_unit(64) == pytest.approx(factor * size)


def test_large_tokens_are_spikes_and_count_apart():
    """A token whose input, or whose branch, is five times the median; not one that is masked."""
    pair = make_pair("attention_branch", "mlp_branch")
    attention = {n: a.copy() for n, a in pair.first.branches.items()}
    before = pair.first.before.copy()
    before[0, 2] *= 40
    attention["attention_branch"][1, 3] *= 40
    before[1, 6] *= 1000  # no token
    pair = pair._replace(first=pair.first._replace(before=before, branches=attention))
    difference, _ = compare_layer(pair, MASK, COARSE)
    assert [*zip(*np.nonzero(difference.spikes), strict=True)] == [(0, 2), (1, 3)]
    assert difference.measured.sum() == MASK.sum() - 2 and not difference.measured[0, 2]
    shares = [0.25, 0.5, 1.0]
    usual = difference.added[difference.measured]
    assert [difference.quantile("added", s) for s in shares] == pytest.approx(
        np.quantile(usual, shares)
    )
    tokens = [k for k in np.ndindex(B, N) if difference.measured[k]]
    a, c = (layer.branches["attention_branch"] for layer in pair[:2])
    errors = [
        length(pair.second.before[k] - pair.first.before[k]) / length(before[k]) for k in tokens
    ]
    mixed = math.sqrt(sum(e**2 for e in errors) / len(errors))  # what comes in from usual tokens
    for k, error in zip(tokens, errors, strict=True):
        square = (1.5 * max(error, mixed)) ** 2 + (2 * COARSE.products) ** 2
        assert difference.predicted[k] == pytest.approx(math.sqrt(square), rel=1e-6)
    units = [(a[k] / length(a[k]), (c[k] - a[k]) / length(a[k])) for k in tokens]
    assert difference.scale == pytest.approx(sum(u @ d for u, d in units) / len(tokens))
    cosines = [u @ v for u, _ in units for v, _ in units]
    assert difference.distinct_tokens == pytest.approx(
        len(tokens) ** 2 / sum(v**2 for v in cosines)
    )
    ratio = (difference.added / difference.predicted)[difference.measured]
    assert difference.quantile("excess", 0.5) == pytest.approx(np.median(ratio))


@pytest.mark.parametrize("factor", [1.3, 0.9, -1.0])
def test_one_factor_of_all_tokens_is_fitted(factor):
    """The weight of a token is 1 over its square, so that no large token decides."""
    pair = make_pair("mlp_branch")
    a = pair.first.branches["mlp_branch"]
    b = factor * a
    b[0, 0] = a[0, 0] + 5 * np.linalg.norm(a[0, 0]) * np.eye(D)[0]
    second = pair.second._replace(branches={"mlp_branch": b})
    _, mlp = compare_layer(pair._replace(second=second), MASK, COARSE)
    tokens = [k for k in np.ndindex(B, N) if MASK[k]]
    unit = [(a[k] / length(a[k]), (b[k] - a[k]) / length(a[k])) for k in tokens]
    scale = sum(u @ c for u, c in unit) / len(tokens)
    share = abs(scale) * math.sqrt(len(tokens) / sum(c @ c for _, c in unit))
    assert mlp.scale == pytest.approx(scale) and mlp.coherence == pytest.approx(share)
    same = pair.second._replace(branches={"mlp_branch": a})
    _, mlp = compare_layer(pair._replace(second=same), MASK, COARSE)
    assert (mlp.scale, mlp.coherence) == (0.0, 0.0)


def test_norms_are_bounded_below_by_a_tenth_of_their_median():
    norm, other = np.array([[1.0, 2.0, 0.01, 50.0]]), np.array([[3.0, 3.0, 3.0, 3.0]])
    usual = np.array([[True, True, True, False]])
    assert bound_sizes(norm, other, usual).tolist() == [[1.0, 2.0, 0.1, 50.0]]
    zeros = np.zeros((1, 4))
    assert bound_sizes(zeros, other, usual).tolist() == [[3.0] * 4]
    assert bound_sizes(zeros, zeros, usual, np.full((1, 4), 7.0)).tolist() == [[7.0] * 4]
    assert bound_sizes(zeros, zeros, usual, zeros).tolist() == [[1.0] * 4]


DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
}
SIZES = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}


@pytest.mark.parametrize("name", DTYPES)
def test_the_coarsest_dtype_that_holds_all_numbers(name):
    numbers = RNG.normal(size=50).astype(DTYPES[name]).astype(float)
    assert find_dtype(numbers) == name
    assert find_dtype(np.r_[numbers, 1e300]) == "float64"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("stream", "branch", "declared", "products"),
    [
        ("float32", "bfloat16", None, "bfloat16"),
        ("float32", "float32", "float16", "float16"),
        ("float32", "bfloat16", "float32", "bfloat16"),
        ("bfloat16", "float32", None, "float32"),
        ("float32", None, None, "float32"),
        ("float16", None, None, "float16"),
        ("float64", "float64", "float64", "float64"),
        ("float64", "float64", "int8", "float64"),
    ],
)
def test_the_rounding_of_the_coarser_run(tmp_path, stream, branch, declared, products):
    """Of its branches, or of its states alone; or what its metadata say, if that is coarser."""

    def write(name, stream, branch, metadata):
        arrays = {"residual": RNG.normal(size=(3, N, D)).astype(DTYPES[stream])}
        if branch:
            arrays["mlp_branch"] = RNG.normal(size=(2, N, D)).astype(DTYPES[branch])
        write_recording(tmp_path / name, arrays, metadata)
        return open_recording(tmp_path / name)

    metadata = {"dtype": declared} if declared else {}
    run = write("a.safetensors", stream, branch, metadata)
    fine = write("b.safetensors", "float64", "float64", {})
    expected = Rounding(SIZES[products], SIZES[stream], products, products == "float64")
    assert find_rounding(run, fine) == find_rounding(fine, run) == expected
    assert find_rounding(run, run) == expected._replace(both=True)


def test_the_dtype_of_a_stream_is_that_after_a_layer(tmp_path):
    """Embeddings may be exact in fewer bits."""
    states = RNG.normal(size=(3, N, D)).astype("float32")
    states[0] = states[0].astype(ml_dtypes.bfloat16)
    write_recording(tmp_path / "a.npz", {"residual": states})
    run = open_recording(tmp_path / "a.npz")
    assert find_rounding(run, run).name == "float32"
