"""Which mask of a model's call says which tokens of an attention exist."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from rank_collapse.watch import torch_products as products
from rank_collapse.watch.recorder import Notes
from rank_collapse.watch.torch_frames import Frame, list_sides
from rank_collapse.watch.torch_pieces import Run
from rank_collapse.watch.torch_products import Weights
from rank_collapse.watch.torch_tokens import Tokens

_TOKEN_MASK = re.compile(
    r"((attention|attn|padding|pad|key_padding|src_key_padding|input|token|src|source|valid|key|text|"
    r"seq|sequence|x|decoder_attention)_?)?masks?"
)
_FOREIGN_MASK = re.compile(r"(memory|encoder|cross)_.*")  # of tokens that another stream attends to
CROSSING = 1e-3  # mean weight of keys that a mask leaves out, above which attention reads them


@dataclasses.dataclass(eq=False)
class Crossed:
    """A mask of the model's call that attention reads past: its own, or that of another stream.

    Attributes:
        name: Name of the argument.
        stream: Name of the first attention of the stream.
        runs: Attentions that read past it.
    """

    name: str
    stream: str
    runs: list[Run]


class CallMasks:
    """The masks of one step, each of the first stream of tokens whose attention obeys it.

    A mask that no attention obeys counts in the first stream that it fits, with a remark. If
    another stream obeys it later, the attentions of the first get back the tokens that it took.

    Args:
        has_mask: Whether the watch has its own mask, which then counts instead.
        notes: Notes about metrics that are left out.

    Attributes:
        watch_mask: The mask of the watch, which says which tokens exist, or None.
    """

    def __init__(self, has_mask: bool, notes: Notes):
        self._has_mask, self._notes = has_mask, notes
        self._streams: dict[str, str] = {}  # {name of a mask: the stream that obeys it}
        self._crossed: dict[str, Crossed] = {}  # {name of a mask that attention reads past: ...}
        self.watch_mask: Any = None

    def find(
        self,
        frames: Sequence[Frame],
        tokens: Tokens,
        weights: Weights,
        fits: Callable[[Tensor], bool],
        hides: Callable[[Tensor], bool],
        stream: str,
    ) -> tuple[Tensor | None, Crossed | None]:
        """Finds Bool [e, n] of the watched call, or of one inside it; None if there is none.

        A mask of tokens counts even where attention crosses it.

        Args:
            frames: The modules that run.
            tokens, weights: Tokens and weights of the product.
            fits: Whether a mask can be the mask of these tokens.
            hides: Whether attention hides the tokens that a mask leaves out.
            stream: Name of the first attention of the stream.

        Returns:
            The mask; and `Crossed` where attention reads past it, else None.
        """
        shape = tokens.index.shape
        if self._has_mask:
            is_one = isinstance(self.watch_mask, Tensor) and self.watch_mask.shape == shape
            return (self.watch_mask.bool() if is_one else None), None
        masks = [
            (name, *list_sides(name, mask))
            for name, mask in _list_masks(frames)
            if mask.shape == shape and self._streams.get(name, stream) == stream
        ]
        for name, *sides in masks:
            crossed = self._crossed.get(name)
            for side in sides:
                if fits(side) and (crossed is None or crossed.stream == stream or hides(side)):
                    self._streams[name] = stream
                    _restore_runs(self._crossed.pop(name, None))
                    return side, None
        for name, *sides in masks:
            is_of_others = name in self._crossed and self._crossed[name].stream != stream
            if _TOKEN_MASK.fullmatch(name) and shape[0] != shape[1] and not is_of_others:
                for side in sides:
                    if products.compute_crossing(tokens, weights, side) <= CROSSING:
                        self._streams[name] = stream
                        return side, None
                return sides[0], self._crossed.setdefault(name, Crossed(name, stream, []))
        return None, None

    def end_pass(self) -> None:
        """Says which masks of the model's call attention reads past."""
        for crossed in self._crossed.values():
            for run in crossed.runs:
                text = f"attention reads tokens that the argument {crossed.name} leaves out"
                self._notes.remark(run.name, f"reading past {crossed.name}", text)


def _restore_runs(crossed):
    """Counts all tokens of the attentions that read past a mask, which is of another stream.

    Args:
        crossed: The mask; None for none.
    """
    for run in crossed.runs if crossed else ():
        spare = run.spare
        run.tokens, run.scalars = spare.tokens, spare.scalars
        run.pieces, run.products, run.spare = spare.pieces, spare.products, None


def _list_masks(frames):
    """Lists (name, tensor) of the masks that the modules that run were given for their tokens.

    A mask that a module was given only for other tokens, to which its cross-attention attends, does
    not count, under whatever name the modules around it have it.

    Args:
        frames: The modules, the outermost first.
    """
    masks, foreign = [], set()
    for frame in reversed(frames):
        other = {id(mask) for name, mask in frame.masks if _FOREIGN_MASK.fullmatch(name)}
        here = [(n, mask) for n, mask in frame.masks if not _FOREIGN_MASK.fullmatch(n)]
        foreign |= other - {id(mask) for _, mask in here} - {id(mask) for _, mask in masks}
        masks = [(n, mask) for n, mask in here if id(mask) not in foreign] + masks
    return masks
