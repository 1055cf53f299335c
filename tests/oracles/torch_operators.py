"""Calls of every operator of PyTorch that paths pass, and their derivatives."""

import pytest

torch = pytest.importorskip("torch")

from rank_collapse.torch.calls import Call, map_nested  # noqa: E402
from rank_collapse.torch.values import Bases, Value  # noqa: E402

aten = torch.ops.aten


RANDOM = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(shape, generator=RANDOM, dtype=torch.float64)


class X:
    """Marks an argument that depends on the state."""

    def __init__(self, *shape, array=None):
        self.array = draw(*shape) if array is None else array


x = X(4, 6)


positive = X(array=x.array.abs() + 0.5)


fraction = X(array=x.array.sigmoid())


image = X(1, 4, 4, 6)


complex_x = X(array=torch.complex(draw(3, 4), draw(3, 4)))


index = torch.tensor([2, 0, 2])


table = torch.tensor([[1, 0, 3, 2, 0, 1]])


mask = torch.arange(24).reshape(4, 6) % 3 == 0


MOVES = {
    "view": (aten.view.default, x, [6, 4]),
    "_unsafe_view": (aten._unsafe_view.default, x, [24]),
    "reshape": (aten.reshape.default, x, [2, 12]),
    "permute": (aten.permute.default, x, [1, 0]),
    "transpose": (aten.transpose.int, x, 0, 1),
    "t": (aten.t.default, x),
    "expand": (aten.expand.default, x, [2, 4, 6]),
    "unsqueeze": (aten.unsqueeze.default, x, 1),
    "squeeze": (aten.squeeze.dims, X(4, 1, 6), [1]),
    "slice": (aten.slice.Tensor, x, 1, 1, 5, 2),
    "select": (aten.select.int, x, 0, 2),
    "split": (aten.split.Tensor, x, 2, 1),
    "split_with_sizes": (aten.split_with_sizes.default, x, [1, 5], 1),
    "unbind": (aten.unbind.int, x, 0),
    "clone": (aten.clone.default, x),
    "alias": (aten.alias.default, x),
    "_to_copy": (aten._to_copy.default, x),
    "lift_fresh_copy": (aten.lift_fresh_copy.default, x),
    "roll": (aten.roll.default, x, [2], [1]),
    "flip": (aten.flip.default, x, [1]),
    "index": (aten.index.Tensor, x, [None, index]),
    "index_select": (aten.index_select.default, x, 1, index),
    "gather": (aten.gather.default, x, 0, table),
    "take": (aten.take.default, x, index),
    "masked_select": (aten.masked_select.default, x, mask),
    "diagonal": (aten.diagonal.default, x, 1),
    "tril": (aten.tril.default, x),
    "triu": (aten.triu.default, x, 1),
    "repeat": (aten.repeat.default, x, [2, 1, 2]),
    "unfold": (aten.unfold.default, x, 1, 3, 2),
    "pixel_shuffle": (aten.pixel_shuffle.default, image, 2),
    "pixel_unshuffle": (aten.pixel_unshuffle.default, image, 2),
    "reflection_pad1d": (aten.reflection_pad1d.default, x, [1, 2]),
    "reflection_pad2d": (aten.reflection_pad2d.default, image, [1, 2, 0, 1]),
    "replication_pad1d": (aten.replication_pad1d.default, X(2, 4, 6), [1, 2]),
    "replication_pad2d": (aten.replication_pad2d.default, image, [1, 2, 0, 1]),
    "upsample_nearest1d": (aten.upsample_nearest1d.default, X(2, 4, 6), [9]),
    "upsample_nearest2d": (aten.upsample_nearest2d.default, image, [8, 9]),
    "view_as_real": (aten.view_as_real.default, complex_x),
    "view_as_complex": (aten.view_as_complex.default, X(4, 3, 2)),
    "real": (aten.real.default, complex_x),
    "imag": (aten.imag.default, complex_x),
    "embedding": (aten.embedding.default, x, table),
    "cat": (aten.cat.default, [x, draw(4, 2), x], 1),
    "stack": (aten.stack.default, [draw(4, 6), x], 1),
    "where": (aten.where.self, mask, x, draw(4, 1)),
    "masked_fill": (aten.masked_fill.Scalar, x, mask, -7.0),
    "masked_scatter": (aten.masked_scatter.default, draw(4, 6), mask, x),
    "copy": (aten.copy.default, draw(4, 6), x),
    "slice_scatter": (aten.slice_scatter.default, draw(4, 9), x, 1, 2, 8),
    "select_scatter": (aten.select_scatter.default, draw(4, 5, 6), x, 1, 3),
    "diagonal_scatter": (aten.diagonal_scatter.default, x, draw(4)),
    "constant_pad_nd": (aten.constant_pad_nd.default, x, [1, 2], 5.0),
    "complex": (aten.complex.default, x, draw(4, 6)),
    "index_put": (aten.index_put.default, draw(5, 6), [torch.tensor([3, 0, 1, 4])], x),
    "scatter": (aten.scatter.src, draw(5, 6), 0, torch.tensor([[4] * 6] * 4), x),
    "index_copy": (aten.index_copy.default, draw(4, 9), 1, torch.tensor([8, 0, 1, 5, 3, 2]), x),
}


SUMS = {
    "sum": (aten.sum.dim_IntList, x, [1], True),
    "mean": (aten.mean.dim, x, [0]),
    "cumsum": (aten.cumsum.default, x, 1),
    "neg": (aten.neg.default, x),
    "trace": (aten.trace.default, x),
    "_conj": (aten._conj.default, complex_x),
    "im2col": (aten.im2col.default, image, [2, 2], [1, 1], [0, 0], [2, 2]),
    "col2im": (aten.col2im.default, X(1, 4, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]),
    "avg_pool1d": (aten.avg_pool1d.default, X(2, 4, 6), [2]),
    "avg_pool2d": (aten.avg_pool2d.default, image, [2, 3]),
    "_adaptive_avg_pool2d": (aten._adaptive_avg_pool2d.default, image, [2, 3]),
    "upsample_linear1d": (aten.upsample_linear1d.default, X(2, 4, 6), [9], False),
    "upsample_bilinear2d": (aten.upsample_bilinear2d.default, image, [8, 9], False),
    "upsample_bicubic2d": (aten.upsample_bicubic2d.default, image, [8, 9], False),
    "_upsample_bilinear2d_aa": (aten._upsample_bilinear2d_aa.default, image, [8, 9], False),
    "_fft_r2c": (aten._fft_r2c.default, x, [1], 0, True),
    "_fft_c2c": (aten._fft_c2c.default, complex_x, [1], 0, True),
    "_fft_c2r": (aten._fft_c2r.default, complex_x, [1], 0, 6),
    "add": (aten.add.Tensor, draw(3, 4, 6), x),
    "sub": (aten.sub.Tensor, draw(4, 6), x),
    "rsub": (aten.rsub.Scalar, x, 3.0),
    "scatter_add": (aten.scatter_add.default, draw(5, 6), 0, torch.tensor([[4] * 6] * 4), x),
    "index_add": (aten.index_add.default, draw(5, 6), 0, torch.tensor([3, 0, 3, 4]), x),
}


PRODUCTS = {
    "mul": (aten.mul.Tensor, draw(3, 4, 6), x),
    "mm": (aten.mm.default, x, draw(6, 5)),
    "bmm": (aten.bmm.default, draw(2, 3, 4), X(2, 4, 6)),
    "mv": (aten.mv.default, x, draw(6)),
    "dot": (aten.dot.default, draw(6), X(6)),
    "convolution": (
        aten.convolution.default,
        *(image, draw(8, 2, 3, 3), draw(8)),
        *([1, 1], [1, 1], [1, 1], False, [0, 0], 2),
    ),
    "addmm": (aten.addmm.default, draw(5), x, draw(6, 5)),
    "addmv": (aten.addmv.default, draw(4), x, draw(6)),
    "baddbmm": (aten.baddbmm.default, draw(2, 3, 6), draw(2, 3, 4), X(2, 4, 6)),
}


ENTRYWISE = {
    name: (getattr(aten, name).default, x)
    for name in [
        "exp",
        "exp2",
        "expm1",
        "rsqrt",
        "reciprocal",
        "tanh",
        "sigmoid",
        "erf",
        "erfc",
        "sin",
        "cos",
        "tan",
        "atan",
        "sinh",
        "cosh",
        "asinh",
        "abs",
        "sign",
        "sgn",
        "relu",
        "gelu",
        "silu",
        "leaky_relu",
        "elu",
        "hardtanh",
        "hardswish",
        "hardsigmoid",
        "mish",
        "softplus",
        "round",
        "floor",
        "ceil",
        "trunc",
        "nan_to_num",
    ]
}


ENTRYWISE |= {
    name: (getattr(aten, name).default, positive)
    for name in ["log", "log2", "log10", "log1p", "sqrt", "rsqrt"]
}


ENTRYWISE |= {name: (getattr(aten, name).default, fraction) for name in ["logit", "erfinv", "asin"]}


ENTRYWISE |= {
    "acos": (aten.acos.default, fraction),
    "atanh": (aten.atanh.default, fraction),
    "acosh": (aten.acosh.default, X(array=positive.array + 1)),
    "clamp": (aten.clamp.default, x, -0.5, 0.7),
    "clamp_min": (aten.clamp_min.default, x, 0.2),
    "clamp_max": (aten.clamp_max.default, x, 0.2),
    "threshold": (aten.threshold.default, x, 0.1, 20.0),
    "_prelu_kernel": (aten._prelu_kernel.default, x, torch.full((1,), 0.3, dtype=torch.float64)),
    "pow": (aten.pow.Tensor_Scalar, x, 3),
}


STATISTICS = {
    "_softmax": (aten._softmax.default, x, -1, False),
    "_log_softmax": (aten._log_softmax.default, x, -1, False),
    "_safe_softmax": (aten._safe_softmax.default, x, -1),
    "var": (aten.var.correction, x, [1]),
    "std": (aten.std.correction, x, [1]),
    "norm": (aten.norm.ScalarOpt_dim, x, 2, [1]),
    "linalg_vector_norm": (aten.linalg_vector_norm.default, x, 2, [1]),
    "logsumexp": (aten.logsumexp.default, x, [1]),
    "logcumsumexp": (aten.logcumsumexp.default, x, 1),
}


CONSTANTS = {
    **{n: (getattr(aten, n).Tensor, x, draw(4, 6)) for n in ["eq", "ne", "gt", "ge", "lt", "le"]},
    **{n: (getattr(aten, n).default, x, draw(4, 6)) for n in ("logical_and", "logical_or")},
    **{
        n: (getattr(aten, n).default, x)
        for n in [
            "isnan",
            "isinf",
            "logical_not",
            "any",
            "all",
            "argmax",
            "argmin",
            "argsort",
            "nonzero",
            "zeros_like",
            "ones_like",
            "empty_like",
            "detach",
            "count_nonzero",
        ]
    },
    "logical_xor": (aten.logical_xor.default, x, draw(4, 6)),
    "full_like": (aten.full_like.default, x, 2.0),
    "new_zeros": (aten.new_zeros.default, x, [3]),
    "new_ones": (aten.new_ones.default, x, [3]),
    "new_full": (aten.new_full.default, x, [3], 2.0),
    "new_empty": (aten.new_empty.default, x, [3]),
    "searchsorted": (aten.searchsorted.Tensor, torch.arange(5.0).double(), x),
    "bucketize": (aten.bucketize.Tensor, x, torch.arange(5.0).double()),
    "histc": (aten.histc.default, x, 4),
    "isin": (aten.isin.Tensor_Tensor, x, draw(4)),
    "floor_divide": (aten.floor_divide.default, x, 2),
    "_local_scalar_dense": (aten._local_scalar_dense.default, X()),
}


CHOICES = {
    "topk": (aten.topk.default, x, 2),
    "sort": (aten.sort.default, x, 0, True),
    "max": (aten.max.dim, x, 1),
    "min": (aten.min.dim, x, 0, True),
    "amax": (aten.amax.default, x, [1]),
    "amin": (aten.amin.default, x, [0], True),
    "median": (aten.median.dim, x, 1),
    "kthvalue": (aten.kthvalue.default, x, 2),
    "maximum": (aten.maximum.default, x, X(4, 6)),
    "minimum": (aten.minimum.default, x, X(4, 6)),
    "max_pool2d_with_indices": (aten.max_pool2d_with_indices.default, image, [2, 2]),
}


def make_call(name, target, *args):
    """Returns a call on values and those of its arguments that depend on the state."""
    bases, values = Bases(), {}

    def make(item):
        if isinstance(item, X):
            new = Value(item.array, 1, base=bases.new())
            return values.setdefault(id(item), new)
        return Value(item) if isinstance(item, torch.Tensor) else item

    call = Call(name, target, [map_nested(make, a) for a in args], {}, "a test", bases)
    return call, list(values.values())


def derive(call, values, tangents, index):
    """Differentiates an operator along tangents in forward mode."""
    if call.name == "copy":  # torch has no rule for it
        return tangents[0]

    def function(*arrays):
        result = call.compute_replacing(tuple(values), arrays)
        return result if index is None else result[index]

    return torch.func.jvp(function, tuple(v.array for v in values), tangents)[1]


def draw_tangents(values):
    return tuple(torch.randn(v.shape, generator=RANDOM, dtype=v.array.dtype) for v in values)


def push(value, values, tangents):
    by_value = dict(zip(map(id, values), tangents, strict=True))
    tangents = [by_value[id(source)] for source in value.sources]
    if not value.batched:
        return value.push(*tangents)
    return torch.func.vmap(value.push)(*(t[None] for t in tangents))[0]
