"""One line to watch a PyTorch model while it trains.

    from rank_collapse.torch import watch

    watched = watch(model, every=100, log="run/metrics.jsonl")   # or log=wandb.log

Measured on the device, in hooks that keep scalars alone: the tokens that each layer's attention
reads, the weights of some of its queries, and the gradients of queries, keys and values. Hooks read
and never write: training is the same to the bit. `rank-collapse watch` draws the file.

Axis letters: b batch, h heads, r measured queries, n tokens, m keys, d width, k per-head width.
"""

import contextlib
import logging
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

from rank_collapse.measures.monitor import ATTENTION, PARTS, monitor
from rank_collapse.measures.spikes import TOKENS
from rank_collapse.measures.table import COLLAPSE, MEASURES
from rank_collapse.report.alarms import Alarm, alarms
from rank_collapse.runs import metrics

ROWS = 64  # queries of each head whose weights are measured, evenly spaced
# Weights that lie side by side in one tensor, in equal shares; `nn.MultiheadAttention` has it too.
TOGETHER = ("c_attn", "qkv", "query_key_value", "in_proj_weight", "Wqkv")
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_log = logging.getLogger("rank_collapse")


def watch(
    model: nn.Module,
    every: int = 100,
    log: Callable[..., Any] | str | Path | None = None,
    tokens: str = "read",
    layers: str | Sequence[int] | None = None,
) -> "Watch":
    """Measures a model at every so many steps of its optimizer, until `close`.

    A step is one of an optimizer that has a parameter of the model; of several forward passes of a
    step (accumulated gradients) the first is measured. Under `torch.nn.parallel` all processes
    measure, and the first writes the means. The measured steps of a compiled model run without
    compilation (`torch.compiler.set_stance`).

    Args:
        model: Of Hugging Face, timm, or any whose blocks are in an `nn.ModuleList` or
            `nn.Sequential`, and have attention as a part; before or after `torch.compile` and
            `DistributedDataParallel`.
        every: Steps.
        log: log({name: number}, step=...), such as `wandb.log` or `trackio.log`; or a path of JSON
            lines, as `rank_collapse.runs.metrics` has them; None for `Watch.rows` alone.
        tokens: "read", what each layer's attention reads; "raw", the output of each block; "unit",
            that with every token divided by its norm.
        layers: The dotted name of the blocks, or which of them; all by default.

    Returns:
        What watches: `rows`, `alarms`, `close()`, and callbacks `hf()` and `lightning()`.

    Raises:
        ValueError: Blocks that are not found, with what was; unknown tokens.
    """
    return Watch(model, every, log, tokens, layers)


class Watch:
    """Hooks on a model; see `watch`.

    Attributes:
        rows: {"step": .., name: a number, or a list with one for each layer} of each measured step.
        alarms: The thresholds of `MEASURES` that were passed, each once.
        step: Steps of the optimizer so far.
    """

    def __init__(self, model, every, log, tokens, layers):
        if tokens not in TOKENS:
            raise ValueError(f"tokens={tokens!r} is not one of {TOKENS}")
        if every < 1:
            raise ValueError(f"every={every} is not 1 or more steps")
        self.rows: list[dict[str, Any]] = []
        self.alarms: list[Alarm] = []
        self.step, self._every, self._log, self._tokens = 0, every, log, tokens
        self._measuring, self._scalars, self._loss, self._mask = False, None, None, None
        name, blocks = blocks_of(model, layers if isinstance(layers, str) else None)
        chosen = None if isinstance(layers, str) else layers
        self.blocks = {i: blocks[i] for i in (range(len(blocks)) if chosen is None else chosen)}
        self._own = {id(p) for p in model.parameters()}
        self._hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
            # After the step: Lightning runs the forward pass in a closure, inside it.
            register_optimizer_step_post_hook(self._at_step),
        ]
        for index, block in self.blocks.items():
            attention = attention_of(block, f"{name}.{index}")
            self._hooks += [
                attention.register_forward_pre_hook(self._read(index), with_kwargs=True),
                attention.register_forward_hook(self._attended(index)),
                block.register_forward_hook(self._after(index)),
            ]
        self._mode = _Products(self)
        self._stance()

    def close(self) -> None:
        """Removes all hooks, and ends the file."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        torch.compiler.set_stance("default")
        if isinstance(self._log, str | Path) and _first_process():
            metrics.finish(self._log)

    def hf(self) -> Any:
        """A `transformers.TrainerCallback` that takes the Trainer's steps, and closes."""
        from transformers import TrainerCallback

        watched = self

        class Callback(TrainerCallback):
            def on_step_begin(self, args, state, control, **others):
                watched.step = state.global_step
                watched._stance()

            def on_train_end(self, args, state, control, **others):
                watched.close()

        return Callback()

    def lightning(self) -> Any:
        """A `lightning.pytorch.Callback` that takes the trainer's steps, and closes."""
        from lightning.pytorch import Callback

        watched = self

        class Watching(Callback):
            def on_train_batch_start(self, trainer, module, batch, batch_idx):
                watched.step = trainer.global_step
                watched._stance()

            def on_fit_end(self, trainer, module):
                watched.close()

        return Watching()

    def _due(self):
        return self._scalars is None and self.step % self._every == 0

    def _stance(self):
        torch.compiler.set_stance("force_eager" if self._due() else "default")

    def _begin(self, model, args, kwargs):
        if model.training and torch.is_grad_enabled() and self._due():
            mask = kwargs.get("attention_mask")
            self._mask = mask if mask is not None and mask.ndim == 2 else None
            self._measuring, self._scalars = True, {}
            self._mode.__enter__()

    def _end(self, model, args, output):
        if self._measuring:
            self._measuring = False
            self._mode.__exit__(None, None, None)
            loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
            self._loss = loss.detach() if loss is not None and loss.ndim == 0 else None

    def _read(self, index):
        def hook(module, args, kwargs):
            if self._measuring:
                self._index = index
                x = next((a for a in (*args, *kwargs.values()) if _are_tokens(a)), None)
                if self._tokens == "read" and x is not None:
                    self._keep(index, _batch_first(module, x))
                if isinstance(module, nn.MultiheadAttention) and x is not None:
                    self.products(*_projected(module, _batch_first(module, x)))

        return hook

    def _attended(self, index):
        def hook(module, args, output):
            weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
            if self._measuring and isinstance(weights, torch.Tensor) and weights.ndim == 4:
                self._weights(weights)

        return hook

    def _after(self, index):
        def hook(block, args, output):
            if self._measuring and self._tokens != "read":
                x = output if isinstance(output, torch.Tensor) else output[0]
                self._keep(index, _batch_first(attention_of(block, ""), x))

        return hook

    def _keep(self, index, x):
        mask = self._mask if self._mask is not None and self._mask.shape == x.shape[:2] else None
        tokens = "raw" if self._tokens == "read" else self._tokens
        with _plainly(x):
            found = monitor(x.detach(), mask=mask, tokens=tokens)
        for name, value in found.items():
            self._scalars.setdefault(name, {})[index] = value

    def products(
        self, query, key, value=None, attn_mask=None, dropout_p=0, is_causal=False, scale=None, **_
    ):
        """The measures of the weights of some queries [b, h, n, k] on all keys [b, g, m, k]."""
        q, k = query.detach(), key.detach()
        with _plainly(q):
            (n, width), m = q.shape[-2:], k.shape[-2]
            rows = torch.linspace(0, n - 1, min(n, ROWS), device=q.device).long()
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
            scale = 1 / math.sqrt(width) if scale is None else scale
            scores = scale * q.float()[..., rows, :] @ k.float().mT
            if is_causal:
                keys = torch.arange(m, device=q.device)
                scores = scores.masked_fill(keys > rows[:, None], -math.inf)
            if attn_mask is not None:
                own = attn_mask.expand(*attn_mask.shape[:-2], n, m)[..., rows, :]
                if own.dtype == torch.bool:
                    own = torch.where(own, 0.0, -math.inf)
                scores = scores + own
            self._weights(torch.softmax(scores, dim=-1).nan_to_num(), rows)

    def _weights(self, p, rows=None):
        with _plainly(p):
            masked = self._mask is not None and self._mask.shape[1] == p.shape[-1]
            keys = self._mask.bool() if masked else None
            exists = keys if rows is None or keys is None else keys[:, rows]
            for name in ATTENTION:
                options = {"key_mask": keys} if name == "sink_rate" else {}
                value = MEASURES[name](p.detach(), mask=exists, **options).mean()
                self._scalars.setdefault(name, {})[self._index] = value

    def _at_step(self, optimizer, args, kwargs):
        if not any(id(p) in self._own for group in optimizer.param_groups for p in group["params"]):
            return
        if self._scalars is not None:
            self._write()
            self._scalars = None
        self.step += 1
        self._stance()

    def _gradients(self):
        for index, block in self.blocks.items():
            squares: dict[str, Any] = {}
            for name, p in block.named_parameters():
                if p.grad is None:
                    continue
                parts = name.split(".")
                for part, names in PARTS.items():
                    if names & set(parts):
                        squares.setdefault(part, []).append(p.grad)
                if set(TOGETHER) & set(parts):
                    axis = 1 if p.ndim == 2 and p.shape[1] > p.shape[0] else 0
                    for part, piece in zip(PARTS, p.grad.chunk(3, dim=axis), strict=True):
                        squares.setdefault(part, []).append(piece)
            for part, pieces in squares.items():
                norm = torch.stack([torch.linalg.vector_norm(g.float()) for g in pieces])
                kept = self._scalars.setdefault(f"{part}_gradient", {})
                kept[index] = torch.linalg.vector_norm(norm)

    def _write(self):
        self._gradients()
        flat = [v.float() for by_layer in self._scalars.values() for v in by_layer.values()]
        flat += [] if self._loss is None else [self._loss.float()]
        values = torch.stack(flat)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(values)
            values = values / torch.distributed.get_world_size()
        numbers = iter(values.tolist())
        row: dict[str, Any] = {"step": self.step}
        row |= {name: [next(numbers) for _ in own] for name, own in self._scalars.items()}
        if self._loss is not None:
            row["loss"] = next(numbers)
        self.rows.append(row)
        if not _first_process():
            return
        said = {(alarm.metric, alarm.threshold) for alarm in self.alarms}
        for alarm in alarms([row], COLLAPSE):
            if (alarm.metric, alarm.threshold) not in said:
                self.alarms.append(alarm)
                _log.warning("%s", alarm)
        own = {name: value for name, value in row.items() if name != "step"}
        if isinstance(self._log, str | Path):
            metrics.append(self._log, self.step, own)
        elif self._log is not None:
            self._log(dict(_flat(own, list(self.blocks))), step=self.step)


class _Products(TorchFunctionMode):
    """Passes queries and keys of scaled dot products to what watches, and changes nothing."""

    def __init__(self, watched: Watch):
        super().__init__()
        self.watched = watched

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            self.watched.products(*args, **kwargs)
        return func(*args, **kwargs)


def blocks_of(model: nn.Module, name: str | None = None) -> tuple[str, Sequence[nn.Module]]:
    """(dotted name, blocks) of a model: the list of modules of one class with attention in each.

    Raises:
        ValueError: None, or several and no name; it lists what there is.
    """
    lists = {
        where: list(module)
        for where, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module)
    }
    known = {where: list(own) for where, own in lists.items() if _are_blocks(own)}
    outer = {
        where: own
        for where, own in known.items()
        if not any(where.startswith(f"{other}.") for other in known)
    }
    if name is not None and name in lists:
        return name, lists[name]
    if name is None and len(outer) == 1:
        return next(iter(outer.items()))
    found = {w: f"{len(own)} × {type(own[0]).__name__}" for w, own in (outer or lists).items()}
    text = ", ".join(f"{where!r} ({what})" for where, what in found.items()) or "no list of modules"
    asked = f"layers={name!r} is not among" if name else "the blocks of the model are not clear in"
    raise ValueError(f"{asked} {text}: name one, layers='...'")


def _are_blocks(modules):
    same = len({type(module) for module in modules}) == 1
    return same and all(_attention_name(module) is not None for module in modules)


def _attention_name(block):
    names = (name for name, _ in block.named_modules() if name)
    last = ((name, name.rpartition(".")[2].lower()) for name in names)
    return next((n for n, end in last if _ATTENTION.search(end) and "norm" not in end), None)


def attention_of(block: nn.Module, where: str) -> nn.Module:
    """The attention of a block.

    Raises:
        ValueError: It has none.
    """
    name = _attention_name(block)
    if name is None:
        parts = ", ".join(child for child, _ in block.named_children())
        raise ValueError(f"{where} ({type(block).__name__}) has no attention among {parts}")
    return block.get_submodule(name)


@contextlib.contextmanager
def _plainly(a):
    """Neither gradients nor the precision of a surrounding `torch.autocast`."""
    with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
        yield


def _are_tokens(a):
    return isinstance(a, torch.Tensor) and a.ndim == 3 and a.is_floating_point()


def _batch_first(module, x):
    """[b, n, d] of what `nn.MultiheadAttention` may have as [n, b, d]."""
    return x.transpose(0, 1) if getattr(module, "batch_first", True) is False else x


def _projected(module, x):
    """Queries and keys [b, h, n, k] of `nn.MultiheadAttention` on its own tokens."""
    with torch.no_grad():
        weights = module.in_proj_weight[: 2 * module.embed_dim]
        bias = None if module.in_proj_bias is None else module.in_proj_bias[: 2 * module.embed_dim]
        both = functional.linear(x, weights, bias)
        return [
            a.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for a in both.chunk(2, dim=-1)
        ]


def _first_process():
    own = torch.distributed
    return not (own.is_available() and own.is_initialized()) or own.get_rank() == 0


def _flat(values, layers):
    for name, value in values.items():
        if isinstance(value, list):
            yield from ((f"{name}/layer_{i}", v) for i, v in zip(layers, value, strict=True))
        else:
            yield name, value
