"""The table of operators: how the result of each depends on its arguments, the pass frozen.

Numbers are positions of arguments in the operator's schema. An operator of no table is refused
where it reads a value of degree 1 or 2.

MOVES       linear in these arguments together; every entry of the result is an entry of one of
            them or a constant, so that a gate stays a gate.
SUMS        linear in these arguments together.
PRODUCTS    linear in each of two arguments, and in a third that is added.
ENTRYWISE   non-linear functions of one argument, entry by entry.
STATISTICS  functions of many entries; the result is frozen.
CONSTANTS   results without a derivative: comparisons, shapes, indices, `detach`.
CHOICES     entries of the argument, picked by its values; the choice is frozen.
NORMS       norms in one operator; the statistics are frozen.
KERNELS     attention in one operator, whose weights are not in the graph; refused.
"""

import dataclasses


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _at(position: int, names: str) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(names.split(), (position,))


MOVES: dict[str, tuple[int, ...]] = {
    **_at(
        0,
        "view _unsafe_view reshape permute transpose t expand unsqueeze squeeze slice select split "
        "split_with_sizes unbind clone alias _to_copy lift_fresh_copy roll flip index index_select "
        "gather take masked_select diagonal tril triu repeat unfold pixel_shuffle pixel_unshuffle "
        "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d upsample_nearest1d "
        "upsample_nearest2d view_as_real view_as_complex real imag embedding",
    ),
    "cat": (0,),
    "stack": (0,),
    "where": (1, 2),
    "masked_fill": (0, 2),
    "masked_scatter": (0, 2),
    "copy": (0, 1),
    "slice_scatter": (0, 1),
    "select_scatter": (0, 1),
    "diagonal_scatter": (0, 1),
    "constant_pad_nd": (0, 2),
    "complex": (0, 1),
    "index_put": (0, 2),
    "scatter": (0, 3),
    "index_copy": (0, 3),
}
SUMS: dict[str, tuple[int, ...]] = {
    **_at(
        0,
        "sum mean cumsum neg trace _conj im2col col2im avg_pool1d avg_pool2d _adaptive_avg_pool2d "
        "upsample_linear1d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa "
        "_fft_r2c _fft_c2c _fft_c2r",
    ),
    "add": (0, 1),
    "sub": (0, 1),
    "rsub": (0, 1),
    "scatter_add": (0, 3),
    "index_add": (0, 3),
}


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of the arguments at `left` and `right`, plus that at `added`.

    `entrywise` marks those in which a gate times another value is a gated MLP. `batched` is False
    where `torch.func.vmap` has no rule.
    """

    left: int = 0
    right: int = 1
    added: int | None = None
    entrywise: bool = False
    batched: bool = True


PRODUCTS: dict[str, Product] = {
    "mul": Product(entrywise=True),
    "mm": Product(),
    "bmm": Product(),
    "mv": Product(),
    "dot": Product(),
    "convolution": Product(added=2),
    "addmm": Product(1, 2, added=0),
    "addmv": Product(1, 2, added=0),
    "baddbmm": Product(1, 2, added=0),
    "_grouped_mm": Product(batched=False),
    "transformers::grouped_mm_fallback": Product(batched=False),
}
ENTRYWISE: dict[str, tuple[int, ...]] = {
    **_at(
        0,
        "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal tanh sigmoid logit erf erfc "
        "erfinv sin cos tan asin acos atan sinh cosh asinh acosh atanh abs sign sgn relu gelu silu "
        "leaky_relu elu hardtanh hardswish hardsigmoid mish softplus clamp clamp_min clamp_max "
        "threshold _prelu_kernel round floor ceil trunc nan_to_num",
    ),
    "pow": (0, 1),
}
STATISTICS = _names(
    "_softmax _log_softmax _safe_softmax var std norm linalg_vector_norm logsumexp logcumsumexp"
)
COMPARISONS = _names(
    "eq ne gt ge lt le isnan isinf logical_not logical_and logical_or logical_xor bitwise_not "
    "bitwise_and bitwise_or bitwise_xor"
)
CONSTANTS = COMPARISONS | _names(
    "any all argmax argmin argsort nonzero count_nonzero searchsorted bucketize histc isin "
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty "
    "_local_scalar_dense sym_size sym_stride sym_numel detach _assert_async "
    "_assert_scalar _assert_tensor_metadata floor_divide"
)
CHOICES = _names(
    "topk sort max min amax amin median kthvalue maximum minimum max_pool2d_with_indices"
)
NORMS = _names(
    "native_layer_norm native_group_norm _fused_rms_norm var_mean "
    "_native_batch_norm_legit_no_training"
)
KERNELS = _names(
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable _flash_attention_forward "
    "_efficient_attention_forward flex_attention _native_multi_head_attention "
    "_transformer_encoder_layer_fwd"
)
# Batch norms in training mode.
BATCH_NORMS = _names(
    "_native_batch_norm_legit_functional _native_batch_norm_legit native_batch_norm"
)
