"""What each primitive of JAX is to frozen paths: the table that everything else looks up.

A primitive that is in no set is refused wherever a value that depends on the input enters it.
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Reorder or copy the entries of one array. A gate stays a gate.
STRUCTURAL = _names(
    "reshape transpose broadcast_in_dim convert_element_type reduce_precision slice squeeze rev "
    "expand_dims copy copy_p split name sharding_constraint "
    "layout_constraint mesh_cast reshard pvary pbroadcast device_put unstack"
)
# Those of them whose effect on a value is not one on its sums.
IDENTITIES = _names(
    "copy copy_p name sharding_constraint layout_constraint mesh_cast reshard device_put"
)
# Choose entries of several arrays, at indices that are constants of the pass.
SELECTING = _names("concatenate stack tile pad gather dynamic_slice dynamic_update_slice scatter")
# Linear in all floating arguments together: sums of entries.
LINEAR = _names(
    "reduce_sum cumsum add_any scatter-add scatter_add reduce_window_sum psum psum_invariant "
    "psum2 all_gather all_gather_invariant all_to_all ppermute pshuffle reduce_scatter "
    "complex real imag conj fft"
)
# Linear in each of the first two arguments.
BILINEAR = _names("mul dot_general conv_general_dilated ragged_dot ragged_dot_general")
# Those of two arguments of which a rule may fix one, and quotients.
SCALING = _names("mul div dot_general")
# Those of them that `jax.vmap` has no full rule for.
UNBATCHED = _names("ragged_dot ragged_dot_general")
# Functions of one entry. As a state, f(h) passes as f(h)/h times h.
POLYNOMIAL = _names("integer_pow square abs sign floor ceil round sqrt rsqrt cbrt")
# Those of them that are no power: their values may also weigh what they are contracted with.
TRANSCENDENTAL = _names(
    "exp exp2 expm1 log log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh logistic "
    "erf erfc erf_inv lgamma digamma bessel_i0e bessel_i1e"
)
UNARY = POLYNOMIAL | TRANSCENDENTAL
# Exponentials are weights until something is known to divide them.
EXPONENTIALS = frozenset(("exp", "exp2"))
# Functions of the entries of several arrays at the same place.
POINTWISE = UNARY | _names(
    "add sub neg mul div max min pow atan2 rem nextafter select_n clamp add_any"
)
# Those whose values are true or false, or whole numbers: constants of the pass.
PREDICATES = _names(
    "eq ne lt le gt ge eq_to lt_to le_to is_finite not and or xor shift_left "
    "shift_right_arithmetic shift_right_logical population_count clz"
)
# Nonlinear in several entries: statistics and choices. They may multiply a state and are no state.
STATISTICS = _names(
    "pmax pmin reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin "
    "cummax cummin "
    "cumprod cumlogsumexp sort top_k approx_top_k reduce_window_max reduce_window_min "
    "scatter_max scatter_min scatter_mul scatter-max scatter-min scatter-mul"
)
# Programs inside the program, that are run in place: the name of the parameter with the program.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "core_closed_call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "call_jaxpr",
}
# Fused kernels, whose products cannot be distinguished, by a part of their names.
KERNELS = ("pallas", "dot_product_attention", "cudnn", "triton", "mosaic", "ffi", "custom_call")
CURES = {
    "kernel": "use an implementation in plain JAX, such as jax.nn.dot_product_attention(..., "
    'implementation="xla")',
    "while": "use jax.lax.scan or a fori_loop with constant bounds, or freeze its arguments with "
    "jax.lax.stop_gradient",
    "default": "freeze its arguments with jax.lax.stop_gradient, or use other operations",
}


def find_cure(primitive: str) -> str:
    """Say what to do about a primitive that is refused.

    Args:
        primitive: Name of the primitive.
    """
    if any(kernel in primitive for kernel in KERNELS):
        return CURES["kernel"]
    return CURES.get(primitive, CURES["default"])
