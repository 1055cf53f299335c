"""Where tensors of a pass come from: maps, rows, scores and writes, by functions and modules."""

import itertools

import pytest

pytest.importorskip("torch")

from rank_collapse.watch.torch_functions import MAPS, read_product
from rank_collapse.watch.torch_origins import Origins
from tests.oracles.measured_layers import (
    Attention,
    D,
    Stack,
    X,
    check_layers,
    compute_entropy,
    compute_ratio,
    nn,
    norm,
    torch,
    watch_step,
)


def call(origins, function, *args, **kwargs):
    """Calls a function of torch, and records where its result comes from."""
    result = function(*args, **kwargs)
    product = read_product(function, args, kwargs) if function in MAPS else None
    origins.see_function(function, product, args, kwargs, result)
    return args[0] if function is torch.Tensor.__setitem__ else result


def map_tokens(origins, x=None):
    """Returns tokens [2, 3, 4] that a linear map made."""
    weight = nn.Parameter(torch.randn(4, 4))
    return call(origins, torch.nn.functional.linear, X[:2, :3, :4] if x is None else x, weight)


def test_arguments_by_name_have_the_tags_of_those_by_position():
    origins = Origins([])
    x, y = map_tokens(origins), map_tokens(origins)
    keys = call(origins, torch.Tensor.mT.__get__, y)
    scores = call(origins, torch.matmul, x, keys)
    functional, weight = torch.nn.functional, nn.Parameter(torch.randn(4, 4))
    for function, named in (
        (torch.matmul, {"input": x, "other": keys}),
        (torch.bmm, {"input": x, "mat2": keys}),
        (torch.softmax, {"input": scores, "dim": -1}),
        (functional.softmax, {"input": scores, "dim": -1}),
        (torch.exp, {"input": scores}),
        (torch.sigmoid, {"input": x}),
        (torch.add, {"input": x, "other": y}),
        (torch.mul, {"input": x, "other": y}),
        (torch.cat, {"tensors": [x, y], "dim": 1}),
        (torch.narrow, {"input": x, "dim": 1, "start": 0, "length": 2}),
        (functional.linear, {"input": x, "weight": weight}),
    ):
        expected = origins.tag(call(origins, function, *named.values()))
        first, *others = named.items()
        for args, kwargs in (((), named), (first[1:], dict(others))):
            tag = origins.tag(call(origins, function, *args, **kwargs))
            for name in ("stream", "is_softmax", "is_exponential", "is_gate", "is_constant"):
                assert getattr(tag, name) == getattr(expected, name), (function, name)
            assert len(tag.terms) == len(expected.terms), function
            assert {m.parameters for m in tag.maps} == {m.parameters for m in expected.maps}
            assert tag.followers.keys() == expected.followers.keys(), function


def test_weights_that_content_chooses_are_weights():
    """The choice of an expert depends on tokens; what is chosen is still of its parameter."""
    origins, experts = Origins([]), nn.Parameter(torch.randn(5, 4, 4))
    x = map_tokens(origins)
    numbers = call(origins, torch.argmax, x, -1)
    assert origins.is_content(numbers)
    for function, args in ((torch.Tensor.__getitem__, ()), (torch.index_select, (0,))):
        index = numbers if not args else numbers.flatten()
        chosen = call(origins, function, experts, *args, index)
        tag = origins.tag(chosen)
        assert tag.parameters == (experts,) and tag.is_constant and not tag.is_content
    table = call(origins, torch.Tensor.__getitem__, torch.ones(5, 4), numbers)  # of no parameter
    assert origins.is_content(table)


def test_numbers_of_several_axes_look_up_rows_and_others_choose_from_a_weight():
    origins, table = Origins([]), nn.Parameter(torch.randn(5, 4))
    for index, looks_up in (
        (torch.tensor([[0, 3, 1], [2, 2, 4]]), True),
        (torch.tensor([4, 0, 1]), False),
        (torch.ones(5, 4) > 0, False),
        (2, False),
        (slice(0, 3), False),
    ):
        chosen = call(origins, torch.Tensor.__getitem__, table, index)
        assert origins.is_constant(chosen) != looks_up
        assert (origins.tag(chosen).parameters == (table,)) != looks_up
    experts = nn.Parameter(torch.randn(5, 4, 2))
    chosen = call(origins, torch.Tensor.__getitem__, experts, torch.tensor([[0, 3], [2, 2]]))
    assert origins.tag(chosen).parameters == (experts,)


def test_rows_are_those_of_the_arguments_of_the_size_of_the_result():
    """Of a vector that is added to all tokens there are none, unless there is no other."""
    origins = Origins([])
    x, vector = map_tokens(origins), map_tokens(origins, X[2:, :1, :4])
    assert not origins.tag(x).stream & origins.tag(vector).stream
    for pair in ((x, vector), (vector, x)):
        assert origins.tag(call(origins, torch.add, *pair)).stream == origins.tag(x).stream
    both = call(origins, torch.add, x, call(origins, torch.Tensor.expand, vector, 2, 3, 4))
    assert origins.tag(both).stream == origins.tag(x).stream | origins.tag(vector).stream
    outer = call(origins, torch.mul, x[:, :1] * 1, vector)
    assert origins.tag(outer).stream >= origins.tag(vector).stream


def test_what_is_bounded_or_exponential_is_so_after_other_functions():
    """A product with what is no gate is no gate; with an exponential it stays exponential."""
    origins = Origins([])
    x, gate = map_tokens(origins), call(origins, torch.sigmoid, map_tokens(origins))
    size = call(origins, torch.exp, map_tokens(origins))
    for function, pair, is_gate, is_exponential in (
        (torch.mul, (gate, gate), True, False),
        (torch.mul, (x, gate), False, False),
        (torch.mul, (gate, x), False, False),
        (torch.mul, (size, gate), True, True),
        (torch.mul, (x, size), False, True),
        (torch.div, (size, x), False, True),
        (torch.add, (x, x), False, False),
    ):
        tag = origins.tag(call(origins, function, *pair))
        assert (tag.is_gate, tag.is_exponential) == (is_gate, is_exponential)


def test_a_factor_smaller_than_the_result_makes_none_of_its_features():
    """As a scale of each token, that a map of its own makes; of two such factors both count."""
    origins = Origins([])
    x = map_tokens(origins)
    scale = call(origins, torch.nn.functional.linear, X[:2, :3, :4], nn.Parameter(torch.ones(1, 4)))
    for pair in ((x, scale), (scale, x)):
        assert origins.tag(call(origins, torch.mul, *pair)).maps == origins.tag(x).maps
    row = call(origins, torch.narrow, x, 1, 0, 1)
    outer = call(origins, torch.mul, scale, row)
    assert origins.tag(outer).maps == origins.tag(x).maps | origins.tag(scale).maps


def test_a_part_of_scores_has_their_products_and_a_sum_over_queries_none():
    origins = Origins([])
    q, k = map_tokens(origins), map_tokens(origins)
    scores = call(origins, torch.matmul, q, call(origins, torch.Tensor.mT.__get__, k))
    p = call(origins, torch.softmax, scores, -1)
    (term,) = origins.tag(p).terms
    for part, is_part in (
        (call(origins, torch.narrow, p, -1, 0, 2), True),
        (call(origins, torch.Tensor.sum, p, -2), False),
        (call(origins, torch.narrow, p, -2, 0, 2), False),
    ):
        tag = origins.tag(part)
        assert (tag.terms, tag.is_softmax) == (((term,), True) if is_part else ((), False))


def test_a_write_into_a_view_of_numbers_leaves_them_constant():
    origins = Origins([])
    base = call(origins, torch.zeros, 2, 3)
    view = call(origins, torch.Tensor.__getitem__, base, 0)
    call(origins, torch.Tensor.add_, view, 1.0)
    assert origins.is_constant(view) and origins.is_constant(base)
    x = map_tokens(origins)
    call(origins, torch.Tensor.copy_, view, x[0, 0, :3])
    assert not origins.is_constant(base)


def test_a_write_into_a_view_keeps_what_is_said_of_its_base():
    """Of scores, of weights, and of the keys that content hides."""
    origins = Origins([])
    q, k = map_tokens(origins), map_tokens(origins)
    scores = call(origins, torch.matmul, q, call(origins, torch.Tensor.mT.__get__, k))
    marks = "is_softmax", "is_chosen", "is_unread"
    for mark, is_on_view in itertools.product((*marks, ""), (False, True)):
        base = call(origins, torch.mul, scores, 1.0)
        tag = origins.tag(base)
        terms = tag.terms
        assert len(terms) == 1 and not any(getattr(tag, name) for name in marks)
        view = call(origins, torch.Tensor.select, base, -1, 0)
        if mark:
            setattr(origins.tag(view) if is_on_view else tag, mark, True)
        call(origins, torch.Tensor.zero_, view)
        written = origins.tag(base)
        assert written.terms == terms
        assert [getattr(written, name) for name in marks] == [name == mark for name in marks]


def test_a_write_moves_every_number_of_what_is_written():
    """Of both summands; a softmax is of the weights before."""
    origins = Origins([])
    both = call(origins, torch.add, map_tokens(origins), map_tokens(origins))
    names = ["entries", "entries 2"]
    for place in (0, (slice(None), 1)):
        target = call(origins, torch.zeros, 2, 3, 4)
        value = call(origins, torch.Tensor.__getitem__, both, place)
        call(origins, torch.Tensor.__setitem__, target, place, value)
        assert sorted(origins.tag(target).followers) == names
        for name in names:
            expected = torch.full((2, 3, 4), -1)
            expected[place] = origins.number(both, name)[place]
            assert torch.equal(origins.number(target, name), expected)
    keys = call(origins, torch.Tensor.mT.__get__, map_tokens(origins))
    p = call(origins, torch.softmax, call(origins, torch.matmul, both, keys), -1)
    softmax = p.detach().clone()
    call(origins, torch.Tensor.__setitem__, p, 0, call(origins, torch.zeros, 3, 3))
    assert origins.tag(p).followers["softmax"]().shape == p.shape
    assert torch.equal(origins.tag(p).followers["softmax"]()[1], softmax[1])


def test_a_number_of_an_unknown_tensor_is_none_of_a_map():
    origins = Origins([])
    q = map_tokens(origins)
    (linear_map,) = origins.tag(q).maps
    call(origins, torch.Tensor.__setitem__, q, (slice(None), 0), X[:2, 0, :4])
    assert origins.tag(q).maps == {linear_map}
    assert (linear_map.find_rows(origins.number(q, "entries")[:, 1:]) >= 0).all()


def test_a_hidden_module_is_a_map_where_it_may_be_one():
    """With a matrix, the same rows and no modules in it; else it hands on where tokens are from."""
    x = X[:2, :3, :4]
    linear, tail = nn.Linear(4, 5), nn.Sequential(nn.Linear(4, 5))
    for module, output, is_map in (
        (linear, torch.zeros(2, 3, 5), True),
        (linear, torch.zeros(2, 5), False),
        (tail, torch.zeros(2, 3, 5), False),
        (nn.LayerNorm(4), torch.zeros(2, 3, 4), False),
    ):
        origins = Origins([])
        tokens = map_tokens(origins, x)
        origins.see_module(module, ((tokens,), {}), output)
        maps = origins.tag(output).maps
        assert (maps != origins.tag(tokens).maps) == is_map
        if is_map:
            (linear_map,) = maps
            assert [a for a, _, _ in linear_map.parameters] == [linear.weight, linear.bias]
    output = torch.zeros(2, 3, 5)
    origins.see_module(nn.Embedding(7, 5), ((torch.zeros(2, 3, dtype=torch.long),), {}), output)
    assert not origins.has(output)


class Hidden(nn.Module):
    """A module whose functions torch does not show, as those of compiled extensions.

    Args:
        function: function(module, x) that it computes.
        *parameters: Its parameters.
    """

    def __init__(self, function, *parameters):
        super().__init__()
        self.function = function
        for i, parameter in enumerate(parameters):
            self.register_parameter(f"part_{i}", parameter)

    def forward(self, x):
        with torch._C.DisableTorchFunction():
            return self.function(x, *self.parameters())


def hide_map(linear):
    return Hidden(torch.nn.functional.linear, linear.weight, linear.bias)


def test_hidden_maps_are_maps_and_other_hidden_modules_pass_tokens_on():
    """Queries, keys, values and norms of a compiled extension: measured as those that are shown."""

    def normalise_first(self, x, mask):
        for attention in self.attentions:
            x = x + attention(self.norm(x), mask)
        return x

    def make(is_hidden):
        torch.manual_seed(3)
        attentions = [Attention() for _ in range(2)]
        for attention in attentions if is_hidden else ():
            for name in "qkvo":
                setattr(attention, name, hide_map(getattr(attention, name)))
        part = Hidden(norm) if is_hidden else nn.RMSNorm(D, 1e-6)
        return Stack(normalise_first, *attentions, norm=part)

    check_layers(make(True))
    expected, _ = watch_step(make(False), X)
    row, watched = watch_step(make(True), X)
    assert row.keys() == expected.keys(), watched
    for name in row:
        assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_scores_that_are_written_into_in_part_keep_their_products():
    kept = []

    def attend(q, k, v, mask):
        scores = q @ k.mT * 8**-0.5
        scores[:, :, :3].add_(q[:, :, :3] @ k.mT)
        kept.append(scores.softmax(-1))
        return kept[0] @ v

    model = Stack(lambda self, x, mask: self.attentions[0](x), Attention(attend=attend))
    row, watched = watch_step(model, X)
    assert row["residual_ratio"] == pytest.approx([compute_ratio(X)], 1e-4), watched
    entropy = compute_entropy(kept[0].detach())
    assert row["attention_entropy"] == pytest.approx([entropy], 1e-4), watched.describe()
