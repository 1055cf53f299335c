"""What is left out and why: an exception while measuring becomes a reason, said once."""

import contextlib
import logging
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("rank_collapse")


class LeftOut(ValueError):
    """What is not measured here; the text says why."""


class Notes:
    """Reasons by layer and by what is left out.

    Attributes:
        reasons: {(number of a layer or None, what): why}, the last of each.
    """

    def __init__(self):
        self.reasons: dict[tuple[int | None, str], str] = {}
        self._said: set[str] = set()
        self._stopped: set[tuple[int | None, str]] = set()

    def attempt(self, layer: int | None, what: str, measure: Callable[..., Any], *args: Any) -> Any:
        """measure(*args), or None where it fails, as a reason.

        What fails in a layer by another error than `LeftOut` is not tried again there.
        """
        if (layer, what) in self._stopped:
            return None
        try:
            found = measure(*args)
        except LeftOut as error:
            self.leave_out(layer, what, str(error))
            return None
        except Exception as error:
            if layer is not None:
                self._stopped.add((layer, what))
            self.leave_out(layer, what, f"{type(error).__name__}: {error}")
            return None
        self.reasons.pop((layer, what), None)
        return found

    def leave_out(self, layer: int | None, what: str, why: str) -> None:
        """Keeps a reason; the first time that it comes it is also a warning."""
        self.reasons[layer, what] = why
        if why not in self._said:
            self._said.add(why)
            of = "" if layer is None else f" of layer {layer}"
            self.warn(f"watch: no {what}{of}: {why}")

    def warn(self, text: Any) -> None:
        """A warning of the logger `rank_collapse`, whose handlers may raise."""
        with contextlib.suppress(Exception):
            _log.warning("%s", text)
