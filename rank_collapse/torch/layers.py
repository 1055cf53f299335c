"""Finds the layers of a PyTorch model, and the modules of their branches, by their names."""

import re
from collections.abc import Sequence

from torch import nn

from rank_collapse.checks import refuse, refuse_if

# Names of the modules whose output a layer adds to the stream, in the order in which they are
# looked up: the first that a layer has. In BERT's layers it is the projection before the sum.
ATTENTION = (
    r"attention\.output\.dense", r"attention\.out_lin", r"self_attn", r"self_attention\.dense",
    r"self_attention", r"attn",
    r"attention", r"mha", r"temporal_block", r"layer\.0\.SelfAttention",
)  # fmt: skip
# Layers that normalise a branch before they add it (Gemma 2 and 3, OLMo 2, GLM-4) have both.
NORMED = (
    {"attention_branch": r"post_attention_layernorm", "mlp_branch": r"post_feedforward_layernorm"},
    {"attention_branch": r"post_self_attn_layernorm", "mlp_branch": r"post_mlp_layernorm"},
    {"attention_branch": r"post_self_attn_layernorm", "mlp_branch": r"post_feedforward_layernorm"},
)
# Attention to the states of an encoder, in the layers of a decoder.
CROSS = (
    r"post_cross_attn_layernorm", r"crossattention\.output\.dense", r"encoder_attn", r"cross_attn",
    r"crossattention", r"cross_attention", r"multihead_attn", r"layer\.1\.EncDecAttention",
)  # fmt: skip
# In BLOOM and MPT the module around the last projection adds the skip.
MLP = (
    r"output\.dense", r"ffn\.lin2", r"ffn\.down_proj", r"mlp\.dense_4h_to_h", r"mlp",
    r"feed_forward", r"ffn", r"ff\.layer_2", r"ff", r"moe", r"linear2", r"fc2", r"ffn_output",
    r"block_sparse_moe", r"layer\.[12]\.DenseReluDense",
)  # fmt: skip


def find_layers(
    model: nn.Module, layers: str | Sequence[nn.Module] | None = None
) -> list[nn.Module]:
    """Find the layers of a model in their order.

    Args:
        model: The model.
        layers: See `recording.record`.

    Raises:
        ValueError: There are none.
    """
    if layers is None:
        blocks = max(_list_stacks(model), key=lambda m: (len(m), _count_parameters(m)), default=[])
        refuse_if(
            not blocks,
            f"{type(model).__name__} has no list of modules: layers= takes its layers, or a "
            "pattern of their names",
        )
        return blocks
    if isinstance(layers, str):
        blocks = [m for name, m in model.named_modules() if re.fullmatch(layers, name)]
        refuse_if(not blocks, f"layers={layers!r} matches the name of no module")
        return blocks
    refuse(
        (not layers, "layers= is empty"),
        (
            not all(isinstance(m, nn.Module) for m in layers),
            "layers= holds an object that is not a module",
        ),
    )
    return list(layers)


def _list_stacks(model):
    """List the lists of modules that may be a model's layers, the outermost ones alone.

    Experts, heads or the parts of an MLP are lists within a layer. A Sequential of modules of
    several kinds is not a stack of layers, unless there is no other list.
    """
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 0
    }

    def is_stack(modules):
        has_one_kind = len(modules) > 1 and len({type(m) for m in modules}) == 1
        return isinstance(modules, nn.ModuleList) or has_one_kind

    stacks = {name: modules for name, modules in lists.items() if is_stack(modules)} or lists

    def is_inside(name, outer):
        return name != outer and (not outer or name.startswith(f"{outer}."))

    return [
        list(modules)
        for name, modules in stacks.items()
        if not any(is_inside(name, outer) for outer in stacks)
    ]


def find_part(block: nn.Module, patterns: Sequence[str]) -> nn.Module | None:
    """Find the module of a layer that makes a branch, by the first pattern that matches.

    Args:
        block: The layer.
        patterns: Patterns of names within the layer.

    Returns:
        The module; None if no name matches.
    """
    modules = dict(block.named_modules())
    for pattern in patterns:
        for name, module in modules.items():
            if re.fullmatch(pattern, name):
                return module
    return None


def find_branches(
    block: nn.Module, attention: str | Sequence[str] = ATTENTION, mlp: str | Sequence[str] = MLP
) -> dict[str, nn.Module | None]:
    """Find the modules of a layer whose outputs are its branches.

    Args:
        block: The layer.
        attention, mlp: See `recording.record`.
    """
    patterns = {"attention_branch": attention, "mlp_branch": mlp}
    if attention is ATTENTION and mlp is MLP:
        for names in NORMED:
            parts = {name: find_part(block, [pattern]) for name, pattern in names.items()}
            if all(part is not None for part in parts.values()):
                return parts
    return {
        name: find_part(block, [wanted] if isinstance(wanted, str) else wanted)
        for name, wanted in patterns.items()
    }


def _count_parameters(modules):
    """Return how many numbers the parameters of some modules have together."""
    return sum(p.numel() for module in modules for p in module.parameters())
