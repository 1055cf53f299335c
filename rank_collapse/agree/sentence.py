"""The answer of a comparison in one or two sentences."""

from typing import Any

from rank_collapse.agree.alignment import OTHER_ORDER
from rank_collapse.agree.differences import Rounding
from rank_collapse.agree.verdict import Fault, Row


def write_sentence(
    agree: bool | None,
    place: dict[str, Any] | None,
    kind: str | None,
    rows: list[Row],
    faults: list[Fault],
    rounding: Rounding,
    embedding: float,
    where: str,
) -> str:
    """Write the answer of a comparison in words: whether two runs agree, where they first differ
    and by how much.

    Args:
        agree: Whether they agree to rounding; None if the inputs of too many sublayers differ.
        place: Layer and sublayer of the first fault; None if there is none, or it is before layer
            0.
        kind: Name of the mistake that explains the fault; None if none is recognised.
        rows: Errors of all sublayers, as medians and quantiles over tokens.
        faults: Sublayers that add more error than rounding explains.
        rounding: Rounding of the coarser run.
        embedding: Median relative error before the first layer.
        where: Which tokens differ there, and by how much.
    """
    if agree is None:
        row = next(row for row in rows if not row.judged)
        return (
            f"cannot tell: from layer {row.layer} on the inputs of the sublayers differ by "
            f"{row.error_in:.2g} of their size; all before is {rounding.name} rounding."
        )
    if agree:
        if all(row.added_most == 0 for row in rows) and embedding == 0:
            return "the same numbers in all layers."
        most = max((r for r in rows if r.judged), key=lambda row: row.excess)
        text = (
            f"agree to {rounding.name} rounding (largest {most.excess:.2g} times the prediction, "
            f"layer {most.layer}, {most.part})."
        )
        late = next((row for row in rows if not row.judged), None)
        if late is not None:
            text += (
                f" From layer {late.layer} on the inputs differ by {late.error_in:.2g} of their "
                "size, so these layers are not judged."
            )
        return text
    if place is None:
        # The error is of tokens that were put into one order.
        amount = "" if kind == OTHER_ORDER else f" {where}"
        return f"differ before layer 0{amount}: {kind}."
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
