"""Rows of several processes of one training run, without a collective that could wait for ever.

Each process that watches says so in the store by which torch's processes met, and puts its rows
there; the first takes those of the others and waits for a few seconds at most.
"""

import datetime
import json
from typing import Any

from torch import distributed

WAIT = datetime.timedelta(seconds=10)


def rank() -> int:
    """Of this process; 0 where there is one alone."""
    return distributed.get_rank() if is_one_of_several() else 0


def is_one_of_several() -> bool:
    """Whether torch's processes have met."""
    return distributed.is_available() and distributed.is_initialized()


class Processes:
    """The other processes that watch the same model.

    Args:
        name: Of the watch, the same on each process.
    """

    def __init__(self, name: str):
        self._name, self._lost = f"rank_collapse/{name}", set()
        if rank():
            self._store().set(f"{self._name}/{rank()}", "")

    @staticmethod
    def _store():
        return distributed.distributed_c10d._get_default_store()

    def gathered(self, step: int, row: dict[str, Any]) -> list[dict[str, Any]]:
        """On the first process the rows of all that watch, its own first; elsewhere that alone."""
        if not is_one_of_several():
            return [row]
        store, rows = self._store(), [row]
        if rank():
            store.set(f"{self._name}/{rank()}", "")
            store.set(f"{self._name}/{step}/{rank()}", json.dumps(row))
            return rows
        for other in range(1, distributed.get_world_size()):
            key = f"{self._name}/{step}/{other}"
            if other in self._lost or not store.check([f"{self._name}/{other}"]):
                continue
            try:
                store.wait([key], WAIT)
                rows.append(json.loads(store.get(key)))
                store.delete_key(key)
            except Exception:  # of another kind by backend: no further wait for that process
                self._lost.add(other)
        return rows


def means_of(rows: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """{name: {number of a layer, or -1: mean over the rows that have it}}."""
    every: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        for name, own in row.items():
            for number, value in own.items():
                every.setdefault(name, {}).setdefault(int(number), []).append(value)
    return {
        name: {number: sum(v) / len(v) for number, v in sorted(own.items())}
        for name, own in every.items()
    }
