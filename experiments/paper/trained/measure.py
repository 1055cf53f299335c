"""What run_trained measures of one network: arrays [texts, ...] by name.

Axis letters: b texts, c masked copies, l layers, h heads, n tokens, d width, k path lengths.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.paper.trained.chains import ChainPass
from experiments.train.path_sizes import measured_sizes
from rank_collapse import pretrained
from rank_collapse.measures.attention import first_column
from rank_collapse.measures.norms import composite_norm
from rank_collapse.network.measured.states import ProfilePass
from rank_collapse.network.passes import LayerMeasure, States
from rank_collapse.paths.contributions import LengthPass
from rank_collapse.paths.truncation import TruncatedPass
from rank_collapse.pretrained import AblationSpec, Group
from rank_collapse.text import tokens
from rank_collapse.theory import bounds
from rank_collapse.theory.logdomain import LogPass
from rank_collapse.theory.reports import BoundPass

VARIANTS = {"alone": "SAN", "mlps": "SAN+MLP", "skips": "SAN+skip", "whole": "Transformer"}
SPIKES = ("spike_entry", "spike_norm", "spike_share", "spike_token", "residual_spike")
ROUNDING = 1e-5  # of float32 scores up to about 100, in attention weights


class Task(NamedTuple):
    """What a language model predicts of texts, c copies of each in a row."""

    inputs: dict[str, Any]  # x and mask [b c, n]
    targets: np.ndarray  # [b c, n]
    chosen: np.ndarray  # Bool [b c, n], the tokens that count
    copies: int  # c

    def losses(self, source: Any, states: Any) -> tuple[np.ndarray, np.ndarray]:
        """(nats, share of right tokens) [b, s] of outputs [b c, s, n, d], means over copies."""
        unembedding, head = source.unembedding, source.masked_head
        if head is not None:
            unembedding, states = head.unembedding, head.read(states)
        losses = pretrained.token_losses(unembedding, states, self.targets, self.chosen)
        return tuple(np.asarray(a).reshape(-1, self.copies, a.shape[1]).mean(1) for a in losses)


def task_of(
    source: Any, inputs: Mapping[str, Any], mask_id: int | None, copies: int
) -> Task | None:
    """The next token of a causal model, masked ones of a masked model; None of others."""
    ids, mask = inputs["x"], inputs["mask"]
    if source.is_causal_lm:
        return Task(dict(inputs), *pretrained.targets_of(ids, mask), 1)
    if source.masked_head is None or mask_id is None:
        return None
    masked, chosen = tokens.masked_copies(ids, mask, mask_id, copies)
    ids, mask = (np.repeat(a, copies, axis=0) for a in (ids, mask))
    return Task({"x": masked, "mask": mask}, ids, chosen, copies)


@dataclasses.dataclass(frozen=True)
class LogNorm(States):
    """log10 ‖X^l‖_{1,∞} of all states."""

    def measure(self, x: Any, mask: Any = None) -> Any:
        """Of one."""
        return jnp.log10(composite_norm(x, mask=mask))


@dataclasses.dataclass(frozen=True)
class LargestEntry(States):
    """max |x_ij| of all states."""

    def measure(self, x: Any, mask: Any = None) -> Any:
        """Of one."""
        return jnp.max(jnp.abs(x if mask is None else jnp.where(mask[:, None], x, 0)))


def residuals(source: Any, inputs: Mapping[str, Any], chunk: int) -> dict[str, np.ndarray]:
    """log10 of ‖res(X)‖/‖X‖ by layer [b, L + 1], whole and in three variants without parts.

    Without skips that of ‖res(X)‖ too, in logarithms throughout: it falls below what floating
    point holds.
    """
    logs = (("log", LogPass()), ("norm", LogNorm()))
    groups = {
        name: Group(
            logs if name in ("alone", "mlps") else (("ratio", ProfilePass()),),
            AblationSpec(variant, "text" if name in ("alone", "mlps") else "published"),
        )
        for name, variant in VARIANTS.items()
    }
    found = {}
    for name, own in pretrained.stream(source, inputs, groups, chunk=chunk).items():
        if "log" in own:
            found[f"log10_residual/{name}"] = own["log"].profile
            found[f"log10_ratio/{name}"] = own["log"].profile - own["norm"]
        else:
            found[f"log10_ratio/{name}"] = np.log10(own["ratio"]["residual_ratio"])
    return found


def sinks(layer: Any, x: Any, seen: Any) -> dict[str, Any]:
    """Of each head: the attention to the first token, and to the most attended one, and which."""
    weights, mask = seen.trace.attention, layer.inputs.token_mask
    queries = layer.inputs.existing_tokens[None, :, None]
    columns = jnp.sum(jnp.where(queries, weights, 0), axis=1) / jnp.sum(
        layer.inputs.existing_tokens
    )
    return {
        "first_column": first_column(weights, mask=mask, key_mask=mask),
        "largest_column": jnp.max(columns, axis=-1),
        "sink": jnp.argmax(columns, axis=-1),
    }


def whole(source: Any, inputs: Mapping[str, Any], chunk: int, num_paths: int) -> dict[str, Any]:
    """Spikes, sinks and chains of attention of the whole network."""
    passes = (
        ("spikes", ProfilePass(SPIKES)),
        ("largest", LargestEntry()),
        ("sinks", LayerMeasure(sinks)),
        ("chains", ChainPass(num_paths)),
    )
    own = pretrained.stream(source, inputs, {"whole": Group(passes)}, chunk=chunk)["whole"]
    spikes = {f"spikes/{name}": own["spikes"][name] for name in SPIKES}
    chains = {"chains/residual": own["chains"]["chain_residual"]}
    attention = {f"sinks/{name}": values for name, values in own["sinks"].items()}
    return spikes | attention | chains | {"spikes/largest": own["largest"]}


def paths(source: Any, task: Task, lengths: Sequence[int], chunk: int) -> dict[str, np.ndarray]:
    """Losses and shares of right tokens by the longest path, frozen and recomputed.

    Also log10 ‖res C_k‖_{1,∞} of the sum of all paths of each length, frozen.
    """
    depth = source.config.depth
    lengths = [k for k in lengths if k <= depth]
    passes = [("sums", LengthPass(source.biased))]
    passes += [(f"up to {k}", TruncatedPass(k)) for k in lengths]
    own = pretrained.stream(source, task.inputs, {"": Group(tuple(passes))}, chunk=chunk)[""]
    sums, keep = own.pop("sums"), task.inputs["mask"]
    _, rest = jax.vmap(lambda a, m: measured_sizes(a, mask=m))(sums.by_length, keep)
    frozen = np.asarray(sums.up_to())[:, lengths]
    states = [sums.output[:, None], frozen, np.stack(list(own.values()), axis=1)]
    loss, right = task.losses(source, np.concatenate(states, axis=1))
    count = len(lengths)
    found = {"paths/lengths": np.tile(lengths, (len(loss), 1))}
    found["paths/log10_residual"] = np.asarray(rest).reshape(len(loss), -1, depth + 1).mean(axis=1)
    for name, values in {"loss": loss, "right": right}.items():
        found[f"paths/{name}"] = values[:, 0]
        found[f"paths/{name}_frozen"] = values[:, 1 : 1 + count]
        found[f"paths/{name}_recomputed"] = values[:, 1 + count :]
    return found


def lemma(layer: Any, x: Any, seen: Any) -> Any:
    """`bounds.lemma_excess` of what a layer's attention reads, less a margin for rounding."""
    read = seen.sublayers["attention"].branch_input
    return bounds.lemma_excess(layer.params.attention, read) - ROUNDING


def theory(source: Any, ids: np.ndarray, chunk: int) -> dict[str, np.ndarray]:
    """Where the lemma's condition holds, and by how much lemma and bounds do, head by head.

    Of the whole network and of attention alone; nothing where there is no W_QK, such as of rotary
    positions, or rows see different tokens.

    Args:
        ids: Texts of one length, so that none is padded.
    """
    config = source.config
    if BoundPass.covers.refusal(config) is not None or config.mask != "none":
        return {}
    groups = {
        name: Group(
            (("bounds", BoundPass()), ("lemma", LayerMeasure(lemma))),
            AblationSpec(VARIANTS[name], "text"),
        )
        for name in ("whole", "alone")
    }
    found = {}
    for name, own in pretrained.stream(source, {"x": ids}, groups, chunk=chunk).items():
        report = own["bounds"]
        found |= {
            f"bounds/{name}/admissible": report.admissible,
            f"bounds/{name}/head": report.head.tightness,
            f"bounds/{name}/layer": report.layer.tightness,
            f"bounds/{name}/lemma": own["lemma"],
            f"bounds/{name}/stack_rhs": report.stack.log10_rhs,
            f"bounds/{name}/stack_lhs": report.stack.log10_lhs,
        }
    return {name: np.asarray(values) for name, values in found.items()}
