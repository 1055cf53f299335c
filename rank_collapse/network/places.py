"""Places of one layer where values are edited and kept while it is computed; see `edits`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Places:
    """The places of one layer as it is computed, where values are edited and kept."""

    edits: Mapping[str, Callable] | None = None
    layer: Any = 0
    keep: tuple[str, ...] = ()  # names of the places whose values are asked for
    prefix: str = ""  # before the names, such as "cross_"
    # Values so far by name: those of edited places before the edit, and those after it.
    unedited: dict[str, Any] = dataclasses.field(default_factory=dict)
    kept: dict[str, Any] = dataclasses.field(default_factory=dict)

    def edits_at(self, name: str) -> bool:
        """Whether there is an edit of the place."""
        return self.edits is not None and self.prefix + name in self.edits

    def wants(self, name: str) -> bool:
        """Whether the value of the place is edited or kept, and so computed separately."""
        return self.edits_at(name) or self.prefix + name in self.keep

    def __call__(self, name: str, value: Any) -> Any:
        """The value after the edit of this place, which is kept where that is asked for."""
        edits, full = self.edits_at(name), self.prefix + name
        if edits:
            self.unedited[full] = value
            value = self.edits[full](value, self.layer)
        if full in self.keep:
            self.kept[full] = value
        return value
