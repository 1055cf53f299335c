"""The measurements of run_trained in one network: arrays [texts, ...] by name.

Axis letters: b texts, c masked copies, l layers, h heads, n tokens, d width, k path lengths.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from experiments.train.path_sizes import measured_sizes
from experiments.trained.chains import ChainPass
from rank_collapse import pretrained
from rank_collapse.checks import refuse_if
from rank_collapse.measures.attention import first_column
from rank_collapse.measures.norms import composite_norm
from rank_collapse.network.measured.influence import attention_share
from rank_collapse.network.measured.states import ProfilePass
from rank_collapse.network.passes import LayerMeasure, States
from rank_collapse.network.surgery import list_ablations
from rank_collapse.network.transformer import LayerValues
from rank_collapse.network.walk import Layer
from rank_collapse.paths.contributions import LengthPass
from rank_collapse.paths.truncation import TruncatedPass
from rank_collapse.pretrained import AblationSpec, Group
from rank_collapse.printed import format_count
from rank_collapse.theory import bounds
from rank_collapse.theory.logdomain import LogPass
from rank_collapse.theory.reports import BoundPass

# Of all readings but the published one (`list_curves`)
ABLATED = {"alone": "SAN", "mlps": "SAN+MLP", "skips": "SAN+skip", "whole": "Transformer"}
AS_PUBLISHED = ", as published"  # after a name: the reading of the published code
SPIKES = ("spike_entry", "spike_norm", "spike_share", "spike_token", "residual_spike")
ROUNDING = 1e-5  # of float32 scores up to about 100, in attention weights


class Task(NamedTuple):
    """The prediction task of a language model, with c copies of each text in a row."""

    inputs: dict[str, np.ndarray]  # x and mask [b c, n]
    targets: np.ndarray  # [b c, n]
    chosen: np.ndarray  # Bool [b c, n], the tokens that count
    copies: int  # c

    def leave_out(self, count: int) -> "Task":
        """Leaves out the first texts; the masked tokens of a text do not depend on later texts."""
        first = count * self.copies
        inputs = {name: values[first:] for name, values in self.inputs.items()}
        return Task(inputs, self.targets[first:], self.chosen[first:], self.copies)

    def token_losses(
        self, source: pretrained.OpenCheckpoint, states: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes (nats, share of right tokens) [b, s], means over copies.

        Args:
            source: The checkpoint, for its head.
            states: Outputs [b c, s, n, d].
        """
        unembedding, head = source.unembedding, source.masked_head
        if head is not None:
            unembedding, states = head.unembedding, head.read(states)
        losses = pretrained.token_losses(unembedding, states, self.targets, self.chosen)
        return tuple(np.asarray(a).reshape(-1, self.copies, a.shape[1]).mean(1) for a in losses)


def make_task(
    source: pretrained.OpenCheckpoint,
    inputs: Mapping[str, np.ndarray],
    mask_id: int | None,
    copies: int,
) -> Task | None:
    """Makes the prediction task of a model: the next token if causal, masked tokens if masked; None
    for others.

    Args:
        source: The checkpoint.
        inputs: x and mask [b, n].
        mask_id: The [MASK] of the vocabulary, or None.
        copies: Number of copies of each text, in which different tokens are masked.
    """
    ids, mask = inputs["x"], inputs["mask"]
    if source.is_causal_lm:
        return Task(dict(inputs), *pretrained.targets_of(ids, mask), 1)
    if source.masked_head is None or mask_id is None:
        return None
    masked, is_counted = masked_copies(ids, mask, mask_id, copies)
    ids, mask = (np.repeat(a, copies, axis=0) for a in (ids, mask))
    return Task({"x": masked, "mask": mask}, ids, is_counted, copies)


def masked_copies(
    ids: Int[np.ndarray, "b n"],
    mask: Bool[np.ndarray, "b n"],
    token: int,
    copies: int,
    share: float = 0.15,
    seed: int = 0,
) -> tuple[Int[np.ndarray, "c n"], Bool[np.ndarray, "c n"]]:
    """Mask tokens in copies of each text; the copies mask different tokens, as far as there are
    enough.

    The first and the last token of a text are never masked, because they close it in most models.

    Args:
        ids, mask: Fields of `Tokens`.
        token: The id that replaces a masked token.
        copies: Number of copies of each text, which follow one another: c = b · copies.
        share: Share of a text's tokens to mask in each copy (at least one token); BERT masks 15 %.
        seed: Seed of the draws.

    Returns:
        (ids of the copies, which of their tokens are masked).

    Raises:
        ValueError: A text of fewer than 3 tokens.

    Source: Devlin et al. 2019, task 1, with the token in all of the places.
    """
    draw = np.random.default_rng(seed)
    chosen = np.zeros((len(ids), copies, ids.shape[1]), bool)
    for number, (text, count) in enumerate(zip(chosen, mask.sum(axis=1), strict=True)):
        refuse_if(
            count < 3,
            f"text {number} has {format_count(count, 'token')}: fewer than 3 have none to mask",
        )
        places = draw.permutation(np.arange(1, count - 1))
        size = max(1, round(share * len(places)))
        for copy, is_masked in enumerate(text):
            order = np.arange(copy * size, (copy + 1) * size)
            is_masked[np.take(places, order, mode="wrap")] = True
    chosen = chosen.reshape(-1, ids.shape[1])
    return np.where(chosen, token, np.repeat(ids, copies, axis=0)), chosen


@dataclasses.dataclass(frozen=True)
class LogNorm(States):
    """log10 ‖X^l‖_{1,∞} of all states."""

    def measure(self, x: Array, mask: Array | None = None) -> Array:
        """Computes log10 of the composite norm of one state [n, d]."""
        return jnp.log10(composite_norm(x, mask=mask))


@dataclasses.dataclass(frozen=True)
class LargestEntry(States):
    """max |x_ij| of all states."""

    def measure(self, x: Array, mask: Array | None = None) -> Array:
        """Computes the largest absolute entry of one state [n, d], over tokens that exist."""
        return jnp.max(jnp.abs(x if mask is None else jnp.where(mask[:, None], x, 0)))


def list_curves(model_type: str) -> dict[str, AblationSpec]:
    """List the ablations of a network by name, as in the text of the paper.

    For an ALBERT they come twice, because without its MLP the published code keeps the MLP's
    activation, skip and norm.
    """
    curves = {name: AblationSpec(variant, "text") for name, variant in ABLATED.items()}
    if ("SAN", "text") in list_ablations(model_type):
        for name in ("alone", "mlps", "skips"):
            curves[name + AS_PUBLISHED] = AblationSpec(ABLATED[name], "published")
    return curves


def measure_residuals(
    source: pretrained.OpenCheckpoint, inputs: Mapping[str, np.ndarray], chunk: int
) -> dict[str, np.ndarray]:
    """Measures log10 of ‖res(X)‖/‖X‖ by layer [b, L + 1] in every ablation of `list_curves`.

    Without skips also log10 of ‖res(X)‖, in logarithms throughout, because it falls below the range
    of floating point.

    Args:
        source: The checkpoint.
        inputs: x and mask [b, n].
        chunk: Texts at once.
    """
    logs = (("log", LogPass()), ("norm", LogNorm()))
    groups = {
        name: Group(
            logs if name.startswith(("alone", "mlps")) else (("ratio", ProfilePass()),), ablation
        )
        for name, ablation in list_curves(source.settings["model_type"]).items()
    }
    results = {}
    for name, values in pretrained.stream(source, inputs, groups, chunk=chunk).items():
        if "log" in values:
            results[f"log10_residual/{name}"] = values["log"].profile
            results[f"log10_ratio/{name}"] = values["log"].profile - values["norm"]
        else:
            results[f"log10_ratio/{name}"] = np.log10(values["ratio"]["residual_ratio"])
    return results


def measure_sinks(layer: Layer, x: Array, layer_values: LayerValues) -> dict[str, Array]:
    """Measures the attention of each head to the first token, and to the most attended one.

    Args:
        layer: The layer.
        x: Unused: its input.
        layer_values: Values that the layer computed.
    """
    weights, mask = layer_values.trace.attention, layer.inputs.token_mask
    is_query = layer.inputs.existing_tokens
    sums = jnp.sum(jnp.where(is_query[None, :, None], weights, 0), axis=1)
    columns = sums / jnp.sum(is_query)
    return {
        "first_column": first_column(weights, mask=mask, key_mask=mask),
        "largest_column": jnp.max(columns, axis=-1),
    }


def measure_states(
    source: pretrained.OpenCheckpoint, inputs: Mapping[str, np.ndarray], chunk: int, num_paths: int
) -> dict[str, np.ndarray]:
    """Measures spikes, sinks and chains of attention of the whole network.

    Args:
        source: The checkpoint.
        inputs: x and mask [b, n].
        chunk: Texts at once.
        num_paths: Random paths of each length whose product is measured.
    """
    passes = (
        ("spikes", ProfilePass(SPIKES)),
        ("largest", LargestEntry()),
        ("sinks", LayerMeasure(measure_sinks)),
        ("chains", ChainPass(num_paths)),
    )
    arrays = pretrained.stream(source, inputs, {"whole": Group(passes)}, chunk=chunk)["whole"]
    spikes = {f"spikes/{name}": arrays["spikes"][name] for name in SPIKES}
    chains = {"chains/residual": arrays["chains"]}
    attention = {f"sinks/{name}": values for name, values in arrays["sinks"].items()}
    return spikes | attention | chains | {"spikes/largest": arrays["largest"]}


def measure_paths(
    source: pretrained.OpenCheckpoint, task: Task, lengths: Sequence[int], chunk: int
) -> dict[str, np.ndarray]:
    """Measures losses and shares of right tokens by the longest path, frozen and recomputed.

    Frozen: sums of paths with the attention weights of the full model. Recomputed: the network
    without longer paths computes its attention again. Both go through the network's own head. A
    masked language model reads several masked copies of each text; results are means over these
    copies.

    Args:
        source: The checkpoint.
        task: Prediction task of the checkpoint.
        lengths: k, the largest number of heads on a path.
        chunk: Texts at once.

    Returns:
        "paths/loss", "paths/right" [b] of the whole network, with "_frozen" and "_recomputed"
        [b, k]; "paths/lengths" [b, k]; "paths/log10_residual" and "paths/path_size" [b, L + 1],
        log10 ‖res C_k‖_{1,∞} and ‖C_k‖_{1,∞} of the frozen sum of all paths of each length;
        "paths/attention_share" [b, L], each layer's share λ_l of attention in the stream.
    """
    depth = source.config.depth
    lengths = [k for k in lengths if k <= depth]
    passes = [("sums", LengthPass()), ("share", LayerMeasure(attention_share))]
    passes += [(f"up to {k}", TruncatedPass(k)) for k in lengths]
    group = {"": Group(tuple(passes))}
    states_by_pass = pretrained.stream(source, task.inputs, group, chunk=chunk)[""]
    sums = states_by_pass.pop("sums")
    share = states_by_pass.pop("share")
    measure_sizes = jax.vmap(lambda states, mask: measured_sizes(states, mask=mask))
    log10_size, residual_sizes = measure_sizes(sums.by_length, task.inputs["mask"])
    frozen = np.asarray(sums.up_to())[:, lengths]
    # Outputs [b c, 1 + k + k, n, d] of c copies of each text: whole, frozen, recomputed.
    states = [sums.output[:, None], frozen, np.stack(list(states_by_pass.values()), axis=1)]
    loss, right = task.token_losses(source, np.concatenate(states, axis=1))
    count = len(lengths)
    results = {"paths/lengths": np.tile(lengths, (len(loss), 1))}
    by_copy = np.asarray(residual_sizes).reshape(len(loss), -1, depth + 1)
    results["paths/log10_residual"] = by_copy.mean(axis=1)
    means = {"attention_share": share, "path_size": 10 ** np.asarray(log10_size, np.float64)}
    for name, values in means.items():
        results[f"paths/{name}"] = values.reshape(len(loss), -1, values.shape[1]).mean(axis=1)
    for name, values in {"loss": loss, "right": right}.items():
        results[f"paths/{name}"] = values[:, 0]
        results[f"paths/{name}_frozen"] = values[:, 1 : 1 + count]
        results[f"paths/{name}_recomputed"] = values[:, 1 + count :]
    return results


def measure_lemma(layer: Layer, x: Array, layer_values: LayerValues) -> Array:
    """Computes `bounds.lemma_excess` of the input to a layer's attention, minus a margin for
    rounding.
    """
    attention_input = layer_values.sublayers["attention"].branch_input
    return bounds.lemma_excess(layer.params.attention, attention_input) - ROUNDING


def measure_bounds(
    source: pretrained.OpenCheckpoint, ids: np.ndarray, chunk: int
) -> dict[str, np.ndarray]:
    """Measures where the lemma's condition holds, and the error of lemma and bounds, head by head.

    Measures the full model and attention alone; returns nothing where there is no W_QK, as with
    rotary positions, or where rows see different tokens.

    Args:
        source: The checkpoint.
        ids: Texts of one length, so no text is padded.
        chunk: Texts at once.
    """
    config = source.config
    if BoundPass.covers.refusal(config) is not None or config.mask != "none":
        return {}
    groups = {
        name: Group(
            (("bounds", BoundPass()), ("lemma", LayerMeasure(measure_lemma))),
            AblationSpec(ABLATED[name], "text"),
        )
        for name in ("whole", "alone")
    }
    results = {}
    for name, values in pretrained.stream(source, {"x": ids}, groups, chunk=chunk).items():
        report = values["bounds"]
        results |= {
            f"bounds/{name}/admissible": report.admissible,
            f"bounds/{name}/head": report.head.tightness,
            f"bounds/{name}/lemma": values["lemma"],
            f"bounds/{name}/stack_rhs": report.stack.log10_rhs,
            f"bounds/{name}/stack_lhs": report.stack.log10_lhs,
        }
    return {name: np.asarray(values) for name, values in results.items()}
