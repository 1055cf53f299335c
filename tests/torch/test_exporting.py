"""Arguments and results by name, and what a traced pass leaves as it was."""

import dataclasses
import logging
import sys
import warnings
from collections import OrderedDict, UserDict, namedtuple
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from rank_collapse.torch import path_lengths  # noqa: E402
from rank_collapse.torch.exporting import (  # noqa: E402
    _attributes_kept,
    _contents_kept,
    _without_logs,
    name_arguments,
    select_result,
    without_compilation,
)
from rank_collapse.torch.scopes import find_start  # noqa: E402
from tests.support.refusals import is_refused  # noqa: E402

A, B, WHOLE = torch.ones(2), torch.zeros(3), torch.ones(2, dtype=torch.int64)
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Fields:
    count: object
    state: object
    last_hidden_state: object = None


@pytest.mark.parametrize(
    ("results", "output", "name", "tensor"),
    [
        (A, None, "the model's result", A),
        ({"ids": WHOLE, "x": A, "y": B}, None, "x", A),
        ({"x": A, "last_hidden_state": B}, None, "last_hidden_state", B),
        ({"x": A, "last_hidden_state": WHOLE}, None, "x", A),
        (OrderedDict(x=A, y=B), "y", "y", B),
        (UserDict(x=A, y=B), "y", "y", B),  # as the outputs of some libraries are
        ((WHOLE, A, B), None, "1", A),
        ([A, B], 1, "1", B),
        (Pair(A, B), None, "first", A),
        (Pair(A, B), "second", "second", B),
        (Fields(3, A), None, "state", A),
        (Fields(3, A, B), None, "last_hidden_state", B),
        (Fields(3, A, B), "state", "state", A),
        ((A.to(torch.complex64), B), None, "0", None),
    ],
)
def test_a_result_by_its_name_or_number(results, output, name, tensor):
    selected_name, selected = select_result(results, output)
    assert selected_name == name and (tensor is None or selected is tensor)


@pytest.mark.parametrize(
    ("results", "output", "message"),
    [
        (A, 0, "output=0: the model returns one tensor; leave output out"),
        (A, "x", "output='x': the model returns one tensor"),
        ({"x": A, "ids": WHOLE}, "ids", r"output='ids' is not one of the tensors .*: \['x'\]"),
        ((A, B), 2, r"output=2 is not one of the tensors it returns: \[0, 1\]"),
        ((A, B), "0", r"output='0' is not one of"),
        ((WHOLE, 3), None, r"returns no floating-point tensor, but \[0, 1\]"),
        ({}, None, r"returns no floating-point tensor, but \[\]"),
        ("text", None, "the model returns a str, not a tensor, tuple, dict or dataclass"),
        (None, None, "the model returns a NoneType, not a tensor"),
    ],
)
def test_a_result_that_is_none_is_refused(results, output, message):
    is_refused(message, select_result, results, output)


class Model(nn.Module):
    def forward(self, x, masks=None, *, scale=1, **others):
        return x


def test_arguments_have_the_names_of_the_signature():
    named = name_arguments(Model(), (A,), {"masks": [B, {"a": WHOLE, "b": 3}], "more": (A, B)})
    expected = {"x": A, "masks.0": B, "masks.1.a": WHOLE, "more.0": A, "more.1": B}
    assert named.keys() == expected.keys()
    assert all(named[name] is tensor for name, tensor in expected.items())
    assert name_arguments(Model(), (3,), {"scale": B}) == {"scale": B}
    is_refused("Model.forward: missing a required argument: 'x'", name_arguments, Model(), (), {})
    too_many = (A, B, A)
    is_refused("Model.forward: too many positional", name_arguments, Model(), too_many, {})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrappers_of_compilation_are_put_back_after_an_error():
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    last = nn.Linear(2, 2)
    compiled = [torch.compile(module, backend="eager") for module in (inner, last)]
    model = nn.Sequential(compiled[0], nn.Linear(2, 2), compiled[1])
    wrapper, linear = model[0], model[1]
    with pytest.raises(KeyError), without_compilation(model) as plain:
        assert plain is model and plain[0] is inner and plain[1] is linear and plain[2] is last
        assert not any("_orig_mod" in name for name, _ in plain.named_modules())
        raise KeyError
    assert model[0] is wrapper and model[2] is compiled[1]
    with without_compilation(torch.compile(model, backend="eager")) as plain:
        assert plain is model and plain[0] is inner
    assert model[0] is wrapper


def test_what_a_pass_assigns_is_put_back():
    """Attributes, new ones and others; parameters, buffers and modules."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.kept = [1]
    weight, running = model[0].weight, model[1].running_mean
    with _attributes_kept(model):
        model.kept, model.new, model.newer = 3, 4, 5
        model[0].weight = nn.Parameter(torch.zeros(2, 2))
        model[1].running_mean = torch.ones(2)
        model[1].register_buffer("more", torch.ones(2))
        del model[0].bias
        model.add_module("2", nn.ReLU())
        model[1].eval()
    assert model.kept == [1] and len(model) == 2
    assert not hasattr(model, "new") and not hasattr(model, "newer")
    assert model[0].weight is weight and model[1].running_mean is running
    assert model[0].bias is not None and not hasattr(model[1], "more") and model[1].training


def test_a_buffer_that_another_replaces_is_put_back():
    """The names stay the same, and tensors of several entries have no truth value."""
    norm = nn.BatchNorm1d(3)
    running, count = norm.running_mean, norm.num_batches_tracked
    with _attributes_kept(norm):
        norm.running_mean = torch.ones(3)
        norm.num_batches_tracked = count.clone()  # equal, and another tensor
    assert norm.running_mean is running and norm.num_batches_tracked is count


def test_contents_that_refer_to_themselves_are_put_back():
    """As a cache whose layers refer to it, and a list in two places."""
    shared, inner = [1, 2], [5]
    cache = SimpleNamespace(layers=shared, states=None)
    cache.whole = cache
    arguments = [(shared, cache), {"cache": cache, "pair": (shared, (inner,))}]
    with _contents_kept(arguments):
        inner.append(6)
        shared.append(3)
        shared[0] = 4
        cache.states, cache.more = A, B
        arguments[1].clear()
    assert shared == [1, 2] and inner == [5] and cache.layers is shared and cache.whole is cache
    assert cache.states is None and not hasattr(cache, "more")
    assert arguments[1].keys() == {"cache", "pair"}


class Two(nn.Module):
    def forward(self, x):
        return 2 * x, x.tanh()


class Viewed(nn.Module):
    """Returns its result in another shape."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x):
        return self.map(x).unflatten(-1, (2, 2)).transpose(-1, -2)


class Whole(nn.Module):
    def __init__(self, begin, join):
        super().__init__()
        self.begin, self.join = begin, join
        self.branch = nn.Linear(4, 4)

    def forward(self, x):
        state = self.join(self.begin, x)
        return state + self.branch(state)


def split(model, start):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    return path_lengths(model.eval(), x, branches="branch", start=start)


def test_a_state_is_the_output_of_a_module_that_is_called_once():
    twice = Whole(nn.Linear(4, 4), lambda begin, x: begin(x) + begin(2 * x))
    is_refused(
        "start='begin': this module is called 2 times; name a module that is called once",
        split, twice, "begin",
    )  # fmt: skip
    two = Whole(Two(), lambda begin, x: sum(begin(x)))
    is_refused(
        "start='begin': 2 tensors leave it; name a module with one output that is used",
        split, two, "begin",
    )  # fmt: skip


class Several(nn.Module):
    """Returns what `make` makes of its linear map."""

    def __init__(self, make):
        super().__init__()
        self.map, self.make = nn.Linear(4, 4), make

    def forward(self, x):
        return self.make(self.map(x))


@pytest.mark.parametrize(
    ("make", "join"),
    [
        (lambda y: (y, y > 0), lambda y, mask: torch.where(mask, y, 2 * y)),
        (
            lambda y: (y.flip(-1).unsqueeze(0), y),
            lambda turned, y: y.flip(-1) / 2 + turned.squeeze(0) / 2,
        ),
    ],
    ids=["mask", "copy"],
)
@torch.no_grad()
def test_other_results_of_the_module_may_be_masks_or_copies_of_the_state(make, join):
    torch.manual_seed(0)
    model = Whole(Several(make), lambda begin, x: join(*begin(x)))
    parts = split(model, "begin")
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    state = join(*model.begin(x))
    torch.testing.assert_close(parts.by_length[0], state)
    torch.testing.assert_close(parts.by_length[1], state @ model.branch.weight.T)


def test_what_is_computed_of_the_state_and_then_moved_is_another_tensor():
    module = Several(lambda y: (y, y.relu().flip(-1)))
    message = "start='begin': 2 tensors leave it"
    is_refused(message, split, Whole(module, lambda begin, x: sum(begin(x))), "begin")


def test_a_module_whose_numbers_are_whole_has_no_state():
    model = Whole(Several(lambda y: y > 0), lambda begin, x: x * begin(x))
    is_refused("start='begin': nothing that it computes is used", split, model, "begin")


STARTS = {
    "": "start='' is neither an argument of the call nor a module; name one with start=, such as",
    "zzz": "start='zzz' is neither an argument of the call nor a module; name one",
    3: "start=3 is neither an argument of the call nor a module; name one",
    "xx": "nor a module; near it: x; name one with start=, such as 'x'",
}


@pytest.mark.parametrize("start", STARTS)
def test_a_start_that_is_neither_an_argument_nor_a_module_is_refused(start):
    model = Whole(nn.Linear(4, 4), lambda begin, x: begin(x))
    exported = SimpleNamespace(
        program=SimpleNamespace(graph=torch.fx.Graph()), arguments={"x": A}, inputs={}
    )
    is_refused(STARTS[start], find_start, model, exported, start)


@pytest.mark.parametrize("start", [None, "x", "again"])
def test_a_tensor_in_two_places_is_one_start(start):
    """It has the name of the first argument; each node that holds it is a start, and no other."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in ("a", "b", "c")]
    inputs = {"a": A, "b": WHOLE, "c": A}
    exported = SimpleNamespace(program=SimpleNamespace(graph=graph), inputs=inputs)
    exported.arguments = {"ids": WHOLE, "x": A, "again": A}
    name, starts = find_start(nn.Module(), exported, start)
    assert name == (start or "x") and starts == {nodes[0], nodes[2]}


def test_where_nothing_can_be_named_the_message_says_so():
    model = Whole(nn.Linear(4, 4), lambda begin, x: begin(x))
    exported = SimpleNamespace(program=SimpleNamespace(graph=torch.fx.Graph()), inputs={})
    exported.arguments = {"ids": WHOLE}
    line = "no argument of floating point; name one with start=, such as the module that makes the"
    is_refused(line, find_start, model, exported, None)
    model.embeddings = nn.ModuleList(nn.Embedding(2, 2) for _ in range(5))
    names = ", ".join(f"'embeddings.{i}'" for i in range(4))
    is_refused(f"such as {names}$", find_start, model, exported, None)


@torch.no_grad()
def test_a_state_in_another_shape_is_the_start():
    torch.manual_seed(0)
    model = Whole(Viewed(), lambda begin, x: begin(x).flatten(-2))
    parts = split(model, "begin")
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    state = model.begin(x).flatten(-2)
    torch.testing.assert_close(parts.by_length[0], state)
    torch.testing.assert_close(parts.by_length[1], state @ model.branch.weight.T)
    assert parts.start == "begin" and parts.output_name == "the model's result"


def test_what_torch_writes_is_held_back_and_logging_is_as_before(capfd):
    logging.disable(logging.INFO)
    try:
        with _without_logs():
            logging.getLogger("torch").error("a line of a log")
            print("another line", file=sys.stderr)
            warnings.warn("a warning", stacklevel=1)
        assert logging.root.manager.disable == logging.INFO
    finally:
        logging.disable(logging.NOTSET)
    assert not any(capfd.readouterr())
