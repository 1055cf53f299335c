"""Exact path sums by length of any PyTorch model, unchanged."""

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from rank_collapse.checks import check_whole
from rank_collapse.torch.exporting import export_model, without_compilation
from rank_collapse.torch.graph import Evaluation
from rank_collapse.torch.inner_skips import check_skips
from rank_collapse.torch.refusals import refuse_product
from rank_collapse.torch.scopes import Branches, find_start
from rank_collapse.torch.sums import carry_sums
from rank_collapse.torch.values import is_floating


@dataclasses.dataclass(frozen=True)
class PathLengths:
    """A model's output, split by the length of the paths that carry it.

    Attributes:
        by_length: [longest + 1, *output]; with several axes of branches [K_1 + 1, K_2 + 1, …,
            *output], in the order of `branches`.
        offset: [*output], output − Σ_k by_length − longer: the contribution of the biases, where
            the sums are those of the state itself.
        output: [*output], the model's own output.
        longer: [*output], the sum of all paths longer than `longest`; None where there are none.
        start: The name of the argument or module that paths start from.
        output_name: Name of this result of the model.
    """

    by_length: Tensor
    offset: Tensor
    output: Tensor
    longer: Tensor | None
    start: str
    output_name: str

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.by_length, self.offset))


@torch.no_grad()
def path_lengths(
    model: nn.Module,
    *inputs: object,
    branches: str | Mapping[str, str],
    start: str | None = None,
    longest: int | None = None,
    direction: Tensor | None = None,
    freeze: bool = True,
    output: str | int | None = None,
    **kwargs: object,
) -> PathLengths:
    """Sum all paths of each length through a model's branches, exactly.

    With attention weights, norm statistics and gates frozen at their values of this pass, the
    output is affine in the state: F(x) = J x + c. Every branch b is marked as t b; then J is a
    polynomial Σ_k t^k J_k, and J_k x is the sum over all paths through k branches. With
    `freeze=False` the same splits the exact Jacobian at this input.

    The graph is that of `torch.export`, in which attention is written out; the model is neither
    changed nor run. Entrywise functions are gates f(h)/h times h, however they are written. If a
    gate is multiplied with another value, the gate is frozen; of two gates, as in sigmoid(a)
    tanh(b), the one with f(0) ≠ 0. Denominators, the choices of a maximum and of experts, and
    detached values are frozen too.

    Args:
        model: Model in evaluation mode, on any device.
        *inputs, **kwargs: Inputs and kwargs of its forward pass.
        branches: A regular expression that must match the full path of a module, such as
            r"layers\\.\\d+\\.(self_attn|mlp)"; or one for each axis of lengths, {"attention": ...,
            "mlp": ...}. If matching modules are nested, only the outermost counts. Each call of a
            module is a separate branch.
        start: The state that paths start from: the name of an argument of floating point, or of a
            module for its output, such as "embed_tokens". None for the only argument of floating
            point.
        longest: The longest path with its own entry; None for all.
        direction: Vector to which the sums are applied, of the state's shape; None for the state
            itself.
        freeze: False for the exact Jacobian.
        output: The name or number of the model's result; None for `last_hidden_state`, or else the
            first tensor of floating point.

    Returns:
        `PathLengths`: for the state itself Σ_k by_length + longer + offset = output.

    Raises:
        ValueError: A model that cannot be exported or frozen, with its module and line; active
            dropout; a pattern, start, output or direction that does not fit.

    Source: Theorem 2.1 of Dong et al. 2021, summed by length as in its section 2.1.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    _check_weights(model)
    if longest is not None:
        check_whole("longest", longest, 0)
    if not isinstance(freeze, bool):
        raise ValueError(f"freeze={freeze!r} is not True or False")
    with without_compilation(model) as model:
        matched = Branches(model, branches)
        exported = export_model(model, inputs, kwargs, output)
        matched.check_used(exported)
        start, start_nodes = find_start(model, exported, start)
    evaluation = Evaluation(exported, matched, start_nodes, freeze)
    result = evaluation.output
    if evaluation.start is None or not result.degree:
        raise ValueError(
            f"no path leads from start={start!r} to {exported.output}: the output depends on that "
            "state only through frozen values (softmax weights, statistics, choices), or not at all"
        )
    if result.degree == 2:
        refuse_product(str(result.product))
    check_skips(result, matched.axes)
    state = evaluation.start.array
    if direction is not None:
        _check_direction(direction, state)
    sums = carry_sums(
        result,
        evaluation.start,
        state if direction is None else direction.to(state),
        len(matched.axes),
        longest,
    )
    by_length, longer = _split_longer(sums, len(matched.axes), longest)
    return PathLengths(
        by_length=by_length,
        offset=result.array - sums.sum(tuple(range(len(matched.axes)))),
        output=result.array,
        longer=longer,
        start=start,
        output_name=exported.output,
    )


def _check_weights(model):
    """Check that this process has all weights of a model, with their numbers.

    Raises:
        ValueError: A wrapper of several processes, a weight that is spread over them, or a weight
            without numbers.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel"):
            inside = ".".join([name or "model", "module"])
            raise ValueError(
                f"torch.export takes no {kind}: give the module inside, {inside}, and patterns for "
                "the names of its modules"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor).__name__ == "DTensor":
            raise ValueError(
                f"{name} is a DTensor, which FSDP2 or tensor parallelism spreads over processes: "
                "load the whole weights into a model of one process"
            )
        if tensor.is_meta:
            raise ValueError(f"{name} is on the device meta and has no numbers: load the weights")


def _check_direction(direction, state):
    """Check that a direction is a tensor like the state.

    Raises:
        ValueError: No tensor, whole numbers, or another shape.
    """
    if not is_floating(direction):
        kind = direction.dtype if isinstance(direction, Tensor) else type(direction).__name__
        raise ValueError(f"direction is {kind}, but must be a tensor of floats")
    if direction.shape != state.shape:
        raise ValueError(
            f"direction has the shape {tuple(direction.shape)}, but must have the shape "
            f"{tuple(state.shape)} of the state"
        )


def _split_longer(sums, num_axes, longest):
    """Split sums by length into those up to `longest` (zeros where there are none) and the
    remaining ones.

    Args:
        sums: [*lengths, *output].
        num_axes: Number of axes of path lengths.
        longest: None for all.
    """
    if longest is None:
        return sums, None
    is_longer = any(size > longest + 1 for size in sums.shape[:num_axes])
    total = sums.sum(tuple(range(num_axes)))
    for axis in range(num_axes):
        size = sums.shape[axis]
        missing = (*sums.shape[:axis], max(longest + 1 - size, 0), *sums.shape[axis + 1 :])
        shorter = sums.narrow(axis, 0, min(size, longest + 1))
        sums = torch.cat([shorter, sums.new_zeros(missing)], axis)
    return sums, total - sums.sum(tuple(range(num_axes))) if is_longer else None
