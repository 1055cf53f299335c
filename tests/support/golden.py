"""Texts that tests keep in tests/golden/texts: what a command says, draws and measures.

    python -m pytest -n 0 -m "" -k golden --rewrite-golden

writes them anew. Look at the difference: each changed line is a result that changed. Words and
whole numbers are compared as they are, and other numbers with a tolerance, because machines round
differently.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.folders import GOLDEN

TEXTS = GOLDEN / "texts"
RTOL = 1e-4  # of a number of a text, which has six digits
MEASURED = 2e-3  # of a measured number, as a share of the largest of its array
# Shares of right answers: at the tiny size one answer of a trained network, which another processor
# turns, is 2 of 255 pairs.
COUNTED = ("accuracy", "auc")
ONE_ANSWER = 0.02
CONVERGED = "/change"  # the last step of an iteration: rounding, other on each processor
UNMOVED = "/equal_points_moved"  # a distance that is 0 but for rounding
PLAIN, EXACT = "plain_log10_", "log10_"  # where these differ, the first is rounding
MOST = 48  # numbers of an array that a text shows
NUMBER = re.compile(r"(?<![\w.])[-+−]?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|inf|nan)(?![\w])")


def format_numbers(values: np.ndarray) -> str:
    """Writes the numbers of an array; of many, some at equal distances, their count and mean."""
    flat = np.ravel(values) + 0.0  # no negative zero
    finite = np.abs(flat[np.isfinite(flat)])
    flat = np.where(np.abs(flat) < 1e-9 * finite.max(initial=0), 0.0, flat)  # cancelled
    shown, end = flat, ""
    if flat.size > MOST:
        shown = flat[:: math.ceil(flat.size / MOST)]
        end = f" of {flat.size}, mean {np.mean(flat):.6g}"
    return " ".join(f"{value:.6g}" for value in shown) + end


def shorten(text: str) -> str:
    """Writes numbers of more than six digits with six, and ends lines without spaces."""

    def write(number: re.Match) -> str:
        if len(number[0]) < 8 or not {".", "e"} & {*number[0]}:
            return number[0]
        return f"{float(number[0]):.6g}"

    return "\n".join(line.rstrip() for line in NUMBER.sub(write, text).splitlines()) + "\n"


def is_close(one: str, other: str) -> bool:
    """Returns whether two numbers are equal, or fractions that differ by rounding."""
    if one == other:
        return True
    if not {".", "e"} & {*one, *other}:
        return False
    a, b = (float(text.replace("−", "-")) for text in (one, other))
    return math.isclose(a, b, rel_tol=RTOL, abs_tol=1e-12)


def list_differences(actual: str, expected: str) -> list[str]:
    """Lists lines that differ in words, or in numbers by more than rounding."""
    lines = actual.splitlines(), expected.splitlines()
    differences = []
    for number, (line, other) in enumerate(zip(*lines, strict=False), 1):
        is_same = NUMBER.sub("#", line) == NUMBER.sub("#", other)
        numbers = NUMBER.findall(line), NUMBER.findall(other)
        if not (is_same and all(map(is_close, *numbers))):
            differences.append(f"line {number}\n  kept {other[:400]}\n  now  {line[:400]}")
    if len(lines[0]) != len(lines[1]):
        differences.append(f"{len(lines[0])} lines, not {len(lines[1])}")
    return differences


def write_arrays(arrays: Mapping[str, Any]) -> str:
    """Writes named arrays as lines "name dtype shape numbers"; seconds become 1."""
    lines = []
    for name, values in sorted(arrays.items()):
        array = np.asarray(values)
        if "seconds" in name:
            array = np.ones_like(array)
        digits = 17 if array.dtype.itemsize > 4 and array.dtype.kind == "f" else 9
        flat = array.ravel().tolist()
        if array.dtype.kind == "f":
            flat = [f"{value:.{digits}g}" for value in flat]
        shape = "x".join(map(str, array.shape)) or "-"
        lines.append("\t".join([name, array.dtype.str, shape, " ".join(map(str, flat))]))
    return "".join(f"{line}\n" for line in lines)


def read_arrays(text: str) -> dict[str, np.ndarray]:
    """Reads what `write_arrays` wrote."""
    arrays = {}
    for line in text.splitlines():
        name, dtype, shape, numbers = line.split("\t")
        sizes = [int(n) for n in shape.split("x")] if shape != "-" else []
        words = numbers.split()
        if dtype == "|b1":
            words = [word == "True" for word in words]
        arrays[name] = np.array(words).astype(dtype).reshape(sizes)
    return arrays


def list_other_arrays(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Lists arrays that differ: in name, dtype or shape, or in numbers by more than `MEASURED`."""
    differences = [f"only in one: {name}" for name in sorted({*actual} ^ {*expected})]
    for name in sorted({*actual} & {*expected}):
        values, kept = np.asarray(actual[name]), expected[name]
        if (values.dtype, values.shape) != (kept.dtype, kept.shape):
            differences.append(f"{name}: {values.dtype} {values.shape}, not {kept.dtype}")
        elif "seconds" in name or name.endswith(CONVERGED):
            continue
        elif kept.dtype.kind != "f":
            if not np.array_equal(values, kept):
                differences.append(f"{name}: {values}, not {kept}")
        else:
            scale = np.abs(kept[np.isfinite(kept)]).max(initial=0)
            near = max(MEASURED * scale, 1e-12)  # below it all is rounding
            if name.rpartition("/")[2] in COUNTED:
                near = ONE_ANSWER
            if name.endswith(UNMOVED):
                near = 1e-6
            close = np.isclose(values, kept, MEASURED, near, equal_nan=True)
            if PLAIN in name:
                close |= ~np.isclose(kept, expected[name.replace(PLAIN, EXACT)], 0, 0.02)
            if not close.all():
                differences.append(f"{name}: {values[~close][:5]}, not {kept[~close][:5]}")
    return differences
