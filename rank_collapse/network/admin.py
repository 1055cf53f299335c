"""Admin: gains ω of the skips that give every residual branch the same weight (Liu et al. 2020).

    # of a Post-LN network, on one batch
    config = rc.network.admin_profile(params, x, config, mask=mask)
    trace = rc.apply(params, x[0], config)

Sublayer i of a Post-LN network becomes x_i = N(ω_i ∘ x_{i−1} + f_i(x_{i−1})). Without a batch:
`rc.design(config, "admin_log")` and `"admin_const"`.

Axis letters: b examples, n tokens, m keys, d width, l layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import PreparedInputs, as_mask, check_indices, prepare_inputs
from rank_collapse.network.parameters import TransformerParams, complete_params
from rank_collapse.network.residual import Gains, apply_gain, normalize_tokens
from rank_collapse.network.transformer import TokenAlgebra
from rank_collapse.network.walk import Algebra, walk_layer, walk_layers
from rank_collapse.struct import refuse_if

_NAMES = {"attention": "attention", "cross": "cross-attention", "mlp": "MLP"}


def admin_profile(
    params: TransformerParams, x: Any, config: TransformerConfig, **inputs: Any
) -> TransformerConfig:
    """The config with Admin's ω as its skip gains, profiled on one batch.

    In the order in which the sublayers (attention, cross-attention, MLP) are passed,
        r_1 = 1,   ω_i = r_i,   r_{i+1} = √(Var(ω_i ∘ x_{i−1}) + Var(f_i(x_{i−1}))),
    Var over all entries of all tokens that exist in the batch, x_i the states with these ω. A gain
    that is learned multiplies ω as it is; the config's own skip gains are replaced. (The published
    code counts padding too, and profiles with dropout.)

    Args:
        params: The network's parameters, as they are before training.
        x: Token ids [b, n], or states [b, n, d], as `apply` takes one example of.
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
    _check_design(config)
    x, inputs = _checked_batch(x, inputs, config)
    params = complete_params(params, config)
    config = config.replace(skip_gain=1.0)
    entries = jax.vmap(lambda x, inputs: prepare_inputs(params, x, config, **inputs)[1])(x, inputs)
    omegas, after = _profile(params, entries, config)
    if not isinstance(after, jax.core.Tracer):
        _check_sizes(np.asarray(after), config)
    return config.replace(skip_gain=Gains(**omegas))


class Profiling(Algebra):
    """A batch of tokens [b, n, d] and r; sublayer i has ω_i = r."""

    def __init__(self, exists: Any):
        self.exists = exists

    def apply_norm(self, layer, spec, state):
        x, r = state
        return jax.vmap(lambda x: normalize_tokens(spec, x))(x), r

    def add_branch(self, layer, spec, state, part):
        x, r = state
        summands = r * apply_gain(spec.skip_gain, x), apply_gain(spec.branch_gain, part)
        return sum(summands), jnp.sqrt(sum(map(self._variance, summands)))

    def apply_branch(self, layer, kind, branch_input):
        def one(x, inputs):
            return getattr(TokenAlgebra(), f"apply_{kind}")(layer.replace(inputs=inputs), x)[0]

        return jax.vmap(one)(branch_input[0], layer.inputs), None

    def _variance(self, a):
        return jnp.var(a, where=jnp.broadcast_to(self.exists[..., None], a.shape))


@jax.jit
def _profile(params, entries: PreparedInputs, config):
    """ω by kind [l] and r after every sublayer [l, kinds]."""
    exists = entries.token_mask
    if exists is None:
        exists = jnp.ones(entries.x.shape[:2], bool)
    algebra = Profiling(exists)

    def step(layer, state):
        state, passages = walk_layer(algebra, layer, state)
        omegas = {kind: passage.state[1] for kind, passage in passages.items()}
        return state, (
            omegas,
            jnp.stack([passage.output_state[1] for passage in passages.values()]),
        )

    start = (entries.x, jnp.ones((), entries.x.dtype))
    return walk_layers(step, start, params, entries, config)[1]


def _check_design(config):
    refuse_if(
        config.norm_placement != "post",
        f"Admin needs norm_placement='post', not {config.norm_placement!r}: "
        'rc.design(config, "admin")',
    )
    for kind in config.kinds:
        refuse_if(
            not getattr(config, f"{kind}_skip"),
            f"Admin's ω multiplies skips, but {kind}_skip=False",
        )


def _checked_batch(x, inputs, config):
    x = jnp.asarray(x)
    is_ids = jnp.issubdtype(x.dtype, jnp.integer)
    refuse_if(
        x.ndim != (2 if is_ids else 3),
        f"x of shape {x.shape} is not token ids [b, n] or states [b, n, d]",
    )
    check_indices({"x": x}, config)
    inputs = {name: a for name, a in inputs.items() if a is not None}
    for name in inputs:
        value = as_mask(inputs[name], name) if "mask" in name else jnp.asarray(inputs[name])
        if value.shape[:1] != x.shape[:1]:
            raise ValueError(f"{name} of shape {value.shape} is not of {x.shape[0]} examples")
        inputs[name] = value
    return x, inputs


def _check_sizes(after, config):
    """Refuses r [l, kinds] that is no gain, and names the first sublayer that made it."""
    bad = np.argwhere(~(np.isfinite(after) & (after > 0)))
    if not len(bad):
        return
    layer, place = bad[0]
    name = f"the {_NAMES[config.kinds[place]]} sublayer of layer {layer}"
    refuse_if(
        not np.isfinite(after[layer, place]),
        f"profiling: an activation that is not finite in {name}",
    )
    raise ValueError(f"profiling: ω = 0 is not positive: nothing varies in {name}")
