"""The attentions of a measured pass, each with the scalars of its tokens and of its weights."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rank_collapse.printed import format_count
from rank_collapse.watch import torch_products as products
from rank_collapse.watch.recorder import LeftOut, Notes
from rank_collapse.watch.torch_call_masks import CallMasks
from rank_collapse.watch.torch_frames import Frame
from rank_collapse.watch.torch_functions import floats_in
from rank_collapse.watch.torch_gradients import choose_shares
from rank_collapse.watch.torch_origins import Origins
from rank_collapse.watch.torch_pieces import Piece, Run, join_documents
from rank_collapse.watch.torch_products import Weights, measure_tokens, measure_weights
from rank_collapse.watch.torch_tags import Tag, Term, join_pasts
from rank_collapse.watch.torch_tokens import (
    find_allowed_tokens,
    find_shared_sources,
    join_tokens,
    read_tokens,
)

Select = Callable[[str, nn.Module], bool]


class Runs:
    """The attentions of one step.

    Args:
        select: Whether an attention counts, by its dotted name and the module.
        tokens: "read", "raw" or "unit".
        has_mask: Whether the watch has its own mask.
        notes: Notes about metrics that are left out.

    Attributes:
        attentions: Attentions in order.
        masks: The masks that say which tokens exist.
    """

    def __init__(self, select: Select, tokens: str, has_mask: bool, notes: Notes):
        self._select, self._kind, self._notes = select, tokens, notes
        self.masks = CallMasks(has_mask, notes)
        self.attentions: list[Run] = []

    def list_inside(self, frame: Frame) -> list[Run]:
        """Lists the attentions that ran inside a module."""
        return [run for run in self.attentions if frame.number in run.frames]

    def drop_inside(self, frame: Frame) -> None:
        """Drops the attentions that ran inside a module, which may be tried again."""
        self.attentions = [run for run in self.attentions if frame.number not in run.frames]
        spares = [run.spare for run in self.attentions if run.spare]
        for run in self.attentions + spares:
            run.pieces = [piece for piece in run.pieces if piece.frame < frame.number]

    def add_product(
        self,
        frames: Sequence[Frame],
        origins: Origins,
        term: Term,
        weights: Weights,
        refusal: str,
        value: Tag,
        result: Tensor,
        parts: Sequence[Term] = (),
    ) -> None:
        """Measures a product, as one of the innermost module with parameters that made its queries.

        Args:
            frames: The modules that run.
            origins: Origins of the pass.
            term: The product of queries and keys.
            weights: Weights of queries and heads.
            refusal: Why they are not weights of attention; "" if they are.
            value: Tag of the values.
            result: Result of the product.
            parts: All products of the same map's queries that weights are made of, such as one for
                each example; () for `term` alone.

        Raises:
            LeftOut: Its weights cannot be measured, or nothing of it.
        """
        owner = _find_owner(frames, term)
        try:
            tokens = read_tokens(term)
            if len(parts) > 1 and len(weights.p) != len(tokens.order):
                tokens = join_tokens(tokens, parts, weights.allowed)
        except LeftOut as error:
            if refusal:
                raise
            tokens, refusal = None, str(error)
        maps = term.query.list_maps()
        sources = tokens.sources if tokens else tuple(linear_map.source for linear_map in maps)
        tags = [source.tag for source in sources]
        past = join_pasts(tags)
        names = tuple(dict.fromkeys([*past, owner.name]))
        origins.begin(result, tags, names)
        if not self._select(owner.name, owner.module):
            return
        around = tuple(frame.number for frame in frames[: frames.index(owner) + 1])
        if tokens:
            is_cross = tokens.is_cross
        else:
            is_cross = find_shared_sources(maps, term.query, term.key) is None
        run = self._find_run(owner.name, around, sources, is_cross, past)
        if run is None:
            self._notes.leave_out(
                owner.name, "later calls", "of calls on different tokens the first is measured"
            )
            return
        if run.turn == 0:
            run.shares += _list_shares(parts or [term], value, sources, is_cross, owner)
        if tokens is None:
            raise LeftOut(refusal)
        weights, refusal = _match_weights(weights, tokens, term, refusal)
        documents, crossed = self._find_documents(frames, tokens, weights, names)
        if crossed:
            if run.spare is None:
                run.spare = dataclasses.replace(
                    run, tokens=None, scalars={}, pieces=[], products=[]
                )
                crossed.runs.append(run)
            whole, _ = self._find_documents(frames, tokens, weights, names, has_masks=False)
            _add_piece(run.spare, owner, tokens, whole, weights, refusal)
        _add_piece(run, owner, tokens, documents, weights, refusal)
        if refusal:
            raise LeftOut(refusal)

    def end_call(self, frame: Frame) -> None:
        """Measures the tokens of a module's call that ends, and keeps the scalars of its products.

        Args:
            frame: Frame of the call.
        """
        spares = [run.spare for run in self.attentions if run.spare]
        for run in self.attentions + spares:
            pieces = [piece for piece in run.pieces if piece.frame == frame.number]
            if pieces:
                run.pieces = []
                self._end_pieces(run, pieces)

    def _end_pieces(self, run, pieces):
        """Measures the tokens of the first call of a run; the other calls must have the same
        tokens.

        Args:
            run: The run.
            pieces: Pieces of all products in the call.
        """
        if len(pieces) > 1:
            pieces = join_documents(pieces)
        first = pieces[0]
        is_first = first.frame == run.frames[-1]
        if is_first:
            run.tokens = first.tokens.index, first.documents
        indices = [piece.tokens.index for piece in pieces]
        if not run.tokens or not all(torch.equal(run.tokens[0], index) for index in indices):
            run.tokens, run.scalars = None, {}
            self._notes.leave_out(run.name, "tokens", "its products have different tokens")
        elif is_first and self._kind == "read" and not run.is_cross:
            x, index = first.tokens.matrix[first.tokens.index], first.tokens.index
            documents = first.documents.masked_fill(products.find_repeated(index), -1)
            scalars = self._notes.attempt(run.name, "tokens", measure_tokens, x, documents, "read")
            run.scalars = scalars or {}
        for piece in pieces:
            if piece.num_keys < 2:
                examples = format_count(len(piece.tokens.index), "example")
                reason = f"{examples} of {format_count(piece.num_keys, 'key')}"
                self._notes.leave_out(run.name, "weights", reason)
            elif piece.scalars:
                by_head = {name: values.mean(dim=0) for name, values in piece.scalars.items()}
                run.products.append((piece.frame, by_head))

    def _find_run(self, name, around, sources, is_cross, past):
        """Finds the run that a product is of; None if its module ran already on other tokens.

        Args:
            name: Name of the attention.
            around: Numbers of the modules around it, and its own.
            sources: Tensors from which its queries were made.
            is_cross: Whether keys are of other tokens.
            past: Names of the attentions from which the queries come.
        """
        key = sources, is_cross, re.sub(r"\d+", "*", name), around[-2:-1]
        turn = sum(run.name == name for run in self.attentions)
        run = next((run for run in self.attentions if run.key == key), None)
        if run is None and (name in past or not turn):
            run = Run(name, is_cross, around, turn, key)
            self.attentions.append(run)
        return run

    def _find_documents(self, frames, tokens, weights, names, *, has_masks=True):
        """Finds the document of each token, in packed rows with several documents as in others, see
        `number_documents`.

        Which tokens exist comes from a mask of the call that fits attention, or else from the keys
        that attention itself leaves out. Cross-attention takes the documents of the attention
        before it.

        Args:
            frames: The modules that run.
            tokens: Tokens of the queries.
            weights: Weights in the order of examples.
            names: Names of the attentions from which the tokens come, and of this one.
            has_masks: Whether masks of the call count.

        Returns:
            Int [e, n], −1 for tokens that do not exist; and `Crossed` where attention reads past
            the mask of the call that decides it, else None.
        """
        shape, among = tokens.index.shape, find_allowed_tokens(tokens, weights.allowed)
        if tokens.is_cross:
            earlier = [r.tokens for r in self.attentions if r.name in names and not r.is_cross]
            if earlier and earlier[-1] and earlier[-1][1].shape == shape:
                return earlier[-1][1], None
        exists, crossed = None, None
        if not tokens.is_cross and has_masks:
            fits = functools.partial(products.fits_mask, allowed=among)
            if among is None:  # of which keys are tokens nothing is known
                fits = torch.all if weights.allowed.all() else torch.any
            hides = functools.partial(products.hides_others, allowed=among)
            exists, crossed = self.masks.find(frames, tokens, weights, fits, hides, names[0])
        if exists is None:
            all_exist = torch.ones(shape, dtype=torch.bool, device=tokens.index.device)
            exists = all_exist if among is None else products.find_tokens(among)
        return products.number_documents(exists.expand(shape), among, tokens.index), crossed

    def measure_output(self, frame: Frame, output: Any) -> None:
        """Measures the output of a module that contains one attention; of several such modules, one
        inside the other, the outermost counts.

        Args:
            frame: The module's call.
            output: Output of the module.
        """
        runs = [run for run in self.list_inside(frame) if not run.is_cross]
        if self._kind == "read" or len(runs) != 1 or runs[0].tokens is None:
            return
        for run in (runs[0], runs[0].spare):
            if run is not None and run.tokens is not None:
                scalars = self._notes.attempt(run.name, "tokens", self._measure_states, run, output)
                run.scalars = scalars or {}

    def _measure_states(self, run, output):
        """Measures the output of a layer, whose tokens stand as those that its attention reads.

        Args:
            run: The attention inside the layer.
            output: Output of the layer; its first tensor of floats counts, [e, n, d] or [tokens,
                d].

        Raises:
            LeftOut: The output has other tokens, or it is ambiguous which axis they are on.
        """
        states = [a.detach() for a in floats_in(output) if a.ndim > 1 and not a.is_complex()]
        index, documents = run.tokens
        if not states or states[0][..., 0].numel() != index.numel():
            shapes = [tuple(a.shape) for a in states[:1]]
            raise LeftOut(f"its results of shapes {shapes} do not have the tokens that it reads")
        x, places = states[0], torch.arange(index.numel(), device=index.device)
        order_matters = min(index.shape) > 1
        is_square = order_matters and x.shape[0] == x.shape[1]
        if is_square and not torch.equal(index.flatten(), places):
            raise LeftOut("equal numbers of examples and tokens leave the axes ambiguous")
        is_swapped = order_matters and x.shape[:2] == index.shape[::-1] != index.shape
        if is_swapped and torch.equal(index.flatten(), places):
            raise LeftOut("its results have tokens first, and its attention reads examples first")
        if x.shape[:2] != index.shape:
            x = x.reshape(-1, x.shape[-1])[index]
        return measure_tokens(x, documents, self._kind)


def _add_piece(run, owner, tokens, documents, weights, refusal):
    """Adds a product to a run, with the scalars of its weights.

    Args:
        run: The run.
        owner: Frame of its module's call.
        tokens: Tokens of the queries.
        documents: Documents of these tokens.
        weights: Weights in the order of examples.
        refusal: Why the weights are not measured; "" if they are.
    """
    if not run.pieces and owner.number == run.frames[-1]:
        run.tokens = tokens.index, documents  # for attention to other tokens in this call
    if tokens.has_own_keys():
        allowed = weights.allowed & (documents >= 0)[:, None]
        weights = weights._replace(allowed=allowed)
    piece = Piece(owner.number, tokens, documents, weights.allowed.shape[-1], {})
    run.pieces.append(piece)
    if not refusal:
        piece.scalars.update(measure_weights(weights, documents))


def _list_shares(parts, value, sources, is_cross, owner):
    """Lists the parameters of queries, keys and values of each product, for their gradients.

    Args:
        parts: The products.
        value: Tag of the values.
        sources: Tensors from which the queries were made.
        is_cross: Whether keys are of other tokens.
        owner: Frame of the attention.
    """
    shares = []
    for part in parts:
        shared = find_shared_sources(part.query.list_maps(), part.query, part.key)
        if (shared is None) == is_cross:  # keys of positions are others
            tags = part.query, part.key, value
            shares.append(choose_shares(tags, sources, owner.number))
    return shares


def _match_weights(weights, tokens, term, refusal):
    """Orders weights by the examples of the tokens.

    Args:
        weights: Weights in the order of the product.
        tokens: Tokens of the queries.
        term: The product of queries and keys.
        refusal: Why they are not weights of attention; "" if they are.

    Returns:
        The weights, which are empty where they do not fit the queries and keys; and the refusal,
        which then says so.
    """
    n, m = (term.sizes[c] for c in term.letters[2][-2:])
    shape = weights.allowed.shape[-2:]
    if shape[0] != n or (shape[1] != m and tokens.has_own_keys()):
        refusal = refusal or f"weights of {shape[0]} × {shape[1]} for {n} queries and {m} keys"
        weights = products.allow_all(n, m, weights.p.device)
    if len(weights.p) == len(tokens.order):
        return products.sort_examples(weights, tokens.order, len(tokens.index)), refusal
    counts = f"{len(weights.p)} matrices of weights for {len(tokens.order)} of queries"
    weights = products.keep_allowed(weights, tokens.order, len(tokens.index))
    return weights, refusal or counts


def _find_owner(frames, term):
    """Finds the innermost module with parameters in which the queries of a product were made.

    If no linear map made the queries, the module that made the keys counts.

    Args:
        frames: The modules that run now, the outermost first.
        term: The product of queries and keys.

    Raises:
        LeftOut: No running module made them.
    """
    for tag in (term.query, term.key):  # queries may be tokens as they are
        numbers = {number for linear_map in tag.maps for number in linear_map.frames}
        for frame in reversed(frames):
            if frame.number in numbers and next(frame.module.parameters(), None) is not None:
                return frame
    raise LeftOut("no module with parameters made its queries")
