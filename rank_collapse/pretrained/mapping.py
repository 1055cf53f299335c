"""From named tensors to the parameters of the network, as a family's table of names says.

A table maps a place in the parameters to a name in the file. Axes are written as in einops, "(h k)
d -> h d k": the axes of the file and, after the arrow, those of the network, where they differ.
Letters: d width, h heads, g groups of keys and values, k and v their widths, f MLP, e embedding, i
input, p positions, s segments, r registers, b buckets; other letters belong to one family.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from rank_collapse.annotations import Tree
from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingParams
from rank_collapse.network.layers import MLPParams, NormParams
from rank_collapse.network.parameters import BlockParams
from rank_collapse.network.positions import RelativeParams
from rank_collapse.network.residual import LearnedGains
from rank_collapse.pretrained.weights import Weights


class NamedTensor(NamedTuple):
    """One array of the parameters: its tensor's whole name (None: zeros), and its axes."""

    name: str | None
    axes: str


class Map(NamedTuple):
    """A map with weight and bias whose axes differ from those in `_MAPS`, or several maps in
    one."""

    name: str
    weight: str
    bias: str = ""


class Names(NamedTuple):
    """Where the tensors of a family lie."""

    stem: str  # What stands before the names of a layer, with {} for its number
    # {place in `BlockParams` or in `TransformerParams`: name of a map or of a norm without
    # ".weight", a `Map`, a `NamedTensor`, or a function of (weights, stem, config)}
    layer: Mapping[str, object]
    outside: Mapping[str, object]


# Of each kind of map, as torch keeps it: the fields it fills, the axes of its weight and its bias.
# Several fields: the first axis after the arrow goes through them.
_QKV = tuple((f"w_{letter}", f"b_{letter}") for letter in "qkv")
_MAPS = {
    "q": ((("w_q", "b_q"),), "(h k) d -> h d k", "(h k) -> h k"),
    "k": ((("w_k", "b_k"),), "(g k) d -> g d k", "(g k) -> g k"),
    "v": ((("w_v", "b_v"),), "(g v) d -> g d v", "(g v) -> g v"),
    "qkv": (_QKV, "(3 h k) d -> 3 h d k", "(3 h k) -> 3 h k"),
    "qkv_grouped": (_QKV, "(n k) d -> n d k", "(n k) -> n k"),
    "o": ((("w_o", "b_o"),), "d (h v) -> h v d", "d"),
    "in": ((("w_in", "b_in"),), "f d -> d f", "f"),
    "gate": ((("w_gate", "b_gate"),), "f d -> d f", "f"),
    "gate_in": ((("w_gate", "b_gate"), ("w_in", "b_in")), "(2 f) d -> 2 d f", "(2 f) -> 2 f"),
    "out": ((("w_out", "b_out"),), "d f -> f d", "d"),
    "project": ((("w_project", "b_project"),), "d e -> e d", "d"),
    "norm": ((("gain", "bias"),), "d", "d"),
    "embedding.norm": ((("gain", "bias"),), "e", "e"),
}
_TYPES = {
    "attention": AttentionParams,
    "cross": AttentionParams,
    "mlp": MLPParams,
    "relative": RelativeParams,
    "embedding": EmbeddingParams,
    "norm": NormParams,
    "gains": LearnedGains,
}


@functools.cache
def _parse_axes(text):
    """Parse "(h k) d -> h d k" to the axes of the file and of the network, each a list of names."""

    def parse_side(side):
        # Each match is the inside of brackets, or else one name.
        return [(group or name).split() for group, name in re.findall(r"\(([^)]*)\)|(\S+)", side)]

    file_side, _, network_side = text.partition(" -> ")
    return parse_side(file_side), parse_side(network_side or file_side)


def take_tensor(weights: Weights, name: str, axes: str, sizes: Mapping[str, int]) -> np.ndarray:
    """Read a tensor of the shape that the axes say, as a view with the network's axes.

    Args:
        weights: The model's tensors.
        name: Name of the tensor.
        axes: See `NamedTensor`.
        sizes: Sizes of each axis but those that are written as numbers.
    """

    def axis_size(axis):
        return int(axis) if axis.isdigit() else sizes[axis]

    def group_sizes(groups):
        return [math.prod(map(axis_size, group)) for group in groups]

    def list_axes(groups):
        """List the axes of all groups, without those of length 1."""
        return [axis for axis in itertools.chain.from_iterable(groups) if axis != "1"]

    file_groups, network_groups = _parse_axes(axes)
    array = weights.take(name, *group_sizes(file_groups))
    file_axes = list_axes(file_groups)
    order = [file_axes.index(axis) for axis in list_axes(network_groups)]
    array = array.reshape([axis_size(axis) for axis in file_axes]).transpose(order)
    if any(len(group) > 1 for group in network_groups):
        array = array.reshape(group_sizes(network_groups))
    return array


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads the tensors of one model."""

    weights: Weights  # Its tensors
    config: TransformerConfig  # The network
    sizes: Mapping[str, int]  # Of the axes of a family's own
    biased: Callable[[str], bool]  # Kind of map → whether it has a bias
    gain_offset: float = 0.0  # What is added to the stored gains of norms
    interleaved: bool = False  # Whether rotary positions turn neighbouring features

    @functools.cached_property
    def _axis_sizes(self):
        """Sizes of the axis letters in the tables of tensor names."""
        c, e = self.config, self.config.embedding
        h, g = c.num_heads, self.sizes.get("g", c.num_heads)
        return {
            "d": c.d_model,
            "h": h,
            "g": g,
            "n": h + 2 * g,  # maps of queries, keys and values in one
            "k": c.qk_width,
            "v": c.v_width,
            "f": c.ff_width,
            "b": c.num_buckets,
            "e": e.d_embed,
            "i": e.d_input,
            "p": e.num_positions,
            "s": e.num_segments,
            "r": e.num_registers,
            **self.sizes,
        }

    def read_fields(self, names: Mapping[str, object], stem: str = "") -> dict[str, Tree]:
        """Read the parts of the parameters that a table names.

        Args:
            names: A table of `Names`.
            stem: Prefix of the names of tensors.
        """
        nested: dict[str, Tree] = {}
        for place, entry in names.items():
            if place.startswith("cross") and not self.config.cross_attention:
                continue
            for path, array in self._read_arrays(place, entry, stem):
                *parents, last = path.split(".")
                part = nested
                for parent in parents:
                    part = part.setdefault(parent, {})
                part[last] = array
        return {name: _build_part(name, part) for name, part in nested.items()}

    def read_layer(self, names: Names, row: tuple[int, ...]) -> BlockParams:
        """Read one layer.

        In a network without a first norm, the first layer has no tensors of an attention norm: it
        gets a norm with gain 1 and bias 0.

        Args:
            names: The family's.
            row: Text in the stem's braces.
        """
        table = dict(names.layer)
        first = row[0] == 0 and not self.config.first_norm
        if first:
            del table["attention_norm"]
        fields = self.read_fields(table, names.stem.format(*row) + ".")
        if first:
            gain, bias = fields["mlp_norm"].gain, fields["mlp_norm"].bias
            bias = None if bias is None else np.zeros_like(bias)
            fields["attention_norm"] = NormParams(gain=np.ones_like(gain), bias=bias)
        return BlockParams(**fields)

    def read_outside(self, names: Names) -> dict[str, Tree]:
        """Read the fields of `TransformerParams` other than its layers."""
        table, tables = dict(names.outside), self.config.embedding
        tokens = table.pop("embedding.tokens", None)
        fields = {"embedding": EmbeddingParams()} | self.read_fields(table)
        embedding = fields["embedding"]
        if tokens is not None:
            tokens = self.weights.table(tokens, tables.vocab_size, tables.d_embed)
            embedding = embedding.replace(tokens=tokens)
        if embedding.positions is not None:  # rows before those are for padding
            last = len(embedding.positions) - tables.num_positions
            embedding = embedding.replace(positions=embedding.positions[last:])
        return self.weights.to_device(fields | {"embedding": embedding})

    def _read_arrays(self, place, entry, stem):
        """Yield (path in the parameters, array) of one line of a table.

        The entry is of one of four kinds:

        - A function of (weights, stem, config), which returns the array at `place`.
        - A `NamedTensor`: the array at `place`.
        - A name: the map or norm whose tensors are name.weight and name.bias, with axes of `_MAPS`.
        - A `Map`: the same with other axes, or several maps in one tensor.

        The last two yield a weight and a bias for each map; None for a bias that is absent.

        Args:
            place: Path in the parameters.
            entry: Entry of the table.
            stem: Prefix of the names of tensors.
        """
        is_norm = place.endswith("norm")
        if callable(entry):
            yield place, entry(self.weights, stem, self.config)
            return
        if isinstance(entry, NamedTensor):
            name = None if entry.name is None else stem + entry.name
            yield place, self._take_array(name, entry.axes, is_norm)
            return
        parent, _, kind = place.rpartition(".")
        if is_norm:
            parent, kind = place, "norm"
        fields, weight_axes, bias_axes = _MAPS[place] if place in _MAPS else _MAPS[kind]
        if not isinstance(entry, Map):
            entry = Map(entry, weight_axes, bias_axes)
        weight = self._take_array(f"{stem}{entry.name}.weight", entry.weight, is_norm)
        bias = None
        if self.biased(kind):
            bias = self._take_array(f"{stem}{entry.name}.bias", entry.bias, False)
        if self.interleaved and kind in ("q", "k"):
            weight, bias = self._in_halves(weight), self._in_halves(bias)
        num_heads = self._axis_sizes["h"] if kind == "qkv_grouped" else None
        weights = _split_maps(weight, len(fields), num_heads)
        biases = _split_maps(bias, len(fields), num_heads)
        for names, weight_part, bias_part in zip(fields, weights, biases, strict=True):
            weight_name, bias_name = names
            yield f"{parent}.{weight_name}", weight_part
            yield f"{parent}.{bias_name}", bias_part

    def _in_halves(self, array):
        """Reorder rotated features: 0, 2, 4, ... come before 1, 3, 5, ...; None stays None."""
        if array is None:
            return None
        width, total = self.config.rotated_width, array.shape[-1]
        return array[..., np.r_[0:width:2, 1:width:2, width:total]]

    def _take_array(self, name, axes, norm):
        """Return a tensor of the checkpoint with these axes; zeros where it has no name."""
        if name is None:
            return np.zeros([self._axis_sizes[a] for a in axes.split()], self.weights.dtype)
        array = take_tensor(self.weights, name, axes, self._axis_sizes)
        if norm and self.gain_offset:
            array = self.gain_offset + np.asarray(array, self.weights.dtype)
        return array


def _split_maps(array, count, heads):
    """Split the maps in one array along its first axis.

    Args:
        array: One map, or several in one; None for a bias that is absent.
        count: Number of maps.
        heads: Heads of queries, if these come before the groups of keys and values; None if the
            axis has one entry for each map.
    """
    if count == 1 or array is None:
        return [array] * count
    if heads is None:
        return list(array)
    groups = (len(array) - heads) // 2
    return np.split(array, [heads, heads + groups])


def _build_part(name, part):
    """Build a part of the parameters from the dictionary of its fields; arrays stay as they are."""
    if not isinstance(part, dict):
        return part
    kind = _TYPES[name.rpartition("_")[2]]
    return kind(**{field: _build_part(field, value) for field, value in part.items()})
