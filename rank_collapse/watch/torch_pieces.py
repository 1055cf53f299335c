"""The runs of attentions in a pass, and the pieces of one: measures of single products."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rank_collapse.watch.torch_tokens import Tokens


class Piece(NamedTuple):
    """What one product gives to a run, until the call of its module ends.

    Attributes:
        frame: Number of the call.
        tokens: Tokens of its queries.
        documents: Documents of its tokens, as `number_documents` gives them.
        num_keys: m.
        scalars: {name: by document and head [k, h]} of its weights.
    """

    frame: int
    tokens: Tokens
    documents: Tensor
    num_keys: int
    scalars: dict[str, Tensor]


def join_documents(pieces: Sequence[Piece]) -> list[Piece]:
    """Joins products for one document each, whose tokens become one row [1, n] in their order.

    Args:
        pieces: Pieces of one call. They stay as they are where a token of one piece attends to a
            token of another, or belongs to two.
    """
    places, order = torch.cat([piece.tokens.index.flatten() for piece in pieces]).sort()
    is_apart = all(piece.tokens.has_own_keys() for piece in pieces)
    if not is_apart or not (places.diff() > 0).all():
        return list(pieces)
    documents = torch.cat([piece.documents.flatten() for piece in pieces])[order]
    scalars, measured = {}, [piece.scalars for piece in pieces if piece.scalars]
    for name in dict.fromkeys(name for columns in measured for name in columns):
        columns = [a.get(name, torch.zeros_like(a["attention_entropy"])) for a in measured]
        scalars[name] = torch.cat(columns)  # the mass that no key has is 0 where it is none
    tokens = pieces[0].tokens._replace(index=places[None])
    num_keys = max(piece.num_keys for piece in pieces)
    return [Piece(pieces[0].frame, tokens, documents[None], num_keys, scalars)]


@dataclasses.dataclass(eq=False)
class Run:
    """One run of an attention on some tokens.

    Attributes:
        name: Name of the module that it is credited to.
        is_cross: Whether keys are of other tokens.
        frames: Numbers of the modules around it, and its own.
        turn: How often its module had run before.
        key: Identity that all its products share.
        tokens: (index, documents) of its tokens, as `Piece` has them; None where products are of
            different tokens.
        scalars: Measures of its tokens, and norms of gradients.
        pieces: Pieces of the products in a call that has not ended.
        products: [(number of a frame, {name: by head [h]}), ...] of each product; for a call with
            one product for each document, their means.
        shares: Parameters that made queries, keys and values, for each product; only in the first
            turn.
        spare: The same run with all tokens that attention reads, where it reads past a mask of the
            model's call; until it is known whether another stream has that mask.
    """

    name: str
    is_cross: bool
    frames: tuple[int, ...]
    turn: int
    key: Any
    tokens: tuple[Tensor, Tensor] | None = None
    scalars: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    products: list[tuple[int, dict[str, Tensor]]] = dataclasses.field(default_factory=list)
    shares: list[Any] = dataclasses.field(default_factory=list)
    spare: "Run | None" = None
