"""What is watched of a network while it trains: `rc.monitor` of every layer, on a few examples."""

from typing import Any

import jax
from jaxtyping import Array, Float

from rank_collapse.measures.monitor import monitor
from rank_collapse.network import encoder_decoder, entry, transformer
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.encoder_decoder import EncoderDecoderConfig, EncoderDecoderParams
from rank_collapse.training.models import Model

EXAMPLES = 8


def layer_scalars(
    model: Model | EncoderDecoderParams,
    data: dict[str, Any],
    config: TransformerConfig | EncoderDecoderConfig,
) -> dict[str, Float[Array, "l"]]:
    """`monitor` of each layer's output and attention, means over the first `EXAMPLES` held out.

    For the `watch` of an `Ensemble`. Of an encoder-decoder those of either half, under teacher
    forcing: "encoder.residual_ratio", "decoder.residual_ratio", ...

    Args:
        model: A network with a read-out, or an encoder-decoder.
        data: With the entry "eval".
        config: The network.
    """
    held_out = data["eval"].first(EXAMPLES)
    if isinstance(config, EncoderDecoderConfig):
        found = jax.vmap(lambda pair: _of_pair(model, pair, config))(held_out)
    else:
        found = jax.vmap(lambda one: _of_example(model, one, config))(held_out)
    return jax.tree.map(lambda a: a.mean(axis=0), found)


def _of_example(model, example, config):
    states = entry.input_states(model.network, example.inputs, config)
    trace = transformer.apply(model.network, states, config, mask=example.mask)
    return _of_layers(trace, example.mask)


def _of_pair(model, pair, config):
    read, read_mask = pair.target[:-1], pair.target_mask[:-1]
    trace = encoder_decoder.apply(
        model, pair.source, read, config, source_mask=pair.source_mask, target_mask=read_mask
    )
    halves = {"encoder": (trace.encoder, pair.source_mask), "decoder": (trace.decoder, read_mask)}
    return {
        f"{half}.{name}": value
        for half, (own, mask) in halves.items()
        for name, value in _of_layers(own, mask).items()
    }


def _of_layers(trace, mask):
    scalars = jax.vmap(lambda x, p: monitor(x, p, mask=mask))
    return scalars(trace.hidden[1:], trace.attention)
