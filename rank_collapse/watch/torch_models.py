"""Which models of PyTorch can be watched, the names of their modules, and which of their attentions
are numbered."""

import re
from collections.abc import Callable, Sequence

from torch import nn

from rank_collapse.checks import find_nearest


def check_model(model: object) -> None:
    """Refuses a model that cannot be watched.

    Raises:
        ValueError: The model is not a module, or is under FSDP or tensor parallelism.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={model!r} is not a torch.nn.Module")
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError("a model under FullyShardedDataParallel is not measured")
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor" and not is_sharded(model):
            raise ValueError(
                f"{name} is a DTensor: a model under tensor parallelism is not measured"
            )


def read_layers(
    model: nn.Module, layers: object
) -> tuple[Callable[[str, nn.Module], bool], tuple[int, ...]]:
    """Reads which attentions of a model are numbered, and which numbers are measured.

    Args:
        model, layers: See `torch_watch.watch`.

    Returns:
        (select(name, module), which returns whether an attention is numbered; the numbers to
        measure, () for all).

    Raises:
        ValueError: An invalid choice of layers.
    """
    if callable(layers):
        return lambda name, module: bool(layers(name, module)), ()
    if layers is None:
        return lambda name, module: True, ()
    is_list = isinstance(layers, Sequence) and not isinstance(layers, str)
    chosen = tuple(layers) if is_list else (layers,)
    kinds = {type(layer) for layer in chosen}
    is_negative = kinds == {int} and min(chosen) < 0
    if kinds not in ({int}, {str}) or is_negative:
        raise ValueError(
            f"layers={layers!r} is neither a list of numbers or names of modules nor a function of "
            "(name, module)"
        )
    if kinds == {int}:
        return lambda name, module: True, chosen
    names = [plain_name(name) for name, _ in model.named_modules()]
    for layer in chosen:
        if layer not in names:
            nearest = ", ".join(map(repr, find_nearest(layer, names) or names[1:4]))
            raise ValueError(
                f"layers={layer!r} is not one of the {len(names)} modules of the model, such as "
                f"{nearest}"
            )

    def select(name, module):
        """Whether an attention is one of the chosen modules, or inside of one."""
        return any(f"{name}.".startswith(f"{layer}.") for layer in chosen)

    return select, ()


def is_sharded(model: nn.Module) -> bool:
    """Returns whether a model, or a part of it, is under FSDP2 (`fully_shard`)."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    return "FSDPModule" in kinds


def plain_name(name: str) -> str:
    """Returns a module's dotted name without what compilation and DDP put before it."""
    return re.sub(r"(^|\.)_orig_mod(?=\.|$)|^module(?=\.|$)", "", name).strip(".")
