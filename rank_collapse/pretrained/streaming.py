"""Measurements on a checkpoint, layer by layer: each layer's weights are read, used and dropped.

A group is a set of passes over some examples of one variant (ablation) of the network; a part is a
chunk of the examples of a group.

All requested measurements go through a layer while its weights are in memory; the next layer is
read meanwhile. Memory holds one layer, the next one as it lies in the file, and the carries of the
passes. One program is compiled for the layers of each variant; variants that measure only states,
and that differ only in skips, share one program.

Axis letters: b examples, l layers, n tokens, d width.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.annotations import AnyArray, Number, Tree
from rank_collapse.checks import check_whole, refuse
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import LayerPass, States, WalkResult, step_passes
from rank_collapse.network.precision import full_precision
from rank_collapse.network.residual import Gains, layer_gains
from rank_collapse.network.surgery import ABLATIONS, READINGS, ablate, skips_left
from rank_collapse.network.walk import Layer
from rank_collapse.pretrained.opened import Source
from rank_collapse.pretrained.weights import stored_values
from rank_collapse.printed import format_count


@dataclasses.dataclass(frozen=True)
class AblationSpec:
    """The parts to remove from a network, as `surgery.ablate` does.

    Attributes:
        name, reading: See `surgery.ablate`.
    """

    name: str = "Transformer"
    reading: str = "published"


@dataclasses.dataclass(frozen=True)
class Group:
    """Passes that share a forward pass.

    Attributes:
        passes: (name, pass) of each pass.
        ablation: The ablation of the network that they measure.
        first, last: The first example, and the example behind the last one; None for all after the
            first.
    """

    passes: tuple[tuple[str, LayerPass], ...]
    ablation: AblationSpec = AblationSpec()
    first: int = 0
    last: int | None = None


@dataclasses.dataclass
class State:
    """The results after a number of layers.

    Attributes:
        layers: Number of layers so far.
        hidden, carries: Hidden states, and carries of the passes, of each part of each group:
            groups in order, each in chunks of examples.
        layer_results: Results of each part, layer by layer.
    """

    layers: int
    hidden: list[AnyArray]
    carries: list[Tree]
    layer_results: list[list[Tree]]


@full_precision
def stream(
    source: Source,
    inputs: Mapping[str, object],
    groups: Mapping[str, Group],
    *,
    chunk: int = 8,
    done: Callable[[State], None] | None = None,
) -> dict[str, dict[str, Tree]]:
    """Measure all that is requested in one pass over the weights.

    Args:
        source: An open checkpoint, or a network in memory.
        inputs: Arrays [b, ...] by argument name of `rank_collapse.apply`, including x; None for an
            absent one. Lists of texts of different lengths are padded and masked; results for
            tokens beyond a text's end have no meaning.
        groups: The passes by name; a group shares a forward pass.
        chunk: Number of examples computed at once, which bounds the memory of a layer. All examples
            go through a layer while its weights are in memory.
        done: Function that is called after each layer with the state.

    Returns:
        {group: {pass: its result}}, arrays [b, ...].

    Raises:
        ValueError: Inputs of different lengths, a chunk below 1, or a group without examples;
            tokens outside of the vocabulary or positions; weights that are not finite, or that make
            hidden states infinite or all 0; a network that a pass does not cover.
        OSError: A file that cannot be read any more.
    """
    config, outside, batch = source.prepare_batch(inputs)
    parts = _split_groups(source, groups, len(batch["x"]), chunk)
    count = len(parts)
    state = State(0, [None] * count, [None] * count, [[] for _ in range(count)])
    try:
        for index in range(config.depth):
            next_index = min(index + 1, config.depth - 1)  # the layer to read ahead
            layer = source.stored_layer(index, next_index)
            for i, part in enumerate(parts):
                arguments = (layer, outside, part.select_inputs(batch), config)
                if not index:
                    state.hidden[i], state.carries[i] = _begin_part(part.start_program, *arguments)
                state.hidden[i], state.carries[i], layer_results = _step_part(
                    part.measured, *arguments, jnp.asarray(index), state.hidden[i], state.carries[i]
                )
                state.layer_results[i].append(_on_host(part, layer_results))
            jax.block_until_ready(state.hidden)
            for part, hidden in zip(parts, state.hidden, strict=True):
                if groups[part.group].ablation.name == "Transformer":
                    _check_states(index, hidden, batch.get("mask"), part.rows)
            state.layers = index + 1
            if done is not None:
                done(state)
            last = layer if index + 1 == config.depth else None
            layer = None  # frees its memory before the next layer is on the device
        results: dict[str, dict[str, list]] = {}
        for i, part in enumerate(parts):
            layer_results = jax.tree.map(lambda *a: np.stack(a, axis=1), *state.layer_results[i])
            arguments = (last, outside, part.select_inputs(batch), config)
            part_results = _finish_part(
                part.measured, *arguments, state.hidden[i], state.carries[i], layer_results
            )
            state.carries[i], state.layer_results[i] = None, []
            for name, result in zip(part.names, _on_host(part, part_results), strict=True):
                unpadded = jax.tree.map(lambda a, n=part.count: a[:n], result)
                results.setdefault(part.group, {}).setdefault(name, []).append(unpadded)
    finally:
        source.layers.drop()

    def join_chunks(chunks):
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *chunks)

    return {
        group: {name: join_chunks(chunks) for name, chunks in by_name.items()}
        for group, by_name in results.items()
    }


def _on_host(part, results):
    """Convert the results of the passes to NumPy arrays."""
    passes, _ = part.measured
    host_results = jax.tree.map(np.asarray, results)
    return tuple(p.on_host(result) for p, result in zip(passes, host_results, strict=True))


def _check_states(index, hidden, mask, rows):
    """Raise an error for states [b, n, d] that are not finite outside of padding, or all 0.

    Args:
        index: Index of the layer, for the message.
        hidden: States of the full model.
        mask: Mask of all examples; None for all tokens.
        rows: Examples of `hidden`.
    """
    is_finite = np.isfinite(hidden).all(axis=-1)
    is_valid = is_finite if mask is None else is_finite | ~mask[rows]
    refuse(
        (
            not is_valid.all(),
            f"hidden states of layer {index} are not finite: weights or inputs are too large for "
            f"{hidden.dtype}",
        ),
        (not np.any(hidden), f"hidden states of layer {index} are all 0: check the weights"),
    )


class _Part(NamedTuple):
    """One chunk of examples of one group."""

    group: str
    names: tuple[str, ...]
    measured: tuple[tuple[LayerPass, ...], AblationSpec]
    skips: Gains | None  # those that are left; None for those of the ablation
    rows: np.ndarray  # of its examples; the last chunk repeats the last example
    count: int  # of them that are not repeats

    @property
    def start_program(self):
        """Return `measured` of the input, from which all variants start."""
        return self.measured if self.skips is None else (self.measured[0], AblationSpec())

    def select_inputs(self, batch):
        """Select the inputs [b, ...] of this chunk of examples."""
        rows = {name: values[self.rows] for name, values in batch.items()}
        if self.skips is None:
            return rows
        return rows | {"skips": jax.tree.map(lambda a: np.full(len(self.rows), a), self.skips)}


def _split_groups(source, groups, total, chunk):
    """List the chunks of every group: the examples that a program computes at once.

    The last chunk repeats its last example so that all chunks have one size.

    Args:
        source, groups, chunk: See `stream`.
        total: Number of examples.
    """
    chunk = check_whole("chunk", chunk, 1)
    parts = []
    for name, group in groups.items():
        last = total if group.last is None else min(group.last, total)
        if not 0 <= group.first < last:
            where = f"first={group.first}, last={group.last}"
            raise ValueError(
                f"group {name!r} has none of {format_count(total, 'example')}: {where}"
            )
        size = min(chunk, last - group.first)
        names, passes = zip(*group.passes, strict=True)
        ablation, skips = _shared_program(group, source.config)
        for start in range(group.first, last, size):
            rows = np.minimum(np.arange(start, start + size), last - 1)
            count = min(size, last - start)
            parts.append(_Part(name, names, (passes, ablation), skips, rows, count))
    return parts


def _shared_program(group, config):
    """Find the ablation whose program measures a group.

    A skip with gain 0 gives the same states as no skip, so ablations that differ only in skips can
    share one compiled program. Passes that measure more than states may depend on the ablation in
    other ways, and share none.

    Args:
        group: One of the groups of `stream`.
        config: The network.

    Returns:
        (the ablation to compile, the gains, 0 or 1, of its skips that make it the group's
        ablation). The gains are None if the group's own ablation is compiled.
    """
    name, reading = group.ablation.name, group.ablation.reading
    states_alone = all(isinstance(layer_pass, States) for _, layer_pass in group.passes)
    has_skips = config.mlp != "none" and config.attention_skip and config.mlp_skip
    is_known = name in ABLATIONS and reading in READINGS
    if not (states_alone and has_skips and not config.parallel and is_known):
        return group.ablation, None
    has_mlp = name in ("SAN+MLP", "Transformer")
    shared = AblationSpec() if has_mlp else AblationSpec("SAN+skip", reading)
    return shared, skips_left(name, reading)


def assemble_layer(
    stored: Tree,
    outside: TransformerParams,
    example: Mapping[str, object],
    config: TransformerConfig,
    index: Number,
    ablation: AblationSpec = AblationSpec(),
    passes: Sequence[LayerPass] = (),
) -> tuple[Layer, TransformerParams]:
    """Return one layer on one example, and the parameters outside of the layers, of a network on
    disk.

    Only this layer's parameters are in memory: the network is described as if all its layers were
    this one.

    Args:
        stored: The layer's parameters, a tree of `Stored`: tensors with the axes as in the file.
        outside, example, config: The parameters outside of the layers, one example of the inputs,
            and the configuration, from `prepare_batch`.
        index: Index of the layer; may be traced.
        ablation: The parts to remove.
        passes: Passes (measurements) that must be defined for the network.
    """
    config = config.replace(layer_map=(0,) * config.depth)  # all layers are the one row
    params = outside.replace(layers=jax.tree.map(lambda a: a[None], stored_values(stored)))
    config, params = ablate(config, params, ablation.name, ablation.reading)
    for layer_pass in passes:
        layer_pass.covers.check(config)
    example = dict(example)
    skips = example.pop("skips", Gains())
    params, prepared = prepare_inputs(params, example.pop("x"), config, **example)
    gains = jax.tree.map(lambda a: a[index], layer_gains(config, prepared.x.dtype, params))
    gains = gains.replace(skip=jax.tree.map(operator.mul, gains.skip, skips))
    row = jax.tree.map(lambda a: a[0], params.layers)
    return Layer(row, gains, index, config, prepared), params


@functools.partial(jax.jit, static_argnums=0)
def _begin_part(measured, stored, outside, examples, config):
    """Compute the states and the carries of passes before the first layer, for a chunk of examples.

    Args:
        measured: `_Part.start_program`.
        stored, outside, config: See `assemble_layer`.
        examples: Result of `_Part.select_inputs`, leaves [b, ...].
    """
    passes, ablation = measured

    def begin_example(example):
        layer, _ = assemble_layer(stored, outside, example, config, 0, ablation, passes)
        start = layer.inputs.x
        return start, tuple(p.init_carry(layer.inputs, layer.config) for p in passes)

    return jax.vmap(begin_example)(examples)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(6, 7))
def _step_part(measured, stored, outside, examples, config, index, hidden, carries):
    """Pass a chunk of examples through one layer: (states, carries, each pass's result of the
    layer).

    Args:
        measured: `_Part.measured`; for the others see `_begin_part`.
        index: Index of the layer.
        hidden, carries: States and carries before the layer.
    """
    passes, ablation = measured

    def step_example(x, carry, example):
        """Pass one example through the layer: (its state, the carries and the results of the
        passes)."""
        layer, _ = assemble_layer(stored, outside, example, config, index, ablation)
        return step_passes(passes, layer, x, carry)

    return jax.vmap(step_example)(hidden, carries, examples)


@functools.partial(jax.jit, static_argnums=0)
def _finish_part(measured, stored, outside, examples, config, hidden, carries, layer_results):
    """Build the result of each pass [b, ...] for a chunk of examples, after the last layer.

    Args:
        measured: `_Part.measured`; for the others see `_step_part`.
        layer_results: Results of each pass for all layers, [b, l, ...].
    """
    passes, ablation = measured

    def finish_example(x, carry, layer_results, example):
        """Make the results of all passes for one example, after the last layer."""
        layer, params = assemble_layer(stored, outside, example, config, 0, ablation)
        return tuple(
            p.build_result(WalkResult(params, x, c, f, layer.inputs, layer.config))
            for p, c, f in zip(passes, carry, layer_results, strict=True)
        )

    return jax.vmap(finish_example)(hidden, carries, layer_results, examples)
