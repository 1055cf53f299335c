"""Language models over bytes at several depths, and the effects of their first training steps.

Pre-norm networks with tied embeddings, trained by AdamW with gradients clipped at 1, as in figure 7
of Dey et al. 2025 (arXiv 2505.01618).

Axis letters: t steps, b examples, n tokens, l layers, d width.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, UInt8

from rank_collapse import checks
from rank_collapse.network.config import TransformerConfig, transformer
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.transformer import apply_batch, compute_layer
from rank_collapse.network.walk import walk_layers
from rank_collapse.scaling.coord_check import coordinates
from rank_collapse.scaling.depth_rules import DepthRule

BYTES = 256


def byte_model(depth: int, width: int, tokens: int = 64) -> TransformerConfig:
    """Makes a causal pre-norm network over bytes with width // 64 heads, GELU, and normal(0, 0.02)
    weights.

    Its scores are divided by 8 √k for heads of width k. At k = 64 this is k itself, from which
    rules that scale with the width of a head start.

    Args:
        depth, width: Depth and width of the network.
        tokens: Number of positions.
    """
    embedding = EmbeddingConfig(
        vocab_size=BYTES, d_embed=width, positions="learned", num_positions=tokens, norm=False
    )
    heads = max(1, width // 64)
    return transformer(
        depth,
        heads,
        width,
        norm_placement="pre",
        final_norm=True,
        norm_eps=1e-5,
        mask="causal",
        init="bert",
        embedding=embedding,
        temperature=8.0,
    )


def text_bytes(text: str, tokens: int) -> UInt8[np.ndarray, "c"]:
    """Convert a text to its bytes.

    Args:
        text: The text.
        tokens: Number of tokens in one sequence; the text must be longer.

    Raises:
        ValueError: Fewer than one sequence of tokens and its next one.
    """
    letters = np.frombuffer(text.encode(), np.uint8)
    checks.refuse_if(
        letters.size <= tokens, f"a text of {letters.size} bytes is too short for {tokens} tokens"
    )
    return letters


def train_network(
    key: jax.Array,
    text: UInt8[np.ndarray, "c"],
    config: TransformerConfig,
    rule: DepthRule,
    *,
    rate: ArrayLike,
    weight_decay: ArrayLike,
    steps: int,
    batch_size: int,
) -> dict[str, Float[Array, "t"]]:
    """Train one network for its first steps; returns its quantities, NaN where a step has none.

    Args:
        key: Random key for the weights and for the places in the text.
        text: UInt8 [c], of `text_bytes`.
        config: A network whose embedding is also its read-out.
        rule: Rule that scales gains and rates.
        rate, weight_decay: Rate and weight decay of AdamW; they may be traced.
        steps: Number of training steps.
        batch_size: Sequences of a step.

    Returns:
        The results of `coordinates` on each batch, "loss", "change" of the first sequence between
        steps, and after the last step "linearisation", see `linearisation_distance`.
    """
    import optax  # here: it takes half a second, which `--help` need not

    key_weights, key_data = jax.random.split(key)
    network = rule.network(config)
    num_tokens = config.embedding.num_positions
    params = start = rule.init(key_weights, config)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        rule.adamw(rate, config, weight_decay=weight_decay),
    )
    size = (steps, batch_size, 1)
    first = jax.random.randint(key_data, size, 0, text.shape[0] - num_tokens)
    place = first + jnp.arange(num_tokens + 1)[None, None, :]
    data = jnp.asarray(text)[place].astype(jnp.int32)
    probe = data[0, :1, :-1]

    def loss(params, batch):
        """Computes the mean loss of a batch: (loss, {name: states to measure})."""
        trace = apply_batch(params, batch[:, :-1], network)
        logits = rule.logit_gain(config) * trace.output @ params.embedding.tokens.T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        states = {"hidden": trace.hidden[-1], "before": trace.hidden[-2], "logits": logits}
        return jnp.mean(losses), states

    def step(carry, batch):
        """Makes one training step, and measures the states before it.

        Args:
            carry: (parameters, state of the optimiser, states of the probe at the step before).
            batch: Texts.

        Returns:
            (the new carry, {name: quantity}).
        """
        params, state, last = carry
        (value, measured), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch)
        quantities = coordinates(measured | {"query_gradient": gradient.layers.attention.w_q[-1]})
        states = apply_batch(params, probe, network).hidden[-1]
        quantities |= {"loss": value, "change": jnp.mean(jnp.abs(states - last))}
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state, states), quantities

    unknown = jnp.full((1, num_tokens, config.d_model), jnp.nan)
    (params, *_), quantities = jax.lax.scan(step, (params, optimizer.init(params), unknown), data)
    distance = jnp.median(linearisation_distance(start, params, probe[0], network))
    by_step = jnp.full(steps, jnp.nan).at[-1].set(distance)
    return quantities | {"linearisation": by_step}


def linearisation_distance(
    params: TransformerParams, other: TransformerParams, x: jax.Array, config: TransformerConfig
) -> Float[Array, "l"]:
    """Compute how far each block f is from linear in its weights, at its input states under θ.

    ‖f(θ*) − f(θ) − f'(θ)(θ* − θ)‖/‖f'(θ)(θ* − θ)‖. It is 0 where a block is linear in its weights,
    which is lazy training.

    Args:
        params, other: θ and θ*, such as before and after training.
        x, config: See `rc.apply`.

    Source: after Dey et al. 2025, section 6, whose distance is of one weight matrix and one unit.
    """
    params, prepared = prepare_inputs(params, x, config)
    other, _ = prepare_inputs(other, x, config)

    def keep_state(layer, state):
        return compute_layer(layer, state).trace.hidden, state

    states = walk_layers(keep_state, prepared.x, params, prepared, config)[1]

    def blocks(params):
        def block_output(layer, carry):
            return carry, compute_layer(layer, layer.extra).trace.hidden

        return walk_layers(block_output, (), params, prepared, config, extra=states)[1]

    moved = jax.tree.map(jnp.subtract, other, params)
    before, linear = jax.jvp(blocks, (params,), (moved,))
    remainder = blocks(other) - before - linear
    size = [jnp.sqrt(jnp.sum(jnp.square(a), axis=(1, 2))) for a in (remainder, linear)]
    return size[0] / size[1]
