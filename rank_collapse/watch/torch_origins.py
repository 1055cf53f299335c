"""Where tensors come from: the linear maps behind queries and keys, and the tokens that maps read.

While a measured pass runs, each tensor has a `Tag`. It names the linear maps that made the tensor.
Its followers are moved through the same views as the tensor, once somebody asks: the numbers of the
entries that a map gave, or the softmax behind weights. So no shape is guessed, and no tensor is
changed.

Axis letters: n queries, m keys, k width; others as in an equation of `einsum`.
"""

import dataclasses
import functools
import itertools
import math
import string
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from rank_collapse.watch import torch_products as products
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
from rank_collapse.watch.torch_masks import (
    SIDES,
    inverts,
    is_allowed,
    is_in_place,
    makes_numbers,
    read_masks,
)
from rank_collapse.watch.torch_tags import PAIR, Map, Source, Tag, Term, join_pasts, join_streams


class Origins:
    """The tags of one pass.

    Args:
        frames: Frames of the modules that run, each with its `number`.
        buffers: Buffers of the model, which are constant.
    """

    def __init__(self, frames: Sequence[Any], buffers: Iterable[Tensor] = ()):
        self._frames = frames
        self._tags: Any = WeakIdKeyDictionary()
        self._recent: list[Tag] = []  # those of the layer that runs
        self._num_entries = 0
        self._results: set[Any] = set()  # roots that attentions gave
        self._sums: Any = WeakIdKeyDictionary()  # terms of means by a softmax over tokens
        for buffer in buffers:
            self._tags[buffer] = Tag(is_constant=True)

    def tag(self, tensor: Tensor) -> Tag:
        """Returns the tag of a tensor, made where it has none: of a parameter, or of a root."""
        if tensor not in self._tags:
            if isinstance(tensor, nn.Parameter):
                self._record(tensor, Tag(is_constant=True, parameters=(tensor,)))
            else:
                self.begin(tensor)
        return self._tags[tensor]

    def _record(self, tensor, tag):
        self._tags[tensor] = tag
        self._recent.append(tag)

    def begin(self, tensor: Tensor, tags: Iterable[Tag] = (), past: tuple[str, ...] = ()) -> None:
        """Makes a tensor one that no map made, such as the result of an attention.

        Args:
            tensor: It.
            tags: Tags of tensors that have its rows.
            past: Names of the attentions that it comes from, before those of the tags.
        """
        tags, root = list(tags), object()
        stream = join_streams(tags) or frozenset([root])
        if past:
            self._results.add(root)
        is_content = bool(past) or any(tag.is_content for tag in tags)
        past = tuple(dict.fromkeys(past + join_pasts(tags)))
        self._record(
            tensor, Tag(frozenset(), frozenset([root]), past, stream, is_content=is_content)
        )

    def has(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has a tag."""
        return tensor in self._tags

    def comes_from_attention(self, tensor: Tensor) -> bool:
        """Returns whether the result of an attention is behind a tensor, or no map."""
        tag = self.tag(tensor)
        return not tag.maps or not self._results.isdisjoint(tag.behind)

    def is_content(self, tensor: Tensor) -> bool:
        """Returns whether a map made a tensor, or something that a map made decided it."""
        return self.has(tensor) and self._tags[tensor].is_content

    def is_constant(self, tensor: Tensor) -> bool:
        """Returns whether a tensor comes from parameters, buffers and numbers alone."""
        is_parameter = isinstance(tensor, nn.Parameter)
        return is_parameter or (self.has(tensor) and self._tags[tensor].is_constant)

    def forget_layer(self) -> None:
        """Drops what a layer's maps read, masks, numbers; a checkpointed layer holds none either.

        The numbers are made again where a later layer uses the same keys.
        """
        for tag in self._recent:
            for name in (*SIDES, "softmax"):
                tag.followers.pop(name, None)
            for follower in tag.followers.values():
                follower.cache_clear()
            if tag.source is not None:
                tag.source.matrix = None
        self._recent.clear()

    def see_function(
        self, function: Any, product: Product | None, args: Any, kwargs: Any, result: Any
    ) -> None:
        """Records where the results of a function come from.

        Args:
            function: Function of torch.
            product: What it multiplies, as `read_product` reads it.
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
                self._tags[output] = Tag(is_constant=True)
            return
        if product is not None and self._see_product(function, product, floats, outputs[0]):
            return
        is_decided = any(self.is_content(a) for a in inputs)
        if product is not None and product.is_elementwise():
            function = torch.mul
        if floats_in(outputs) and floats:
            self._derive_tags(function, (args, kwargs), floats, floats_in(outputs))
        if is_assignment or is_in_place(function):
            self._see_write(args, is_assignment)
        for output in outputs:
            if is_decided and not self.has(output):
                self._record(output, Tag())
            if is_decided:
                tag = self._tags[output]
                if tag.parameters:  # which of several weights
                    continue
                tag.is_content, tag.is_constant = True, False
                if tag.terms or not (tag.maps or tag.stream):
                    self._see_masks(function, args, kwargs, output, tag)
        if function in SOFTMAX | EXPONENTIALS and outputs[0].ndim > 2:
            self._see_softmax(function, floats[0], outputs[0])

    def _see_write(self, args, is_assignment):
        """Records what is written into a tensor by an index, or into a view of it.

        Args:
            args: Args of the call.
            is_assignment: Whether by an index.
        """
        target = args[0]
        if is_assignment and isinstance(args[2], Tensor) and self.has(target) and self.has(args[2]):

            def write(numbers, name):
                numbers[args[1]] = self._number(args[2], name)

            self._write_followers(target, self._tags[target], self._tags[args[2]], write)
        base = target._base
        if base is None or not self.has(target) or self.is_constant(target):
            return
        view, earlier = self._tags[target], self.tag(base)
        tag = _join_tags([t for t in (earlier, view) if not t.is_constant])
        tag.terms = tuple(dict.fromkeys(earlier.terms + view.terms))
        tag.is_softmax = earlier.is_softmax or view.is_softmax
        tag.is_chosen = earlier.is_chosen or view.is_chosen
        tag.is_unread = earlier.is_unread or view.is_unread or "allowed" in view.followers
        tag.followers = dict(earlier.followers)
        place = target.storage_offset() - base.storage_offset()

        def write_view(numbers, name):
            part = numbers.as_strided(target.shape, target.stride(), place)
            part.copy_(self._number(target, name, view))

        self._write_followers(base, tag, view, write_view)
        self._record(base, tag)

    def _write_followers(self, tensor, tag, written, write):
        """Makes followers of a tensor into which others were written.

        Args:
            tensor, tag: It, and its tag.
            written: Tag of what was written.
            write: write(numbers of the tensor, name of the follower), which writes those of a part.
        """
        shape, stride, device = tensor.shape, tensor.stride(), tensor.device
        names = [n for n in {**tag.followers, **written.followers} if n not in (*SIDES, "softmax")]
        for name in names:
            earlier = tag.followers.get(name)

            def make_numbers(name=name, earlier=earlier):
                numbers = torch.empty_strided(shape, stride, dtype=torch.long, device=device)
                numbers.copy_(earlier()) if earlier else numbers.fill_(-1)
                write(numbers, name)
                return numbers

            tag.followers[name] = functools.cache(make_numbers)

    def _number(self, tensor, name, tag=None):
        """Returns the numbers of a tensor's follower of a name, or −1 where it has none."""
        follower = (tag or self._tags[tensor]).followers.get(name)
        return -torch.ones_like(tensor, dtype=torch.long) if follower is None else follower()

    def see_module(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Records a module whose code torch does not show: a linear map, if it can be one.

        Args:
            module: It.
            inputs: All arguments of its call.
            output: Its first tensor.
        """
        tensors, parameters = floats_in(inputs), list(module.parameters())
        if not tensors:
            return
        x, matrices = tensors[0], [parameter for parameter in parameters if parameter.ndim > 1]
        if matrices and x.shape[:-1] == output.shape[:-1] and not [*module.children()]:
            axes = string.ascii_lowercase[: x.ndim - 1]
            product = Product(x, matrices[0], (f"{axes}y", "z", f"{axes}z"))
            self._see_map(product, parameters, output)
        else:
            self._derive_tags(None, (), tensors, [output])

    def is_weights(self, product: Product) -> bool:
        """Returns whether the first factor of a product has weights of keys, which it sums over.

        Args:
            product: It.
        """
        tag = self.tag(product.first)
        if tag.is_constant or not (tag.terms or tag.is_softmax):
            return False
        letters, _, result = product.letters
        axes = [i for i, c in enumerate(letters) if c not in result]
        changes = _find_changes(tag, axes)
        if changes is None:
            return bool(tag.terms) or not self._has_same_rows(tag, axes)
        size = math.prod(product.first.shape[i] for i in axes)
        is_turned = changes == (True, False) and tag.is_softmax and bool(tag.terms)
        return is_turned or changes == (False, True) or (changes == (False, False) and size == 1)

    def read_terms(self, product: Product) -> tuple[Term, ...]:
        """Reads the products of queries and keys that weights come from.

        Args:
            product: Of weights and values. If it sums over what came first in scores, these are
                keys, and what came second are queries.
        """
        tag, (letters, _, result) = self.tag(product.first), product.letters
        axes = [i for i, c in enumerate(letters) if c not in result]
        if _find_changes(tag, axes) != (True, False):
            return tag.terms
        return tuple(
            Term((second, first, scores[:-2] + scores[-1] + scores[-2]), t.sizes, t.key, t.query)
            for t in tag.terms
            for first, second, scores in (t.letters,)
        )

    def read_weights(self, product: Product) -> products.Weights:
        """Reads the weights that meet values, and which keys masks leave them.

        Args:
            product: Product of weights and values.
        """
        tag = self.tag(product.first)
        allowed, softmax = (
            tag.followers.get(name, lambda: None)() for name in ("allowed", "softmax")
        )
        if allowed is None and tag.is_unread and not tag.is_chosen:
            allowed = product.first > 0
        axes, values, result = product.letters
        queries = [c for c in axes if c in result and c not in values]
        if len(queries) > 1:  # and heads, which share the values
            changes = [_find_changes(tag, [axes.index(c)]) for c in queries]
            moving = [c for c, change in zip(queries, changes, strict=True) if any(change or ())]
            queries = moving or queries[-1:]
        return products.read_weights(product.first, allowed, softmax, product.letters, queries)

    def read_linear_attention(self, product: Product) -> tuple[Term, Tag] | None:
        """Reads which queries and keys a product has whose second factor is Σ_j k_j v_jᵀ.

        Args:
            product: Product of two tensors.

        Returns:
            The product of queries and keys that nobody computes, and the tag of the values; None if
            it is another product.
        """
        tag, inner = self.tag(product.second), self._sums.get(product.second)
        if self.tag(product.first).terms:
            return None
        first, second, result = product.letters
        summed = [i for i, c in enumerate(second) if c not in result]
        if inner is not None:
            is_over_features = "".join(second[i] for i in summed) == second[-2:-1]
        elif len(tag.terms) == 1 and not tag.is_softmax:
            (inner,) = tag.terms
            is_over_features = _find_changes(tag, summed) == (True, False)
        else:
            return None
        shape = [inner.sizes[c] for c in inner.letters[2]]
        if list(product.second.shape) != shape or not is_over_features:
            return None
        letters = dict(zip(inner.letters[2], second, strict=True))
        axes = [c for c in inner.letters[0] if c not in letters]
        if len(axes) != 1 or not _sums_tokens(inner, axes[0]):
            return None
        (token,) = axes
        unused = next(c for c in string.ascii_uppercase if c not in first + second)
        key = "".join(letters.get(c, unused) for c in inner.letters[0])
        sizes = dict(zip(first, product.first.shape, strict=True)) | {unused: inner.sizes[token]}
        scores = "".join(c for c in result if c in first) + unused
        return Term((first, key, scores), sizes, self.tag(product.first), inner.query), inner.key

    def begin_mean(self, product: Product, result: Tensor) -> None:
        """Makes a mean of values, by a softmax over tokens, one that no map made.

        It may be Σ_j k_j v_jᵀ of linear attention, whose keys have gone through the softmax.

        Args:
            product: Of what the softmax gave and values.
            result: What it gives.
        """
        self.begin(result, [self.tag(product.second)])
        self._sums[result] = self._make_term(product, result)

    def split_nested(self, tensor: Tensor) -> list[tuple[Tensor, Tag]]:
        """Splits a jagged tensor into those of its rows [1, ...], each with its tag.

        Args:
            tensor: It.
        """
        tag = self.tag(tensor)
        follower = tag.followers.get("entries", lambda: -torch.ones_like(tensor, dtype=torch.long))
        rows = zip(tensor.unbind(), follower().unbind(), strict=True)
        return [
            (x[None], dataclasses.replace(tag, followers={"entries": _keep(numbers[None])}))
            for x, numbers in rows
        ]

    def read_choice(self, mask: Tensor) -> dict[str, Any]:
        """Reads whether content decides a mask, and what it leaves whatever the content is.

        Args:
            mask: Mask of `scaled_dot_product_attention`.

        Returns:
            Arguments of `compute_dot_weights`.
        """
        if not self.is_content(mask):
            return {}
        return {"is_chosen": True, "static": self._tags[mask].followers.get("allowed")}

    def _see_product(self, function, product, inputs, output):
        """Records a linear map, or a product of queries and keys; returns whether it is one."""
        is_weight = [self.is_constant(factor) for factor in product[:2]]
        if function not in PRODUCTS or any(is_weight):
            if all(is_weight) and function in PRODUCTS and product.first.ndim < 3:
                return False  # a weight that is made of two
            if is_weight == [True, False] and function in PRODUCTS:
                product = product.swap()
            if self._mixes_heads(function, product):
                return False
            self._see_map(product, [a for a in inputs if a is not product.first], output)
            return True
        if product.letters[2][-2:-1] not in product.letters[0]:
            product = product.swap()
        first, second, result = product.letters
        is_matrix = set(first) & set(result) - set(second) and set(second) & set(result) - set(
            first
        )
        if not is_matrix or self._is_mixture(product) or self._is_mixture(product.swap()):
            return False
        term = self._make_term(product, output)
        tag, sizes, result = _join_tags([term.query, term.key]), term.sizes, term.letters[2]
        tag.terms, tag.is_content = (term,), True
        n, m = (sizes[c] for c in result[-2:])
        order = [result.index(c) for c in product.letters[2]]

        def number_pairs():
            numbers = torch.arange(n, device=output.device)[:, None] * PAIR
            numbers = numbers + torch.arange(m, device=output.device)
            return numbers.expand([sizes[c] for c in result]).permute(order)

        tag.followers["pairs"] = functools.cache(number_pairs)
        self._record(output, tag)
        if function in (torch.baddbmm, Tensor.baddbmm):
            self._see_masks(function, inputs, {}, output, tag)
        return True

    def _make_term(self, product, output):
        """Makes the term of a product, with the axes of queries and keys last in its scores."""
        first, second, result = product.letters
        query, key = self.tag(product.first), self.tag(product.second)
        sizes = dict(zip(first, product.first.shape, strict=True))
        sizes |= dict(zip(second, product.second.shape, strict=True))
        sizes |= dict(zip(result, output.shape, strict=True))
        axes = self._find_token_axes(query, first, second, result)
        axes += self._find_token_axes(key, second, first, result)
        if len(axes) == 2:
            result = "".join([c for c in result if c not in axes] + axes)
        return Term((first, second, result), sizes, query, key)

    def _find_token_axes(self, tag, letters, others, result):
        """Finds the letters of tokens, and none of heads, in one factor of scores; [] if several.

        Args:
            tag: Of the factor.
            letters, others, result: Of the factor, of the other one and of scores.
        """
        free = [c for c in result if c in letters and c not in others]
        tokens = [c for c in free if not self._has_same_rows(tag, [letters.index(c)])]
        axes = tokens or free
        return axes if len(axes) == 1 else []

    def _mixes_heads(self, function, product):
        """Returns whether a linear map mixes heads of weights or scores, and no features."""
        tag = self.tag(product.first)
        letters, _, result = product.letters
        changes = _find_changes(tag, [i for i, c in enumerate(letters) if c not in result])
        if changes is None:
            return bool(tag.terms) and function is not functional.linear
        return changes == (False, False)

    def _is_mixture(self, product):
        """Returns whether the first factor has a matrix for each token, and both axes are features.

        So it is with what mixes experts, or streams of a token.
        """
        tag = self.tag(product.first)
        letters, other, result = product.letters
        free = [i for i, c in enumerate(letters) if c in result and c not in other]
        summed = [i for i, c in enumerate(letters) if c not in result]
        is_matrix = math.prod(product.first.shape[i] for i in free) > 1
        return is_matrix and self._has_same_rows(tag, free) and self._has_same_rows(tag, summed)

    def _has_same_rows(self, tag, axes):
        """Returns whether entries along axes of a tensor are features of one token, as is known."""
        if "entries" not in tag.followers or not tag.maps:
            return False
        numbers = tag.followers["entries"]()
        if not numbers.numel():
            return False
        rows = []
        for ends in ([], axes):
            entry = numbers[tuple(-1 if i in ends else 0 for i in range(numbers.ndim))]
            rows.append([m.find_rows(entry).item() for m in tag.list_maps()])
        return rows[0] == rows[1] and max(rows[0]) >= 0

    def _see_map(self, product, parameters, output):
        """Records a linear map, and keeps what it read.

        Args:
            product: Of its input and its weight.
            parameters: Tensors of its call but for the input.
            output: Its result.
        """
        (read, weight, result), x = product.letters, product.first
        nested = output if output.is_nested else None
        if nested is not None:  # one row of tokens after the other
            (read, result), x, output = ("ay", "az"), x.values(), output.values()
            self._tags[x] = self.tag(product.first)
        axes = [c for c in read if c in result]
        features = [c for c in result if c not in read]
        source = self._read_source(x, [read.index(c) for c in axes])
        sizes = dict(zip(result, output.shape, strict=True))
        shape = [sizes[c] for c in axes + features]
        has_rows = [x.shape[read.index(c)] for c in axes] == shape[: len(axes)]
        axis = weight.find(features[0]) if len(features) == 1 else -1
        shares = tuple(share for a in parameters for share in self._read_parameters(a, axis))
        running = tuple(frame.number for frame in self._frames)
        entries = self._num_entries, output.numel(), math.prod(shape[len(axes) :]), has_rows
        linear_map = Map(source, shares, running, *entries)
        self._num_entries += output.numel()
        tag = Tag(frozenset([linear_map]), source.tag.behind | {source}, source.tag.past)
        tag.stream, tag.is_content = source.tag.stream, True

        def number_entries():
            numbers = torch.arange(linear_map.count, device=output.device).reshape(shape)
            order = [(axes + features).index(c) for c in result]
            numbers = (numbers + linear_map.start).permute(order)
            return numbers if nested is None else _nest(numbers, nested)

        tag.followers["entries"] = functools.cache(number_entries)
        self._record(output if nested is None else nested, tag)

    def _read_source(self, x, axes):
        """Returns what a map reads: a tensor as a matrix.

        Args:
            x: The tensor.
            axes: Those of rows.
        """
        tag, order = self.tag(x), axes + [i for i in range(x.ndim) if i not in axes]
        count = math.prod(x.shape[i] for i in axes)
        tag.stream = tag.stream or frozenset([tag])
        if tag.source is None or tag.source.order != order:
            tag.source = Source(tag, order, count)
        tag.source.matrix = x.detach().permute(order).reshape(count, x.numel() // max(count, 1))
        self._recent.append(tag)
        return tag.source

    def _read_parameters(self, tensor, axis):
        """Reads which parameters a weight is, or is made of.

        Args:
            tensor: The weight.
            axis: Axis of the outputs in it.

        Returns:
            [(the parameter, axis of the outputs or −1, the first of them), ...]; None for the
            parameter if it is unknown; [] of a buffer.
        """
        axis = 0 if tensor.ndim == 1 else axis
        if isinstance(tensor, nn.Parameter):
            return [(tensor, axis, 0)]
        tag = self._tags.get(tensor, Tag())
        if tag.is_constant and not tag.parameters:
            return []
        if len(tag.parameters) == 1:
            (parameter,) = tag.parameters
            is_slice = tensor._base is parameter and tensor.is_contiguous()
            if parameter.numel() != tensor.numel():
                if is_slice and tensor.shape[1:] == parameter.shape[1:] and axis == 0:
                    return [(parameter, axis, tensor.storage_offset() // tensor.stride(0))]
                return [(None, -1, 0)]
        largest = max((p.numel() for p in tag.parameters), default=0)
        if largest != tensor.numel():
            return [(None, -1, 0)]
        return [(parameter, -1, 0) for parameter in tag.parameters]

    def _derive_tags(self, function, arguments, inputs, outputs):
        """Records another function: its results come from where its arguments come from.

        Args:
            function, arguments: The call, with (args, kwargs).
            inputs, outputs: Its tensors of floats.
        """
        tagged = [(self.tag(a), a) for a in inputs if self.has(a) or self.is_constant(a)]
        pairs = [(tag, a) for tag, a in tagged if not tag.is_constant]
        if not pairs and len(tagged) == len(inputs):
            if _looks_up(function, arguments):
                for output in outputs:
                    self.begin(output)
                return
            parameters = tuple(dict.fromkeys(p for tag, _ in tagged for p in tag.parameters))
            for output in outputs:
                self._record(output, Tag(is_constant=True, parameters=parameters))
            return
        pairs = pairs or [(self.tag(a), a) for a in inputs if not self.is_constant(a)]
        is_move = function in MOVES and (len(pairs) == 1 or function in JOINS)
        for i, output in enumerate(outputs):
            makers = _select_makers(function, pairs, output)
            tag = _join_tags([tag for tag, _ in pairs])
            tag.maps = frozenset().union(*(maker.maps for maker, _ in makers))
            alike = [t for t, a in pairs if a.numel() == output.numel()]
            tag.stream = join_streams(alike or [t for t, _ in pairs])
            if function not in PRODUCTS or len(pairs) == 1:  # a mixture has no weights
                tag.terms, tag.is_softmax = _merge_terms(pairs, output)
            tag.is_exponential = function in EXPONENTIALS or any(t.is_exponential for t, _ in pairs)
            tag.is_gate = function in GATES or all(t.is_gate for t, _ in pairs)
            if is_move:
                names = dict.fromkeys(name for t, _ in pairs for name in t.followers)
                for name in names:
                    followers = pytree.tree_map(self._find_follower(name), arguments)
                    move = functools.partial(_move_followers, function, followers, i)
                    tag.followers[name] = functools.cache(move)
            elif not reorders(function):
                tag.followers = _join_followers([t for t, a in makers if a.shape == output.shape])
            self._record(output, tag)

    def _find_follower(self, name):
        """Returns a function that gives the follower of a tensor, and other arguments as they are.

        Args:
            name: Name of the followers.
        """

        def find(argument):
            if not floats_in(argument):
                return argument
            options = {"size": argument.shape, "fill_value": -1, "device": argument.device}
            followers = self._tags.get(argument, Tag()).followers
            return followers.get(name, functools.partial(torch.full, **options))

        return find

    def _see_softmax(self, function, x, result):
        """Records a softmax, or the exponentials of one that is computed by hand.

        Args:
            function: Function of `SOFTMAX` or `EXPONENTIALS`.
            x, result: Scores, and what it makes of them.
        """
        scores, tag = self.tag(x), self.tag(result)
        if function in SOFTMAX:
            tag.terms, tag.is_softmax = scores.terms, True
            if tag.terms:
                names = ("pairs", "allowed")
                tag.followers = {n: f for n, f in tag.followers.items() if n in names}
        if scores.terms:
            is_masked = "allowed" in scores.followers or scores.is_unread
            if is_masked and not scores.is_chosen:
                tag.followers["allowed"] = _keep(is_allowed(x.detach()))
            if function in SOFTMAX:
                tag.followers["softmax"] = _keep(result.detach())

    def _see_masks(self, function, args, kwargs, result, tag):
        """Records which scores masks leave that content does not decide.

        Args:
            function, args, kwargs: The call.
            result, tag: Scores, and their tag; or a mask that content decides, and its tag.
        """
        operands = [(self._tags[a], a) for a in tensors_in([args, kwargs]) if self.has(a)]
        tag.is_chosen |= any(t.is_chosen for t, _ in operands)
        tag.is_unread |= any(t.is_unread for t, _ in operands)
        if function is None:
            return
        if not result.is_floating_point():
            sides = SIDES[::-1] if inverts(function, args) else SIDES
            for t, a in operands:
                for name, side in zip(SIDES, sides, strict=True):
                    if name in t.followers and a.shape == result.shape:
                        tag.followers.setdefault(side, t.followers[name])
        for operand, keep, name in read_masks(function, args, kwargs, result):
            mask = Tag() if operand is None else self._tags.get(operand, Tag())
            is_float = operand is not None and operand.is_floating_point()
            if mask.terms or (mask.is_content and is_float and keep is None):
                continue  # scores
            if mask.is_content:
                tag.is_chosen = True
                sides = SIDES if is_float else (name,)
                keep = next((mask.followers[n] for n in sides if n in mask.followers), None)
            elif keep is None:
                tag.is_unread |= not mask.parameters
            if keep is not None:
                side = SIDES[0] if result.is_floating_point() else name
                join = functools.partial(_intersect, tag.followers.get(side), keep, result.shape)
                tag.followers[side] = functools.cache(join)


def _nest(values, nested):
    """Returns values [tokens, d] as a jagged tensor with the rows of another."""
    return torch.nested.nested_tensor_from_jagged(values, nested.offsets(), nested.lengths())


def _keep(tensor):
    """Returns a follower that gives a tensor."""
    return functools.cache(lambda: tensor)


def _intersect(first, second, shape):
    """Joins Bool followers of a shape, of which the first may be missing."""
    allowed = second().bool().expand(shape)
    return allowed if first is None else first() & allowed


def _join_tags(tags):
    """Returns the tag of what comes from several tensors, without what depends on shapes."""
    maps = frozenset().union(*(tag.maps for tag in tags))
    behind = frozenset().union(*(tag.behind for tag in tags))
    is_content = any(tag.is_content for tag in tags)
    return Tag(maps, behind, join_pasts(tags), join_streams(tags), is_content=is_content)


def _join_followers(tags):
    """Joins the followers of tensors of one shape; the entries of further summands stay apart."""
    followers: dict[str, Any] = {}
    for tag in tags:
        for name, follower in tag.followers.items():
            if name in SIDES and name in followers:
                parts = followers[name], follower
                followers[name] = functools.cache(lambda parts=parts: parts[0]() & parts[1]())
            else:
                followers.setdefault(name, follower)
    numbered = [tag for tag in tags if "entries" in tag.followers]
    covered = numbered[0].maps if numbered else frozenset()
    for tag in numbered[1:]:
        if not tag.maps <= covered:
            covered |= tag.maps
            for name in [name for name in tag.followers if name.startswith("entries")]:
                place = next(i for i in itertools.count(2) if f"entries {i}" not in followers)
                followers[f"entries {place}"] = tag.followers[name]
    return followers


def _select_makers(function, pairs, output):
    """Selects those of the arguments whose maps make the result: no gates and no divisors.

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
    return args[1].ndim > 1 and not args[1].is_floating_point() and args[1].dtype != torch.bool


def _find_changes(tag, axes):
    """Finds whether the query, and whether the key, changes along axes of scores; None if unknown.

    Args:
        tag: Of the scores.
        axes: Numbers of the axes.
    """
    if "pairs" not in tag.followers:
        return None
    pairs = tag.followers["pairs"]()
    if not pairs.numel():
        return None
    pairs = pairs[tuple(slice(0, None if step else 1) for step in pairs.stride())]
    largest = pairs.amax(dim=axes, keepdim=True) if axes else pairs
    query, key = (
        ((change(pairs) != change(largest)) & (pairs >= 0)).any().item()
        for change in (lambda a: a // PAIR, lambda a: a % PAIR)
    )
    return query, key


def _move_followers(function, arguments, i):
    """Applies a function that moves entries to followers.

    Args:
        function: Function of `MOVES`.
        arguments: (args, kwargs) of its call, with functions that give followers.
        i: Which of several results.
    """
    args, kwargs = pytree.tree_map(lambda a: a() if callable(a) else a, arguments)
    if function is Tensor.contiguous:
        return args[0]
    if function is Tensor.view:  # followers may lie otherwise in memory
        function = Tensor.reshape
    if function is torch.view_as_complex:
        args = [a.double() for a in args]
    result = function(*args, **kwargs)
    result = result if isinstance(result, Tensor) else result[i]
    return result.long() if function is torch.view_as_real else result


def _sums_tokens(term, letter):
    """Returns whether a product sums over tokens of its first factor, along this letter."""
    if "entries" not in term.query.followers:
        return False
    numbers, axis = term.query.followers["entries"](), term.letters[0].index(letter)
    ends = [numbers.select(axis, i).flatten()[:1] for i in (0, -1)]
    rows = [[m.find_rows(end).item() for m in term.query.list_maps()] for end in ends]
    return rows[0] != rows[1]


def _merge_terms(pairs, output):
    """Returns the terms that a result still has, and whether it comes from a softmax.

    Of the arguments those count that have its size, or its queries.

    Args:
        pairs: (tag, tensor) of each argument.
        output: The result.
    """
    tags = []
    for tag, x in pairs:
        if x.ndim > 1 and output.ndim > 1:
            is_same_size = x.numel() == output.numel()
            if is_same_size or x.shape[-2] == output.shape[-2]:
                tags.append(tag)
    terms = dict.fromkeys(term for tag in tags for term in tag.terms)
    return tuple(terms), any(tag.is_softmax for tag in tags)


def find_shared_sources(maps: Sequence[Map], query: Tag, key: Tag) -> list[Source] | None:
    """Finds what queries and keys are both made of.

    Args:
        maps: Linear maps that gave the queries.
        query, key: Tags of both.

    Returns:
        What stands behind the fewest maps; [] if both have the same roots by ways of their own,
        such as two norms, or keys are of the same rows of the stream in an earlier layer; None if
        keys are of other tokens.
    """
    read, read_by_keys = ([m.source for m in used] for used in (maps, key.list_maps()))
    is_same_rows = {source.count for source in read} == {source.count for source in read_by_keys}
    if is_same_rows and _list_makers(read) == _list_makers(read_by_keys):
        return [source for source in dict.fromkeys(read) if source in read_by_keys]
    while maps:
        sources = list(dict.fromkeys(linear_map.source for linear_map in maps))
        shared = [source for source in sources if source in key.behind]
        if any(source.matrix is None for source in shared):
            break  # of another layer
        if shared:
            return shared
        maps = [earlier for source in sources for earlier in source.tag.list_maps()]
    if _list_roots(query) == _list_roots(key):
        return []
    is_earlier = set(key.past) <= set(query.past) and not query.stream.isdisjoint(key.stream)
    return [] if is_earlier and is_same_rows else None


def _list_makers(sources):
    """Lists the maps and roots that sources come from, without those behind other maps."""
    return {a for source in sources for a in source.tag.maps | source.tag.behind}


def _list_roots(tag):
    """Lists what no map made, behind a tensor."""
    return {tensor for tensor in tag.behind if not isinstance(tensor, Source)}


def find_features(tag: Tag, linear_map: Map) -> Tensor | None:
    """Finds Bool [width], the features of a map's output in a tensor; None if unknown.

    Args:
        tag: Of the tensor.
        linear_map: The map.
    """
    width, parts = linear_map.width, []
    for name in [name for name in tag.followers if name.startswith("entries")]:
        entries = tag.followers[name]() - linear_map.start
        is_inside = (entries >= 0) & (entries < linear_map.count)
        part = torch.zeros(width + 1, dtype=torch.bool, device=entries.device)
        part[torch.where(is_inside, entries % width, width)] = True
        parts.append(part[:-1])
    features = torch.stack(parts).any(dim=0) if parts else None
    return features if features is not None and features.any() else None
