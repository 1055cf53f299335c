"""Which modules of a model are layers, which are attention, and which part they are of a pass.

Attention is what owns projections of queries and of keys, or one of both side by side. Layers are
the elements of the one `nn.ModuleList` or `nn.Sequential` whose elements have attention.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from rank_collapse.watch.names import PARTS

# Names of further projections of queries, of keys and values in one, and of all three in one.
QUERY = PARTS["query"] | {"q_a_proj", "q_b_proj", "linear_q", "q_linear", "q_attn", "in_proj_q"}
KEY = PARTS["key"] | {"linear_k", "k_linear", "kv", "kv_proj", "to_kv", "wkv", "key_value"}
KEY |= {"kv_a_proj_with_mqa", "kv_b_proj", "c_attn", "in_proj"}
TOGETHER = {"c_attn", "qkv", "qkv_proj", "to_qkv", "wqkv", "query_key_value", "w_pack", "c_qkv"}
_LISTS = (nn.ModuleList, nn.Sequential)


class Place(NamedTuple):
    """Where an attention stands: the number of its layer, and its dotted name inside."""

    layer: int
    name: str
    first: bool  # Whether it is the layer's first


class Structure:
    """Layers and attentions of a model, held weakly.

    Attributes:
        where: The dotted name of the layers' list.
        names: The dotted name of each layer.
        kinds: The class of each layer.
        blocks: {layer: its number}, of those that are chosen.
        places: {attention: `Place`}, in chosen layers.
        together: {module that projects to queries, keys and values at once: its attention}.
        around: The modules that have the layers in them, the model itself among them.

    Raises:
        ValueError: No layer, or several lists and no name; it lists what there is. Layers that are
            not there. Sharded parameters.
    """

    def __init__(self, model: nn.Module, layers: str | Sequence[int] | None):
        _refuse_sharded(model)
        name = layers if isinstance(layers, str) else None
        self.where, found = _layers_of(model, name)
        own = {module: where for where, module in model.named_modules(remove_duplicate=True)}
        self.names = [own[module] for module in found]
        self.kinds = [type(module).__name__ for module in found]
        self.chosen = _chosen(layers, len(found))
        self.blocks: Any = weakref.WeakKeyDictionary()
        self.places: Any = weakref.WeakKeyDictionary()
        self.together: Any = weakref.WeakKeyDictionary()
        self.around: Any = weakref.WeakSet()
        for number in self.chosen:
            self.blocks[found[number]] = number
            for place, (where, attention) in enumerate(attentions_in(found[number])):
                self.places[attention] = Place(number, where, place == 0)
                for child in fused_of(attention):
                    self.together[child] = attention
        for module, where in own.items():
            if not where or any(block.startswith(f"{where}.") for block in self.names):
                self.around.add(module)


def owned(module: nn.Module) -> dict[str, Any]:
    """{name in lower case without "_weight" and "_bias": its children and parameters}."""
    found: dict[str, Any] = {}
    for name, part in (*module.named_children(), *module.named_parameters(recurse=False)):
        plain = name.lower().removesuffix("_weight").removesuffix("_bias")
        found.setdefault(plain, []).append(part)
    return found


def is_attention(module: nn.Module) -> bool:
    """Whether a module owns projections of queries and keys."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    names = owned(module).keys()
    return bool(names & TOGETHER or (names & QUERY and names & KEY))


def fused_of(attention: nn.Module) -> list[nn.Module]:
    """The children of an attention that project to queries, keys and values at once."""
    names = owned(attention)
    if names.keys() & (QUERY - {"q"}):  # "q" may be the bias of queries beside what is in one
        return []
    return [p for n in TOGETHER | {"in_proj"} for p in names.get(n, ()) if isinstance(p, nn.Module)]


def attentions_in(block: nn.Module) -> list[tuple[str, nn.Module]]:
    """(dotted name, attention) of a layer, itself among them."""
    return [(where, module) for where, module in block.named_modules() if is_attention(module)]


def _has_attention(module):
    return any(map(is_attention, module.modules()))


def _lists_in(module):
    """{dotted name: elements} of the lists with attention, but those inside others."""
    found: dict[str, list[Any]] = {}
    for where, own in module.named_modules():
        elements = list(dict.fromkeys(own)) if isinstance(own, _LISTS) else []
        if any(where.startswith(f"{other}.") or other == "" for other in found):
            continue
        kinds = [type(element) for element in elements]
        repeated = len(kinds) == 1 or len(set(kinds)) < len(kinds)
        if repeated and any(map(_has_attention, elements)):
            found[where] = elements
    return found


def _expanded(elements) -> Iterator[nn.Module]:
    """Layers: the elements, or the blocks in the lists that they have inside, as Swin's stages."""
    for element in elements:
        inner = [] if is_attention(element) else _lists_in(element).values()
        blocks = [block for own in inner for block in own]
        alike = len({type(block) for block in blocks}) == 1
        if alike and all(_has_attention(b) and not is_attention(b) for b in blocks):
            yield from _expanded(blocks)
        else:
            yield element


def _layers_of(model, name):
    known = _lists_in(model)
    if name is not None:
        own = dict(model.named_modules()).get(name)
        inside = {w: e for w, e in known.items() if w == name or w.startswith(f"{name}.")}
        if isinstance(own, _LISTS) and _has_attention(own):
            inside = {name: list(dict.fromkeys(own))}
    else:
        inside = known
    if len(inside) == 1:
        ((where, elements),) = inside.items()
        found = list(dict.fromkeys(_expanded(elements)))
        if isinstance(model.get_submodule(where), nn.Sequential):  # without what is around them
            there = [i for i, layer in enumerate(found) if _has_attention(layer)]
            found = found[there[0] : there[-1] + 1]
        return where, found
    found = {w: f"{len(own)} × {type(own[0]).__name__}" for w, own in known.items()}
    text = ", ".join(f"{where!r} ({what})" for where, what in found.items())
    if not text:
        raise ValueError(
            f"no layers with attention in a {type(model).__name__}: no nn.ModuleList or "
            "nn.Sequential whose elements own projections of queries and keys"
        )
    asked = f"layers={name!r} is not among" if name else "the layers of the model are not clear in"
    raise ValueError(f"{asked} {text}: name one, layers='...'")


def _chosen(layers, count):
    if layers is None or isinstance(layers, str):
        return list(range(count))
    chosen = list(layers)
    wrong = [i for i in chosen if type(i) is not int or not 0 <= i < count]
    if wrong or not chosen:
        raise ValueError(f"layers={layers!r} of a model with layers 0 to {count - 1}")
    return chosen


def _refuse_sharded(model):
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError("a model under FullyShardedDataParallel is not measured")
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise ValueError(
                f"{name} is a DTensor: a model under FSDP2 (fully_shard) or tensor parallelism is "
                "not measured"
            )


def width_of(attention: nn.Module) -> int | None:
    """The width d of the tokens that an attention reads; None where its projections don't say."""
    if isinstance(attention, nn.MultiheadAttention):
        return attention.embed_dim
    parts = owned(attention)
    every = [p for name in sorted(QUERY | TOGETHER | {"in_proj"}) for p in parts.get(name, ())]
    for part in every:
        for name in ("in_features", "nx", "in_channels"):  # of linear maps, of GPT-2's, of maps
            if isinstance(getattr(part, name, None), int):
                return getattr(part, name)
    return None
