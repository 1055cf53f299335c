"""`watch` on many kinds of models: equal to other code, or left out; and training never changed."""

import numpy as np
import pytest
from broken_watch import BROKEN, breaking
from torch_models import CASES, L, built, inputs_of, loss_of, torch

from rank_collapse.torch import watch

QUICK = {"gpt2", "bloom", "falcon", "gpt_neox", "llama", "bert", "t5_decoder", "xlnet", "swin"}


def composite(x):
    return np.sqrt(np.abs(x).sum(axis=0).max() * np.abs(x).sum(axis=1).max())


def ratio_of(x, mask):
    """‖X − 1x̄ᵀ‖/‖X‖ in ‖·‖_{1,∞}, the mean over examples."""
    each = [a[m] for a, m in zip(x, mask, strict=True)]
    return np.mean([composite(a - a.mean(axis=0)) / composite(a) for a in each])


def entropy_of(p, mask):
    """The mean over examples of that over heads and the queries that exist."""
    p = np.concatenate([p, np.maximum(1 - p.sum(axis=-1, keepdims=True), 1e-30)], axis=-1)  # sinks
    rows = -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1)
    return np.mean([r[:, m].mean() for r, m in zip(rows, mask, strict=True)])


def by_hand(case, padding):
    """(what each layer's attention reads [l, b, n, d], its weights [l, b, h, n, m])."""
    model, reads = built(case, "eager"), []

    def keep(module, args, kwargs):
        x = args[0] if args else kwargs["hidden_states"]
        reads.append(x.detach().numpy())

    for name in dict.fromkeys(case.where.format(i) for i in range(L)):
        model.get_submodule(name).register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        output = model(**inputs_of(case, padding), output_attentions=True)
    return reads, [a.numpy() for a in output[case.attentions]]


def steps_of(model, inputs, steps=2):
    """Losses, and at the end the parameters."""
    torch.manual_seed(1)
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-3), []
    for _ in range(steps):
        loss = loss_of(model(**inputs))
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
        pytest.param(c, how, padding, marks=() if is_quick(c, how, padding) else pytest.mark.full)
        for c in CASES
        for how in c.implementations
        for padding in c.padding
    ],
    ids=str,
)
def test_scalars_are_those_of_other_code(case, implementation, padding):
    inputs = inputs_of(case, padding)
    plain = steps_of(built(case, implementation), inputs)
    model = built(case, implementation)
    watched = watch(model, 1, layers=case.layers)
    losses, parameters = steps_of(model, inputs)
    watched.close()
    assert losses == plain[0] and all(map(torch.equal, parameters, plain[1]))
    if case.left_out:
        assert case.left_out in watched.describe() and not watched.rows
        return
    reads, weights = by_hand(case, padding)
    row, text = watched.rows[0], watched.describe()
    for layer, (x, p) in enumerate(zip(reads, weights, strict=True)):
        x = x.swapaxes(0, 1) if x.shape[:2] == p.shape[2::-2] else x
        shown = np.ones(x.shape[:2], bool)
        if x.shape[:2] == inputs.get("attention_mask", x[0]).shape:
            shown = inputs["attention_mask"].bool().numpy()
        assert row["residual_ratio"][layer] == pytest.approx(ratio_of(x, shown), rel=1e-3), text
        assert row["attention_entropy"][layer] == pytest.approx(entropy_of(p, shown), rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize(
    "case, broken",
    [(case, BROKEN[i % len(BROKEN)]) for i, case in enumerate(CASES)],
    ids=str,
)
def test_no_error_reaches_the_training_of_any_kind(case, broken, monkeypatch, tmp_path):
    how, padding = case.implementations[-1], case.padding[-1]
    inputs = inputs_of(case, padding)
    plain = steps_of(built(case, how), inputs)
    model = built(case, how)
    watched = watch(model, 1, breaking(broken, monkeypatch, tmp_path), layers=case.layers)
    losses, parameters = steps_of(model, inputs)
    assert losses == plain[0] and all(map(torch.equal, parameters, plain[1]))
    reason = "no space left" if not case.left_out or broken == "all" else case.left_out
    assert watched.step == 2 and reason in watched.describe().lower()
    watched.close()
