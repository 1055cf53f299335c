"""`watch` on many kinds of models: equal to other code, or left out; and training never changed."""

import numpy as np
import pytest

pytest.importorskip("torch")

from rank_collapse.torch import watch
from tests.oracles.torch_models import CASES, L, build, make_inputs, measure_loss, torch
from tests.oracles.watched_scalars import compute_entropy, compute_ratio
from tests.support.broken_watch import BROKEN, break_part

QUICK = {"gpt2", "bloom", "falcon", "gpt_neox", "llama", "bert", "t5_decoder", "xlnet", "swin"}


def run_by_hand(case, padding):
    """Returns (what each layer's attention reads [l, b, n, d], its weights [l, b, h, n, m])."""
    model, reads = build(case, "eager"), []

    def keep(module, args, kwargs):
        x = args[0] if args else kwargs["hidden_states"]
        reads.append(x.detach().numpy())

    for name in dict.fromkeys(case.where.format(i) for i in range(L)):
        model.get_submodule(name).register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        output = model(**make_inputs(case, padding), output_attentions=True)
    return reads, [a.numpy() for a in output[case.attentions]]


def train(model, inputs, steps=2):
    """Trains; returns the losses, and the parameters at the end."""
    torch.manual_seed(1)
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-3), []
    for _ in range(steps):
        loss = measure_loss(model(**inputs))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, [p.detach().clone() for p in model.parameters()]


def is_quick(case, implementation, padding):
    last = case.implementations[-1], case.padding[-1]
    return str(case) in QUICK and (implementation, padding) == last


@pytest.mark.parametrize(
    "case, implementation, padding",
    [
        pytest.param(
            c,
            implementation,
            padding,
            marks=() if is_quick(c, implementation, padding) else pytest.mark.full,
        )
        for c in CASES
        for implementation in c.implementations
        for padding in c.padding
    ],
    ids=str,
)
def test_scalars_are_those_of_other_code(case, implementation, padding):
    inputs = make_inputs(case, padding)
    plain = train(build(case, implementation), inputs)
    model = build(case, implementation)
    watched = watch(model, 1, layers=case.layers)
    losses, parameters = train(model, inputs)
    watched.close()
    assert losses == plain[0] and all(map(torch.equal, parameters, plain[1]))
    if case.left_out:
        assert case.left_out in watched.describe() and not watched.rows
        return
    reads, weights = run_by_hand(case, padding)
    row, text = watched.rows[0], watched.describe()
    for layer, (x, p) in enumerate(zip(reads, weights, strict=True)):
        x = x.swapaxes(0, 1) if x.shape[:2] == p.shape[2::-2] else x
        token_mask = np.ones(x.shape[:2], bool)
        if x.shape[:2] == inputs.get("attention_mask", x[0]).shape:
            token_mask = inputs["attention_mask"].bool().numpy()
        assert row["residual_ratio"][layer] == pytest.approx(
            compute_ratio(x, token_mask), rel=1e-3
        ), text
        assert row["attention_entropy"][layer] == pytest.approx(
            compute_entropy(p, token_mask), rel=1e-3
        )


@pytest.mark.full
@pytest.mark.parametrize(
    "case, broken",
    [(case, BROKEN[i % len(BROKEN)]) for i, case in enumerate(CASES)],
    ids=str,
)
def test_no_error_reaches_the_training_of_any_kind(case, broken, monkeypatch, tmp_path):
    implementation, padding = case.implementations[-1], case.padding[-1]
    inputs = make_inputs(case, padding)
    plain = train(build(case, implementation), inputs)
    model = build(case, implementation)
    watched = watch(model, 1, break_part(broken, monkeypatch, tmp_path), layers=case.layers)
    losses, parameters = train(model, inputs)
    assert losses == plain[0] and all(map(torch.equal, parameters, plain[1]))
    reason = "no space left" if not case.left_out or broken == "all" else case.left_out
    assert watched.step == 2 and reason in watched.describe().lower()
    watched.close()
