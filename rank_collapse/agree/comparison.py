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
    compare_on_remainders,
    compare_sums,
    find_rounding,
)
from rank_collapse.agree.kinds import name_embedding, name_kind
from rank_collapse.agree.outputs import compare_outputs
from rank_collapse.agree.recording import ROUNDING, Recording, open_recording
from rank_collapse.agree.replay import Replay, find_replay, pair_layers
from rank_collapse.agree.sentence import write_sentence
from rank_collapse.agree.verdict import Fault, Row, find_faults, summarize
from rank_collapse.printed import format_count

# What products round to although their results are float32, by name.
_PRODUCTS = {"float16 or TF32": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Agreement:
    """The result of a comparison of two recordings.

    Attributes:
        agree: Whether all differences are rounding; None where the recordings do not decide it.
        first: {"layer": from 0, "part": name} of the first sublayer at fault, or None.
        kind: The mistake that explains it, or None.
        sentence: The answer in words.
        rows: Rows of all sublayers.
        rounding: Rounding of the coarser run.
        embedding: Median relative error before the first layer.
        outputs: {"next tokens that differ": share, …} of recorded logits.
        remarks: Further sentences for the reader.
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
        """Returns 0 where the runs agree, 1 where they differ, and 2 where the recordings do not
        decide it."""
        return {True: 0, False: 1, None: 2}[self.agree]

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as a JSON object."""
        sublayers = []
        for row in self.rows:
            fields = row._asdict()
            for name, value in fields.items():
                is_nan = value != value
                fields[name] = None if is_nan else value
            sublayers.append(fields)
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
            "sublayers": sublayers,
        }


def compare_files(first: str | os.PathLike, second: str | os.PathLike) -> Agreement:
    """Compare two recordings.

    Args:
        first, second: Files: see `agree.recording`.

    Raises:
        ValueError: A file is not a recording, or the recordings have different inputs or shapes.
    """
    return compare_recordings(open_recording(first), open_recording(second))


def compare_recordings(
    first: Recording, second: Recording, replay: Replay | None = None
) -> Agreement:
    """Compare two recordings, layer by layer.

    Args:
        first, second: Opened recordings. A fault is a difference between them; either run may have
            caused it.
        replay: One run's model on the inputs of the other, if the model can be run; it may be one
            of the two recordings.

    Raises:
        ValueError: The recordings have different inputs or shapes.
    """
    shift = _find_shift(first, second)
    if first.num_layers != second.num_layers and not shift:
        raise ValueError(
            f"{first.path.name} has {format_count(first.num_layers, 'layer')}, {second.path.name} "
            f"{second.num_layers}: residual has a state before each layer and one after the last"
        )
    alignment = align_tokens(first, second)
    rounding = find_rounding(first, second)
    if shift:
        return _answer_shift(first, second, alignment, rounding, shift)
    embedding, embedding_kind, where = _compare_embeddings(first, second, alignment, rounding)
    replay = None if alignment.order else replay or find_replay(first, second)
    rows = _tabulate(first, second, alignment, rounding, replay)
    faults = find_faults(rows, rounding)
    remarks = list(alignment.remarks)
    for recording in (first, second):
        if recording.ignored:
            names = ", ".join(map(str, recording.ignored[:8]))
            remarks.append(f"other arrays of {recording.path.name} are not read: {names}")
    if (faults or embedding_kind) and rounding.products < min(_PRODUCTS.values()):
        coarser = _find_products(first, second, alignment, rounding, replay)
        if coarser is not None:
            rounding, rows = coarser
            faults, embedding_kind = [], None
            remarks.append(
                f"the recordings hold {_find_name(rounding.stream)}, and their differences are "
                f"those of {rounding.name} products"
            )
    faults = _move_to_sum(first, second, alignment, rounding, replay, rows, faults)
    outputs = compare_outputs(first, second, alignment)
    kind = alignment.order or embedding_kind
    place = None
    if faults:
        fault = faults[0]
        row = rows[fault.index]
        place = {"layer": row.layer, "part": row.part}
        kind = kind or name_kind(
            _find_difference(first, second, alignment, rounding, replay, row), alignment.mask
        )
    judged = [row for row in rows if row.judged]
    agree: bool | None = not (faults or kind)
    if agree and len(judged) < len(rows) / 2:
        agree = None
    if embedding_kind:
        place = None
    sentence = write_sentence(agree, place, kind, rows, faults, rounding, embedding, where)
    return Agreement(
        agree, place, kind, sentence, tuple(rows), rounding, embedding, outputs, tuple(remarks)
    )


def _list_differences(pair, mask, rounding):
    """Yield the differences of a layer's sublayers, and that of the sum that the layer makes of
    them.

    Args:
        pair: The layer in both runs.
        mask: Tokens that exist.
        rounding: The expected rounding.
    """
    yield from compare_layer(pair, mask, rounding)
    total = compare_sums(pair, mask, rounding)
    if total is not None:
        yield total


def _move_to_sum(first, second, alignment, rounding, replay, rows, faults):
    """Move the first fault from a branch to the sum of its layer where the branch is right.

    If one run changes the stream within a layer, for example by a hook that scales the layer's
    input, a branch reads another input than the recorded states show.

    Args:
        first, second, alignment, rounding, replay: See `_tabulate`.
        rows: Rows of all sublayers.
        faults: Faults in order.

    Returns:
        The faults, before which the sum's fault is put.
    """
    row = rows[faults[0].index] if faults else None
    if row is None or row.part == "layer":
        return faults
    sums = [i for i, r in enumerate(rows) if (r.layer, r.part) == (row.layer, "layer")]
    for pair in pair_layers(first, second, alignment, replay):
        if pair.first.index == row.layer:
            difference = compare_on_remainders(pair, row.part, alignment.mask, rounding)
            if difference is not None and not find_faults([summarize(difference)], rounding):
                total = next((f for f in faults if f.index == sums[0]), None)
                return [total or Fault(sums[0], "all tokens"), *faults]
            break
    return faults


def _tabulate(first, second, alignment, rounding, replay):
    """Return the errors of all sublayers in order, each summarized over tokens.

    With a replay (one run's model computed again on the other run's inputs) sublayers show their
    own errors; the incoming error of a row is still that of the two runs themselves.

    Args:
        first, second: The recordings.
        alignment: Which tokens of the two are compared.
        rounding: The expected rounding.
        replay: The replay, or None.
    """
    rows = [
        summarize(difference)
        for pair in pair_layers(first, second, alignment, replay)
        for difference in _list_differences(pair, alignment.mask, rounding)
    ]
    if replay is None or replay.recording in (first, second):
        return rows
    error_in = {
        (row.layer, row.part): row.error_in
        for row in _tabulate(first, second, alignment, rounding, None)
    }
    return [
        row._replace(error_in=error_in.get((row.layer, row.part), row.error_in)) for row in rows
    ]


def _find_difference(first, second, alignment, rounding, replay, row) -> Difference:
    """Return the difference of one row; the files are read once more up to its layer."""
    for pair in pair_layers(first, second, alignment, replay):
        if pair.first.index == row.layer:
            differences = _list_differences(pair, alignment.mask, rounding)
            return next(d for d in differences if d.part == row.part)
    raise AssertionError(row.layer)


def _compare_embeddings(first, second, alignment, rounding):
    """Compare the states before the first layer.

    Args:
        first, second: The recordings.
        alignment: Which tokens of the two are compared.
        rounding: The expected rounding.

    Returns:
        (the median over tokens of the relative error, the kind of mistake, which tokens differ by
        how much). The kind is None if the error is no larger than rounding explains.
    """
    a, b = next(pair_layers(first, second, alignment, None))[:2]
    x, y, mask = a.before, b.before, alignment.mask
    size = bound_sizes(*(np.linalg.norm(z, axis=-1) for z in (x, y)), mask)
    error = (np.linalg.norm(y - x, axis=-1) / size)[mask]
    most = 4 * max(rounding.products, rounding.stream)
    kind = name_embedding(x, y) if np.quantile(error, 0.95) > most else None
    differs = error > most
    where = f"by {np.median(error):.2g} of the size"
    if differs.any() and differs.mean() < 0.5:
        where = f"by {np.median(error[differs]):.2g} of the size in {differs.sum()} of "
        where += f"{len(error)} tokens"
    return float(np.median(error)), kind, where


def _find_products(first, second, alignment, rounding, replay):
    """Test whether products of a coarser dtype explain all differences.

    Errors of such products reach all tokens and both branches from the first layer on; no mistake
    does this.

    Args:
        first, second, alignment, replay: See `_tabulate`.
        rounding: The expected rounding of the states.

    Returns:
        (the rounding with the coarser products, the rows of the table for this rounding); None if
        no dtype explains the differences.
    """
    for name, products in _PRODUCTS.items():
        coarser = Rounding(products, rounding.stream, name, True)
        coarse_rows = _tabulate(first, second, alignment, coarser, replay)
        parts = {row.part for row in coarse_rows}
        if {"attention", "mlp"} <= parts:
            parts.discard("layer")  # the sum of both branches, which has no products
        first_rows = [row for row in coarse_rows if row.layer == 0 and row.part in parts]
        start = [row for row in first_rows if row.error_in < products]
        alike = [0.2 < row.excess < MEDIAN and row.excess_few < 8 * row.excess for row in start]
        if start and all(alike) and not find_faults(coarse_rows, coarser):
            return coarser, coarse_rows
    return None


def _find_name(size):
    """Return the name of the dtype whose relative rounding error is `size`."""
    return next(name for name, value in ROUNDING.items() if value == size)


def _find_shift(first, second):
    """Find whether the states of one run are recorded one layer later than those of the other.

    Returns:
        1 if the second run's first state is that after layer 0 of the first run; −1 for the
        opposite; 0 for neither.
    """
    if first.shape != second.shape or min(first.num_layers, second.num_layers) < 2:
        return 0
    a, b = next(first.read_layers()), next(second.read_layers())

    def distance(x, y):
        """Computes ‖x − y‖/‖x‖."""
        return np.linalg.norm(x - y) / max(np.linalg.norm(x), 1e-300)

    at_place = distance(a.before, b.before)
    later, earlier = distance(a.after, b.before), distance(b.after, a.before)
    if min(later, earlier) < 0.1 * at_place and min(later, earlier) < 0.1:
        return 1 if later < earlier else -1
    return 0


def _answer_shift(first, second, alignment, rounding, shift):
    """Return the answer where the states of one recording are off by one layer.

    Args:
        first, second: The recordings.
        alignment: Which tokens of the two are compared.
        rounding: The expected rounding.
        shift: 1 if the second recording begins one layer late, −1 if the first does.
    """
    late, early = (second, first) if shift > 0 else (first, second)
    kind = f"the states of {late.path.name} are off by one layer"
    sentence = (
        f"{kind}: its first state is the one after layer 0 of {early.path.name}. `residual` begins "
        "with the state before layer 0."
    )
    return Agreement(False, None, kind, sentence, (), rounding, float("nan"), {}, alignment.remarks)
