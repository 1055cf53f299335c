"""Reports of bounds of networks with gains and temperatures."""

import jax
import numpy as np

import rank_collapse as rc

make_report = jax.jit(rc.bound_report)


TEMPERATURE, GAIN = 1.7, 0.8


# of three heads: by layer and feature of the attention, by layer of the MLP
GAINS = rc.Gains(attention=np.linspace(-1.2, 0.9, 12).reshape(2, 6), mlp=np.array([0.7, -1.3]))
