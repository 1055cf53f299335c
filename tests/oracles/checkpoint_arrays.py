"""Our arrays of a checkpoint folder, to compare with those of `transformers`."""

import jax
import numpy as np

import rank_collapse as rc
from rank_collapse import pretrained
from rank_collapse.pretrained.families.vit import cut_patches
from tests.oracles.path_examples import over_batch


def example_inputs(config, arguments):
    """(inputs, mask or None) of a batch as `rank_collapse.apply` takes them, one example a row."""
    if "pixel_values" in arguments:
        size = round((config.embedding.d_input / arguments["pixel_values"].shape[1]) ** 0.5)
        return jax.vmap(lambda image: cut_patches(image, size))(arguments["pixel_values"]), None
    if "input_features" in arguments:
        return arguments["input_features"].transpose(0, 2, 1), None
    return arguments["input_ids"], arguments["attention_mask"].astype(bool)


def traces(config, params, arguments, part="encoder", memory=None):
    """The batch's traces, vmapped, for the arguments that `transformers` takes."""
    x, mask = example_inputs(config, arguments)
    batch = {"x": x, "mask": mask}
    if part == "decoder":
        decoder_arguments = {
            name: arguments[f"decoder_{name}"] for name in ("input_ids", "attention_mask")
        }
        batch = dict(zip(("x", "mask"), example_inputs(config, decoder_arguments), strict=True))
        batch |= {"memory": memory, "memory_mask": mask}
    return over_batch(rc.apply, params, config, batch)


def hidden_states(trace, config):
    """Returns hidden states as `transformers` does: for images the last is before the norm."""
    images = config.embedding.d_input and not config.embedding.convolutions
    return np.array(trace.hidden if images else trace.hidden_states)


def ours(folder, arguments):
    """Computes the arrays of `architectures.run` from the folder."""
    config, params = pretrained.load(folder)
    trace = traces(config, params, arguments)
    states = {"hidden": hidden_states(trace, config), "attention": np.asarray(trace.attention)}
    if "decoder_input_ids" in arguments:
        config, params = pretrained.load(folder, part="decoder")
        trace = traces(config, params, arguments, "decoder", trace.output)
        states["decoder_hidden"] = hidden_states(trace, config)
        states["decoder_attention"] = np.asarray(trace.attention)
        states["cross_attention"] = np.asarray(trace.layers.cross_attention)
    return states


def largest_difference(actual, expected, arguments):
    """max |a − b| / max |b| of each array, over the tokens that exist, layer by layer."""
    worst = {}
    for name, reference in expected.items():
        values = actual[name]
        assert values.shape == reference.shape, (name, values.shape, reference.shape)
        decoder = name.startswith(("decoder", "cross"))
        mask = arguments.get("decoder_attention_mask" if decoder else "attention_mask")
        if mask is None:
            mask = np.ones((reference.shape[0], reference.shape[-2]), int)
        token_mask = mask.astype(bool)
        # Query tokens are the last axis but one of hidden states and attentions alike.
        shape = (token_mask.shape[0],) + (1,) * (reference.ndim - 3) + (token_mask.shape[1], 1)
        token_mask = token_mask.reshape(shape)
        axes = (0, *range(2, reference.ndim))
        gap = np.max(np.abs(np.where(token_mask, values - reference, 0.0)), axis=axes)
        worst[name] = float(
            np.max(gap / np.max(np.abs(np.where(token_mask, reference, 0.0)), axis=axes))
        )
    return worst
