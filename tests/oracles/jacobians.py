"""The Jacobian of the last state, by `jax.jacfwd` through an edit."""

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc


def jacobian_by_hand(params, config, ids, layer):
    """∂(last state)/∂(state after a layer) [t, i, s, j], by jacfwd through an edit."""

    def last_state(change):
        def add(state, number):
            return state + jnp.where(number == layer, 1.0, 0.0) * change

        return rc.apply(params, ids, config, edit={"residual": add}).hidden[-1]

    return np.asarray(jax.jit(jax.jacfwd(last_state))(jnp.zeros((len(ids), config.d_model))))
