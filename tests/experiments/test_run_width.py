"""run_width on made-up accuracies."""

from types import SimpleNamespace

import numpy as np
import pytest

from experiments import run_width


def test_the_deepest_is_set_beside_the_shallowest_in_any_order():
    """--depths=12,1 is --depths=1,12; a seed that diverged at one depth has no difference."""
    accuracies = {"depth 12": [0.9, 0.8, 0.5], "depth 1": [0.88, 0.4, 0.5], "depth 3": [0.0] * 3}
    results = {
        name: {"diverged_at": np.array([-1, -1, 2 if "12" in name else -1])}
        | {"whole": {"accuracy": np.array(values)}}
        for name, values in accuracies.items()
    }
    cases = {
        name: SimpleNamespace(
            recipe=SimpleNamespace(config=SimpleNamespace(depth=int(name.split()[1])))
        )
        for name in results
    }
    (row,) = run_width.judge_claims(results, cases)
    assert row.setting == "12 layers and 1" and row.draws == 2
    assert row.estimate == pytest.approx(0.5)  # of the two seeds, one is within .05
