"""Every measure inside torch.compile is the one outside, whatever the backend."""

import numpy as np
import pytest

import rank_collapse as rc

torch = pytest.importorskip("torch")
RNG = np.random.default_rng(0)
INPUTS = {
    "tokens": torch.tensor(RNG.normal(size=(2, 5, 4)) + 0.3, dtype=torch.float32),
    "attention": torch.tensor(RNG.dirichlet(np.ones(5), (2, 3, 5)), dtype=torch.float32),
    "scores": torch.tensor(RNG.normal(size=(2, 3, 5, 5)), dtype=torch.float32),
}
MASK = torch.tensor([True, True, True, True, False])
CALLS = {name: (measure, INPUTS[measure.needs]) for name, measure in rc.MEASURES.items()}
CALLS |= {
    "residual": (rc.residual, INPUTS["tokens"]),
    "composite_norm": (rc.composite_norm, INPUTS["tokens"]),
    "monitor": (lambda x, mask: rc.monitor(x, INPUTS["attention"], mask=mask), INPUTS["tokens"]),
    "profile": (
        lambda x, mask: rc.profile(x, mask=mask, measures=("residual_ratio", "stable_rank")),
        INPUTS["tokens"],
    ),
    "attention_rows": (
        lambda q, mask: rc.attention_rows(q, q, mask=mask, causal=True),
        INPUTS["scores"],
    ),
}
CASES = [("eager", name) for name in CALLS]
CASES += [("inductor", n) for n in ("residual_ratio", "stable_rank", "monitor", "attention_rows")]
pytestmark = pytest.mark.full  # the quick suite has a compiled model that is watched


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor's own imports
@pytest.mark.parametrize(("backend", "name"), CASES)
def test_a_measure_under_compile(backend, name):
    """Inside a step that goes on: what the compiler cannot trace runs outside of its graphs."""
    torch._dynamo.reset()
    measure, x = CALLS[name]

    def step(x):
        doubled = 2 * x if name in ("residual", "composite_norm", "attention_rows") else 1 * x
        return doubled.sum(), measure(doubled, mask=MASK)

    compiled, plain = torch.compile(step, backend=backend)(x), step(x)
    for value, want in zip(list_leaves(compiled), list_leaves(plain), strict=True):
        np.testing.assert_allclose(value, want, rtol=2e-5, atol=1e-6)


def list_leaves(tree):
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, tuple | list):
        return [leaf for part in tree for leaf in list_leaves(part)]
    return [] if tree is None else [np.asarray(tree)]
