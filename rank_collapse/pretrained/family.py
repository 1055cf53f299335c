"""A family of models: what turns the entries of a config.json into a network and its weights."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.pretrained.read_out import ReadOut
from rank_collapse.pretrained.weights import Draw, Weights

Settings = dict[str, Any]

# No published model has a tenth of it; what is built per layer would fill the memory beyond.
MAX_LAYERS = 10_000
_LAYERS = {
    "num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers",
    "num_hidden_groups", "inner_group_num",
}  # fmt: skip
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
_NAMES |= {list: "a list", dict: "an object"}


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`, as its file in this package describes it.

    Attributes:
        model_type: As in config.json.
        defaults: The entries of config.json that are read, and what each is where it is absent.
        anchors: Ends of tensor names, one of which is in every checkpoint: what stands before it
            is the prefix of all names.
        config: settings -> the network.
        params: (weights, settings, config) -> its parameters.
        draw: (tensor name, settings) -> how the tensor is drawn at initialisation.
        read_out: (weights, settings, config) -> the `ReadOut` of a causal language model; None
            where there is none, or one that is not linear.
        parts: The networks of one checkpoint, where there are several; the first is the default.
        kinds: The types of entries whose default does not tell, such as one that is None.
        nullable: Entries for which null is a value of its own rather than the default.
    """

    model_type: str
    defaults: Mapping[str, Any]
    anchors: tuple[str, ...]
    config: Callable[[Settings], TransformerConfig]
    params: Callable[[Weights, Settings, TransformerConfig], TransformerParams]
    draw: Callable[[str, Settings], Draw]
    read_out: Callable[[Weights, Settings, TransformerConfig], ReadOut] | None = None
    parts: tuple[str, ...] = ()
    kinds: Mapping[str, tuple[type, ...]] = dataclasses.field(default_factory=dict)
    nullable: tuple[str, ...] = ()

    def settings(self, given: Mapping[str, Any], part: str | None = None) -> Settings:
        """The entries of a config.json, completed by the defaults and, of several parts, the part.

        Raises:
            ValueError: A quantised checkpoint, a part that the family does not have, an entry of
                another type than its default's, a number that is not finite, or layers beyond
                `MAX_LAYERS`.
        """
        if part is not None and part not in self.parts:
            raise ValueError(
                f"part={part!r} of a {self.model_type} model is not one of {self.parts}"
            )
        quantised = given.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise ValueError(
                f"a checkpoint quantised by {method!r} is not supported: save it in bfloat16 or "
                "float32"
            )
        # An entry that is null in the file means the default, as it does where it was written.
        usual = self.defaults.keys() - set(self.nullable)
        given = {k: v for k, v in given.items() if v is not None or k not in usual}
        for name in given.keys() & self.defaults.keys():
            if given[name] is None:
                continue
            kinds = self.kinds.get(name, (type(self.defaults[name]),))
            check_entry(name, given[name], kinds)
            given[name] = float(given[name]) if kinds == (float,) else given[name]
        return {**self.defaults, **given, **({"part": part or self.parts[0]} if self.parts else {})}


def check_entry(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    """Refuses an entry of a config.json that is of none of these types.

    Raises:
        ValueError: Another type, a number that is not finite, or layers beyond `MAX_LAYERS`.
    """
    if type(value) not in kinds and not (float in kinds and type(value) is int):
        expected = " or ".join(_NAMES[kind] for kind in kinds)
        raise ValueError(f"{name}={value!r}"[:100] + f" is not {expected}")
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is not finite")
    if type(value) is int and abs(value) >= 2**63:
        raise ValueError(f"{name} has {len(str(value))} digits")
    if name in _LAYERS and not 1 <= value <= MAX_LAYERS:
        raise ValueError(f"{name}={value!r} is not between 1 and {MAX_LAYERS}")
