"""The watched metrics of a network while it trains: `monitored` scalars, on a few examples."""

import jax
from jaxtyping import Array, Float

from rank_collapse.network import encoder_decoder
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.encoder_decoder import EncoderDecoderConfig, EncoderDecoderParams
from rank_collapse.network.inputs import input_states
from rank_collapse.network.measured.monitored import monitored
from rank_collapse.training.models import Model
from rank_collapse.training.tasks.examples import Examples
from rank_collapse.training.tasks.sequences import SequencePairs

EXAMPLES = 8


def layer_scalars(
    model: Model | EncoderDecoderParams,
    data: dict[str, Examples | SequencePairs],
    config: TransformerConfig | EncoderDecoderConfig,
) -> dict[str, Float[Array, "l"]]:
    """Measures `monitor` of each layer, means over the first `EXAMPLES` held-out examples.

    For the `watch` of an `Ensemble`. In an encoder-decoder both halves are measured, under teacher
    forcing: "encoder.residual_ratio", "decoder.residual_ratio", ...

    Args:
        model: A network with a classifier, or an encoder-decoder.
        data: Data with the entry "eval".
        config: Configuration of the network.
    """

    def measure_example(example):
        states = input_states(model.network, example.inputs, config)
        return monitored(model.network, states, config, mask=example.mask)[1]

    def measure_pair(pair):
        """Measures one pair of sentences: {"encoder.NAME" or "decoder.NAME": scalars}."""
        memory, encoder = monitored(
            model.encoder, pair.source, config.encoder, mask=pair.source_mask
        )
        _, decoder = monitored(
            encoder_decoder.decoder_params(model, config),
            pair.target[:-1],
            config.decoder,
            mask=pair.target_mask[:-1],
            memory=memory,
            memory_mask=pair.source_mask,
        )
        halves = {"encoder": encoder, "decoder": decoder}
        return {
            f"{half}.{name}": v for half, scalars in halves.items() for name, v in scalars.items()
        }

    is_pair = isinstance(config, EncoderDecoderConfig)
    single = measure_pair if is_pair else measure_example
    scalars = jax.vmap(single)(data["eval"].first(EXAMPLES))
    return jax.tree.map(lambda a: a.mean(axis=0), scalars)
