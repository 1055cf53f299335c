"""Admin: gains ω of the skips that give every residual branch the same weight (Liu et al. 2020).

    # of a Post-LN network, on one batch
    config = rc.network.admin_profile(params, x, config, mask=mask)
    trace = rc.apply(params, x[0], config)

Sublayer i of a Post-LN network becomes x_i = N(ω_i ∘ x_{i−1} + f_i(x_{i−1})). Without a batch:
`rc.design(config, "admin_log")` and `"admin_const"`.

Axis letters: b examples, n tokens, m keys, d width, l layers.
"""

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.annotations import ArrayLike
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.input_checks import as_mask, check_indices
from rank_collapse.network.inputs import PreparedInputs, batch_size, prepare_inputs
from rank_collapse.network.parameters import TransformerParams, complete_params
from rank_collapse.network.residual import Gains, apply_gain, normalise_tokens
from rank_collapse.network.transformer import TokenAlgebra
from rank_collapse.network.walk import Algebra, walk_layer, walk_layers

_NAMES = {"attention": "attention", "cross": "cross-attention", "mlp": "MLP"}


def admin_profile(
    params: TransformerParams, x: ArrayLike, config: TransformerConfig, **inputs: ArrayLike | None
) -> TransformerConfig:
    """Profile Admin's ω on one batch, and return the config with them as its skip gains.

    In the order in which the sublayers (attention, cross-attention, MLP) are passed,
        r_1 = 1,   ω_i = r_i,   r_{i+1} = √(Var(ω_i ∘ x_{i−1}) + Var(f_i(x_{i−1}))).
    Var is over all entries of all tokens that exist in the batch, and x_i are the states with these
    ω. A gain that is learned multiplies ω as it is; the config's skip gains are replaced. (The
    published code counts padding too, and profiles with dropout.)

    Args:
        params: The network's parameters, as they are before training.
        x: Token ids [b, n], or states [b, n, d]: a batch of inputs of `apply`.
        config: A Post-LN network, with a skip around every sublayer.
        **inputs: mask, bias, memory, memory_mask, segments and positions of `apply`, each with the
            leading axis b; with a mask [b, n] other tokens count in no variance.

    Returns:
        The config with `skip_gain` a `Gains` of ω [l].

    Raises:
        ValueError: Another placement of norms, a sublayer without a skip, inputs that are not a
            batch, or a batch that gives an activation that is not finite or an ω of 0.

    Source: Liu et al. 2020, "Admin: adaptive model initialization".
    """
    if config.norm_placement != "post":
        raise ValueError(
            f"Admin needs norm_placement='post', not {config.norm_placement!r}: "
            'rc.design(config, "admin")'
        )
    for kind in config.kinds:
        if not getattr(config, f"{kind}_skip"):
            raise ValueError(f"Admin's ω multiplies skips, but {kind}_skip=False")
    x, inputs = _check_batch(x, inputs, config)
    params = complete_params(params, config)
    config = config.replace(skip_gain=1.0)
    prepared = jax.vmap(lambda x, inputs: prepare_inputs(params, x, config, **inputs)[1])(x, inputs)
    omegas, roots = _profile_layers(params, prepared, config)
    if not isinstance(roots, jax.core.Tracer):
        _check_roots(np.asarray(roots), config)
    return config.replace(skip_gain=Gains(**omegas))


class Profiling(Algebra):
    """A state is a batch of tokens [b, n, d] and r; sublayer i has ω_i = r."""

    def __init__(self, token_mask: ArrayLike):
        self.token_mask = token_mask  # Bool [b, n]

    def apply_norm(self, layer, spec, state):
        """Normalise the tokens of all examples."""
        x, r = state
        return jax.vmap(lambda x: normalise_tokens(spec, x))(x), r

    def add_branch(self, layer, spec, state, branch_output):
        """Add a branch to the stream: (the sum, the root of the sum of both variances)."""
        x, r = state
        stream = r * apply_gain(spec.skip_gain, x)
        branch = apply_gain(spec.branch_gain, branch_output)
        return stream + branch, jnp.sqrt(self._variance(stream) + self._variance(branch))

    def apply_branch(self, layer, kind, branch_input):
        """Compute the branch of each example, without further results."""

        def apply_one(x, inputs):
            return TokenAlgebra().apply_branch(layer.replace(inputs=inputs), kind, x)[0]

        return jax.vmap(apply_one)(branch_input[0], layer.inputs), None

    def _variance(self, a):
        return jnp.var(a, where=jnp.broadcast_to(self.token_mask[..., None], a.shape))


@jax.jit
def _profile_layers(params, prepared: PreparedInputs, config):
    """Compute ω by kind [l], and r after every sublayer [l, kinds].

    Args:
        params: Complete parameters.
        prepared: `PreparedInputs` of all examples, leading axis b.
        config: The network.
    """
    algebra = Profiling(prepared.existing_tokens)

    def step(layer, state):
        """Pass a layer: (the state, (ω of each sublayer, the roots after all sublayers))."""
        state, sublayers = walk_layer(algebra, layer, state)
        omegas = {kind: values.state[1] for kind, values in sublayers.items()}
        roots = jnp.stack([values.output_state[1] for values in sublayers.values()])
        return state, (omegas, roots)

    start = (prepared.x, jnp.ones((), prepared.x.dtype))
    return walk_layers(step, start, params, prepared, config)[1]


def _check_batch(x, inputs, config):
    """Convert the inputs to arrays, and check that they are a batch of one size.

    Args:
        x: Token ids or states.
        inputs: Further inputs by argument name; None for one that is absent.
        config: The network.

    Returns:
        (x as an array, {argument name: array} of the inputs that are not absent).

    Raises:
        ValueError: The inputs are not a batch of one size, or token ids are not in the table.
    """
    x = jnp.asarray(x)
    is_ids = jnp.issubdtype(x.dtype, jnp.integer)
    if x.ndim != (2 if is_ids else 3):
        raise ValueError(f"x of shape {x.shape} is not token ids [b, n] or states [b, n, d]")
    check_indices({"x": x}, config)
    arrays = {
        name: as_mask(value, name) if "mask" in name else jnp.asarray(value)
        for name, value in inputs.items()
        if value is not None
    }
    batch_size({"x": x} | arrays)
    return x, arrays


def _check_roots(roots, config):
    """Check that every r [l, kinds] can be a gain.

    Raises:
        ValueError: An r is not finite or is 0; the message names the first such sublayer.
    """
    faults = np.argwhere(~np.isfinite(roots) | (roots <= 0))
    if len(faults):
        layer, place = faults[0]
        sublayer = f"the {_NAMES[config.kinds[place]]} sublayer of layer {layer}"
        if not np.isfinite(roots[layer, place]):
            raise ValueError(f"profiling met an activation in {sublayer} that is not finite")
        raise ValueError(
            f"profiling gave ω = 0 in {sublayer}, where nothing varies; ω must be positive"
        )
