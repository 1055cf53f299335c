"""The complete examples of docs/your_model.md are short, and print what the page says."""

import contextlib
import io
import re

import numpy as np
import pytest

from tests.support.folders import REPOSITORY

PAGE = (REPOSITORY / "docs" / "your_model.md").read_text("utf-8")
EXAMPLES = dict(re.findall(r"### ([\w ]+)\n.*?```python\n(.*?)```", PAGE, re.DOTALL))
NUMBER = re.compile(r"\d+\.?\d*(?:e-?\d+)?")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_the_page_says(name):
    code = EXAMPLES[name]
    if "import torch" in code:
        pytest.importorskip("torch")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, name, "exec"), {})
    said = NUMBER.findall(code.strip().splitlines()[-1].partition("  # ")[2])
    assert len(said) == 4
    np.testing.assert_allclose(
        [float(n) for n in NUMBER.findall(printed.getvalue())], list(map(float, said)), rtol=0.01
    )


def test_the_examples_are_complete_and_short():
    assert list(EXAMPLES) == ["A plain function", "Equinox", "Flax Linen", "Flax NNX", "PyTorch"]
    for code in EXAMPLES.values():
        lines = [line for line in code.splitlines() if line and "import" not in line]
        assert len(lines) < 15
