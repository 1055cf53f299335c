"""Weights of attention where they meet values: their scores and their masks.

The `Tag` of a tensor describes where it comes from; its rows are the axes along which tokens
differ, its features the others (`torch_tags`). A product has one letter for each axis of its
factors and of its result.

Axis letters: n queries, m keys, k width; others as in an equation of `einsum`.
"""

import dataclasses
import math
import string
from typing import Any

import torch
from torch import Tensor

from rank_collapse.watch import torch_products as products
from rank_collapse.watch.torch_followers import (
    find_changes,
    has_same_rows,
    keep_follower,
    sums_tokens,
)
from rank_collapse.watch.torch_functions import (
    Product,
)
from rank_collapse.watch.torch_scores import make_term
from rank_collapse.watch.torch_tag_table import TagTable
from rank_collapse.watch.torch_tags import Tag, Term


def is_weights(table: TagTable, product: Product) -> bool:
    """Returns whether the first factor of a product consists of attention weights, and the product
    sums over their keys.

    The pairs of query and key of its entries show this: along the axes over which it sums, the keys
    change and the queries do not. Queries may take the part of keys if the scores were transposed.

    Args:
        table: Tags of the pass, {tensor: its origin}.
        product: The product, with letters of the axes.
    """
    tag = table.tag(product.first)
    if tag.is_constant or not (tag.terms or tag.is_softmax):
        return False
    letters, _, result = product.letters
    axes = [i for i, c in enumerate(letters) if c not in result]
    changes = find_changes(tag, axes)
    if changes is None:
        return bool(tag.terms) or not has_same_rows(tag, axes)
    size = math.prod(product.first.shape[i] for i in axes)
    is_turned = changes == (True, False) and tag.is_softmax and bool(tag.terms)
    return is_turned or changes == (False, True) or (changes == (False, False) and size == 1)


def read_terms(table: TagTable, product: Product) -> tuple[Term, ...]:
    """Reads the products of queries and keys that weights come from.

    Args:
        table: Tags of the pass.
        product: Product of weights and values. If it sums over the axis that came first in the
            scores, these are keys, and the second axis has the queries.
    """
    tag, (letters, _, result) = table.tag(product.first), product.letters
    axes = [i for i, c in enumerate(letters) if c not in result]
    if find_changes(tag, axes) != (True, False):
        return tag.terms

    def exchange(term):
        """Returns the product with its keys as queries and its queries as keys."""
        query_letters, key_letters, scores = term.letters
        transposed = scores[:-2] + scores[-1] + scores[-2]
        return Term((key_letters, query_letters, transposed), term.sizes, term.key, term.query)

    return tuple(map(exchange, tag.terms))


def read_weights(table: TagTable, product: Product) -> products.Weights:
    """Reads attention weights where they are multiplied with values, and the keys that masks leave
    to each query.

    The softmax's result and the masks have followed the weights through all views. If a mask could
    not be read, the keys with a weight above 0 count as those that it leaves. Axes that the values
    do not have are queries; if heads share the values, the axes along which the pair of query and
    key changes are.

    Args:
        table: Tags of the pass, {tensor: its origin}.
        product: Product of weights and values, with letters of the axes.
    """
    tag = table.tag(product.first)
    allowed = tag.followers["allowed"]() if "allowed" in tag.followers else None
    softmax = tag.followers["softmax"]() if "softmax" in tag.followers else None
    if allowed is None and tag.is_unread and not tag.is_chosen:
        allowed = product.first > 0
    axes, values, result = product.letters
    queries = [c for c in axes if c in result and c not in values]
    if len(queries) > 1:  # and heads, which share the values
        changes = [find_changes(tag, [axes.index(c)]) for c in queries]
        moving = [c for c, change in zip(queries, changes, strict=True) if any(change or ())]
        queries = moving or queries[-1:]
    return products.read_weights(product.first, allowed, softmax, product.letters, queries)


def read_linear_attention(table: TagTable, product: Product) -> tuple[Term, Tag] | None:
    """Reads the queries and keys of linear attention, q_i (Σ_j k_j v_jᵀ), where no weights are
    computed.

    A product is recognised if its second factor is itself a product that sums over tokens, such as
    Σ_j k_j v_jᵀ, and its first factor is multiplied with the features of the keys.

    Args:
        table: Tags of the pass, {tensor: its origin}.
        product: Product of two tensors, with letters of the axes.

    Returns:
        The product of queries and keys, which is never computed, and the tag of the values; None if
        it is another product.
    """
    tag, inner = table.tag(product.second), table.sums.get(product.second)
    if table.tag(product.first).terms:
        return None
    first, second, result = product.letters
    summed = [i for i, c in enumerate(second) if c not in result]
    if inner is not None:
        is_over_features = "".join(second[i] for i in summed) == second[-2:-1]
    elif len(tag.terms) == 1 and not tag.is_softmax:
        (inner,) = tag.terms
        is_over_features = find_changes(tag, summed) == (True, False)
    else:
        return None
    shape = [inner.sizes[c] for c in inner.letters[2]]
    if list(product.second.shape) != shape or not is_over_features:
        return None
    letters = dict(zip(inner.letters[2], second, strict=True))
    axes = [c for c in inner.letters[0] if c not in letters]
    if len(axes) != 1 or not sums_tokens(inner, axes[0]):
        return None
    (token,) = axes
    unused = next(c for c in string.ascii_uppercase if c not in first + second)
    key = "".join(letters.get(c, unused) for c in inner.letters[0])
    sizes = dict(zip(first, product.first.shape, strict=True)) | {unused: inner.sizes[token]}
    scores = "".join(c for c in result if c in first) + unused
    return Term((first, key, scores), sizes, table.tag(product.first), inner.query), inner.key


def begin_mean(table: TagTable, product: Product, result: Tensor) -> None:
    """Marks a mean of values by a softmax over tokens as a tensor that no linear map made.

    It may be Σ_j k_j v_jᵀ in linear attention whose keys passed a softmax; so the product is kept.

    Args:
        table: Tags of the pass, {tensor: its origin}.
        product: Product of the output of the softmax and values.
        result: Result of the mean.
    """
    table.begin(result, [table.tag(product.second)])
    table.sums[result] = make_term(table, product, result)


def split_nested(table: TagTable, tensor: Tensor) -> list[tuple[Tensor, Tag]]:
    """Splits a jagged tensor into its rows [1, ...], each with its record of origin.

    Args:
        table: Tags of the pass, {tensor: its origin}.
        tensor: The tensor.
    """
    tag = table.tag(tensor)
    follower = tag.followers.get("entries", lambda: -torch.ones_like(tensor, dtype=torch.long))
    rows = zip(tensor.unbind(), follower().unbind(), strict=True)
    return [
        (x[None], dataclasses.replace(tag, followers={"entries": keep_follower(numbers[None])}))
        for x, numbers in rows
    ]


def read_choice(table: TagTable, mask: Tensor) -> dict[str, Any]:
    """Reads whether content decides a mask, and the keys that remain for any content.

    Args:
        table: Tags of the pass.
        mask: Mask of `scaled_dot_product_attention`.

    Returns:
        Arguments of `compute_dot_weights`.
    """
    if not table.is_content(mask):
        return {}
    return {"is_chosen": True, "static": table.tags[mask].followers.get("allowed")}
