"""Every family against stored results of `transformers` (see make_golden.py)."""

from pathlib import Path

import numpy as np
import pytest
from comparison import largest_difference, ours

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FOLDERS = sorted(f.name for f in GOLDEN.iterdir() if f.is_dir())
TOLERANCE = 1e-5
pytestmark = pytest.mark.usefixtures("optimized")


def test_golden_folders_exist():
    families = {"bert", "roberta", "albert", "xlnet", "distilbert", "t5", "gpt2", "vit", "llama"}
    assert families <= {name.split("-")[0] for name in FOLDERS}


@pytest.mark.parametrize("name", FOLDERS)
def test_hidden_states_and_attentions(name):
    if list((GOLDEN / name).glob("*.bin")):
        pytest.importorskip("torch")
    stored = np.load(GOLDEN / name / "expected.npz")
    arguments = {k[3:]: v for k, v in stored.items() if k.startswith("in/")}
    expected = {k[4:]: v for k, v in stored.items() if k.startswith("out/")}
    worst = largest_difference(ours(GOLDEN / name, arguments), expected, arguments)
    assert max(worst.values()) < TOLERANCE, worst
