"""Records the residual stream and the branches of a PyTorch model for `rank-collapse agree`.

from rank_collapse.torch import record

with record(model, "a.safetensors"):
    model(**batch)
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rank_collapse.agree.recording import write_tensors
from rank_collapse.struct import refuse, refuse_if

# Names of the modules whose output a layer adds to the stream, in the order in which they are
# looked up: the first that a layer has. In BERT's layers it is the projection before the sum.
ATTENTION = (
    r"attention\.output\.dense", r"attention\.out_lin", r"self_attn", r"self_attention", r"attn",
    r"attention", r"mha", r"temporal_block", r"layer\.0\.SelfAttention",
)  # fmt: skip
MLP = (
    r"output\.dense", r"ffn\.lin2", r"mlp", r"feed_forward", r"ffn", r"ff", r"moe", r"linear2",
    r"fc2", r"ffn_output", r"block_sparse_moe", r"layer\.1\.DenseReluDense",
)  # fmt: skip


@contextlib.contextmanager
def record(
    model: nn.Module,
    path: str | os.PathLike,
    *,
    layers: str | Sequence[nn.Module] | None = None,
    attention: str | Sequence[str] = ATTENTION,
    mlp: str | Sequence[str] = MLP,
) -> Iterator[None]:
    """Record what the model computes inside the block, and write it at the end.

    Several calls, such as steps with a cache of keys and values, are joined along the tokens. The
    model computes the same numbers; its hooks are removed.

    Args:
        model: Any model whose layers take the stream [b, n, d] as their first argument and return
            it, alone or first.
        path: An .npz or .safetensors file.
        layers: The layers in their order, or a pattern of their names; by default the elements of
            the longest list of modules.
        attention, mlp: Patterns of the names, within a layer, of the modules whose output is the
            branch. Where none matches, the branch is not recorded.

    Raises:
        ValueError: No layers, or what they take and return is no stream.
    """
    blocks = find_layers(model, layers)
    tape = _Tape(len(blocks))
    handles = [model.register_forward_pre_hook(tape.read_inputs, with_kwargs=True)]
    handles.append(model.register_forward_hook(tape.read_output))
    for index, block in enumerate(blocks):
        handles.append(
            block.register_forward_pre_hook(tape.make_state_hook(index), with_kwargs=True)
        )
        handles.append(block.register_forward_hook(tape.make_end_hook(index)))
        for name, patterns in (("attention_branch", attention), ("mlp_branch", mlp)):
            part = find_part(block, [patterns] if isinstance(patterns, str) else patterns)
            if part is not None:
                handles.append(part.register_forward_hook(tape.make_branch_hook(name, index)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    names = {module: name for name, module in model.named_modules()}
    metadata = {
        "torch": torch.__version__,
        "model": type(model).__name__,
        "layers": ",".join(names.get(block, "") for block in blocks),
    }
    write_tensors(path, tape.join(), metadata)


def find_layers(
    model: nn.Module, layers: str | Sequence[nn.Module] | None = None
) -> list[nn.Module]:
    """Find the layers of a model in their order.

    Args:
        model: The model.
        layers: See `record`.

    Raises:
        ValueError: There are none.
    """
    if layers is None:
        lists = [
            list(module)
            for module in model.modules()
            if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 0
        ]
        blocks = max(lists, key=lambda m: (len(m), _count_parameters(m)), default=[])
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
        (not all(isinstance(m, nn.Module) for m in layers), "layers= has what is no module"),
    )
    return list(layers)


def find_part(block: nn.Module, patterns: Sequence[str]) -> nn.Module | None:
    """Find the module of a layer that makes a branch, by the first pattern that matches.

    Args:
        block: The layer.
        patterns: Of names within the layer.
    """
    modules = dict(block.named_modules())
    for pattern in patterns:
        for name, module in modules.items():
            if re.fullmatch(pattern, name):
                return module
    return None


def _count_parameters(modules):
    """Return how many numbers the modules hold."""
    return sum(p.numel() for module in modules for p in module.parameters())


def _first_tensor(values: Any, name: str) -> torch.Tensor:
    """Return the first tensor of floats of arguments or of an output.

    Raises:
        ValueError: There is none.
    """
    if isinstance(values, torch.Tensor):
        return values
    candidates = values.values() if isinstance(values, Mapping) else values
    for value in candidates if isinstance(candidates, (list, tuple)) else list(candidates or ()):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
    raise ValueError(f"{name} has no tensor of floats")


class _Tape:
    """What the calls of a model showed, a list of tensors [b, n, …] for each name and layer."""

    def __init__(self, depth: int):
        self.depth = depth
        self.states: list[list[torch.Tensor]] = [[] for _ in range(depth + 1)]
        self.branches: dict[str, list[list[torch.Tensor]]] = {}
        self.token_ids: list[torch.Tensor] = []
        self.masks: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []

    def read_inputs(self, module, arguments, keywords):
        """Keeps token ids and the mask of a call."""
        tensors = [*arguments, *keywords.values()]
        ids = [t for t in tensors if isinstance(t, torch.Tensor) and t.ndim == 2]
        whole = [t for t in ids if not t.is_floating_point() and t.dtype != torch.bool]
        ids_by_name = keywords.get("input_ids")
        if isinstance(ids_by_name, torch.Tensor) or whole:
            self.token_ids.append(_keep(ids_by_name if ids_by_name is not None else whole[0]))
        mask = next(
            (keywords[k] for k in ("attention_mask", "mask") if keywords.get(k) is not None), None
        )
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            self.masks.append(_keep(mask))

    def read_output(self, module, arguments, output):
        """Keeps the logits of a call, if its output names them."""
        logits = getattr(output, "logits", None)
        if isinstance(logits, torch.Tensor) and logits.ndim == 3:
            self.logits.append(_keep(logits))

    def make_state_hook(self, index):
        """Return a hook that keeps the stream before a layer."""

        def keep_state(module, arguments, keywords):
            if index == 0:
                state = _first_tensor([*arguments, *keywords.values()], "the first layer's input")
                self.states[0].append(_keep(state))

        return keep_state

    def make_end_hook(self, index):
        """Return a hook that keeps the stream after a layer."""

        def keep_state(module, arguments, output):
            self.states[index + 1].append(_keep(_first_tensor(output, f"layer {index}'s output")))

        return keep_state

    def make_branch_hook(self, name, index):
        """Return a hook that keeps a branch."""
        branches = self.branches.setdefault(name, [[] for _ in range(self.depth)])

        def keep_branch(module, arguments, output):
            branches[index].append(_keep(_first_tensor(output, f"layer {index}'s {name}")))

        return keep_branch

    def join(self) -> dict[str, torch.Tensor]:
        """Join the calls along the tokens.

        Raises:
            ValueError: No call, or a layer was not called, or not with a stream.
        """
        refuse_if(not self.states[0], "the model was not called inside record(…)")
        for index, states in enumerate(self.states):
            refuse_if(
                len(states) != len(self.states[0]),
                f"layer {index - 1} was called {len(states)} times, layer 0 "
                f"{len(self.states[0])} times: layers= takes the layers of the stream",
            )
        shape = self.states[0][0].shape
        refuse_if(
            len(shape) not in (2, 3),
            f"the first layer's input has shape {list(shape)}, not [examples, tokens, width]",
        )
        residual = [torch.cat(states, dim=-2) for states in self.states]
        for index, state in enumerate(residual):
            refuse_if(
                state.shape != residual[0].shape,
                f"the stream has shape {list(residual[0].shape)} before layer 0 and "
                f"{list(state.shape)} after layer {index - 1}",
            )
        arrays = {"residual": torch.stack(residual)}
        for name, branches in self.branches.items():
            joined = [torch.cat(calls, dim=-2) for calls in branches if calls]
            if len(joined) == self.depth and all(b.shape == residual[0].shape for b in joined):
                arrays[name] = torch.stack(joined)
        tokens = residual[0].shape[:-1]
        for name, calls in (("token_ids", self.token_ids), ("logits", self.logits)):
            values = torch.cat(calls, dim=1) if calls else None
            if values is not None and values.shape[: len(tokens)] == tokens:
                arrays[name] = values
        if self.masks and self.masks[-1].shape == tokens:  # of a cache the last call has all
            arrays["mask"] = self.masks[-1].to(torch.uint8)
        return arrays


def _keep(tensor):
    """Return a copy in the host's memory without a graph."""
    return tensor.detach().to("cpu", copy=True)
