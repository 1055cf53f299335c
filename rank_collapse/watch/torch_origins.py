"""Where tensors come from: the linear maps behind queries and keys, and the tokens that maps read.

While a measured pass runs, each tensor has a `Tag`. It names the linear maps that made the tensor.
Its followers are the numbers of the entries that a map returned, or the softmax behind weights;
they are moved through the same views as the tensor when they are needed. So no shape is guessed,
and no tensor is changed.
"""

import functools
import itertools
import string
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from rank_collapse.watch.torch_followers import join_followers, join_tags, move_followers
from rank_collapse.watch.torch_functions import (
    EXPONENTIALS,
    FACTORS,
    GATES,
    JOINS,
    MOVES,
    PRODUCTS,
    QUOTIENTS,
    SOFTMAX,
    Product,
    floats_in,
    reorders,
    tensors_in,
)
from rank_collapse.watch.torch_maps import see_map
from rank_collapse.watch.torch_masks import (
    SIDES,
    is_in_place,
    makes_numbers,
)
from rank_collapse.watch.torch_scores import see_bias_masks, see_masks, see_product, see_softmax
from rank_collapse.watch.torch_tag_table import TagTable
from rank_collapse.watch.torch_tags import Tag, join_streams


class Origins(TagTable):
    """The tags of one pass, recorded from the functions and modules that run."""

    def see_function(
        self,
        function: object,
        product: Product | None,
        args: object,
        kwargs: object,
        result: object,
    ) -> None:
        """Records where the results of a function come from.

        Args:
            function: Function of torch.
            product: Product that it computes, as `read_product` reads it.
            args, kwargs, result: Args, kwargs and result of its call.
        """
        is_assignment = function is Tensor.__setitem__
        outputs, inputs = (
            tensors_in(args[0] if is_assignment else result),
            tensors_in([args, kwargs]),
        )
        floats = floats_in(inputs)
        if makes_numbers(function) or not (inputs or is_assignment):
            for output in floats_in(outputs):
                self.tags[output] = Tag(is_constant=True)
            return
        if product is not None and see_product(self, function, product, floats, outputs[0]):
            return
        is_decided = any(self.is_content(a) for a in inputs)
        if product is not None and product.is_elementwise():
            function = torch.mul
        if floats_in(outputs) and floats:
            self._derive_tags(function, (args, kwargs), floats, floats_in(outputs))
        if is_assignment or is_in_place(function):
            for target in tensors_in(args[0] if args else kwargs)[: None if args else 1]:
                self._see_write(target, args, is_assignment)
        for output in outputs:
            if is_decided and not self.has(output):
                self.record(output, Tag())
            if is_decided:
                tag = self.tags[output]
                if tag.parameters:  # which of several weights
                    continue
                tag.is_content, tag.is_constant = True, False
                if tag.terms or not (tag.maps or tag.stream):
                    see_masks(self, function, args, kwargs, output, tag)
                else:
                    see_bias_masks(self, function, args, kwargs, output, tag)
        if function in SOFTMAX | EXPONENTIALS and outputs[0].ndim > 1:
            see_softmax(self, function, floats[0], outputs[0])

    def _see_write(self, target, args, is_assignment):
        """Records a write into a tensor by an index, or into a view of it.

        The numbers that follow the written values (of map outputs, or of query-key pairs) replace
        those at the same places of the tensor. If the tensor is a view, its base gets the records
        of both.

        Args:
            target: The tensor, or the view.
            args: Args of the call.
            is_assignment: Whether by an index.
        """
        if is_assignment and isinstance(args[2], Tensor) and self.has(target) and self.has(args[2]):

            def write(numbers, name):
                """Writes the numbers of the assigned tensor, by name, at the index of the
                assignment."""
                numbers[args[1]] = self.number(args[2], name)

            self._write_followers(target, self.tags[target], self.tags[args[2]], write)
        base = target._base
        if base is None or not self.has(target) or self.is_constant(target):
            return
        view, earlier = self.tags[target], self.tag(base)
        tag = join_tags([t for t in (earlier, view) if not t.is_constant])
        tag.terms = tuple(dict.fromkeys(earlier.terms + view.terms))
        tag.is_softmax = earlier.is_softmax or view.is_softmax
        tag.is_chosen = earlier.is_chosen or view.is_chosen
        tag.is_unread = earlier.is_unread or view.is_unread or "allowed" in view.followers
        tag.followers = dict(earlier.followers)
        place = target.storage_offset() - base.storage_offset()

        def write_view(numbers, name):
            """Writes the numbers of the view, by name, at its place in the numbers of the base."""
            part = numbers.as_strided(target.shape, target.stride(), place)
            part.copy_(self.number(target, name, view))

        self._write_followers(base, tag, view, write_view)
        self.record(base, tag)

    def _write_followers(self, tensor, tag, written, write):
        """Writes the numbers that follow written values into the numbers that follow a tensor.

        Args:
            tensor, tag: The tensor, and its tag, the record of its origin.
            written: Tag of the written values.
            write: write(numbers of the tensor, name of the numbers), which writes the numbers of a
                part.
        """
        shape, stride, device = tensor.shape, tensor.stride(), tensor.device
        names = [n for n in {**tag.followers, **written.followers} if n not in (*SIDES, "softmax")]
        for name in names:
            earlier = tag.followers.get(name)

            def make_numbers(name=name, earlier=earlier):
                """Writes the numbers into those of the tensor before; −1 where nothing is known."""
                numbers = torch.empty_strided(shape, stride, dtype=torch.long, device=device)
                numbers.copy_(earlier()) if earlier else numbers.fill_(-1)
                write(numbers, name)
                return numbers

            tag.followers[name] = functools.cache(make_numbers)

    def see_module(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Records a module whose code torch does not show: a linear map, if it can be one.

        Args:
            module: The module.
            inputs: All arguments of the module's call.
            output: First tensor of the output.
        """
        tensors, parameters = floats_in(inputs), list(module.parameters())
        if not tensors:
            return
        x, matrices = tensors[0], [parameter for parameter in parameters if parameter.ndim > 1]
        if matrices and x.shape[:-1] == output.shape[:-1] and not [*module.children()]:
            # The layout of the matrix is hidden: its first axis is taken for the outputs, z.
            axes = string.ascii_lowercase[: x.ndim - 1]
            product = Product(x, matrices[0], (f"{axes}y", "z", f"{axes}z"))
            see_map(self, product, parameters, output)
        else:
            self._derive_tags(None, (), tensors, [output])

    def _derive_tags(self, function, arguments, inputs, outputs):
        """Records another function: its results come from where its arguments come from.

        Args:
            function, arguments: The call, with (args, kwargs); no function for code that torch does
                not show.
            inputs, outputs: Tensors of floats that the function reads and returns.
        """
        tagged = [a for a in inputs if self.has(a) or self.is_constant(a)]
        pairs = [(self.tag(a), a) for a in tagged]  # (tag, tensor)
        moving = [(tag, a) for tag, a in pairs if not tag.is_constant]
        if not moving and len(tagged) == len(inputs):
            self._record_constants(function, arguments, [tag for tag, _ in pairs], outputs)
            return
        pairs = moving or [(self.tag(a), a) for a in inputs if not self.is_constant(a)]
        tags = [tag for tag, _ in pairs]
        is_move = function in MOVES and (len(pairs) == 1 or function in JOINS)
        for i, output in enumerate(outputs):
            makers = _select_makers(function, pairs, output)
            tag = join_tags(tags)
            for earlier in (t for t, a in pairs if a is output):  # changed in place
                tag.is_chosen, tag.is_unread = earlier.is_chosen, earlier.is_unread
            tag.maps = frozenset().union(*(maker.maps for maker, _ in makers))
            same_size = [t for t, a in pairs if a.numel() == output.numel()]
            tag.stream = join_streams(same_size or tags)
            if function not in PRODUCTS or len(pairs) == 1:  # a mixture has no weights
                tag.terms, tag.is_softmax = _merge_terms(pairs, output)
            tag.is_exponential = function in EXPONENTIALS or any(t.is_exponential for t in tags)
            tag.is_gate = function in GATES or all(t.is_gate for t in tags)
            if is_move:
                names = dict.fromkeys(itertools.chain.from_iterable(t.followers for t in tags))
                for name in names:
                    followers = pytree.tree_map(self._find_follower(name), arguments)
                    move = functools.partial(move_followers, function, followers, i)
                    tag.followers[name] = functools.cache(move)
            elif not reorders(function):
                tag.followers = join_followers([t for t, a in makers if a.shape == output.shape])
            self.record(output, tag)

    def _record_constants(self, function, arguments, tags, outputs):
        """Records the results of a function of constants.

        They begin a stream if the function looks tokens up; otherwise they are constants.

        Args:
            function, arguments, outputs: See `_derive_tags`.
            tags: Tags of the constants.
        """
        if _looks_up(function, arguments):
            for output in outputs:
                self.begin(output)
            return
        parameters = dict.fromkeys(itertools.chain.from_iterable(t.parameters for t in tags))
        joined = tuple(floats_in(arguments)) if function in JOINS else ()
        for output in outputs:
            self.record(output, Tag(is_constant=True, parameters=tuple(parameters), joined=joined))

    def _find_follower(self, name):
        """Returns a function that finds the follower of a tensor: what makes numbers of its shape.

        A tensor without this follower gets a function that makes −1 in all entries. Other arguments
        stay as they are.

        Args:
            name: Name of the followers.
        """

        def find(argument):
            """Returns the function that makes the numbers of one argument."""
            if not floats_in(argument):
                return argument
            options = {"size": argument.shape, "fill_value": -1, "device": argument.device}
            followers = self.tags.get(argument, Tag()).followers
            return followers.get(name, functools.partial(torch.full, **options))

        return find


def _select_makers(function, pairs, output):
    """Selects the arguments whose maps make the result, without gates and divisors.

    Args:
        function: The function.
        pairs: (tag, tensor) of each argument that counts.
        output: The result.
    """
    if function in QUOTIENTS and len(pairs) == 2:
        return pairs[:1]
    if function not in FACTORS or len(pairs) < 2:
        return pairs
    makers = [(tag, a) for tag, a in pairs if not tag.is_gate and a.numel() == output.numel()]
    return makers or pairs


def _looks_up(function, arguments):
    """Returns whether a function looks tokens up in a table, by their numbers."""
    if function is functional.embedding:
        return True
    args, _ = arguments
    if function is not Tensor.__getitem__ or args[0].ndim != 2 or not isinstance(args[1], Tensor):
        return False
    return args[1].ndim > 1 and args[1].dtype != torch.bool


def _merge_terms(pairs, output):
    """Merges the terms of the arguments that have the size of the result, or its queries.

    Args:
        pairs: (tag, tensor) of each argument.
        output: The result.

    Returns:
        (the terms that the result still has, whether it comes from a softmax).
    """
    tags = []
    for tag, x in pairs:
        if x.ndim > 1 and output.ndim > 1:
            is_same_size = x.numel() == output.numel()
            if is_same_size or x.shape[-2] == output.shape[-2]:
                tags.append(tag)
    terms = dict.fromkeys(term for tag in tags for term in tag.terms)
    return tuple(terms), any(tag.is_softmax for tag in tags)
