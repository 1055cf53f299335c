"""What needs no JAX runs where there is none: measures of NumPy and torch, and what watches."""

import subprocess
import sys

import numpy as np
import pytest

import rank_collapse as rc
from tests.support.closeness import assert_close

BLOCKED = """
import sys

class NoJax:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

if SETTING == "finder":
    sys.meta_path.insert(0, NoJax())
else:
    sys.modules.update(jax=None, jaxlib=None)
"""

NUMPY = """
import numpy as np, rank_collapse as rc
x = np.random.default_rng(0).normal(size=(3, 5, 4))
p = np.random.default_rng(1).dirichlet(np.ones(5), (3, 2, 5))
for name, measure in rc.MEASURES.items():
    print(name, np.asarray(measure(x if measure.needs == "tokens" else p), float).sum())
scalars = rc.monitor(x, p) | rc.monitor(x, mask=[1, 1, 1, 1, 0], segments=[0, 0, 1, 1, 1])
for name, value in scalars.items():
    print(name, float(value))
print("profile", float(rc.profile([*x], exclude="spikes")["residual_ratio"].sum()))
print("rows", float(rc.attention_rows(p, p, causal=True)["attention_entropy"].sum()))
rc.residual(x), rc.composite_norm(x), rc.MEASURES["residual_ratio"].alarm
"""

TORCH = """
import numpy as np, rank_collapse as rc, torch, rank_collapse.torch
x = torch.tensor(np.random.default_rng(0).normal(size=(3, 5, 4)), requires_grad=True)
p = torch.tensor(np.random.default_rng(1).dirichlet(np.ones(5), (3, 2, 5)))
for name, measure in rc.MEASURES.items():
    print(name, float(measure(x if measure.needs == "tokens" else p).sum().detach()))
scalars = rc.monitor(x, p) | rc.monitor(x, mask=[1, 1, 1, 1, 0], segments=[0, 0, 1, 1, 1])
for name, value in scalars.items():
    print(name, float(value.detach()))
print("profile", float(rc.profile([*x], exclude="spikes")["residual_ratio"].sum().detach()))
print("rows", float(rc.attention_rows(p, p, causal=True)["attention_entropy"].sum()))
rc.rank_one_ratio(x).sum().backward()
"""

WATCH = """
import json, pathlib, sys
from rank_collapse.command import main
path = pathlib.Path(sys.argv[1]) / "metrics.jsonl"
lines = [json.dumps({"step": i, "residual_ratio": [1 / (1 + i)] * 2}) for i in range(3)]
path.write_text("\\n".join(lines))
sys.exit(main(["watch", str(path.parent)]))
"""


def run_without_jax(setting, program, *arguments):
    setup = f"SETTING = {setting!r}\n" + BLOCKED
    check = "\nassert sys.modules.get('jax') is None"
    return subprocess.run(
        [sys.executable, "-c", setup + program + check, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("program", "setting"),
    [(NUMPY, "none"), pytest.param(TORCH, "finder", marks=pytest.mark.full)],
    ids=["numpy", "torch"],
)
def test_measures_are_those_with_jax(program, setting):
    """Each agrees to 1e-9 with the value computed here."""
    if program is TORCH:
        pytest.importorskip("torch")
    done = run_without_jax(setting, program)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    x = np.random.default_rng(0).normal(size=(3, 5, 4))
    p = np.random.default_rng(1).dirichlet(np.ones(5), (3, 2, 5))
    want = {
        name: np.asarray(measure(x if measure.needs == "tokens" else p), float).sum()
        for name, measure in rc.MEASURES.items()
    }
    for name, value in lines[: len(want)]:
        assert_close(float(value), want[name], rtol=1e-9, err_msg=name)
    scalars = rc.monitor(x, p) | rc.monitor(x, mask=[1, 1, 1, 1, 0], segments=[0, 0, 1, 1, 1])
    for name, value in lines[len(want) : -2]:
        assert_close(float(value), scalars[name], rtol=1e-9, err_msg=name)


def test_the_command_watch_draws(tmp_path):
    pytest.importorskip("matplotlib")
    done = run_without_jax("finder", WATCH, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figures/metrics.png").stat().st_size > 0
