"""Attentions where torch hides values: in torch.func, and in operators that call functions."""

import pytest

pytest.importorskip("torch")

from torch._higher_order_ops.map import map as operators_map, map_impl
from torch._higher_order_ops.scan import scan, scan_op
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

from rank_collapse.torch import watch
from rank_collapse.watch.recorder import Notes
from rank_collapse.watch.torch_hidden import HiddenCalls
from tests.oracles.measured_layers import (
    Attention,
    D,
    F,
    H,
    Stack,
    X,
    add_in_turn,
    heads,
    join,
    torch,
    watch_step,
)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_pass_inside_of_torch_func_is_named(is_mapped):
    """Gradients by torch.func, of all examples together or of each."""
    model = Stack(add_in_turn, Attention(), Attention())
    parameters = dict(model.named_parameters())
    watched, optimizer = watch(model, 1), torch.optim.SGD(model.parameters(), 0.1)

    def compute_loss(parameters, x):
        x = x[None] if is_mapped else x
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    differentiate = torch.func.grad(compute_loss)
    if is_mapped:
        differentiate = torch.func.vmap(differentiate, (None, 0))
    for name, gradient in differentiate(parameters, X).items():
        parameters[name].grad = gradient.mean(0) if is_mapped else gradient
    optimizer.step()
    watched.close()
    assert not watched.rows and "it ran inside of torch.func" in watched.describe()


class Mapped(Attention):
    """Attention of one example, mapped over examples."""

    def __init__(self, is_fused):
        super().__init__()
        self.is_fused = is_fused

    def forward(self, x, mask=None):
        maps = self.q, self.k, self.v

        def attend(x):
            q, k, v = (part(x).unflatten(-1, (H, -1)).transpose(0, 1) for part in maps)
            if self.is_fused:
                y = F.scaled_dot_product_attention(q, k, v)
            else:
                p = (q @ k.mT * (D // H) ** -0.5).softmax(-1)
                y = F.dropout(p, 0.0) @ v
            return self.o(y.transpose(0, 1).flatten(-2))

        return torch.vmap(attend)(x)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_layer_inside_of_torch_func_has_a_reason(is_fused):
    """It is not measured; the layers around it are, and a softmax of no attention is no layer."""
    gates = torch.vmap(lambda x: torch.softmax(x, -1).sum())

    def add_gated(self, x, mask):
        gates(x)
        return add_in_turn(self, x, mask)

    torch.manual_seed(5)
    model = Stack(add_gated, Attention(), Mapped(is_fused), Attention())
    row, watched = watch_step(model, X)
    described = watched.describe()
    assert len(row["residual_ratio"]) == 2 and described.count("torch.func") == 1
    assert "attentions.1: no layer: its attention ran inside of torch.func" in described


class Hidden(Attention):
    """Attention inside of an operator of torch that calls functions."""

    def __init__(self, operator):
        super().__init__()
        self.operator = operator

    def compute(self, x):
        """Computes the attention."""
        q, k, v = (heads(part(x)) for part in (self.q, self.k, self.v))
        return self.o(join((q @ k.mT * (D // H) ** -0.5).softmax(-1) @ v))

    def forward(self, x, mask=None):
        if self.operator == "cond":
            return torch.cond(x.sum() > -1e9, self.compute, torch.clone, (x,))
        if self.operator == "while_loop":
            start = torch.tensor(0), x
            return while_loop(lambda i, x: i < 1, lambda i, x: (i + 1, self.compute(x)), start)[1]
        if self.operator == "scan":
            return scan(lambda x, y: (self.compute(x), y.clone()), x, torch.zeros(2, 3))[0]
        if self.operator == "map":
            return operators_map(lambda x: self.compute(x[None])[0], x)
        q, k, v = (heads(part(x)).detach() for part in (self.q, self.k, self.v))
        return self.o(join(flex_attention(q, k, v)))  # without gradients, as it has none on CPUs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "operator",
    [
        "cond",
        "flex_attention",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("while_loop", "scan", "map")),
    ],
)
def test_a_layer_inside_of_an_operator_that_calls_functions_has_a_reason(operator):
    """The layers around it are measured, and training has the same bits as without a watch."""
    gradients = []
    for is_watched in (False, True):
        torch.manual_seed(5)
        model = Stack(add_in_turn, Attention(), Hidden(operator), Attention())
        if is_watched:
            row, watched = watch_step(model, X)
        else:
            model(X).backward()
        gradients.append([p.grad for p in model.parameters()])
    for first, second in zip(*gradients, strict=True):
        assert first is second is None or torch.equal(first, second)
    described = watched.describe()
    assert len(row["residual_ratio"]) == 2 and described.count("no layer") == 1
    assert f"attentions.1: no layer inside of {operator}: torch does not show" in described


@pytest.mark.parametrize(
    ("result", "is_said"),
    [((X.sum(), X), True), ((X, X.sum()), True), (X[0, 0], False), (X > 0, False), (None, False)],
)
def test_operators_have_the_names_that_users_know(result, is_said):
    """If one of their results may have tokens."""
    notes = Notes()
    operators = {"cond": torch.ops.higher_order.cond, "map": map_impl, "scan": scan_op}
    for name, operator in operators.items():
        HiddenCalls(notes).see(f"h.{name}", operator, (), result)
    assert notes.reasons == {
        (f"h.{name}", f"layer inside of {name}"): (
            f"no layer inside of {name}: torch does not show what runs there"
        )
        for name in operators if is_said
    }  # fmt: skip


def test_an_operator_that_calls_functions_without_tokens_has_no_reason():
    def add_gated(self, x, mask):
        return add_in_turn(
            self, x * torch.cond(x.sum() > 0, torch.cos, torch.sin, (x.sum(),)), mask
        )

    row, watched = watch_step(Stack(add_gated, Attention()), X)
    assert len(row["residual_ratio"]) == 1 and "no layer" not in watched.describe()
