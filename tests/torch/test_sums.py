"""Sums over paths of every length, against the enumeration of the paths of random graphs."""

import collections
import gc
import itertools

import pytest

torch = pytest.importorskip("torch")

from rank_collapse.torch.sums import carry_sums, sort_sources  # noqa: E402
from rank_collapse.torch.values import Value  # noqa: E402


def make_graph(seed, num_axes, batched):
    """Makes values that are sums of earlier ones times numbers; some leave a branch."""
    random = torch.Generator().manual_seed(seed)
    values, factors = [Value(torch.zeros(3), 1)], {}

    def make_push(numbers):
        def push(*tangents):
            if not batched:  # `vmap` cannot read numbers
                tangents = [torch.tensor(t.tolist(), dtype=t.dtype) for t in tangents]
            return sum(n * t for n, t in zip(numbers, tangents, strict=True))

        return push

    for i in range(1, 9):
        count = int(torch.randint(1, 4, (), generator=random))
        chosen = torch.randperm(len(values), generator=random)[:count].tolist()
        sources = tuple(values[k] for k in {*chosen, i - 1})
        numbers = torch.randn(len(sources), generator=random, dtype=torch.float64).tolist()
        inner = Value(torch.zeros(3), 1, sources=sources, push=make_push(numbers), batched=batched)
        factors[id(inner)] = dict(zip(map(id, sources), numbers, strict=True))
        values.append(inner)
        if i % 2:
            left = Value(torch.zeros(3), 1, sources=(inner,), axis=i // 2 % num_axes)
            factors[id(left)] = {id(inner): 1.0}
            values.append(left)
    return values, factors


def enumerate_paths(value, start, factors, num_axes):
    """Returns {lengths: the sum of the products of the factors of all paths}."""
    if value is start:
        return {(0,) * num_axes: 1.0}
    sums = collections.defaultdict(float)
    for source in value.sources:
        for lengths, number in enumerate_paths(source, start, factors, num_axes).items():
            longer = list(lengths)
            if value.axis is not None:
                longer[value.axis] += 1
            sums[tuple(longer)] += number * factors[id(value)][id(source)]
    return sums


@pytest.mark.parametrize("longest", [None, 0, 1, 3])
@pytest.mark.parametrize("num_axes", [1, 2])
@pytest.mark.parametrize("batched", [True, False])
def test_sums_are_those_of_all_paths(longest, num_axes, batched):
    for seed in range(3):
        values, factors = make_graph(seed, num_axes, batched)
        direction = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        sums = carry_sums(values[-1], values[0], direction, num_axes, longest)
        expected = torch.zeros_like(sums)
        for lengths, number in enumerate_paths(values[-1], values[0], factors, num_axes).items():
            most = lengths if longest is None else [min(k, longest + 1) for k in lengths]
            expected[tuple(most)] += number * direction
        torch.testing.assert_close(sums, expected)
        if longest is not None:
            assert max(sums.shape[:num_axes]) <= longest + 2


def test_each_value_comes_once_and_after_its_sources():
    values, _ = make_graph(0, 1, True)
    order = sort_sources(values[-1])
    places = {id(value): i for i, value in enumerate(order)}
    assert len(places) == len(order)
    for value in order:
        assert all(places[id(source)] < places[id(value)] for source in value.sources)
    value = Value(torch.zeros(()), 1)
    for _ in range(60):  # 2^60 paths
        value = Value(torch.zeros(()), 1, sources=(value, value))
    assert len(sort_sources(value)) == 61


def test_sums_that_no_later_value_needs_are_freed():
    """A chain: of ten values only the sums of two are needed at a time."""
    width, numbers, alive = 1009, itertools.count(1), []

    def push(tangent):
        if next(numbers) in (2, 10):
            objects = gc.get_objects()
            tensors = (a for a in objects if type(a) is torch.Tensor and a.numel() == width)
            alive.append(len({a.data_ptr() for a in tensors}))
        return 2 * torch.tensor(tangent.tolist())  # not by `vmap`

    value = start = Value(torch.zeros(1), 1)
    for _ in range(10):
        value = Value(torch.zeros(1), 1, sources=(value,), push=push, batched=False)
    total = carry_sums(value, start, torch.ones(width), 1, None)
    assert torch.equal(total, torch.full((1, width), 1024.0))
    second, last = alive
    assert last <= second + 1
