"""Products of queries and keys: scores, their softmax, and the masks that meet them.

The `Tag` of a tensor describes where it comes from; its rows are the axes along which tokens
differ, its features the others (`torch_tags`). A product has one letter for each axis of its
factors and of its result.

Axis letters: n queries, m keys, k width; others as in an equation of `einsum`.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from rank_collapse.watch.torch_followers import (
    find_changes,
    has_same_rows,
    intersect_masks,
    join_tags,
    keep_follower,
)
from rank_collapse.watch.torch_functions import (
    PRODUCTS,
    SOFTMAX,
    Product,
    tensors_in,
)
from rank_collapse.watch.torch_maps import see_map
from rank_collapse.watch.torch_masks import (
    SIDES,
    hides_keys,
    inverts,
    is_allowed,
    read_masks,
)
from rank_collapse.watch.torch_tag_table import TagTable
from rank_collapse.watch.torch_tags import PAIR, Tag, Term


def see_product(
    table: TagTable, function: Callable, product: Product, inputs: Sequence[Tensor], output: Tensor
) -> bool:
    """Records a linear map, or a product of queries and keys.

    Args:
        table: Tags of all tensors.
        function: The function of torch.
        product: Its two factors, with letters of the axes.
        inputs: All tensors among its arguments.
        output: Its result.

    Returns:
        Whether it is one of the two, and is recorded.
    """
    is_weight = [table.is_constant(factor) for factor in product[:2]]
    if function not in PRODUCTS or any(is_weight):
        if all(is_weight) and function in PRODUCTS and product.first.ndim < 3:
            return False  # a weight that is made of two
        if is_weight == [True, False] and function in PRODUCTS:
            product = product.swap()
        if _mixes_heads(table, function, product):
            return False
        see_map(table, product, [a for a in inputs if a is not product.first], output)
        return True
    if product.letters[2][-2:-1] not in product.letters[0]:
        product = product.swap()
    first, second, result = product.letters
    is_matrix = set(first) & set(result) - set(second) and set(second) & set(result) - set(first)
    if not is_matrix or _is_mixture(table, product) or _is_mixture(table, product.swap()):
        return False
    term = make_term(table, product, output)
    tag, sizes, result = join_tags([term.query, term.key]), term.sizes, term.letters[2]
    tag.terms, tag.is_content = (term,), True
    n, m = (sizes[c] for c in result[-2:])
    order = [result.index(c) for c in product.letters[2]]

    def number_pairs():
        """Numbers the (query, key) pair of every score, in the layout of the scores."""
        numbers = torch.arange(n, device=output.device)[:, None] * PAIR
        numbers = numbers + torch.arange(m, device=output.device)
        return numbers.expand([sizes[c] for c in result]).permute(order)

    tag.followers["pairs"] = functools.cache(number_pairs)
    table.record(output, tag)
    if function in (torch.baddbmm, Tensor.baddbmm):
        see_masks(table, function, inputs, {}, output, tag)
    return True


def make_term(table: TagTable, product: Product, output: Tensor) -> Term:
    """Describes a product of queries and keys: origins of both, and letters of the axes, with those
    of queries and keys last in its scores.

    Args:
        table: Tags of all tensors, {tensor: its origin}.
        product: Queries times keys, with letters of the axes.
        output: The scores.
    """
    first, second, result = product.letters
    query, key = table.tag(product.first), table.tag(product.second)
    sizes = dict(zip(first, product.first.shape, strict=True))
    sizes |= dict(zip(second, product.second.shape, strict=True))
    sizes |= dict(zip(result, output.shape, strict=True))
    axes = _find_token_axes(table, query, first, second, result)
    axes += _find_token_axes(table, key, second, first, result)
    if len(axes) == 2:
        result = "".join([c for c in result if c not in axes] + axes)
    return Term((first, second, result), sizes, query, key)


def _find_token_axes(table: TagTable, tag, letters, other_letters, result):
    """Finds the axis of tokens, among axes of tokens and of heads, in one factor of scores.

    Entries along an axis of heads are features of one token; along an axis of tokens they come from
    different rows.

    Args:
        table: Tags of the pass, {tensor: its origin}.
        tag: Tag of the factor.
        letters, other_letters, result: Letters of the axes of this factor, of the other factor, and
            of the scores.

    Returns:
        [letter]; [] if there are several such axes.
    """
    free = [c for c in result if c in letters and c not in other_letters]
    tokens = [c for c in free if not has_same_rows(tag, [letters.index(c)])]
    axes = tokens or free
    return axes if len(axes) == 1 else []


def _mixes_heads(table: TagTable, function, product):
    """Returns whether a linear map mixes heads of weights or scores, instead of features.

    Along the axes over which it sums, the entries of its input then belong to one query and one
    key.

    Args:
        table: Tags of the pass, {tensor: its origin}.
        function: The function of torch.
        product: The product of the input (first) and a constant weight, with letters of the axes.
    """
    tag = table.tag(product.first)
    letters, _, result = product.letters
    changes = find_changes(tag, [i for i, c in enumerate(letters) if c not in result])
    if changes is None:
        return bool(tag.terms) and function is not functional.linear
    return changes == (False, False)


def _is_mixture(table: TagTable, product):
    """Returns whether the first factor has a matrix for each token, and both axes are features.

    Products that mix experts, or the streams of a token, have this form.

    Args:
        table: Tags of the pass, {tensor: its origin}.
        product: The product of two tensors, with letters of the axes.
    """
    tag = table.tag(product.first)
    letters, other, result = product.letters
    free = [i for i, c in enumerate(letters) if c in result and c not in other]
    summed = [i for i, c in enumerate(letters) if c not in result]
    is_matrix = math.prod(product.first.shape[i] for i in free) > 1
    return is_matrix and has_same_rows(tag, free) and has_same_rows(tag, summed)


def see_softmax(table: TagTable, function: Callable, x: Tensor, result: Tensor) -> None:
    """Records a softmax, or the exponentials of one that is computed by hand.

    Args:
        table: Tags of the pass.
        function: Function of `SOFTMAX` or `EXPONENTIALS`.
        x, result: Scores, and their softmax.
    """
    scores, tag = table.tag(x), table.tag(result)
    if function in SOFTMAX:
        tag.terms, tag.is_softmax = scores.terms, True
        if tag.terms:
            names = ("pairs", "allowed")
            tag.followers = {n: f for n, f in tag.followers.items() if n in names}
    if scores.terms:
        is_masked = "allowed" in scores.followers or scores.is_unread
        if is_masked and not scores.is_chosen:
            tag.followers["allowed"] = keep_follower(is_allowed(x.detach()))
        if function in SOFTMAX:
            tag.followers["softmax"] = keep_follower(result.detach())


def see_masks(
    table: TagTable,
    function: Callable,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    result: Tensor,
    tag: Tag,
) -> None:
    """Records which keys masks leave to each query, in the tag of the scores ("allowed").

    A mask that content decides, as in top-k attention, does not show which tokens exist: it only
    marks the scores as chosen. A mask that cannot be read marks them as unread.

    Args:
        table: Tags of the pass, {tensor: its origin}.
        function, args, kwargs: The call.
        result, tag: Scores and their tag; or a mask that content decides, and its tag.
    """
    operands = [(table.tags[a], a) for a in tensors_in([args, kwargs]) if table.has(a)]
    tag.is_chosen |= any(t.is_chosen for t, _ in operands)
    tag.is_unread |= any(t.is_unread for t, _ in operands)
    if tag.terms and "allowed" not in tag.followers:  # masks of scores that were put elsewhere
        tag.is_unread |= any(t.terms and "allowed" in t.followers for t, _ in operands)
    if not result.is_floating_point():
        sides = SIDES[::-1] if inverts(function, args) else SIDES
        for t, a in operands:
            for name, side in zip(SIDES, sides, strict=True):
                if name in t.followers and a.shape == result.shape:
                    tag.followers.setdefault(side, t.followers[name])
    for operand, keep, name in read_masks(function, args, kwargs, result):
        mask = Tag() if operand is None else table.tags.get(operand, Tag())
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
            _join_mask(tag, SIDES[0] if result.is_floating_point() else name, keep, result)


def see_bias_masks(
    table: TagTable,
    function: Callable,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    result: Tensor,
    tag: Tag,
) -> None:
    """Records which keys a mask hides in a bias that maps of tokens make for scores ("allowed").

    Any tensor made of tokens may be such a bias. Therefore only masks count that content does not
    decide, and only where they write numbers far below 0.

    Args:
        table: Tags of the pass, {tensor: its origin}.
        function, args, kwargs: The call.
        result, tag: Floats, and their tag.
    """
    if all(map(table.is_content, tensors_in([args, kwargs]))) or not hides_keys(function, result):
        return
    for operand, keep, _ in read_masks(function, args, kwargs, result):
        if keep is not None and not (operand is not None and table.is_content(operand)):
            _join_mask(tag, SIDES[0], keep, result)


def _join_mask(tag, side, keep, result):
    """Records that a mask hides entries of a tensor, beside the masks that already do.

    Args:
        tag: Tag of the tensor.
        side: One of `SIDES`.
        keep: Makes the mask, Bool.
        result: The tensor.
    """
    join = functools.partial(intersect_masks, tag.followers.get(side), keep, result.shape)
    tag.followers[side] = functools.cache(join)
