"""Rows are of one pass: where the gradients of a pass are dropped, the next pass is measured."""

import pytest

pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint

from rank_collapse.torch import watch
from rank_collapse.watch.torch_arrivals import Arrivals
from tests.oracles.measured_layers import Attention, Stack, X, add_in_turn, compute_ratio, torch

PASSES = X, X + 1, X * X, X - 2


class Kept(Attention):
    """Attention that keeps the ratio of every call, and may be computed again in the backward
    pass."""

    def __init__(self, is_recomputed=False):
        super().__init__()
        self.is_recomputed, self.ratios = is_recomputed, []

    def forward(self, x, mask=None):
        if not self.is_recomputed:
            y = super().forward(x)
        else:
            y = checkpoint(super().forward, x, use_reentrant=False)
        self.ratios.append(compute_ratio(self.kept[0]))
        return y


def compute_norms(model):
    """Computes the norm of the gradient of the queries, of each layer."""
    maps = [attention.q for attention in model.attentions]
    return [torch.cat([q.weight.grad, q.bias.grad[:, None]], 1).norm().item() for q in maps]


def check_row(row, model, number, norms):
    """Checks that a row has the ratios of one pass, and gradients of the queries."""
    ratios = [attention.ratios[number] for attention in model.attentions]
    assert row["residual_ratio"] == pytest.approx(ratios, rel=1e-4)
    assert row["query_gradient"] == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("place", ["after", "to zero", "between"])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_row_is_of_the_pass_after_a_step_that_the_scaler_skips(place, is_recomputed):
    """The loop clears the gradients after the step, or between forward and backward pass."""
    model = Stack(add_in_turn, Kept(is_recomputed), Kept(is_recomputed))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38, backoff_factor=1e-38)
    watched, losses = watch(model, 1), []
    for x in PASSES[:3]:
        loss = 1e4 * model(x)
        if place == "between":
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item() / 1e4)
        norms = compute_norms(model)
        if place != "between":
            optimizer.zero_grad(set_to_none=place == "after")
        if len(losses) == 1:
            assert watched.step == 0  # skipped
        else:
            check_row(watched.rows[-1], model, len(losses) - 1, norms)
            assert watched.rows[-1]["loss"] == pytest.approx(losses[-1])
    watched.close()
    assert [row["step"] for row in watched.rows] == [0, 1]


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_the_first_pass_counts_where_gradients_add_up(is_recomputed, is_frozen):
    """Also in the step after one, and where some parameters have no gradient, or one of zero."""
    model = Stack(add_in_turn, Kept(is_recomputed), Kept(is_recomputed))
    if is_frozen:
        torch.nn.init.zeros_(model.attentions[1].o.weight)
        model.attentions[0].v.weight.requires_grad = False
    optimizer, watched = torch.optim.SGD(model.parameters(), 0.0), watch(model, 1)
    for number in (0, len(PASSES)):
        for x in PASSES:
            model(x).backward()
        norms = compute_norms(model)
        optimizer.step()
        optimizer.zero_grad()
        check_row(watched.rows[-1], model, number, norms)
    watched.close()


@pytest.mark.parametrize("form", ["passes", "derivative", "evaluation", "evaluation mode"])
def test_passes_without_dropped_gradients_do_not_begin_again(form):
    """Of several passes before one backward pass, of a derivative by other means, and of an
    evaluation after a backward pass, the first training pass counts."""
    model = Stack(add_in_turn, Kept())
    optimizer, watched = torch.optim.SGD(model.parameters(), 0.0), watch(model, 1)
    loss = model(PASSES[0])
    if form == "derivative":
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    if form.startswith("evaluation"):
        loss.backward()
        held = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        with torch.set_grad_enabled(form == "evaluation mode"):
            model.train(form == "evaluation")
            model(PASSES[1])
            model.train()
        for parameter, gradient in zip(model.parameters(), held, strict=True):
            parameter.grad = gradient
    else:
        (loss + model(PASSES[1])).backward()
    norms = compute_norms(model)
    optimizer.step()
    watched.close()
    check_row(watched.rows[0], model, 0, norms)


def test_a_pass_does_not_begin_again_inside_of_the_backward_pass():
    """Where gradients are dropped as soon as they come, and layers are computed again."""
    model = Stack(add_in_turn, Kept(True), Kept(True))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    watched = watch(model, 1)
    model(X).backward()
    watched.step = 1
    watched.close()
    ratios = [attention.ratios[0] for attention in model.attentions]
    assert watched.rows[0]["residual_ratio"] == pytest.approx(ratios, rel=1e-4)


def test_gradients_have_the_same_bits_with_hooks_and_without():
    models = [Stack(add_in_turn, Attention(), Attention()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    watched = watch(models[1], 1)
    for x in PASSES:
        for model in models:
            model(x).backward()
    watched.close()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
        assert not other._backward_hooks and not other._post_accumulate_grad_hooks


ZERO, ONES, NAN = torch.zeros(2), torch.ones(2), torch.tensor([1.0, torch.nan])


@pytest.mark.parametrize(
    ("gradients", "are_dropped"),
    [
        ((None, None), True),
        ((ZERO, None), True),
        ((ZERO, ZERO), True),
        ((ONES, None), False),
        ((ZERO, ONES), False),  # as of a parameter that nothing uses
        ((ONES, NAN), True),
        ((NAN, NAN), True),
        ((ONES, ONES), False),
        ((ZERO.to_sparse(), None), False),  # of a layout that is not looked into
    ],
)
def test_gradients_are_dropped_where_no_step_can_use_them(gradients, are_dropped):
    """Also where they are expected again, as after each part of a model."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    frozen, late = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    frozen.requires_grad = False
    arrivals = Arrivals()
    arrivals.expect([*parameters, frozen, late])
    assert not arrivals.are_dropped()  # none has come
    sum(p.sum() for p in parameters).backward()
    arrivals.expect(parameters)
    late.grad = torch.ones(2)  # of another pass
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    assert arrivals.are_dropped() == are_dropped
