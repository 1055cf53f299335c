"""Records the residual stream and the branches of a PyTorch model for `rank-collapse agree`.

Example:

    from rank_collapse.torch import record

    with record(model, "a.safetensors"):
        model(**batch)
"""

import contextlib
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from rank_collapse.agree.other_inputs import OtherInputs
from rank_collapse.agree.recording import BRANCHES, write_tensors
from rank_collapse.checks import refuse_if
from rank_collapse.torch.caches import CacheRows
from rank_collapse.torch.layers import (
    ATTENTION,
    CROSS,
    MLP,
    find_branches,
    find_layers,
    find_part,
)
from rank_collapse.torch.replacing import convert_array, replace_tensor

TOKENS_FIRST = ("xlnet", "fsmt")  # models of transformers whose stream is [n, b, d]


@contextlib.contextmanager
def record(
    model: nn.Module,
    path: str | os.PathLike,
    *,
    layers: str | Sequence[nn.Module] | None = None,
    attention: str | Sequence[str] = ATTENTION,
    mlp: str | Sequence[str] = MLP,
    inputs: str | os.PathLike | None = None,
    noise: float = 0.0,
    seed: int = 0,
) -> Iterator[None]:
    """Record the forward passes inside the block, and write the recording at the end.

    Several calls, such as steps with a cache of keys and values, are joined along the tokens. The
    model computes the same numbers, and its hooks are removed at the end.

    Args:
        model: Any model whose layers take the stream [b, n, d] as their first argument and return
            it, alone or first. The streams [n, b, d] of XLNet and FSMT are recorded as [b, n, d].
        path: An .npz or .safetensors file; with inputs=, a .safetensors file.
        layers: The layers in their order, or a pattern of their names; by default the elements of
            the longest list of modules that is not inside another list. In an encoder-decoder only
            one stack is recorded.
        attention, mlp: Patterns for the names, within a layer, of the modules whose output is the
            branch. If none matches, the branch is not recorded. In the layers of a decoder, the
            branch of the attention is by default the sum of both attentions.
        inputs: The recording of another run of the same tokens. Every sublayer takes in the stream
            of that run, so that its own error is measured without the errors before it; the model's
            output has no meaning then.
        noise: Relative size of the noise that is added to these inputs; it shows how much a
            sublayer amplifies errors.
        seed: Seed of the noise.

    Raises:
        ValueError: There are no layers, they do not take and return the stream, the model is
            compiled, beam search exchanges the rows of its cache, speculative decoding drops some
            of its tokens, or the inputs have other tokens or layers.
    """
    _refuse_compiled(model)
    blocks = find_layers(model, layers)
    other_inputs = None if inputs is None else OtherInputs(inputs, noise, seed, out=path)
    tape = _Tape(model, blocks, other_inputs)
    handles = [
        model.register_forward_pre_hook(tape.begin_call, with_kwargs=True),
        model.register_forward_hook(tape.end_call),
    ]
    for block in dict.fromkeys(blocks):
        handles.append(block.register_forward_pre_hook(tape.begin_layer, with_kwargs=True))
        cross = find_part(block, CROSS) if attention is ATTENTION else None
        for name, part in find_branches(block, attention, mlp).items():
            parts = [part, cross] if name == "attention_branch" and cross is not part else [part]
            if part is not None:
                parts = [module for module in parts if module is not None]
                for module in parts:
                    keep = partial(tape.keep_branch, name, module is parts[-1])
                    handles.append(module.register_forward_hook(keep))
        handles.append(block.register_forward_hook(tape.end_layer))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    arrays = tape.join()
    metadata = {
        "torch": torch.__version__,
        "model": type(model).__name__,
        "layers": ",".join(tape.layer_names),
    }
    if other_inputs is not None:
        metadata |= other_inputs.describe()
    write_tensors(path, arrays, metadata)


def _refuse_compiled(model):
    """Raise a ValueError for a model that torch.compile changed: its graphs call no hooks."""
    for name, module in model.named_modules():
        is_compiled = getattr(module, "_compiled_call_impl", None) is not None
        refuse_if(
            is_compiled or "_orig_mod" in module._modules,
            f"{name or type(module).__name__} is compiled, and its graphs call no hooks: record "
            "the model that torch.compile was given (model._orig_mod), before it is compiled",
        )


def _first_tensor(values: Any, name: str) -> torch.Tensor:
    """Return the first tensor of floats of arguments or of an output.

    Raises:
        ValueError: There is none, or it is nested.
    """
    if isinstance(values, torch.Tensor):
        values = [values]
    candidates = values.values() if isinstance(values, Mapping) else values
    for value in list(candidates or ()):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            refuse_if(
                value.is_nested,
                f"{name} is a nested tensor. nn.TransformerEncoder makes one of texts with padding "
                "in eval mode: build it with enable_nested_tensor=False",
            )
            return value
    raise ValueError(f"{name} has no tensor of floats")


class _LayerCall:
    """What one call of a layer showed."""

    def __init__(self, name: str, before: torch.Tensor):
        self.name, self.before = name, before
        self.after: torch.Tensor | None = None
        self.branches: dict[str, torch.Tensor] = {}


class _Tape:
    """What the calls of a model showed: the calls of its layers, in their order.

    A layer that the model calls several times, as in ALBERT, counts as several layers.

    Args:
        model: The model.
        blocks: The layers.
        others: Inputs that take the place of the stream.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], others: OtherInputs | None = None
    ):
        self.names = {module: name for name, module in model.named_modules()}
        self.others = others
        self._is_decoder = "decoder" in self.names[blocks[0]].split(".")
        self._is_encoder = False  # of an encoder-decoder
        config = getattr(model, "config", None)
        self._is_tokens_first = getattr(config, "model_type", None) in TOKENS_FIRST
        self.calls: list[list[_LayerCall]] = []
        self.token_ids: list[torch.Tensor] = []
        self.masks: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self._cache_rows = CacheRows()

    @property
    def layer_names(self) -> list[str]:
        """Returns the names of the layers in the order of their calls."""
        return [layer.name for layer in self.calls[0]]

    def begin_call(self, module, arguments, keywords):
        """Keeps token ids and the mask of a call of the model.

        Args:
            module: The model.
            arguments, keywords: Arguments of the call.
        """
        self.calls.append([])
        self._cache_rows.begin_call(keywords)
        names = list(inspect.signature(module.forward).parameters)
        if any(name.startswith(("decoder_", "tgt")) for name in (*names, *keywords)):
            named = dict(zip(names, arguments, strict=False)) | keywords
            arguments, keywords = (), _choose_stack(named, self._is_decoder)
            self._is_encoder = not self._is_decoder
        if self.others is not None:
            self.others.begin_call()
        tensors = [t for t in (*arguments, *keywords.values()) if isinstance(t, torch.Tensor)]
        whole = [
            t
            for t in (keywords.get("input_ids"), *tensors)
            if isinstance(t, torch.Tensor)
            and not t.is_floating_point()
            and t.dtype != torch.bool
            and t.ndim in (1, 2)
        ]
        if whole:
            self.token_ids.append(_keep(whole[0]))
        mask = _read_mask(keywords)
        if mask is not None:
            self.masks.append(_keep(mask))

    def end_call(self, module, arguments, output):
        """Keeps the logits of a call, if its output names them, and the rows of its cache."""
        self._cache_rows.end_call(output)
        logits = getattr(output, "logits", None)
        if isinstance(logits, torch.Tensor) and logits.ndim == 3 and not self._is_encoder:
            self.logits.append(_keep(logits))

    def begin_layer(self, module, arguments, keywords):
        """Keeps the stream before a layer.

        Args:
            module: The layer.
            arguments, keywords: The arguments of its call.

        Returns:
            (arguments, keywords) with the stream of another run; None if the layer reads its own.
        """
        if _is_recomputed():
            return None
        if not self.calls:
            self.calls.append([])  # a part of the model is called, not the model
        name = self.names[module]
        state = _first_tensor([*arguments, *keywords.values()], f"the input of layer {name}")
        before = self._turn(_keep(state))
        self.calls[-1].append(_LayerCall(name, before))
        if self.others is None:
            return None
        array = self.others.take_state(len(self.calls[-1]) - 1, before.shape)
        other = convert_array(self._turn(array), state)
        return replace_tensor(arguments, state, other), replace_tensor(keywords, state, other)

    def end_layer(self, module, arguments, output):
        """Keeps the stream after a layer."""
        if _is_recomputed():
            return
        name = self.names[module]
        state = _first_tensor(output, f"the output of layer {name}")
        self.calls[-1][-1].after = self._turn(_keep(state))

    def _turn(self, states):
        """Exchanges examples and tokens of states [n, b, d] whose model has tokens first."""
        return states.swapaxes(0, 1) if self._is_tokens_first and states.ndim == 3 else states

    def keep_branch(self, branch, is_last, module, arguments, output):
        """Keeps a branch of the current layer, or adds to it what a second module makes.

        Args:
            branch: Name of the branch.
            is_last: Whether no other module of the layer adds to this branch.
            module: The module that makes it.
            arguments: Arguments of its call.
            output: Its output.

        Returns:
            The output with the branch of another run; None if the output stays as it is.
        """
        if _is_recomputed() or not (self.calls and self.calls[-1]):
            return None
        state = self.calls[-1][-1].before
        tensor = _first_tensor(output, f"the output of {self.names[module]}")
        if tensor.numel() != state.numel():  # OPT computes its MLP of [b · n, d]
            return None
        branches = self.calls[-1][-1].branches
        earlier = branches.get(branch)
        added = self._turn(_keep(tensor).reshape(self._turn(state).shape))
        branches[branch] = added if earlier is None else earlier + added
        if self.others is None or not is_last:
            return None
        array = self.others.take_branch(len(self.calls[-1]) - 1, branch)
        if array is None:
            return None
        if earlier is not None:  # the state after both is that of the other run
            array = array - earlier.to(torch.float64).numpy().reshape(array.shape)
        return replace_tensor(output, tensor, convert_array(self._turn(array), tensor))

    def join(self) -> dict[str, torch.Tensor]:
        """Join the calls of the model along the tokens.

        Raises:
            ValueError: No call, or its layers have no common stream.
        """
        self.calls = [layers for layers in self.calls if layers]
        refuse_if(not self.calls, "the model was not called inside record(…), or no layer of it")
        for layers in self.calls:
            refuse_if(
                [layer.name for layer in layers] != self.layer_names,
                f"one call of the model has the layers {', '.join(self.layer_names)}, another "
                f"{', '.join(layer.name for layer in layers)}",
            )
            self._check_stream(layers)
        shapes = [layers[0].before.shape for layers in self.calls]
        refuse_if(
            len({(*shape[:-2], shape[-1]) for shape in shapes}) > 1,
            "the calls of the model have states of shapes "
            f"{', '.join(str(list(shape)) for shape in dict.fromkeys(shapes))}, but only their "
            "numbers of tokens may differ: record such calls one by one",
        )
        by_layer = list(zip(*self.calls, strict=True))  # for each layer, its calls

        def join_tokens(parts):
            return torch.cat(list(parts), dim=-2)

        residual = [join_tokens(layer.before for layer in by_layer[0])]
        residual += [join_tokens(layer.after for layer in calls) for calls in by_layer]
        arrays = {"residual": torch.stack(residual)}
        for name in BRANCHES:
            if all(name in layer.branches for calls in by_layer for layer in calls):
                branches = [
                    join_tokens(layer.branches[name] for layer in calls) for calls in by_layer
                ]
                arrays[name] = torch.stack(branches)
        tokens = residual[0].shape[:-1]
        self._check_ids(tokens)
        for name, values in (("token_ids", self.token_ids), ("logits", self.logits)):
            axis = -1 if name == "token_ids" else -2
            joined = torch.cat(values, dim=axis) if values else None
            if joined is not None and joined.shape[: len(tokens)] == tokens:
                arrays[name] = joined
        if self.masks and self.masks[-1].shape == tokens:  # with a cache the last call has all
            arrays["mask"] = self.masks[-1].to(torch.uint8)
        if self.others is not None:
            arrays.pop("logits", None)  # of a stream that is no run's
            mask = None if "mask" not in arrays else arrays["mask"].bool().numpy()
            self.others.check_complete(len(self.layer_names), mask)
        return arrays

    def _check_ids(self, tokens):
        """Raises a ValueError where token ids [b, n] show that the stream is [n, b, d].

        Args:
            tokens: Shape of the stream without its width.
        """
        ids = tuple(torch.cat(self.token_ids, dim=-1).shape) if self.token_ids else ()
        refuse_if(
            len(tokens) == 2 and ids == tokens[::-1] != tokens,
            f"the stream has {list(tokens)} states, and the token ids have shape {list(ids)}: it "
            "has tokens first. Write states [examples, tokens, width] with rank_collapse.record",
        )

    def _check_stream(self, layers):
        """Raises a ValueError where the layers of a call have no common stream."""
        shape = layers[0].before.shape
        refuse_if(
            len(shape) not in (2, 3),
            f"the input of layer {layers[0].name} has shape {list(shape)}, not [examples, "
            "tokens, width]",
        )
        for layer in layers:
            refuse_if(layer.after is None, f"layer {layer.name} did not return")
            for text, state in (("before", layer.before), ("after", layer.after)):
                refuse_if(
                    state.shape != shape,
                    f"the stream has shape {list(shape)} before layer {layers[0].name} and "
                    f"{list(state.shape)} {text} layer {layer.name}; layers= takes the layers of "
                    "one stream, or a pattern of their names",
                )


def _is_recomputed():
    """Returns whether a backward pass runs, in which gradient checkpointing computes layers
    again."""
    return torch._C._current_graph_task_id() != -1


def _choose_stack(named, is_decoder):
    """Choose the arguments of an encoder-decoder that are those of its recorded stack.

    Args:
        named: All arguments by name; those of the decoder begin with "decoder_" or "tgt".
        is_decoder: Whether the decoder is recorded.

    Returns:
        {name: argument}, with names as in a model of one stack.
    """
    return {
        re.sub("^(decoder_|tgt_(?=key))", "", name): argument
        for name, argument in named.items()
        if name.startswith(("decoder_", "tgt")) == is_decoder
    }


def _read_mask(keywords):
    """Read which tokens exist from the arguments of a call of the model.

    Args:
        keywords: The arguments by name.

    Returns:
        [b, n]; None if there is no mask of tokens.
    """
    for name in ("attention_mask", "mask", "src_key_padding_mask", "key_padding_mask"):
        mask = keywords.get(name)
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            continue
        if "padding" in name:  # of torch.nn: true, or -inf, for tokens that do not exist
            return mask == 0
        return mask
    return None


def _keep(tensor):
    """Return a copy in the host's memory without a graph."""
    return tensor.detach().to("cpu", copy=True)
