"""What a user's editor sees of the public API; pyright reads it in strict mode and nobody runs it.

`tests_docs/test_types.py` adds a line for every public name.
"""

# pyright: strict

import jax
import numpy as np

import rank_collapse as rc

config = rc.san(3, 2, 8, mask="causal").replace(attention_skip=True)
params = rc.init(jax.random.key(0), config)
trace = rc.apply(params, np.zeros((4, 8), np.float32), config, keep=("q",))
trace = trace.replace(hidden=trace.hidden_states)
layer: int = trace.layer_axis
mean: jax.Array = trace.hidden.mean() + trace.attention.sum() + trace.layers.hidden[0]
branch: jax.Array | None = trace.mlp_branch


def halve(value: jax.Array, layer: jax.Array) -> jax.Array:
    return 0.5 * value


batch = rc.network.apply_batch(params, np.zeros((2, 4, 8), np.float32), config, edit={"q": halve})
ratio: jax.Array = rc.residual_ratio(trace.output, mask=np.ones(4, bool))
profile = rc.profile(batch, measures=("residual_ratio", "token_cosine"))
first: jax.Array = profile["residual_ratio"]
figure = rc.plot(profile)
lengths = rc.path_contributions(params, np.zeros((4, 8), np.float32), config)
total: jax.Array = lengths.total
by_length: jax.Array = lengths.by_length
parts: jax.Array = rc.direct_contributions(params, np.zeros((4, 8), np.float32), config).heads
report = rc.bound_report(params, np.zeros((4, 8), np.float32), config)
tightness: jax.Array = report.mean_layer.tightness + report.log10_residual[1:]
for name in rc.MEASURES:
    rc.profile(trace, measures=name)
by_name: dict[str, jax.Array] = rc.monitor(trace.output, trace.attention)
measure: rc.measures.Measure = rc.MEASURES["residual_ratio"]
half = rc.Gains(attention=0.5).replace(mlp=0.5)
with_gains = config.replace(skip_gain=half)
proved = rc.theory.exact_profile(params, np.zeros((4, 8), np.float32), config)
network = rc.pretrained.load("folder")
