"""The comparison of two recordings: a sentence, a table of sublayers, the first one at fault."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from rank_collapse.agree.alignment import align_tokens
from rank_collapse.agree.differences import (
    MEDIAN,
    Difference,
    Rounding,
    bound_sizes,
    compare_layer,
    compare_sums,
    find_rounding,
)
from rank_collapse.agree.kinds import name_embedding, name_kind
from rank_collapse.agree.recording import ROUNDING, Recording, open_recording
from rank_collapse.agree.verdict import Fault, Row, find_faults, is_judged, summarize

# What products round to although their results are float32, by name.
_PRODUCTS = {"float16 or TF32": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Agreement:
    """What the comparison of two recordings says.

    Attributes:
        agree: Whether all differences are rounding; None where that cannot be said.
        first: {"layer": from 0, "part": name} of the first sublayer at fault, or None.
        kind: The mistake that explains it, or None.
        sentence: The answer in words.
        rows: All sublayers.
        rounding: Of the coarser run.
        embedding: Median relative error before the first layer.
        outputs: {"next tokens that differ": share, …} of recorded logits.
        remarks: What else the reader must know.
    """

    agree: bool | None
    first: dict[str, Any] | None
    kind: str | None
    sentence: str
    rows: tuple[Row, ...]
    rounding: Rounding
    embedding: float
    outputs: dict[str, float]
    remarks: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """Returns 0 where they agree, 1 where they differ, 2 where that cannot be said."""
        return {True: 0, False: 1, None: 2}[self.agree]

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as JSON has them."""
        return {
            "agree": bool(self.agree),
            "first": self.first,
            "kind": self.kind,
            "sentence": self.sentence,
            "cannot_tell": self.agree is None,
            "rounding": self.rounding.name,
            "embedding_error": self.embedding,
            "outputs": self.outputs,
            "remarks": list(self.remarks),
            "sublayers": [
                {k: None if v != v else v for k, v in row._asdict().items()} for row in self.rows
            ],
        }


def compare_files(first: str | os.PathLike, second: str | os.PathLike) -> Agreement:
    """Compare two recordings.

    Args:
        first, second: Files: see `agree.recording`.

    Raises:
        ValueError: A file is no recording, or they are of different inputs or shapes.
    """
    return compare_recordings(open_recording(first), open_recording(second))


def compare_recordings(first: Recording, second: Recording) -> Agreement:
    """Compare two recordings, layer by layer.

    Args:
        first, second: Opened recordings. A fault is one of the pair, whichever run has it.

    Raises:
        ValueError: They are of different inputs or shapes.
    """
    shift = _find_shift(first, second)
    if first.num_layers != second.num_layers and not shift:
        raise ValueError(
            f"{first.path.name} has {first.num_layers} layers, {second.path.name} "
            f"{second.num_layers}: residual has a state before each layer and one after the last"
        )
    alignment = align_tokens(first, second)
    rounding = find_rounding(first, second)
    if shift:
        return _answer_shift(first, second, alignment, rounding, shift)
    embedding, embedding_kind = _compare_embeddings(first, second, alignment, rounding)
    rows = _tabulate(first, second, alignment, rounding)
    faults = find_faults(rows, rounding)
    remarks = list(alignment.remarks)
    for recording in (first, second):
        if recording.ignored:
            names = ", ".join(map(str, recording.ignored[:8]))
            remarks.append(f"{recording.path.name} has other arrays, which are not read: {names}")
    if (faults or embedding_kind) and rounding.products < min(_PRODUCTS.values()):
        coarser = _find_products(first, second, alignment, rounding, rows)
        if coarser is not None:
            rounding, rows = coarser
            faults, embedding_kind = [], None
            remarks.append(
                f"the recordings hold {_find_name(rounding.stream)}, and their differences are "
                f"those of {rounding.name} products"
            )
    outputs = _compare_outputs(first, second, alignment)
    kind = alignment.order or embedding_kind
    place = None
    if faults:
        fault = faults[0]
        row = rows[fault.index]
        place = {"layer": row.layer, "part": row.part}
        kind = kind or name_kind(
            _find_difference(first, second, alignment, rounding, row), alignment.mask
        )
    judged = [row for row in rows if is_judged(row)]
    agree: bool | None = not (faults or kind)
    if agree and len(judged) < len(rows) / 2:
        agree = None
    if embedding_kind:
        place = None
    sentence = _write_sentence(agree, place, kind, rows, judged, faults, rounding, embedding)
    return Agreement(
        agree, place, kind, sentence, tuple(rows), rounding, embedding, outputs, tuple(remarks)
    )


def _pair_layers(first, second, alignment):
    """Yield the aligned layers of both recordings."""
    for a, b in zip(first.read_layers(), second.read_layers(), strict=True):
        yield alignment.take(a, alignment.first), alignment.take(b, alignment.second)


def _list_differences(a, b, mask, rounding):
    """Yield the differences of a layer, its sum included."""
    yield from compare_layer(a, b, mask, rounding)
    total = compare_sums(a, b, mask, rounding)
    if total is not None:
        yield total


def _tabulate(first, second, alignment, rounding):
    """Return the rows of all sublayers in order."""
    return [
        summarize(difference)
        for a, b in _pair_layers(first, second, alignment)
        for difference in _list_differences(a, b, alignment.mask, rounding)
    ]


def _find_difference(first, second, alignment, rounding, row) -> Difference:
    """Return the difference of one row; the files are read once more up to its layer."""
    for a, b in _pair_layers(first, second, alignment):
        if a.index == row.layer:
            differences = _list_differences(a, b, alignment.mask, rounding)
            return next(d for d in differences if d.part == row.part)
    raise AssertionError(row.layer)


def _compare_embeddings(first, second, alignment, rounding):
    """Return the median relative error before the first layer, and its kind if it is a fault."""
    a, b = next(_pair_layers(first, second, alignment))
    x, y, mask = a.before, b.before, alignment.mask
    size = bound_sizes(*(np.linalg.norm(z, axis=-1) for z in (x, y)), mask)
    error = (np.linalg.norm(y - x, axis=-1) / size)[mask]
    most = 4 * max(rounding.products, rounding.stream)
    kind = name_embedding(x, y) if np.quantile(error, 0.95) > most else None
    return float(np.median(error)), kind


def _find_products(first, second, alignment, rounding, rows):
    """Return (rounding, rows) if products of a coarser dtype explain all differences.

    They reach all tokens and both parts alike from the first layer on, as no mistake does.
    """
    for name, products in _PRODUCTS.items():
        coarser = Rounding(products, rounding.stream, name)
        coarse_rows = _tabulate(first, second, alignment, coarser)
        start = [row for row in coarse_rows if row.layer == 0 and row.error_in < products]
        alike = [0.2 < row.excess < MEDIAN and row.excess_few < 8 * row.excess for row in start]
        if start and all(alike) and not find_faults(coarse_rows, coarser):
            return coarser, coarse_rows
    return None


def _find_name(size):
    """Return the dtype of a relative error of rounding."""
    return next(name for name, value in ROUNDING.items() if value == size)


def _find_shift(first, second):
    """Return 1 if states of the second run begin one layer later, -1 if one earlier, else 0."""
    if first.shape != second.shape or min(first.num_layers, second.num_layers) < 2:
        return 0
    a, b = next(first.read_layers()), next(second.read_layers())

    def distance(x, y):
        return np.linalg.norm(x - y) / max(np.linalg.norm(x), 1e-300)

    at_place = distance(a.before, b.before)
    later, earlier = distance(a.after, b.before), distance(b.after, a.before)
    if min(later, earlier) < 0.1 * at_place and min(later, earlier) < 0.1:
        return 1 if later < earlier else -1
    return 0


def _answer_shift(first, second, alignment, rounding, shift):
    """Return the answer where states are off by one layer."""
    late, early = (second, first) if shift > 0 else (first, second)
    kind = f"the states of {late.path.name} are off by one layer"
    sentence = (
        f"{kind}: its first state is the one after layer 0 of {early.path.name}. `residual` begins "
        "with the state before layer 0."
    )
    return Agreement(False, None, kind, sentence, (), rounding, float("nan"), {}, alignment.remarks)


def _compare_outputs(first, second, alignment):
    """Return how the logits differ, {} where one run has none."""
    logits = [recording.read_logits() for recording in (first, second)]
    if any(values is None for values in logits):
        return {}
    if logits[0].shape[-1] != logits[1].shape[-1]:
        raise ValueError(f"logits have {logits[0].shape[-1]} and {logits[1].shape[-1]} entries")
    chosen = [
        np.take_along_axis(values, positions[..., None], axis=1)[alignment.mask]
        for values, positions in zip(logits, (alignment.first, alignment.second), strict=True)
    ]
    log_p = [values - _log_sum_exp(values) for values in chosen]
    next_token = chosen[0].argmax(axis=-1)
    rows = np.arange(len(next_token))
    change = np.abs(log_p[1][rows, next_token] - log_p[0][rows, next_token])
    return {
        "share of next tokens that differ": float(np.mean(next_token != chosen[1].argmax(axis=-1))),
        "mean change of their log-probability": float(change.mean()),
        "largest change of their log-probability": float(change.max()),
    }


def _log_sum_exp(values):
    """Return log Σ exp over the last axis, which stays."""
    most = values.max(axis=-1, keepdims=True)
    return most + np.log(np.exp(values - most).sum(axis=-1, keepdims=True))


def _write_sentence(agree, place, kind, rows, judged, faults: list[Fault], rounding, embedding):
    """Write the answer in one or two sentences."""
    if agree is None:
        row = next(row for row in rows if not is_judged(row))
        return (
            f"cannot tell: from layer {row.layer} on the inputs of the sublayers differ by "
            f"{row.error_in:.2g} of their size; all before is {rounding.name} rounding."
        )
    if agree:
        if all(row.added_most == 0 for row in rows) and embedding == 0:
            return "the same numbers in all layers."
        most = max(judged, key=lambda row: row.excess)
        text = (
            f"agree to {rounding.name} rounding (largest {most.excess:.2g} times the prediction, "
            f"layer {most.layer}, {most.part})."
        )
        late = next((row for row in rows if not is_judged(row)), None)
        if late is not None:
            text += (
                f" From layer {late.layer} on the inputs differ by {late.error_in:.2g} of their "
                "size, and nothing can be said."
            )
        return text
    if place is None:
        return f"differ before layer 0 by {embedding:.2g} of the size: {kind}."
    fault, row = faults[0], rows[faults[0].index]
    name = {"attention": "attention", "mlp": "MLP", "layer": "sum"}[row.part]
    has_states_alone = all(other.part == "layer" for other in rows)
    added, times = {
        "some tokens": (row.added_most, row.excess_few),
    }.get(fault.reason, (row.added, row.excess))
    whose = f"layer {row.layer}" if has_states_alone else f"layer {row.layer}'s {name}"
    text = f"{whose} adds {added:.2g} of its size, {times:.2g} times its rounding"
    if fault.reason == "one factor":
        text = f"{whose} is {1 + row.scale:.4g} times its size in the first run"
    text += f": {kind}" if kind else ""
    return f"{text}; all before is rounding." if faults[0].index else f"{text}."
