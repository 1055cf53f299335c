"""Our side of the comparison with `transformers`: the same arrays from a checkpoint folder."""

import jax
import numpy as np
from path_examples import over_batch

import rank_collapse as rc
from rank_collapse import pretrained
from rank_collapse.pretrained.patches import cut_patches


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
    given = {"x": x, "mask": mask}
    if part == "decoder":
        own = {name: arguments[f"decoder_{name}"] for name in ("input_ids", "attention_mask")}
        given = dict(zip(("x", "mask"), example_inputs(config, own), strict=True))
        given |= {"memory": memory, "memory_mask": mask}
    return over_batch(rc.apply, params, config, given)


def hidden_states(trace, config):
    """Hidden states as `transformers` reports them: of images the last one before the norm."""
    images = config.embedding.d_input and not config.embedding.convolutions
    return np.array(trace.hidden if images else trace.hidden_states)


def ours(folder, arguments):
    """The arrays of `architectures.run`, from the folder alone."""
    config, params = pretrained.load(folder)
    trace = traces(config, params, arguments)
    found = {"hidden": hidden_states(trace, config), "attention": np.asarray(trace.attention)}
    if "decoder_input_ids" in arguments:
        config, params = pretrained.load(folder, part="decoder")
        trace = traces(config, params, arguments, "decoder", trace.output)
        found["decoder_hidden"] = hidden_states(trace, config)
        found["decoder_attention"] = np.asarray(trace.attention)
        found["cross_attention"] = np.asarray(trace.layers.cross_attention)
    return found


def largest_difference(found, expected, arguments):
    """max |a − b| / max |b| of each array, over the tokens that exist, layer by layer."""
    worst = {}
    for name, want in expected.items():
        have = found[name]
        assert have.shape == want.shape, (name, have.shape, want.shape)
        decoder = name.startswith(("decoder", "cross"))
        mask = arguments.get("decoder_attention_mask" if decoder else "attention_mask")
        if mask is None:
            mask = np.ones((want.shape[0], want.shape[-2]), int)
        kept = mask.astype(bool)
        # Query tokens are the last axis but one of hidden states and attentions alike.
        shape = (kept.shape[0],) + (1,) * (want.ndim - 3) + (kept.shape[1], 1)
        kept = kept.reshape(shape)
        axes = (0, *range(2, want.ndim))
        gap = np.max(np.abs(np.where(kept, have - want, 0.0)), axis=axes)
        worst[name] = float(np.max(gap / np.max(np.abs(np.where(kept, want, 0.0)), axis=axes)))
    return worst


def near(found, want, **tolerances):
    """Asserts that all arrays of two trees are close; of dictionaries, all that are wanted."""
    if isinstance(want, dict):
        found, want = {name: found[name] for name in want}, {**want}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerances), found, want)
