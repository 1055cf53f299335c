"""A family of models: what turns the entries of a config.json into a network and its weights."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.pretrained.weights import Draw, Weights

Settings = dict[str, Any]


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
        parts: The networks of one checkpoint, where there are several; the first is the default.
    """

    model_type: str
    defaults: Mapping[str, Any]
    anchors: tuple[str, ...]
    config: Callable[[Settings], TransformerConfig]
    params: Callable[[Weights, Settings, TransformerConfig], TransformerParams]
    draw: Callable[[str, Settings], Draw]
    parts: tuple[str, ...] = ()

    def settings(self, given: Mapping[str, Any], part: str | None = None) -> Settings:
        """The entries of a config.json, completed by the defaults and, of several parts, the part.

        Raises:
            ValueError: A part that the family does not have.
        """
        if part is not None and part not in self.parts:
            raise ValueError(
                f"part={part!r} of a {self.model_type} model is not one of {self.parts}"
            )
        # An entry that is null in the file means the default, as it does where it was written.
        given = {k: v for k, v in given.items() if v is not None or k not in self.defaults}
        return {**self.defaults, **given, **({"part": part or self.parts[0]} if self.parts else {})}
