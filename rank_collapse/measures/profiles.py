"""Measurements layer by layer, of one example or a batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from rank_collapse.annotations import AnyArray
from rank_collapse.checks import refuse, refuse_if
from rank_collapse.measures import documents, spikes
from rank_collapse.measures.arrays import (
    broadcast_mask,
    is_jax_array,
    match_framework,
    namespace,
    on_host,
    where_it_lives,
)
from rank_collapse.measures.layer_arrays import KINDS, has_head_axis, stack_layers
from rank_collapse.measures.layer_measures import measure_states, measure_weights
from rank_collapse.measures.rounding import layer_limits
from rank_collapse.measures.table import MEASURES, MeasureName, check_measure_names


class Profile(NamedTuple):
    """Measures by layer, as `profile` gives them; `rc.plot` draws it.

    `profile["residual_ratio"]` equals `profile.measures["residual_ratio"]`. A pytree of JAX: layers
    are the first axis, so that `jax.vmap(rc.profile, out_axes=1)` gives [l, b] as `batch_axis`
    does.

    Attributes:
        measures: {name: [l] or [l, b]}.
        rounding: Bool [l] or [l, b], True where residual_ratio is at most `rounding_limit` of the
            dtype in which the states came (9.5e-7 for float32, 2⁻⁷ for bfloat16). Tokens then
            differ by no more than the rounding of the layer that made them, so measures of their
            differences show rounding. None where residual_ratio is not among the measures.
        spiked: Bool [l] or [l, b], True where one token holds more than half of ‖res(X)‖_F²
            (`residual_spike`); residual_ratio then describes that token, and says little about the
            others. False where `rounding` is True. None where residual_ratio is not among the
            measures.
        left_out: [l] or [l, b], the number of tokens that `exclude` left out; None without it.
    """

    measures: Mapping[str, Float[AnyArray, "l *b"]]
    rounding: Bool[AnyArray, "l *b"] | None = None
    spiked: Bool[AnyArray, "l *b"] | None = None
    left_out: Float[AnyArray, "l *b"] | None = None

    def __getitem__(self, name: object) -> AnyArray:
        """Return a measure by name; a field by number, as in every tuple."""
        return self.measures[name] if isinstance(name, str) else tuple.__getitem__(self, name)

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            measures = self.measures if isinstance(self.measures, Mapping) else ()  # or a leaf
            names = ", ".join(f"profile[{measure!r}]" for measure in measures)
            message = f"Profile has no {name!r}; a measure is read by its name: {names}"
            raise AttributeError(message, name=name, obj=self)

    @property
    def notes(self) -> dict[str, AnyArray]:
        """Return the notes that accompany the measures, by name."""
        notes = {name: getattr(self, name) for name in self._fields[1:]}
        return {name: a for name, a in notes.items() if a is not None}

    def columns(self) -> tuple[dict[str, int], dict[str, np.ndarray]]:
        """Return ({axis: its size}, {measure or note: array [l] or [l, b]}).

        Raises:
            ValueError: Arrays of other axes.
        """
        columns = {n: np.asarray(on_host(a)) for n, a in {**self.measures, **self.notes}.items()}
        shape = next(iter(columns.values())).shape
        refuse_if(len(shape) not in (1, 2), f"a profile of shape {shape} is not [l] or [l, b]")
        return dict(zip(("layer", "example"), shape, strict=False)), columns

    def to_pandas(self) -> Any:
        """Convert to a DataFrame with a row per layer, or per layer and example."""
        import pandas as pd

        sizes, columns = self.columns()
        index = pd.MultiIndex.from_product(map(range, sizes.values()), names=sizes)
        if len(sizes) == 1:
            index = index.get_level_values(0)
        return pd.DataFrame({name: a.reshape(-1) for name, a in columns.items()}, index=index)

    def to_xarray(self) -> Any:
        """Convert to a Dataset over "layer", or over "layer" and "example"."""
        import xarray as xr

        sizes, columns = self.columns()
        coordinates = {name: range(size) for name, size in sizes.items()}
        return xr.Dataset({n: (tuple(sizes), a) for n, a in columns.items()}, coordinates)


@where_it_lives
def profile(
    hidden: AnyArray,
    *,
    measures: MeasureName | Sequence[MeasureName] | None = None,
    mask: AnyArray | None = None,
    key_mask: AnyArray | None = None,
    segments: AnyArray | None = None,
    num_segments: int | None = None,
    batch_axis: int | None = None,
    tokens: spikes.TokenKind = "raw",
    norm: Callable[[AnyArray], AnyArray] | Sequence[Callable[[AnyArray], AnyArray]] | None = None,
    exclude: spikes.Excluded | None = None,
    threshold: float = spikes.SPIKE,
) -> Profile:
    """Measure hidden states by layer, of one example or of a batch, from any framework.

    Also measures attention weights, if the measures are measures of attention: means over heads.

    Args:
        hidden: A `Trace` of one example or a batch, whose last state is measured before the final
            norm; an array [l, n, d]; a list or tuple of layers [n, d] or [b, n, d], such as
            `hidden_states` of a transformers model; or an array of four axes, with `batch_axis`.
            For measures of attention: a `Trace`; [l, h, n, m]; layers [h, n, m] or [b, h, n, m],
            such as `attentions` of a transformers model; or an array of five axes, with
            `batch_axis`.
        measures: One name from `MEASURES`, or several, all of tokens or all of attention. None for
            "residual_ratio", or for "attention_entropy" if the array has the axes of attention.
        mask: Bool [n], or [b, n] with a batch: the tokens that exist.
        key_mask: Key mask of attention, Bool [m], or [b, m] with a batch: the keys that exist, as
            `rc.measures.first_column` and `rc.sink_rate` take it.
        segments: Int [n], or [b, n] with a batch, of packed rows: tokens with the same number form
            a document, and an example is a document. Number 0 is a document like any other. If it
            marks padding, as in MaxText, pass mask=segments > 0.
        num_segments: The largest number of documents that exist in a row. It is needed where
            segments are traced: each row then has this many examples, NaN where it has fewer
            documents, and all are NaN where a row has more.
        batch_axis: Axis of the batch in an array: 1 for [l, b, ...], 0 for [b, l, ...].
        tokens: "raw", as they are; "unit", x_i/|x_i|; "read", what attention reads, N(x).
        norm: N of "read": a function of one layer's tokens, or a sequence of one per state.
        exclude, threshold: "spikes" leaves out tokens longer than `threshold` times the median.

    Returns:
        A `Profile` of [l] or [l, b]; NaN where tokens are not finite, or where fewer exist than
        the measure needs.

    Raises:
        ValueError: An unknown measure, layers of different shapes, a batch whose axis is unknown,
            or a mask that does not fit.

    Source: Dong et al. 2021, figure 2 for the residual ratio.
    """
    if measures is None:
        measures = "attention_entropy" if has_head_axis(hidden, batch_axis) else "residual_ratio"
    names = (measures,) if isinstance(measures, str) else tuple(measures)
    needs = {MEASURES[name].needs for name in names if name in MEASURES}
    kind = "attention" if needs == {"attention"} else "tokens"
    names, limit = check_measure_names(names, kind), layer_limits(hidden, batch_axis)
    subject, axes = KINDS[kind]
    hidden = stack_layers(hidden, batch_axis, kind)
    token_mask = mask
    if mask is not None:
        rows = (*hidden.shape[: -len(axes)], hidden.shape[-2])  # [l, n] or [l, b, n]
        hidden, mask = broadcast_mask(hidden, mask, rows, f"{subject} with tokens")
    refuse(
        (
            key_mask is not None and kind != "attention",
            f"key_mask= applies to attention, not to {subject}",
        ),
        (
            segments is not None and key_mask is not None,
            "segments= and key_mask= exclude each other",
        ),
        (num_segments is not None and segments is None, "num_segments= needs segments="),
    )
    if segments is not None and hidden.ndim == len(axes) + 1:  # a batch of one
        hidden = hidden[:, None]
        mask = None if mask is None else mask[:, None]
    if segments is not None and num_segments is None:
        hidden, mask, key_mask = _split_by_document(hidden, token_mask, segments, kind)
    read = None if tokens != "read" and norm is None else _apply_norms(norm, hidden)

    def measure_layer(x, x_mask, x_read):
        """Measure one layer, or all layers at once."""
        if kind == "attention":
            return measure_weights(names, x, x_mask, key_mask)
        choice = {"tokens": tokens, "exclude": exclude, "threshold": threshold}
        return measure_states(names, x, x_mask, x_read, **choice)

    def measure_layers(hidden, mask):
        """Measure all layers: JAX arrays in one program, others layer by layer to save memory."""
        if is_jax_array(hidden):
            return measure_layer(hidden, mask, read)
        results = []
        for i, layer in enumerate(hidden):
            layer_mask = None if mask is None else mask[i]
            layer_read = None if read is None else read[i]
            results.append(measure_layer(layer, layer_mask, layer_read))
        stack = namespace(hidden).stack
        return {name: stack([result[name] for result in results]) for name in results[0]}

    if num_segments is not None:
        layer_mask = None if mask is None else mask[0]  # the same in every layer
        packed = hidden, layer_mask, segments, num_segments
        values = _measure_by_document(measure_layers, *packed, kind)
    else:
        values = measure_layers(hidden, mask)
    return make_profile(values, limit)


def make_profile(values: Mapping[str, object], limit: float | np.ndarray) -> Profile:
    """Make a `Profile` of the measures of every layer.

    Args:
        values: Measures and notes [l] or [l, b], as `measure_states` gives them.
        limit: `rounding_limit` of the states' dtype: one number, or one for each layer [l].
    """
    measures = {name: a for name, a in values.items() if name not in Profile._fields}
    if "residual_ratio" not in measures:
        return Profile(measures, left_out=values.get("left_out"))
    ratio = measures["residual_ratio"]
    if np.ndim(limit):
        limit = np.reshape(limit, (-1,) + (1,) * (ratio.ndim - 1))
    rounding = ratio <= match_framework(ratio, np.asarray(limit, np.float32))[1]
    return Profile(measures, rounding, values["spiked"] & ~rounding, values.get("left_out"))


def _split_by_document(hidden, mask, segments, kind):
    """Split layers so that an example is a document.

    Args:
        hidden: [l, b, n, d], or attention [l, b, h, n, n].
        mask: See `profile`.
        segments: See `profile`.
        kind: "tokens" or "attention".

    Returns:
        (layers [l, documents, ...], a mask of existing tokens [l, documents, n], the same mask for
        keys).
    """
    packed = documents.split_documents(segments, mask, (hidden.shape[1], hidden.shape[-2]))
    take = packed.split_tokens if kind == "tokens" else packed.split_weights
    layers = take(hidden)
    exists = match_framework(layers, packed.exists)[1]
    token_mask = namespace(layers).broadcast_to(exists, (len(layers), *exists.shape))
    return layers, token_mask, exists if kind == "attention" else None


def _measure_by_document(measure_layers, hidden, mask, segments, num_segments, kind):
    """Measure packed rows, which hold several documents each, where the documents may be traced.

    Under jit the number of documents in a row is unknown, so `num_segments` slots are measured for
    each row. Slots without a document give NaN; a row with more documents gives NaN in all slots.

    Args:
        measure_layers: measure(layers, mask [l, b, n]) → {name: [l, b]}.
        hidden: [l, b, n, d], or attention [l, b, h, n, n].
        mask: Bool [b, n]; None for all.
        segments, num_segments: See `profile`.
        kind: "tokens" or "attention".

    Returns:
        {name: [l, b · num_segments]}, the documents of a row one after the other.
    """
    rows, xp = (hidden.shape[1], hidden.shape[-2]), namespace(hidden)
    numbers, are_too_many, num_segments = documents.number_documents(
        hidden, segments, mask, rows, num_segments
    )

    def measure_document(number):
        """Measure the documents with this number in all rows."""
        is_token = numbers == number
        layers = hidden
        if kind == "attention":
            is_pair = is_token[:, None, :, None] & is_token[:, None, None, :]
            layers = xp.where(is_pair, hidden, 0)
        return measure_layers(layers, xp.broadcast_to(is_token, (len(hidden), *rows)))

    by_document = documents.measure_documents(measure_document, hidden, num_segments)
    values = {}
    for name, a in by_document.items():
        columns = xp.moveaxis(a, 0, -1).reshape((len(hidden), -1))
        is_float = columns.dtype != xp.bool
        values[name] = xp.where(are_too_many, xp.nan, columns) if is_float else columns
    return values


def _apply_norms(norm, hidden):
    """Apply its norm to each layer's tokens, or one norm to all layers."""
    norms = norm if isinstance(norm, Sequence) else [norm] * len(hidden)
    refuse_if(
        None in norms or len(norms) != len(hidden),
        f"tokens='read' needs norm=, the norm of all {len(hidden)} states or one for each",
    )
    return namespace(hidden).stack([n(h) for n, h in zip(norms, hidden, strict=True)])
