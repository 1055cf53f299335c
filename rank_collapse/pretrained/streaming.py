"""Measurements on a checkpoint, layer by layer: each layer's weights are read, used and dropped.

All measurements that are asked for go through a layer while its weights are there; the next layer
is read meanwhile. What is kept is one layer, the next as it lies in the file, and what passes
carry from layer to layer. One program is compiled for the layers of each variant.

Axis letters: b examples, l layers, n tokens, d width.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import Entry, enter
from rank_collapse.network.gains import layer_gains
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import LayerPass, one_row, row_of, through
from rank_collapse.network.precision import full_precision
from rank_collapse.network.surgery import variant
from rank_collapse.pretrained.lazy import Stored, values
from rank_collapse.pretrained.opened import OpenCheckpoint


@dataclasses.dataclass(frozen=True)
class Job:
    """Passes that share a forward pass.

    Attributes:
        passes: By name.
        variant, reading: Of the network; see `surgery.variant`.
        first, last: The examples; None for all behind the first.
    """

    passes: tuple[tuple[str, LayerPass], ...]
    variant: str = "Transformer"
    reading: str = "published"
    first: int = 0
    last: int | None = None


@dataclasses.dataclass
class State:
    """What is known when a number of layers are done; enough to go on from there.

    Attributes:
        layers: How many.
        hidden, carries: Of each part of each job (jobs in order, each in chunks of examples).
        told: What each layer told of it, layer by layer.
    """

    layers: int
    hidden: list[Any]
    carries: list[Any]
    told: list[list[Any]]

    def arrays(self) -> Any:
        """All of it but the number of layers, as a pytree to save."""
        return {"hidden": self.hidden, "carries": self.carries, "told": self.told}

    def with_arrays(self, arrays: Any) -> "State":
        """The same number of layers with other arrays."""
        return State(self.layers, **arrays)

    @property
    def whole(self) -> bool:
        """Whether it is at the border of a layer."""
        return all(len(told) == self.layers for told in self.told)


@full_precision
def stream(
    source: OpenCheckpoint,
    inputs: Mapping[str, Any],
    jobs: Mapping[str, Job],
    *,
    chunk: int = 8,
    state: State | None = None,
    done: Callable[[State], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Everything asked for in one pass over the weights.

    Args:
        source: From `rank_collapse.pretrained.open_checkpoint`.
        inputs: Arrays [b, ...] by argument name of `rank_collapse.apply`, x among them; None for
            one that is absent.
        jobs: What to measure.
        chunk: Examples at once: bounds the memory of what a layer computes. All examples go
            through a layer while it is there.
        state: Where an interrupted stream of the same jobs goes on.
        done: Called behind each layer with the state, of which it may keep what it copies.

    Returns:
        {job: {pass: its result}}, arrays [b, ...].

    Raises:
        ValueError: Inputs of different lengths, chunk below 1, a job of no example; tokens outside
            of the vocabulary or positions; weights that are not finite.
        OSError: A file that cannot be read any more. `done` has been given what was known before.
    """
    config, outside, given = source.entered(inputs)
    total = len(given["x"])
    parts = _parts(source, jobs, total, chunk)
    if state is None:
        count = len(parts)
        state = State(0, [None] * count, [None] * count, [[] for _ in range(count)])
    last = None
    try:
        for index in range(state.layers, config.depth):
            layer = source.stored_layer(index, min(index + 1, config.depth - 1))
            for i, (_, _, rows, static) in enumerate(parts):
                examples = {k: v[rows] for k, v in given.items()}
                if not index:
                    state.hidden[i], state.carries[i] = _begin(
                        layer, outside, examples, config, **static
                    )
                state.hidden[i], state.carries[i], told = _step(
                    layer, jnp.asarray(index), outside, state.hidden[i], state.carries[i],
                    examples, config, **static,
                )  # fmt: skip
                state.told[i].append(jax.tree.map(np.asarray, told))
            jax.block_until_ready(state.hidden)
            state.layers = index + 1
            if done is not None:
                done(state)
            last, layer = layer if index + 1 == config.depth else None, None
        if last is None:
            last = source.stored_layer(config.depth - 1)
        found: dict[str, dict[str, list]] = {}
        for i, (name, job, rows, static) in enumerate(parts):
            told = jax.tree.map(lambda *a: np.stack(a, axis=1), *state.told[i])
            results = _finish(
                last, outside, state.hidden[i], state.carries[i], told,
                {k: v[rows] for k, v in given.items()}, config, **static,
            )  # fmt: skip
            state.carries[i], state.told[i] = None, []
            kept = _count(rows, job, total)
            for (what, _), result in zip(job.passes, results, strict=True):
                own = jax.tree.map(lambda a, kept=kept: np.asarray(a)[:kept], result)
                found.setdefault(name, {}).setdefault(what, []).append(own)
    finally:
        source.layers.drop()
    return {
        name: {
            what: jax.tree.map(lambda *a: np.concatenate(a), *chunks)
            for what, chunks in results.items()
        }
        for name, results in found.items()
    }


def state_like(
    source: OpenCheckpoint,
    inputs: Mapping[str, Any],
    jobs: Mapping[str, Job],
    layers: int,
    *,
    chunk: int = 8,
) -> State:
    """The shapes of the state that `stream` has behind a number of layers.

    Args:
        source, inputs, jobs, chunk: As of `stream`.
        layers: How many.
    """
    config, outside, given = source.entered(inputs)
    layer = jax.tree.map(lambda a: Stored(a, tuple(range(a.ndim))), source.row_like)
    found = State(layers, [], [], [])
    for _, _, rows, static in _parts(source, jobs, len(given["x"]), chunk):
        examples = {k: v[rows] for k, v in given.items()}
        begin, step = (functools.partial(fn, **static) for fn in (_begin, _step))
        hidden, carries = jax.eval_shape(begin, layer, outside, examples, config)
        index = jax.ShapeDtypeStruct((), jnp.int32)
        *_, told = jax.eval_shape(step, layer, index, outside, hidden, carries, examples, config)
        found.hidden.append(hidden)
        found.carries.append(carries)
        found.told.append([told] * layers)
    return found


def _parts(source, jobs, total, chunk):
    """(name, job, rows of its examples, what is compiled in) of every chunk of every job.

    Raises:
        ValueError: A chunk of no example, or a job of none.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} is not 1 or more examples")
    found = []
    for name, job in jobs.items():
        if not 0 <= job.first < _last(job, total):
            where = f"first={job.first}, last={job.last}"
            raise ValueError(f"job {name!r} has none of {total} examples: {where}")
        passes = tuple(layer_pass for _, layer_pass in job.passes)
        static = {"passes": passes, "cut": (job.variant, job.reading, source.family.model_type)}
        found += [(name, job, rows, static) for rows in _chunks(job, total, chunk)]
    return found


def _chunks(job, total, chunk):
    """Rows of the job's examples, `chunk` at a time; the last chunk repeats the last example."""
    last = _last(job, total)
    size = min(chunk, last - job.first)
    return [
        np.minimum(np.arange(start, start + size), last - 1)
        for start in range(job.first, last, size)
    ]


def _count(rows, job, total):
    return min(len(rows), _last(job, total) - int(rows[0]))


def _last(job, total):
    return total if job.last is None else min(job.last, total)


def entered_layer(
    layer: Any,
    outside: TransformerParams,
    example: Mapping[str, Any],
    config: TransformerConfig,
    cut: tuple[str, str, str],
) -> tuple[TransformerParams, Entry, TransformerConfig]:
    """(parameters with the one layer as their stack, entry, config) of a variant and one example.

    Args:
        layer: A tree of `lazy.Stored`.
        outside: What stands outside of the layers.
        example: Its arguments of `rank_collapse.apply`.
        config: The network.
        cut: (variant, reading, family) as of `surgery.variant`.
    """
    config = one_row(config)
    stack = jax.tree.map(lambda a: a[None], values(layer))
    config, params = variant(config, outside.replace(layers=stack), *cut)
    example = dict(example)
    params, entry = enter(params, example.pop("x"), config, **example)
    return params, entry, config


@functools.partial(jax.jit, static_argnames=("passes", "cut"))
def _begin(layer, outside, examples, config, *, passes, cut):
    def one(example):
        _, entry, own = entered_layer(layer, outside, example, config, cut)
        return entry.x, tuple(p.begin(entry, own) for p in passes)

    return jax.vmap(one)(examples)


@functools.partial(
    jax.jit, static_argnames=("passes", "cut"), donate_argnames=("hidden", "carries")
)
def _step(layer, index, outside, hidden, carries, examples, config, *, passes, cut):
    def one(x, carry, example):
        params, entry, own = entered_layer(layer, outside, example, config, cut)
        gains = jax.tree.map(lambda a: a[index], layer_gains(own, entry.x.dtype, params))
        return through(passes, (row_of(params), gains, index), x, carry, entry, own)

    return jax.vmap(one)(hidden, carries, examples)


@functools.partial(jax.jit, static_argnames=("passes", "cut"))
def _finish(layer, outside, hidden, carries, told, examples, config, *, passes, cut):
    def one(x, carry, told, example):
        params, entry, own = entered_layer(layer, outside, example, config, cut)
        return tuple(
            p.finish(params, x, c, t, entry, own)
            for p, c, t in zip(passes, carry, told, strict=True)
        )

    return jax.vmap(one)(hidden, carries, told, examples)
