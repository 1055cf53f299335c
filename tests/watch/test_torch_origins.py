"""Which products are attention, which tokens its keys are of, and what needs no weights."""

import itertools

import numpy as np
import pytest

pytest.importorskip("torch")

from rank_collapse.watch.torch_functions import MAPS, read_product
from rank_collapse.watch.torch_origins import Origins
from tests.oracles.measured_layers import (
    RIGHT,
    Attention,
    D,
    Stack,
    X,
    check_layers,
    compute_entropy,
    compute_ratio,
    heads,
    join,
    make_maps,
    nn,
    norm,
    pad,
    torch,
    watch_step,
)


def share_pairs(self, x, mask):
    kv = None
    for i, attention in enumerate(self.attentions):
        x = x + attention(norm(x), mask, kv if i % 2 else None)
        kv = attention.kv
    return x


def share_first(self, x, mask):
    """All attentions have the keys of the embedding, by maps of their own."""
    kv = tuple(heads(part(norm(x))) for part in self.parts)
    for attention in self.attentions:
        x = x + attention(norm(x), mask, kv)
        x = x + self.mlp(x).relu()
    return x


def share_one(self, x, mask):
    """The first attention's keys, and values of the last layer's input."""
    k = None
    for attention in self.attentions:
        y = attention(norm(x), mask, None if k is None else (k, heads(attention.v(norm(x)))))
        k, x = attention.kv[0], x + y
    return x


def mask_keys(scores, mask):
    return scores.masked_fill(mask[:, None, None] == 0, -torch.inf).softmax(-1)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("body", [share_pairs, share_first, share_one])
def test_keys_of_an_earlier_layer_are_of_the_same_tokens(body, is_padded):
    torch.manual_seed(0)
    options = {"parts": make_maps(D, D, count=2), "mlp": nn.Linear(D, D)}
    weigh = mask_keys if is_padded else None
    model = Stack(body, *(Attention(weigh) for _ in range(4)), **options)
    watched = check_layers(model, *((pad(RIGHT), RIGHT) if is_padded else ()))
    assert not any(name.startswith("cross.") for name in watched.rows[0])


def test_an_encoder_of_the_same_input_has_other_tokens():
    model = torch.nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x, x).square().mean()

    row, _ = watch_step(Both(), torch.randn(2, 5, 8))
    assert len(row["residual_ratio"]) == 2 and "cross.attention_entropy" in row


def test_padding_of_the_keys_is_none_of_the_queries():
    """An encoder of as many padded tokens ran before; the queries come from other ones."""

    def read_encoder(self, x, others):
        encoder, across = self.attentions
        states = others + encoder(others)
        return across(x, kv=(heads(across.k(states)), heads(across.v(states))))

    def hide(scores, mask):
        return scores.masked_fill(RIGHT[:, None, None] == 0, -torch.inf).softmax(-1)

    model = Stack(read_encoder, Attention(hide), Attention())
    row, watched = watch_step(model, X, pad(RIGHT))
    (encoded, _), (_, p) = (attention.kept for attention in model.attentions)
    assert row["residual_ratio"][0] == pytest.approx(compute_ratio(encoded, RIGHT), 1e-4)
    (entropy,) = (v for v in row["cross.attention_entropy"] if v == v)
    assert entropy == pytest.approx(compute_entropy(p), 1e-4), watched.describe()


LOOKED_UP = {
    "an index": lambda table, ids: table[ids],
    "an index of one more axis": lambda table, ids: table[ids[:, :, None]][:, :, 0],
    "an embedding": lambda table, ids: torch.nn.functional.embedding(ids, table),
}


@pytest.mark.parametrize("look_up", LOOKED_UP.values(), ids=LOOKED_UP)
def test_tokens_from_a_table_are_other_tokens_than_latents(look_up):
    def read_latents(self, ids, mask):
        across, within = self.attentions
        tokens, x = look_up(self.table, ids), self.latents.expand(len(ids), -1, -1)
        x = x + across(x, kv=(heads(across.k(tokens)), heads(across.v(tokens))))
        return x + within(x)

    torch.manual_seed(0)
    parts = {"table": nn.Parameter(torch.randn(7, D)), "latents": nn.Parameter(torch.randn(4, D))}
    model = Stack(read_latents, Attention(), Attention(), **parts)
    row, watched = watch_step(model, torch.tensor([[0, 3, 5], [6, 1, 2]]))
    (_, across), (reads, within) = (attention.kept for attention in model.attentions)
    check_values(row["cross.attention_entropy"], [compute_entropy(across), None])
    check_values(row["attention_entropy"], [None, compute_entropy(within)])
    check_values(row["residual_ratio"], [None, compute_ratio(reads)])
    assert not watched.alarms


def check_values(values, expected):
    """Checks one value of each attention, where None is expected to be NaN."""
    expected = [np.nan if value is None else value for value in expected]
    np.testing.assert_allclose(values, expected, rtol=1e-4)


OTHER_ROWS = {
    "pooled": lambda x: x.unflatten(1, (3, 3)).mean(2),
    "some tokens": lambda x: x[:, :4] * 1,
    "twice": lambda x: torch.cat([x, x.tanh()], dim=1),
}


@pytest.mark.parametrize("choose", OTHER_ROWS.values(), ids=OTHER_ROWS)
def test_keys_of_other_rows_of_an_earlier_layer_are_other_tokens(choose):
    def read_earlier(self, x, mask):
        first, second, *later = self.attentions
        x = x + first(x)
        other = choose(self.map(x))
        x = x + second(x)
        for attention in later:
            x = x + attention(x, kv=(heads(attention.k(other)), heads(attention.v(other))))
        return x

    torch.manual_seed(0)
    model = Stack(read_earlier, *(Attention() for _ in range(4)), map=nn.Linear(D, D))
    row, _ = watch_step(model, X)
    entropies = [compute_entropy(attention.kept[1]) for attention in model.attentions]
    check_values(row["attention_entropy"], [*entropies[:2], None, None])
    check_values(row["cross.attention_entropy"], [None, None, *entropies[2:]])


class SelfThenCross(nn.Module):
    """Attends to its tokens and then to other ones, in one call."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x, others):
        within, across = self.parts
        p = mask_keys(heads(within.q(x)) @ heads(within.k(x)).mT / 3, RIGHT)
        x = x + within.o(join(p @ heads(within.v(x))))
        p = (heads(across.q(x)) @ heads(across.k(others)).mT / 3).softmax(-1)
        self.kept = p.detach()
        return across.o(join(p @ heads(across.v(others))))


def test_padding_of_the_queries_is_that_of_the_attention_before_in_the_same_call():
    def read_both(self, x, others):
        return self.attentions[0](x, others)

    model = Stack(read_both, SelfThenCross())
    row, watched = watch_step(model, pad(RIGHT), X[:, :7].flip(1))
    (entropy,) = (v for v in row["cross.attention_entropy"] if v == v)
    expected = compute_entropy(model.attentions[0].kept, RIGHT)
    assert entropy == pytest.approx(expected, 1e-4), watched.describe()


class TwoMemories(nn.Module):
    """A block that attends to its tokens, and then to the tokens of two memories."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(
            nn.MultiheadAttention(D, 1, batch_first=True, bias=False) for _ in range(3)
        )

    def forward(self, x, memories):
        within, *across = self.parts
        x = x + within(x, x, x)[0]
        self.kept = []
        for attention, memory in zip(across, memories, strict=True):
            update, p = attention(x, memory, memory)
            self.kept.append(p.detach()[:, None])
            x = x + update
        return x


def test_a_second_cross_attention_of_a_layer_has_a_reason():
    torch.manual_seed(0)
    blocks = [TwoMemories() for _ in range(2)]

    def read_both(self, x, memories):
        for block in self.attentions:
            x = block(x, memories)
        return x

    memories = torch.randn(2, len(X), 4, D)
    row, watched = watch_step(Stack(read_both, *blocks), X, memories)
    check_values(row["cross.attention_entropy"], [compute_entropy(b.kept[0]) for b in blocks])
    assert len(row["attention_entropy"]) == 2
    for i in range(2):
        names = [f"attentions.{i}.parts.{part}" for part in (1, 2)]
        reason = f"its layer has another one: {names[0]} is measured"
        assert f"  {names[1]}: no cross-attention: {reason}" in watched.describe().splitlines()


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
