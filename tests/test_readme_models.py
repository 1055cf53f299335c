"""The README's examples for checkpoints, Flax models and plain JAX, run as they stand."""

import re
from pathlib import Path

import numpy as np

from rank_collapse.measures.residuals import residual_ratio

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLE = re.compile(r"<!-- test: models -->\n```python\n(.*?)```", re.DOTALL)


def test_examples():
    examples = EXAMPLE.findall((REPOSITORY / "README.md").read_text("utf-8"))
    scopes = []
    for example in examples:
        scopes.append({})
        exec(compile(example, "README.md", "exec"), scopes[-1])
    checkpoint, flax_model, plain = scopes
    assert checkpoint["trace"].hidden.shape == (13, 5, 768)
    assert not checkpoint["san_config"].attention_skip
    last = [float(residual_ratio(checkpoint[name].hidden[-1])) for name in ("trace", "san_trace")]
    assert last[1] < 1e-3 < last[0]
    assert len(flax_model["profile"]) == 3
    assert flax_model["ours"].w_q.shape == (4, 32, 8)
    assert plain["by_layer"].shape == (4,)
    assert np.all(np.diff(plain["by_layer"]) < 0)
