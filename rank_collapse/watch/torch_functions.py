"""Functions of torch by their effect: they multiply, move entries, or make weights of scores."""

import string
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from rank_collapse.annotations import AnyArray


def _find_functions(*names):
    """Finds the functions of these names in `torch` and among the methods of tensors."""
    candidates = [getattr(place, name, None) for name in names for place in (torch, Tensor)]
    return {function for function in candidates if function is not None}


_REORDERS = ("index_", "scatter", "take", "sort", "msort", "topk", "masked_s", "put", "segment")
CONVOLUTIONS = {functional.conv1d, functional.conv2d, functional.conv3d}
EINSUM = _find_functions("einsum")
PRODUCTS = EINSUM | _find_functions("matmul", "mm", "bmm", "baddbmm", "__matmul__")
MAPS = PRODUCTS | CONVOLUTIONS | {functional.linear} | _find_functions("addmm")
SOFTMAX = {functional.softmax, torch.softmax, Tensor.softmax}
EXPONENTIALS = {torch.exp, Tensor.exp, torch.exp2, Tensor.exp2}
GATES = _find_functions("sigmoid", "sigmoid_", "tanh", "tanh_", "hardtanh") | {
    functional.sigmoid, functional.tanh, functional.hardsigmoid, functional.softplus,
    functional.hardtanh, torch.special.expit, *SOFTMAX, *EXPONENTIALS,
}  # fmt: skip
FACTORS = _find_functions(
    "mul", "mul_", "multiply", "multiply_", "__mul__", "__rmul__", "__imul__", "addcmul",
    "addcmul_", "lerp", "lerp_",
)  # fmt: skip
QUOTIENTS = _find_functions("div", "div_", "true_divide", "divide")
JOINS = _find_functions("cat", "concat", "stack", "hstack", "vstack")
MOVES = JOINS | {Tensor.T.__get__, Tensor.mT.__get__} | _find_functions(
    "view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten", "squeeze",
    "unsqueeze", "expand", "chunk", "split", "split_with_sizes", "tensor_split", "unbind",
    "__getitem__", "narrow", "select", "movedim", "swapaxes", "swapdims", "repeat", "tile",
    "repeat_interleave", "broadcast_to", "roll", "flip", "index_select", "expand_as", "view_as",
    "moveaxis", "view_as_complex", "view_as_real", "gather", "take_along_dim",
)  # fmt: skip


def reorders(function: object) -> bool:
    """Returns whether a function puts entries elsewhere by indices, and is not one of `MOVES`."""
    name = getattr(function, "__name__", "")
    return function not in MOVES and name.startswith(_REORDERS)


def tensors_in(values: AnyArray) -> list[Tensor]:
    """Lists the tensors among arguments or results, also of tuples, lists and dictionaries."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def floats_in(values: AnyArray) -> list[Tensor]:
    """Lists the tensors of real or complex floats among arguments or results."""
    return [a for a in tensors_in(values) if a.is_floating_point() or a.is_complex()]


class Product(NamedTuple):
    """A product of two tensors by the letters of the axes: of each of them, and of the result."""

    first: Tensor
    second: Tensor
    letters: tuple[str, str, str]

    def swap(self) -> "Product":
        """Returns the same product with its factors in the other order."""
        first, second, result = self.letters
        return Product(self.second, self.first, (second, first, result))

    def is_elementwise(self) -> bool:
        """Returns whether the product is entry by entry, without a sum over an axis."""
        first, second, result = self.letters
        return result in (first, second) and set(first + second) == set(result)


def read_product(function: object, args: object, kwargs: object) -> Product | None:
    """Reads which two tensors a function multiplies; None where they are not matrices.

    Args:
        function: One of `MAPS`.
        args, kwargs: Arguments of the call.
    """
    tensors = tensors_in([args, kwargs])
    if function in EINSUM:
        return _read_einsum(args, tensors)
    if function in CONVOLUTIONS or function is functional.linear:
        x, weight = tensors[:2]
        axes = string.ascii_lowercase[: max(x.ndim - 2, 0)]
        if function in CONVOLUTIONS:
            is_batch = x.ndim == weight.ndim
            return Product(x, weight, (f"xy{axes}", "z", f"xz{axes}")) if is_batch else None
        axes += "x" if x.ndim > 1 else ""
        return Product(x, weight, (f"{axes}y", "zy", f"{axes}z")) if weight.ndim == 2 else None
    a, b = tensors[-2:]
    if min(a.ndim, b.ndim) < 2:
        return None
    batch_axes = string.ascii_lowercase[: max(a.ndim, b.ndim) - 2]  # broadcast from the last on
    first = batch_axes[len(batch_axes) - (a.ndim - 2) :]
    second = batch_axes[len(batch_axes) - (b.ndim - 2) :]
    sizes = dict(zip(first, a.shape, strict=False))
    second_letters = ""
    for letter, size in zip(second, b.shape, strict=False):
        is_repeated = size == 1 and sizes.get(letter, 1) > 1
        # An axis of one that is used again and again is none of the first factor's.
        second_letters += letter.upper() if is_repeated else letter
    return Product(a, b, (f"{first}xy", f"{second_letters}yz", f"{batch_axes}xz"))


def _read_einsum(args, tensors):
    """Reads the letters of an equation of two tensors, and gives letters to its dots.

    Args:
        args: Arguments of einsum.
        tensors: The tensors among them.

    Returns:
        The product with its letters; None if the first argument is no equation with "->", or if
        there are not two tensors.
    """
    if not isinstance(args[0], str) or "->" not in args[0] or len(tensors) != 2:
        return None
    inputs, result = args[0].replace(" ", "").split("->")
    unused = "".join(c for c in string.ascii_uppercase if c not in args[0])
    letters, longest = [], ""  # of each tensor; the letters of the longest "..."
    for tensor, axes in zip(tensors, inputs.split(","), strict=True):
        num_named = len(axes.replace("...", ""))
        dots = unused[: tensor.ndim - num_named][::-1]  # reversed: "..." is aligned at its end
        letters.append(axes.replace("...", dots))
        longest = max(longest, dots, key=len)
    return Product(*tensors, (*letters, result.replace("...", longest)))
