"""Counts violations of the paper's lemma and bounds over random draws, in float64.

Draws networks of several shapes with random weight, bias and token sizes, and checks, wherever
the lemma's condition max D_ii ≤ 1.2564312 holds: the technical lemma (I − D)P̃ ≤ P ≤ (I + 2D)P̃
entry by entry, the bound of every head, of every layer, and of the whole stack, with γ*. Prints
the counts and the ranges of γ* and tightness. There is no such table in the paper; the expected
number of violations is 0. About half a minute on 2 cores:

    python -m experiments.check_bounds --num_draws=5000
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import rank_collapse as rc
from experiments.shell import cli
from rank_collapse.network.attention import attention_scores
from rank_collapse.theory import bounds

SHAPES = ((8, 16, 1), (8, 16, 4), (16, 8, 2), (3, 4, 2))  # tokens, width, heads


FLAGS = cli.make_flags("check_bounds")
flags.DEFINE_integer("num_draws", 5000, "Networks drawn.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("seed", 0, "Base seed.", lower_bound=0, flag_values=FLAGS)


def main(options: flags.FlagValues) -> None:
    with cli.open_run(options, "check_bounds") as run:
        counts = run.summary or count_violations(options.num_draws, options.seed)
        for name, value in counts.items():
            print(f"{name:28s} {value:.6g}")
        run.finish(counts)


def count_violations(num_draws: int, seed: int = 0, shapes=SHAPES) -> dict[str, float]:
    """Counts and ranges over `num_draws` networks of two layers, shared among the shapes."""
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(seed), len(shapes))
        each = -(-num_draws // len(shapes))
        draws = []
        for key, shape in zip(keys, shapes, strict=True):
            batch = jax.jit(jax.vmap(lambda k, shape=shape: single_draw(k, *shape)))
            draws.append(jax.device_get(batch(jax.random.split(key, each))))
    flat = {name: np.concatenate([d[name].reshape(-1) for d in draws]) for name in draws[0]}
    ok, layer_ok, stack_ok = flat["head_ok"], flat["layer_ok"], flat["stack_ok"]
    return {
        "draws": each * len(shapes),
        "heads": ok.size,
        "admissible": int(ok.sum()),
        "lemma_violations": int((flat["lemma_excess"][ok] > 0).sum()),
        "lemma_violations_elsewhere": int((flat["lemma_excess"][~ok] > 0).sum()),
        "head_violations": int((flat["head_tightness"][ok] < 0).sum()),
        "layers_admissible": int(layer_ok.sum()),
        "layer_violations": int((flat["layer_tightness"][layer_ok] < 0).sum()),
        "stacks_admissible": int(stack_ok.sum()),
        "stack_violations": int((flat["stack_tightness"][stack_ok] < 0).sum()),
        "gamma_min": float(flat["gamma"][ok].min()),
        "gamma_max": float(flat["gamma"][ok].max()),
        "tightness_min": float(flat["head_tightness"][ok].min()),
        "tightness_max": float(flat["head_tightness"][ok].max()),
        "layer_tightness_min": float(flat["layer_tightness"][layer_ok].min()),
        "layer_tightness_max": float(flat["layer_tightness"][layer_ok].max()),
    }


def single_draw(key, num_tokens, width, num_heads):
    """One network of two layers, its bounds, and by how much the lemma fails in its first layer."""
    config = rc.san(2, num_heads, width)
    key_params, key_weights, key_size, key_tokens, key_mean = jax.random.split(key, 5)

    def size(key, low, high):
        return 10 ** jax.random.uniform(key, (), minval=low, maxval=high)

    params = rc.init(key_params, config, size(key_weights, -1, 0.4), 0.3)
    x = size(key_size, -1.2, 0.3) * jax.random.normal(key_tokens, (num_tokens, width))
    x = x + jax.random.normal(key_mean, (1, width))
    report = rc.bound_report(params, x, config)
    excess = lemma_excess(rc.layer_params(params, config, 0).attention, x)
    nothing = jnp.full_like(excess, -1)
    return {
        "head_ok": report.admissible,
        "layer_ok": report.admissible.all(1),
        "stack_ok": report.stack_admissible[None],
        "lemma_excess": jnp.stack([excess, nothing]),
        "head_tightness": report.head.tightness,
        "layer_tightness": report.layer.tightness,
        "stack_tightness": report.stack.tightness[None],
        "gamma": report.gamma,
    }


def lemma_excess(params, x):
    """The largest of (I − D)P̃ − P and P − (I + 2D)P̃, per head, less a margin for rounding."""
    rest = x - jnp.mean(x, axis=0, keepdims=True)
    w_qk, _ = bounds.head_weights(params)
    deviation = jnp.einsum("nd,hde,me->hnm", rest, w_qk, rest) / np.sqrt(params.w_q.shape[-1])
    spread = jnp.max(deviation, axis=-1) - jnp.min(deviation, axis=-1)
    scores = attention_scores(params, x, x)
    weights = jax.nn.softmax(scores, axis=-1)
    common = jax.nn.softmax(scores - deviation, axis=-1)  # P̃: all its rows are equal
    low = (1 - spread[:, :, None]) * common - weights
    high = weights - (1 + 2 * spread[:, :, None]) * common
    return jnp.max(jnp.maximum(low, high), axis=(1, 2)) - 1e-13


if __name__ == "__main__":
    cli.run(main, FLAGS)
