"""Causal language models of bytes: their text, their networks, and what is measured of them.

Axis letters: l layers, n tokens, d width, c bytes, k path lengths.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

import rank_collapse as rc
from experiments.shell.executor import Executor
from experiments.shell.options import Flags
from experiments.trained.training import Training
from rank_collapse.measures.influence import settled
from rank_collapse.network.inputs import PreparedInputs, prepare_inputs
from rank_collapse.network.passes import LayerPass, Walked, run as run_pass
from rank_collapse.network.transformer import Tokens
from rank_collapse.network.walk import Layer, final_norm
from rank_collapse.pretrained import depth
from rank_collapse.text.tokens import read_texts
from rank_collapse.text.words import default_text
from rank_collapse.training import Ensemble, Recipe
from rank_collapse.training.recipe import config_of
from rank_collapse.training.tasks.examples import Examples

BYTES = 256
STEPS_PER_EPOCH = 25  # of which the training loss is the mean
LOOKS = 8  # at the networks while they train, besides the one before
PLAIN, QK_NORM = "softmax", "qk_norm"
CURES = ("gated", "softpick", "off_by_one", QK_NORM)  # which are said to stop sinks
STATES = ("residual_ratio", "effective_rank", "spike_entry")


def bytes_of(path: str | None) -> UInt8[np.ndarray, "t"]:
    """A text's bytes, its paragraphs or rows by lines; of the text of the package for None.

    Raises:
        FileNotFoundError, ValueError: See `text.read_texts`.
    """
    text = default_text() if path is None else "\n".join(read_texts(path))
    return np.frombuffer(text.encode(), np.uint8)


def data_of(text: UInt8[np.ndarray, "t"], num_tokens: int, most: int) -> dict[str, Examples]:
    """Windows of a text that follow each other, each byte labelled with the next one.

    Args:
        text: Its bytes.
        num_tokens: Bytes of a window.
        most: Windows that are held out at most, evenly from the last tenth of the text.

    Raises:
        ValueError: A text of fewer than two windows.
    """
    count = (len(text) - 1) // num_tokens
    if count < 2:
        raise ValueError(
            f"a text of {len(text)} bytes has fewer than two windows of num_tokens={num_tokens}"
        )
    shape, used = (count, num_tokens), count * num_tokens
    inputs, labels = (text[i : i + used].reshape(shape).astype(np.int32) for i in (0, 1))
    first = count - max(1, count // 10)
    chosen = np.unique(np.linspace(first, count - 1, most).astype(int))
    return {
        "train": Examples(jnp.asarray(inputs[:first]), jnp.asarray(labels[:first])),
        "eval": Examples(jnp.asarray(inputs[chosen]), jnp.asarray(labels[chosen])),
    }


def network_of(options: Flags, variant: str) -> rc.TransformerConfig:
    """A pre-norm network as Llama is built, with the attention of a variant.

    Raises:
        ValueError: Sizes that do not fit each other.
    """
    config = rc.transformer(
        options.depth,
        options.num_heads,
        options.d_model,
        d_ff=options.d_ff,
        mlp="swiglu",
        mask="causal",
        norm_placement="pre",
        norm="rms",
        norm_eps=1e-5,
        final_norm=True,
        position="rotary",
        qk_norm="head" if variant == QK_NORM else "none",
        embedding=rc.EmbeddingConfig(vocab_size=BYTES, d_embed=options.d_model, norm=False),
    )
    return config if variant == QK_NORM else rc.variant(config, variant)


def training_of(options: Flags, variant: str, data: Any, executor: Executor) -> Training:
    """What trains the networks of a variant, Adam with a linear decay after a warm-up."""
    epochs = -(-options.n_steps // STEPS_PER_EPOCH)
    recipe = Recipe(
        network_of(options, variant),
        BYTES,
        options.batch_size,
        epochs,
        shuffle=True,
        schedule="linear",
        clip_norm=1.0,
        unroll=1,
        steps_per_epoch=STEPS_PER_EPOCH,
    )
    ensemble = Ensemble(
        recipe,
        lambda key: data,
        mesh=executor.mesh,
        epochs_per_chunk=-(-epochs // LOOKS),
        watch=make_measure(recipe),
    )
    return Training(ensemble, executor.run, name=variant)


class WholePass(LayerPass):
    """X^0 .. X^L [L + 1, n, d]; what attention reads of each, and of the last the output; each of
    them after the final norm; and attention [L, h, n, n]."""

    def begin(self, prepared: PreparedInputs, config: rc.TransformerConfig) -> Array:
        """X^0."""
        return prepared.x

    def step(self, layer: Layer, x: Any, seen: Any, carry: Any) -> tuple[Any, Any]:
        """What the layer computed."""
        read = seen.passages["attention"].branch_input
        return carry, (seen.trace.hidden, read, seen.trace.attention)

    def finish(self, walked: Walked) -> tuple[Array, Array, Array, Array]:
        """All of it."""
        hidden, read, attention = walked.found
        hidden = jnp.concatenate([walked.carry[None], hidden])
        outside = walked.params, walked.prepared, walked.config
        lens = jax.vmap(lambda x: final_norm(Tokens(), x, *outside))(hidden)
        return hidden, jnp.concatenate([read, lens[-1:]]), lens, attention


def make_measure(recipe: Recipe) -> Callable[..., dict[str, Float[Array, "..."]]]:
    """measure(model, data, hyper, key) of one run, means over the windows that are held out.

    loss                         nats a byte
    residual_ratio, effective_rank, spike_entry
                                 of the states X^0 .. X^L, as of `MEASURES`, [L + 1]
    largest                      max |x_ij| of each state, [L + 1]
    unit_residual_ratio          of unit tokens, [L + 1]
    read_residual_ratio          of what the attention of the next layer reads, and of the output
                                 after the final norm, [L + 1]
    sink_rate                    share of a layer's heads of which the first byte gets more than .3
                                 of the attention, mean over queries, [L]
    first_column                 that attention itself, mean over heads, [L]
    lens_kl                      KL divergence of each state's prediction to the output's, nats,
                                 [L + 1]
    loss_up_to                   nats a byte by paths of lengths 0 .. k alone, frozen, [L + 1]
    """

    def measure(model, data, hyper, _):
        config, (w, b) = config_of(recipe, hyper), model.classifier

        def of_window(window):
            network = model.network, window.inputs, config
            hidden, read, lens, attention = run_pass(WholePass(), *prepare_inputs(*network), config)
            of_lens, of_paths = (
                jax.nn.log_softmax(states @ w + b[None, None])
                for states in (lens, rc.path_contributions(*network).up_to())
            )
            kl = jnp.sum(jnp.exp(of_lens) * (of_lens - of_lens[-1:]), axis=-1)
            return dict(rc.profile(hidden, measures=STATES)) | {
                "loss": loss_of(of_lens, window.labels)[-1],
                "largest": jnp.max(jnp.abs(hidden), axis=(1, 2)),
                "unit_residual_ratio": rc.profile(hidden, tokens="unit")["residual_ratio"],
                "read_residual_ratio": rc.profile(read)["residual_ratio"],
                "sink_rate": rc.sink_rate(attention),
                "first_column": rc.first_column(attention).mean(axis=-1),
                "lens_kl": kl.mean(axis=-1),
                "loss_up_to": loss_of(of_paths, window.labels),
            }

        return jax.tree.map(lambda a: a.mean(axis=0), jax.lax.map(of_window, data["eval"]))

    return measure


def loss_of(log_p: Float[Array, "l n c"], labels: Int[Array, "n"]) -> Float[Array, "l"]:
    """Nats a byte of several predictions log p of the next bytes."""
    return -jnp.take_along_axis(log_p, labels[None, :, None], axis=-1).mean(axis=(1, 2))


def depth_used(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Two of the definitions of `rc.depth_report`, [s, t], NaN where a loss is not finite.

    Args:
        found: What `make_measure` gives at each look, [s, t, ...].
    """
    loss, kl = found["loss"][..., None], found["lens_kl"]
    near = kl < depth.KL * kl.max(axis=-1, keepdims=True)
    enough = np.abs(found["loss_up_to"] - loss) <= depth.LOSS * loss
    layers = {"lens": np.argmax(near, axis=-1), "paths": np.asarray(settled(enough))}
    return {
        name: np.where(np.isfinite(found["loss"]), used, np.nan) for name, used in layers.items()
    }
