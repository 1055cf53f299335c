"""Measurements layer by layer, of one example or a batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from rank_collapse.measures import documents, spikes
from rank_collapse.measures.arrays import (
    as_floats,
    broadcast_mask,
    is_jax_array,
    match_framework,
    namespace,
    on_host,
    where_it_lives,
)
from rank_collapse.measures.norms import num_tokens
from rank_collapse.measures.table import MEASURES, MeasureName, check_measure_names
from rank_collapse.struct import refuse, refuse_if

# Of one token these say nothing: NaN.
NEEDS_TWO_TOKENS = ("residual_ratio", "token_cosine", "bulk_ratio")


class Profile(NamedTuple):
    """Measures by layer, as `profile` gives them; `rc.plot` draws it.

    `profile["residual_ratio"]` is that of `profile.measures`. A pytree of JAX: layers are the first
    axis, so that `jax.vmap(rc.profile, out_axes=1)` gives [l, b] as `batch_axis` does.

    Attributes:
        measures: {name: [l] or [l, b]}.
        rounding: Bool [l] or [l, b], True where residual_ratio is at most `rounding_limit` of the
            dtype that the states came in (9.5e-7 of float32, 2⁻⁷ of bfloat16). Tokens then differ
            by no more than the rounding of the layer that made them, which decides measures of
            what they differ by. None where residual_ratio is not among the measures.
        spiked: Bool [l] or [l, b], True where one token holds more than half of ‖res(X)‖_F²
            (`residual_spike`): residual_ratio is then of that token, and says little of the others.
            False where `rounding` is True. None where residual_ratio is not among the measures.
        left_out: [l] or [l, b], how many tokens `exclude` left out; None without it.
    """

    measures: Mapping[str, Float[Any, "l *b"]]
    rounding: Bool[Any, "l *b"] | None = None
    spiked: Bool[Any, "l *b"] | None = None
    left_out: Float[Any, "l *b"] | None = None

    def __getitem__(self, name: Any) -> Any:
        """Return a measure by name; a field by number, as of every tuple."""
        return self.measures[name] if isinstance(name, str) else tuple.__getitem__(self, name)

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            measures = self.measures if isinstance(self.measures, Mapping) else ()  # or a leaf
            names = ", ".join(f"profile[{measure!r}]" for measure in measures)
            message = f"Profile has no {name!r}; a measure is read by its name: {names}"
            raise AttributeError(message, name=name, obj=self)

    @property
    def notes(self) -> dict[str, Any]:
        """Return what stands beside the measures, by name."""
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
    hidden: Any,
    *,
    measures: MeasureName | Sequence[MeasureName] | None = None,
    mask: Any = None,
    key_mask: Any = None,
    segments: Any = None,
    num_segments: int | None = None,
    batch_axis: int | None = None,
    tokens: spikes.TokenKind = "raw",
    norm: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
    exclude: spikes.Excluded | None = None,
    threshold: float = spikes.SPIKE,
) -> Profile:
    """Measure hidden states by layer, of one example or of a batch, from any framework.

    Or of attention weights, where the measures are of those: means over heads.

    Args:
        hidden: A `Trace`, of one example or a batch, whose last state is measured before the final
            norm; an array [l, n, d]; a list or tuple of layers [n, d] or [b, n, d], such as
            `hidden_states` of a transformers model; or an array of four axes, with `batch_axis`.
            Of attention: a `Trace`; [l, h, n, m]; layers [h, n, m] or [b, h, n, m], such as
            `attentions` of a transformers model; or an array of five axes, with `batch_axis`.
        measures: One name out of `MEASURES`, or several, all of tokens or all of attention. None
            for "residual_ratio", or "attention_entropy" of what has the axes of attention.
        mask: Bool [n], or [b, n] with a batch: the tokens that exist.
        key_mask: Of attention, Bool [m], or [b, m] with a batch: the keys that exist, as
            `rc.measures.first_column` and `rc.sink_rate` take it.
        segments: Int [n], or [b, n] with a batch, of packed rows: tokens of one number are a
            document, and an example is a document. Number 0 is one as any other: where it marks
            padding, as in MaxText, say mask=segments > 0.
        num_segments: The most documents of a row that exist. Needed where segments are traced: then
            each row has so many examples, NaN where it has fewer documents, and all are NaN where
            one has more.
        batch_axis: Axis of the batch in an array: 1 for [l, b, ...], 0 for [b, l, ...].
        tokens: "raw", as they are; "unit", x_i/|x_i|; "read", what attention reads, N(x).
        norm: N of "read": a function of one layer's tokens, or a sequence of one per state.
        exclude, threshold: "spikes" leaves out tokens longer than `threshold` times the median.

    Returns:
        A `Profile` of [l] or [l, b]; NaN where tokens are not finite, or where fewer exist than
        the measure needs.

    Raises:
        ValueError: An unknown measure, layers of different shapes, a batch whose axis is not
            known, or a mask that does not fit.

    Source: Dong et al. 2021, figure 2 for the residual ratio.
    """
    if measures is None:
        measures = "attention_entropy" if _is_attention(hidden, batch_axis) else "residual_ratio"
    names = (measures,) if isinstance(measures, str) else tuple(measures)
    needs = {MEASURES[name].needs for name in names if name in MEASURES}
    kind = "attention" if needs == {"attention"} else "tokens"
    names, limit = check_measure_names(names, kind), _rounding_limits(hidden, batch_axis)
    subject, axes = _KINDS[kind]
    hidden = _stack_layers(hidden, batch_axis, kind)
    token_mask = mask
    if mask is not None:
        rows = (*hidden.shape[: -len(axes)], hidden.shape[-2])  # [l, n] or [l, b, n]
        hidden, mask = broadcast_mask(hidden, mask, rows, f"{subject} with tokens")
    refuse(
        (
            key_mask is not None and kind != "attention",
            f"key_mask is of attention, not of {subject}",
        ),
        (
            segments is not None and key_mask is not None,
            "segments= and key_mask= exclude each other",
        ),
        (num_segments is not None and segments is None, "num_segments= needs segments="),
    )
    if segments is not None and hidden.ndim == len(axes) + 1:  # a batch of one
        hidden, mask = hidden[:, None], None if mask is None else mask[:, None]
    if segments is not None and num_segments is None:
        hidden, mask, key_mask = _split_by_document(hidden, token_mask, segments, kind)
    read = None if tokens != "read" and norm is None else _apply_norms(norm, hidden)

    def measure_layer(x, x_mask, x_read):
        if kind == "attention":
            return measure_weights(names, x, x_mask, key_mask)
        choice = {"tokens": tokens, "exclude": exclude, "threshold": threshold}
        return measure_states(names, x, x_mask, x_read, **choice)

    def measure_layers(hidden, mask):
        if is_jax_array(hidden):  # one program; others layer by layer, for less memory
            return measure_layer(hidden, mask, read)
        layers = [[None] * len(hidden) if a is None else a for a in (hidden, mask, read)]
        results = [measure_layer(*layer) for layer in zip(*layers, strict=True)]
        stack = namespace(hidden).stack
        return {name: stack([result[name] for result in results]) for name in results[0]}

    if num_segments is not None:
        layer_mask = None if mask is None else mask[0]  # the same in every layer
        packed = hidden, layer_mask, segments, num_segments
        values = _measure_by_document(measure_layers, *packed, kind)
    else:
        values = measure_layers(hidden, mask)
    return make_profile(values, limit)


def make_profile(values: Mapping[str, Any], limit: Any) -> Profile:
    """Make a `Profile` of the measures of every layer.

    Args:
        values: Measures and notes [l] or [l, b], as `measure_states` gives them.
        limit: `rounding_limit` of the states' dtype, a number or one for each layer [l].
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
        (layers [l, documents, ...], the tokens that exist [l, documents, n], those as keys).
    """
    packed = documents.split_documents(segments, mask, (hidden.shape[1], hidden.shape[-2]))
    take = packed.split_tokens if kind == "tokens" else packed.split_weights
    layers = take(hidden)
    exists = match_framework(layers, packed.exists)[1]
    token_mask = namespace(layers).broadcast_to(exists, (len(layers), *exists.shape))
    return layers, token_mask, exists if kind == "attention" else None


def _measure_by_document(measure_layers, hidden, mask, segments, num_segments, kind):
    """Measure packed rows whose documents may be traced.

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
    """Apply to each layer's tokens its norm, or the one norm of all."""
    norms = norm if isinstance(norm, Sequence) else [norm] * len(hidden)
    refuse_if(
        None in norms or len(norms) != len(hidden),
        f"tokens='read' needs norm=, the norm of all {len(hidden)} states or one for each",
    )
    return namespace(hidden).stack([n(h) for n, h in zip(norms, hidden, strict=True)])


# 2^−p of the p bits behind the point, by the name of a dtype or its beginning
_EPSILONS = {
    "float64": 2**-52,
    "float32": 2**-23,
    "float16": 2**-10,
    "bfloat16": 2**-7,
    "float8_e5m2": 2**-2,
    "float8": 2**-3,
    "float4": 2**-1,
}
_ROUNDINGS = 8


def rounding_limit(dtype: Any) -> float:
    """Return the residual ratio of tokens that differ by nothing but a layer's rounding.

    A layer that has made all tokens equal still rounds them one by one: bias, sum with the skip,
    and in a norm the mean, its subtraction, the variance, the division, scale and shift. These are
    r = 8 operations, each rounded by at most ε/2 of its size. res(·) at most doubles a norm, so the
    ratio is up to r ε. For dtypes of fewer than 32 bits r = 1: layers compute in float32 and round
    only what is stored.

    Args:
        dtype: Number format of floats, or its name.

    Raises:
        ValueError: No dtype of floats.
    """
    name = getattr(dtype, "name", getattr(dtype, "__name__", dtype))  # np.float32 has the latter
    name = str(name).rpartition(".")[2]
    epsilon = next((e for start, e in _EPSILONS.items() if name.startswith(start)), None)
    refuse_if(epsilon is None, f"dtype={name!r} is not one of floats: {', '.join(_EPSILONS)}")
    return (_ROUNDINGS if name in ("float32", "float64") else 1) * epsilon


def _rounding_limits(hidden, batch_axis):
    """Return the limit of the states' dtype; of a list one per layer [l]."""

    def read_limit(states):
        array = getattr(states, "hidden", states)  # of a Trace
        name = str(getattr(array, "dtype", "")).rpartition(".")[2]
        return rounding_limit(name if "float" in name else "float32")

    if not isinstance(hidden, list | tuple):
        return read_limit(hidden)
    limits = np.array([read_limit(states) for states in hidden])
    return limits.max() if batch_axis == 0 and len(limits) else limits


_KINDS = {"tokens": ("hidden states", "nd"), "attention": ("attention weights", "hnm")}


def _is_attention(hidden, batch_axis):
    """Return whether something has one axis more than hidden states: that of heads."""
    if isinstance(hidden, list | tuple):
        return any(getattr(layer, "ndim", 0) == 4 for layer in hidden)
    shape = tuple(getattr(hidden, "shape", ()))
    square = len(shape) == 4 and batch_axis is None and shape[-1] == shape[-2]
    return square or len(shape) == 5


def _stack_layers(hidden, batch_axis, kind):
    """Stack arrays of a kind, its axes behind [l] or [l, b].

    Args:
        hidden, batch_axis: See `profile`.
        kind: "tokens" or "attention".
    """
    subject, axes = _KINDS[kind]
    if hasattr(hidden, "layer_axis"):  # a Trace
        batch_axis = 1 - hidden.layer_axis if hidden.hidden.ndim == 4 else None
        hidden = hidden.hidden if kind == "tokens" else hidden.attention
    elif isinstance(hidden, Mapping):
        raise ValueError(
            f"{subject} are a {type(hidden).__name__} with {', '.join(map(str, hidden))}: "
            "pass one array or list of arrays, such as output.hidden_states"
        )
    refuse_if(
        hidden is None or (isinstance(hidden, list | tuple) and any(h is None for h in hidden)),
        f"{subject} are None: a model of transformers gives its attention weights where it is "
        'loaded with attn_implementation="eager"; of fused attention see rc.attention_rows',
    )
    if isinstance(hidden, list | tuple):
        layers = [as_floats(h) for h in hidden]
        shapes = {tuple(h.shape) for h in layers}
        refuse_if(len(shapes) != 1, f"{subject} have different shapes, or there are none: {shapes}")
        traced = next((h for h in layers if is_jax_array(h)), layers[0])
        hidden = namespace(traced).stack([match_framework(traced, h)[1] for h in layers])
        batch_axis = 1 if batch_axis is None and hidden.ndim == len(axes) + 2 else batch_axis
    hidden, letters = as_floats(hidden), ", ".join(axes)
    leading, shape = hidden.ndim - len(axes), tuple(hidden.shape)
    batch_axes = (None,) if leading == 1 else (0, 1)
    refuse(
        (
            leading not in (1, 2) or not shape[0],
            f"{subject} of shape {shape} are not [l, {letters}] or [l, b, {letters}]",
        ),
        (
            batch_axis not in batch_axes,
            f"batch_axis={batch_axis} of {subject} of shape {shape}: 1 for "
            f"[l, b, {letters}], 0 for [b, l, {letters}] as jax.vmap gives it, "
            f"None for [l, {letters}]",
        ),
    )
    return namespace(hidden).moveaxis(hidden, 0, 1) if batch_axis == 0 else hidden


def measure_states(
    names: Sequence[str], x: Any, mask: Any = None, read: Any = None, **choice: Any
) -> dict[str, Any]:
    """Measure tokens [..., n, d]: NaN where they are not finite, or too few exist.

    Args:
        names: Out of `MEASURES`.
        x: The tokens.
        mask: Bool [..., n]; None for all.
        read, choice: Results of `spikes.choose_tokens`.

    Returns:
        {name: measure}. Also "left_out" and, with residual_ratio, "spiked", see `Profile`.
    """
    x, mask, left_out = spikes.choose_tokens(x, mask, read, **choice)
    flagged = ("residual_spike",) if "residual_ratio" in names else ()
    computed = tuple(dict.fromkeys((*names, *flagged)))
    if is_jax_array(x):
        from rank_collapse.measures import on_jax

        values = on_jax.compile_function(_measure_finite, (0,))(computed, x, mask)
    else:
        xp = namespace(x)
        counted = x if mask is None else xp.where(mask[..., None], x, 0)
        finite = xp.all(xp.isfinite(counted), axis=(-2, -1))
        x = xp.where(finite[..., None, None], x, 0)
        values = _measure_finite(computed, x, mask)
        values = {name: xp.where(finite, a, xp.nan) for name, a in values.items()}
    notes = {} if left_out is None else {"left_out": left_out}
    if flagged:
        notes["spiked"] = values["residual_spike"] > 0.5
    return {name: values[name] for name in names} | notes


def _measure_finite(names, x, mask):
    """Compute measures of finite tokens by name; NaN where they need two tokens and have fewer."""
    values = {name: MEASURES[name](x, mask=mask) for name in names}
    xp = namespace(x)
    for name in NEEDS_TWO_TOKENS:
        if name in values:
            values[name] = xp.where(num_tokens(x, mask) < 2, xp.nan, values[name])
    return values


def measure_weights(
    names: Sequence[str], p: Any, mask: Any = None, key_mask: Any = None
) -> dict[str, Any]:
    """Measure attention [..., h, n, m], means over heads.

    Args:
        names: Out of `MEASURES`.
        p: Weights.
        mask: Bool [..., n], the queries that exist; None for all.
        key_mask: Bool [..., m], the keys that exist; None for all.
    """
    options = {name: {"key_mask": key_mask} for name in ("first_column", "sink_rate")}
    values = {name: MEASURES[name](p, mask=mask, **options.get(name, {})) for name in names}
    return {name: a.mean(axis=-1) if a.ndim == p.ndim - 2 else a for name, a in values.items()}
