"""The graph of a model's forward pass, from `torch.export`, with the model left as it was."""

import contextlib
import dataclasses
import inspect
import io
import itertools
import logging
import operator
import traceback
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from rank_collapse.annotations import Tree
from rank_collapse.torch.calls import map_nested
from rank_collapse.torch.values import is_floating

_ROOT = "model"  # the model's name in the module that is exported
_NO_CONTAINERS = (Tensor, nn.Module, type, types.ModuleType)


@dataclasses.dataclass(frozen=True)
class Exported:
    """A model's graph and the tensors that enter it.

    Attributes:
        program: Program from `torch.export`, decomposed into core ATen operators.
        weights: Parameters, buffers and constants, by the name of their node.
        inputs: The tensors among the arguments, by the name of their node.
        arguments: The tensors among the arguments, by their name: "hidden_states", "masks.0".
        output: Name of the model's result that the graph returns.
        blocks: (block, node) of all nodes of the first graph that are inside of a `torch.autocast`
            block. In `program` such nodes are without the names of their modules.
    """

    program: ExportedProgram
    weights: dict[str, Tensor]
    inputs: dict[str, Tensor]
    arguments: dict[str, Tensor]
    output: str
    blocks: tuple[tuple[torch.fx.Node, torch.fx.Node], ...] = ()


class _OneResult(nn.Module):
    """Calls a model with some tensors and returns one of its results."""

    def __init__(self, model, compute):
        super().__init__()
        self.model = model
        self._compute = compute

    def forward(self, *tensors):
        return self._compute(self.model, tensors)


def export_model(
    model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: str | int | None
) -> Exported:
    """Export a model's forward pass at some inputs.

    Args:
        model: Model in evaluation mode.
        inputs, kwargs: Inputs and kwargs of its forward pass.
        output: The name or number of the result; None for `last_hidden_state` or the first
            floating-point tensor.

    Raises:
        ValueError: Inputs that the model does not take; a model that torch.export cannot trace.
    """
    arguments = name_arguments(model, inputs, kwargs)
    tensors = list({id(t): t for t in arguments.values()}.values())
    places = {id(tensor): i for i, tensor in enumerate(tensors)}
    described: list[str] = []

    def compute(model, traced):
        """Calls the model with traced tensors, and returns the selected result."""

        def replace(leaf):
            return traced[places[id(leaf)]] if id(leaf) in places else leaf

        args, keywords = map_nested(replace, (inputs, kwargs))
        with _OneGradientMode():
            results = model(*args, **keywords)
        name, result = select_result(results, output)
        described.append(name)
        return result

    wrapped = _OneResult(model, compute)
    math_attention = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    kept = _attributes_kept(model), _contents_kept([inputs, kwargs])
    with kept[0], kept[1], torch.no_grad(), math_attention, _without_logs():
        try:
            program = torch.export.export(wrapped, tuple(tensors), strict=False)
            blocks = tuple(_list_blocks(program.graph_module))
            program = program.run_decompositions()
            _place_views(program.graph)
        except _WrongResult as error:
            raise ValueError(str(error)) from None
        except Exception as error:
            raise ValueError(_describe_failure(error, model)) from error
    signature = program.graph_signature
    stored = {**program.state_dict, **program.constants}
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    weights = {node: stored[name] for node, name in names.items()}
    nodes = [node for node in signature.user_inputs if isinstance(node, str)]
    inputs_of_nodes = dict(zip(nodes, tensors, strict=True))
    return Exported(program, weights, inputs_of_nodes, arguments, described[0], blocks)


def name_arguments(
    model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """Name the tensors among the arguments of a model's forward pass.

    Raises:
        ValueError: Arguments that its signature does not have.
    """
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*inputs, **kwargs).arguments
    except TypeError as error:
        raise ValueError(f"{type(model).__name__}.forward: {error}") from None
    named: dict[str, Any] = {}
    for name, value in bound.items():
        is_keywords = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        named |= value if is_keywords else {name: value}
    return {name: tensor for key, value in named.items() for name, tensor in _leaves(key, value)}


def _leaves(name: str, tree: Tree) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of the tensors in nested lists, tuples and dictionaries."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, list | tuple):
        for i, element in enumerate(tree):
            yield from _leaves(f"{name}.{i}", element)
    elif isinstance(tree, dict):
        for key, element in tree.items():
            yield from _leaves(f"{name}.{key}", element)


class _WrongResult(ValueError):
    """Says that `output` names no tensor of the model's results."""


def select_result(results: Any, output: str | int | None) -> tuple[str, Tensor]:
    """Return one tensor of a model's results.

    Args:
        results: What the model returns.
        output: Name or number of the tensor; None for the only one, for "last_hidden_state", or
            else for the first floating-point tensor.

    Returns:
        (name, tensor).

    Raises:
        ValueError: The result does not exist, or is not a floating-point tensor.
    """
    if isinstance(results, Tensor):
        if output is not None:
            raise _WrongResult(f"output={output!r}: the model returns one tensor; leave output out")
        named: dict[Any, Any] = {"the model's result": results}
    elif isinstance(results, Mapping):
        named = dict(results)
    elif isinstance(results, list | tuple):
        fields = getattr(results, "_fields", range(len(results)))
        named = dict(zip(fields, results, strict=True))
    elif dataclasses.is_dataclass(results):
        named = {f.name: getattr(results, f.name) for f in dataclasses.fields(results)}
    else:
        raise _WrongResult(
            f"the model returns a {type(results).__name__}, not a tensor, tuple, dict or dataclass"
        )
    floating = [name for name, value in named.items() if is_floating(value)]
    if output is not None:
        if output not in floating:
            raise _WrongResult(
                f"output={output!r} is not one of the tensors it returns: {floating}"
            )
        return str(output), named[output]
    if not floating:
        raise _WrongResult(f"the model returns no floating-point tensor, but {list(named)}")
    name = "last_hidden_state" if "last_hidden_state" in floating else floating[0]
    return str(name), named[name]


@contextlib.contextmanager
def without_compilation(model: nn.Module) -> Iterator[nn.Module]:
    """Put the modules that `torch.compile` wraps in place of their wrappers, and put those back.

    Args:
        model: The model, which may be such a wrapper itself.

    Yields:
        The model without wrappers, whose paths have no "_orig_mod".
    """
    replaced = []
    model = getattr(model, "_orig_mod", model)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if hasattr(child, "_orig_mod"):
                replaced.append((module, name, child))
    for module, name, child in replaced:
        module._modules[name] = child._orig_mod
    try:
        yield model
    finally:
        for module, name, child in replaced:
            module._modules[name] = child


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Hold back what torch.export itself writes about a failure, which the exception repeats."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextlib.contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put back all attributes of all modules that a traced forward pass assigns."""
    saved = []
    for module in model.modules():
        attributes = dict(vars(module))
        tables = {
            key: dict(value)
            for key, value in attributes.items()
            if key in ("_parameters", "_buffers", "_modules")
        }
        saved.append((module, attributes, tables))
    try:
        yield
    finally:
        for module, attributes, tables in saved:
            for name in vars(module).keys() - attributes.keys():
                vars(module).pop(name)
            vars(module).update(attributes)
            for key, table in tables.items():
                current = vars(module)[key]
                if current.keys() != table.keys() or any(current[k] is not table[k] for k in table):
                    current.clear()
                    current.update(table)


class _OneGradientMode(TorchFunctionMode):
    """Ignores where a forward pass turns gradients on or off, on which its numbers do not depend.

    Otherwise torch.export detaches the results of such a block, and forgets its modules' names.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Calls a function of torch, but no switch of gradients.

        Args:
            func, args, kwargs: The function and its arguments.
            types: Types of the arguments, which are not used.
        """
        if func is torch._C._set_grad_enabled:
            return None
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _contents_kept(tree: Tree) -> Iterator[None]:
    """Put back what a traced forward pass assigns to objects among its arguments, such as a cache
    of keys and values.
    """
    saved: dict[int, tuple[Any, Any]] = {}  # {id: (a list or dictionary, its copy)}

    def save(thing):
        """Saves the entries of a list, a dictionary or an object, and those inside them."""
        if isinstance(thing, tuple):
            for element in thing:
                save(element)
        is_object = hasattr(thing, "__dict__") and not isinstance(thing, _NO_CONTAINERS)
        entries = thing if isinstance(thing, list | dict) else vars(thing) if is_object else None
        if entries is None or id(entries) in saved or callable(thing):
            return
        saved[id(entries)] = entries, entries.copy()
        for element in list(entries.values() if isinstance(entries, dict) else entries):
            save(element)

    save(tree)
    try:
        yield
    finally:
        for entries, copy in saved.values():
            is_list = isinstance(entries, list)
            now = entries if is_list else [entries.get(key) for key in copy]
            before = copy if is_list else copy.values()
            if len(entries) != len(copy) or any(map(operator.is_not, now, before)):
                entries.clear()
                entries.extend(copy) if is_list else entries.update(copy)


def _list_blocks(graph):
    """Lists (block, node) of the nodes inside of `torch.autocast` blocks of an exported graph.

    Args:
        graph: The `GraphModule`.
    """
    blocks = []
    for node in graph.graph.nodes:
        if str(getattr(node.target, "__name__", "")) == "wrap_with_autocast":
            inner = [a for a in node.args if isinstance(a, torch.fx.Node) and a.op == "get_attr"]
            for attribute in inner:
                module = getattr(graph, attribute.target)
                blocks += [(node, n) for n in module.graph.nodes if n.op == "call_function"]
                blocks += [(node, n) for _, n in _list_blocks(module)]
    return blocks


def _place_views(graph: torch.fx.Graph) -> None:
    """Put views that `torch.export` makes again back into the modules around them.

    A view of a tensor that is changed in place is made again where it is read next, and gets the
    name of the module that reads it. It belongs to the innermost module around its reader and its
    tensor, because other modules may read it too.

    Args:
        graph: The decomposed graph.
    """
    for node in graph.nodes:
        if node.meta.get("is_functional_regenerated"):
            stacks = [n.meta.get("nn_module_stack") or {} for n in (node, node.args[0])]
            pairs = zip(*(stack.items() for stack in stacks), strict=False)
            shared = itertools.takewhile(lambda pair: pair[0][0] == pair[1][0], pairs)
            node.meta["nn_module_stack"] = dict(pair[0] for pair in shared)


def _describe_failure(error: Exception, model: nn.Module) -> str:
    """Describe in one line where a model cannot be exported, and what to change."""
    names = {id(module): name for name, module in model.named_modules()}
    place = "the model"
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(id(module)):
            file = frame.f_code.co_filename.rsplit("/", 1)[-1]
            place = f"{names[id(module)]} ({file}:{line})"
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    cure = "make its forward pass one that torch.export takes"
    hint = _name_causal_hint(error)
    if hint:
        return (
            f"torch.export fails in {place}: PyTorch reads the mask to see whether it is causal; "
            f"give {hint}=True if it is, else {hint}=False"
        )
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any("flex_attention" in code.co_filename + code.co_name for code in codes):
        cure = "build the model with attn_implementation='eager' or 'sdpa', not FlexAttention"
    elif "data-dependent" in str(error).lower() or "DataDependent" in type(error).__name__:
        cure = "its Python code branches on values of a tensor; write that with torch.where"
    return f"torch.export fails in {place}: {type(error).__name__}: {message[:200]}; {cure}"


def _name_causal_hint(error):
    """Name the argument that tells a Transformer of `torch.nn` whether its mask is causal.

    Args:
        error: Error of torch.export.

    Returns:
        The argument of the outermost such module; None if the error is another one.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if all(frame.f_code.co_name != "_detect_is_causal_mask" for frame in frames):
        return None
    modules = [frame.f_locals.get("self") for frame in frames]
    is_decoder = any(isinstance(module, nn.TransformerDecoder) for module in modules)
    is_whole = any(isinstance(module, nn.Transformer) for module in modules)
    return "tgt_is_causal" if is_decoder else "src_is_causal" if is_whole else "is_causal"


def module_calls(node: torch.fx.Node) -> list[tuple[str, str]]:
    """List (call, path) of the modules in which a node is computed, the outermost first.

    A call tells the calls of one module apart. The model itself is left out.
    """
    calls = []
    for call, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        if path.startswith(f"{_ROOT}."):
            calls.append((call, path.removeprefix(f"{_ROOT}.").split("@")[0]))
    return calls


def describe_place(node: torch.fx.Node) -> str:
    """Name the module of a node and the line of code that computes it."""
    calls = module_calls(node)
    module = f"module {calls[-1][1]!r}" if calls else "the model's own forward"
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    pairs = list(itertools.pairwise(lines))
    # Lines of graphs that torch itself wrote have the file "<eval_with_key>".
    pairs = [pair for pair in pairs if pair[0].startswith('File "') and '"<' not in pair[0]]
    if pairs:
        place, code = pairs[-1]
        file, number = place.split('"')[1], place.split(", line ")[1].split(",")[0]
        return f"{module} ({file.rsplit('/', 1)[-1]}:{number}: {code[:70]})"
    return module
