"""Tables of docs/accelerators.md and docs/benchmarks.md, from the measurements on a machine."""

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rank_collapse.runs.files import RunError, load_arrays, write_atomically

BLOCK = r"(?<=<!-- measured: {} -->\n).*?(?=<!-- end -->)"  # of a kind of device
Lines = Sequence[Mapping[str, Any]]


class Difference(NamedTuple):
    """The largest difference of a run on a device from the same run on a CPU.

    Attributes:
        run: Its name.
        arrays, equal: Number of arrays and columns, and number of bit-identical ones.
        name: Name of the array or column with the largest difference.
        largest: Largest difference, relative to the largest value of the array.
    """

    run: str
    arrays: int
    equal: int
    name: str
    largest: float


def compare_runs(run: str, device: Path, cpu: Path) -> Difference:
    """Compares all arrays and the columns of the table of two runs.

    Args:
        run: Name of the run.
        device, cpu: Folders.

    Raises:
        ValueError: They have different arrays, or arrays of different shapes.
    """
    ours, theirs = read_numbers(device), read_numbers(cpu)
    if ours.keys() != theirs.keys():
        name = min(ours.keys() ^ theirs.keys())
        raise ValueError(f"{run}: only one of {device} and {cpu} has {name}")
    worst, worst_name, equal = 0.0, "", 0
    for name, values in ours.items():
        reference = theirs[name]
        if values.shape != reference.shape:
            raise ValueError(
                f"{run}: {name} has shape {values.shape} in {device} and {reference.shape} in {cpu}"
            )
        difference = largest_difference(values, reference)
        equal += difference == 0
        if not difference <= worst:  # NaN too
            worst, worst_name = difference, name
    return Difference(run, len(ours), equal, worst_name, worst)


def largest_difference(values: np.ndarray, reference: np.ndarray) -> float:
    """Computes max |a − b| / max |b|; infinite where one of two numbers is not finite."""
    is_other = (values != reference) & ~(np.isnan(values) & np.isnan(reference))
    if not is_other.any():
        return 0.0
    a, b = values[is_other], reference[is_other]
    if not (np.isfinite(a) & np.isfinite(b)).all():
        return float("inf")
    scale = np.abs(reference[np.isfinite(reference)]).max()
    return float(np.abs(a - b).max() / scale) if scale else float("inf")


def read_numbers(folder: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a run and the numbers of its table, as float64.

    Args:
        folder: Folder of the run.
    """
    numbers = {}
    if (folder / "arrays.npz").exists():
        arrays = load_arrays(folder / "arrays.npz")
        numbers = {n: a.astype(np.float64) for n, a in arrays.items() if a.dtype.kind in "biuf"}
    if (folder / "results.csv").exists():
        rows = list(csv.DictReader((folder / "results.csv").read_text("utf-8").splitlines()))
        for name in rows[0] if rows else ():
            cells = [row[name] for row in rows]
            numbers |= {f"results.csv: {name}": a for a in [_as_numbers(cells)] if a is not None}
    return numbers


def _as_numbers(cells):
    try:
        return np.array([float(cell) if cell else np.nan for cell in cells])
    except ValueError:  # text
        return None


def write_pages(docs: Path, lines: Lines, differences: Sequence[Difference]) -> list[Path]:
    """Writes the tables of the kind of device that was measured; returns the pages.

    The tables of a CPU are in benchmarks.md, those of an accelerator in accelerators.md.

    Args:
        docs: Folder of the pages.
        lines: Lines of speed.jsonl and steps.jsonl.
        differences: Differences from a CPU, by experiment.

    Raises:
        ValueError: There are no measurements, or a page has no place for them.
        RunError: A page cannot be read or written.
    """
    speed = [line for line in lines if "benchmark" in line]
    steps = [line for line in lines if "step" in line]
    if not speed:
        raise ValueError("the folder has no speed.jsonl, or an empty one: nothing was measured")
    kind = "cpu" if speed[0]["machine"]["device"].startswith("cpu") else "accelerator"
    page = docs / ("benchmarks.md" if kind == "cpu" else "accelerators.md")
    try:
        text = page.read_text("utf-8")
    except OSError as error:
        raise RunError(f"{page} cannot be read: {error.strerror}") from error
    pattern = BLOCK.format(kind)
    if not re.search(pattern, text, re.DOTALL):
        raise ValueError(f"{page} has no line <!-- measured: {kind} -->")
    tables = make_tables(speed, steps, differences)
    new = re.sub(pattern, lambda _: tables, text, count=1, flags=re.DOTALL)
    write_atomically(page, new.encode())
    return [page]


def write_number(value: float | None) -> str:
    """Writes a number with three digits, without an exponent below a million; None as ""."""
    if value is None:
        return ""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"


def make_tables(speed: Lines, steps: Lines, differences: Sequence[Difference]) -> str:
    """Makes the Markdown tables of all measurements, the last one of each benchmark.

    Args:
        speed, steps: Lines of JSON.
        differences: Differences from a CPU, by experiment.
    """
    machine = speed[-1]["machine"]
    driver = next((line["driver"] for line in steps if line.get("driver")), None)
    name = f"{machine['device']}" + (f" ({driver})" if driver else "")
    cores, version = machine["cores"], machine["jax"]
    parts = [f"Measured on {machine['date']}: {name}, {cores} cores, JAX {version}."]
    for line in {line["benchmark"]: line for line in speed}.values():
        cells = [
            (
                case["case"],
                write_number(1e3 * min(case["seconds"])),
                write_number(case["compile_seconds"] or None),
                write_number(case["gigabytes"] or None),
            )
            for case in line["timings"]
        ]
        heads = (line["benchmark"], "ms, fastest round", "compiling, s", "GB")
        columns = [c for c in zip(heads, *cells, strict=True) if any(c[1:])]
        rows = [f"| {' | '.join(row)} |" for row in zip(*columns, strict=True)]
        parts.append("\n".join([rows[0], "|---" * len(columns) + "|", *rows[1:]]))
        figures = [
            f"| {figure} | {write_number(value) or 'none'} |"
            for figure, value in line["figures"].items()
            if not figure.startswith("CPU ms")
        ]
        if figures:
            parts.append("\n".join([f"| {line['benchmark']} | |", "|---|---|", *figures]))
    ended = {line["step"]: line for line in steps}
    if "tests" in ended:
        parts.append(f"Tests on the device: {ended['tests']['last_line']}.")
    if differences:
        rows = [
            "| experiment | arrays, columns | equal to the bit | largest difference from a CPU |",
            "|---|---|---|---|",
            *(
                f"| {d.run} | {d.arrays} | {d.equal} | {d.largest:.2g}, {d.name} |"
                if d.name
                else f"| {d.run} | {d.arrays} | {d.equal} | 0 |"
                for d in differences
            ),
        ]
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"
