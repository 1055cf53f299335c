"""The coordinate check of depth with this library's own network, under several rules.

    checks = depth_check(["sp", "completep"], depths=(2, 8, 32))
    print(checks["completep"])

A pre-norm language model over bytes with tied embeddings, trained by AdamW with gradients clipped
at 1: the network of figure 7 of Dey et al. 2025 (arXiv 2505.01618).

Axis letters: t steps, b examples, n tokens, l layers, d width.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from rank_collapse import struct
from rank_collapse.network.config import TransformerConfig, transformer
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.transformer import apply_batch, compute_layer, walk_layers
from rank_collapse.runs import seeds as every_seed
from rank_collapse.text.words import default_text
from rank_collapse.training.depth_rules import DepthRule, RuleName, depth_rule
from rank_collapse.watch.coord_check import CoordCheck, coordinates

BYTES = 256


class Training(struct.Struct):
    """How the networks are trained; floats may be traced."""

    rate: Any = 1e-3
    weight_decay: Any = 0.1
    steps: int = struct.static(10)
    batch: int = struct.static(4)
    tokens: int = struct.static(64)


def byte_model(depth: int, width: int, tokens: int = 64) -> TransformerConfig:
    """A causal pre-norm network over bytes: heads of width 64, GELU, normal(0, 0.02) weights.

    Its scores are divided by 8 √k for heads of width k, by k where that is 64: what rules scale
    with the width of a head is scaled from there.
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


def bytes_of(text: str, tokens: int) -> UInt8[np.ndarray, "c"]:
    """The bytes of a text.

    Raises:
        ValueError: Fewer than one sequence of tokens and its next one.
    """
    found = np.frombuffer(text.encode(), np.uint8)
    struct.refuse_if(
        found.size <= tokens, f"a text of {found.size} bytes is too short for {tokens} tokens"
    )
    return found


def trained(
    key: Any, text: Any, config: TransformerConfig, rule: DepthRule, training: Training
) -> dict[str, Float[Array, "t"]]:
    """The quantities of one network over its first steps; NaN where a step has none.

    Args:
        key: Of the weights and of the places in the text.
        text: UInt8 [c], of `bytes_of`.
        config: A network with an embedding, which is its read-out too.

    Returns:
        Those of `coordinates` on each batch, "loss", "change" of the first sequence between steps,
        and after the last step "linearisation", see `linearisation_distance`.
    """
    import optax

    key_weights, key_data = jax.random.split(key)
    network, size = rule.network(config), (training.steps, training.batch, 1)
    params = start = rule.init(key_weights, config)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        rule.adamw(training.rate, config, weight_decay=training.weight_decay),
    )
    first = jax.random.randint(key_data, size, 0, text.shape[0] - training.tokens)
    place = first + jnp.arange(training.tokens + 1)[None, None, :]
    data = jnp.asarray(text)[place].astype(jnp.int32)
    probe = data[0, :1, :-1]

    def loss(params, batch):
        trace = apply_batch(params, batch[:, :-1], network)
        logits = rule.logit_gain(config) * trace.output @ params.embedding.tokens.T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        seen = {"hidden": trace.hidden[-1], "before": trace.hidden[-2], "logits": logits}
        return jnp.mean(losses), seen

    def step(carry, batch):
        params, state, last = carry
        (value, seen), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch)
        found = coordinates(seen | {"query_gradient": gradient.layers.attention.w_q[-1]})
        states = apply_batch(params, probe, network).hidden[-1]
        found |= {"loss": value, "change": jnp.mean(jnp.abs(states - last))}
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state, states), found

    unknown = jnp.full((1, training.tokens, config.d_model), jnp.nan)
    (params, *_), found = jax.lax.scan(step, (params, optimizer.init(params), unknown), data)
    distance = jnp.median(linearisation_distance(start, params, probe[0], network))
    steps = jnp.full(training.steps, jnp.nan).at[-1].set(distance)
    return found | {"linearisation": steps}


def linearisation_distance(
    params: TransformerParams, other: TransformerParams, x: Any, config: TransformerConfig
) -> Float[Array, "l"]:
    """‖f(θ*) − f(θ) − f'(θ)(θ* − θ)‖/‖f'(θ)(θ* − θ)‖ of each block f at the states it had under θ.

    0 where a block is linear in its weights: the network is then as lazy as its features.

    Args:
        params, other: θ and θ*, such as before and after training.
        x, config: As in `rc.apply`.

    Source: after Dey et al. 2025, section 6, whose distance is of one weight matrix and one unit.
    """
    params, prepared = prepare_inputs(params, x, config)
    other, _ = prepare_inputs(other, x, config)

    def own_state(layer, state):
        return compute_layer(layer, state).state, state

    states = walk_layers(own_state, prepared.x, params, prepared, config)[1]

    def blocks(params):
        def one(layer, carry):
            return carry, compute_layer(layer, layer.extra).state

        return walk_layers(one, (), params, prepared, config, extra=states)[1]

    moved = jax.tree.map(jnp.subtract, other, params)
    before, linear = jax.jvp(blocks, (params,), (moved,))
    rest = blocks(other) - before - linear
    size = [jnp.sqrt(jnp.sum(jnp.square(a), axis=(1, 2))) for a in (rest, linear)]
    return size[0] / size[1]


def depth_check(
    rules: Sequence[RuleName],
    depths: Sequence[int] = (2, 8, 32),
    *,
    width: int = 64,
    base_width: int = 256,
    seeds: int = 3,
    base_seed: int = 0,
    text: str | None = None,
    training: Training | None = None,
) -> dict[str, CoordCheck]:
    """{rule: `CoordCheck`} of `byte_model`, whose base has the least depth and the base width.

    One program for each depth: rules and floats of the training are traced.

    Args:
        rules: Names of `rc.depth_rule`.
        width, base_width: Of the networks and of the rules' base.
        seeds, base_seed: As everywhere: seed s is fold_in(key(base_seed), s).
        text: What is learned; the text shipped with the package by default.
        training: `Training()` by default.

    Raises:
        ValueError: A text of fewer bytes than tokens.
    """
    training = training or Training()
    letters = bytes_of(text or default_text(), training.tokens)
    base = byte_model(min(depths), base_width, training.tokens)
    given = {name: depth_rule(name, base) for name in rules}
    mesh = every_seed.seed_mesh()
    keys = every_seed.lay_out(every_seed.seed_keys(base_seed, seeds), mesh)
    found: dict[str, list] = {name: [] for name in given}
    for depth in depths:
        config = byte_model(depth, width, training.tokens)
        program = every_seed.spread(
            lambda key, shared, config=config: trained(key, shared[0], config, *shared[1:]),
            mesh,
            at_once=every_seed.seeds_at_once(mesh),
        )
        for name, rule in given.items():
            values = program(keys, (letters, rule, training))
            found[name].append(every_seed.to_host(values, seeds))
    return {
        name: CoordCheck(jax.tree.map(lambda *a: np.stack(a)[None], *own), tuple(depths))
        for name, own in found.items()
    }
