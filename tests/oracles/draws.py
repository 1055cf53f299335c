"""Parameters and inputs drawn by numpy: nothing to compile, where JAX's draws take seconds.

`jax.device_put` compiles nothing either; `jnp.asarray` has a program for every shape.
"""

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc

initial = jax.jit(lambda config: rc.init(jax.random.key(0), config))


def parameters(config, seed=0, weight_scale=1.0, bias_scale=0.3, gain_scale=0.1):
    """Draws parameters without symmetry, in the shapes that `rank_collapse.init` gives.

    Matrices are normal(0, weight_scale²/fan-in), biases normal(0, bias_scale²), gains of norms and
    learned gains normal(1, gain_scale²).
    """
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        z, name = rng.standard_normal(leaf.shape), path[-1].name
        if name in ("gain", "q_norm", "k_norm", "skip", "branch"):
            z = 1 + gain_scale * z
        elif name == "bias" or name.startswith("b_"):
            z = bias_scale * z
        else:
            z = weight_scale * z / np.sqrt(leaf.shape[-2])
        return jax.device_put(z.astype(leaf.dtype))

    return jax.tree.map_with_path(draw, initial.eval_shape(config))


def redrawn(params, count, seed=2):
    """Draws `count` networks of the initialisation of `params`, with leaves [count, ...].

    Weights are normal, with the mean square of those of `params`. Constant leaves stay.
    """
    rng = np.random.default_rng(seed)

    def draw(leaf):
        if np.ptp(leaf) == 0:
            return jnp.broadcast_to(leaf, (count, *leaf.shape))
        z = rng.standard_normal((count, *leaf.shape))
        return jax.device_put((z * np.sqrt(np.mean(np.square(leaf)))).astype(leaf.dtype))

    return jax.tree.map(draw, params)


def normal(*shape, seed=1):
    """Draws standard normal numbers."""
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape))


def tokens(n, d, seed=1, shift=0.3):
    """Draws inputs [n, d], normal around a common token."""
    return jax.device_put(np.random.default_rng(seed).standard_normal((n, d)) + shift)


def with_value(array, index, value):
    """Copies an array, as NumPy's, and sets what an index selects."""
    copy = np.array(array)
    copy[index] = value
    return copy


def changed(params, **parts):
    """Replaces fields in parts of the layers, as in changed(params, attention={"w_q": ...})."""
    layers = params.layers
    edited_parts = {name: getattr(layers, name).replace(**fields) for name, fields in parts.items()}
    return params.replace(layers=layers.replace(**edited_parts))
