"""Which modules are branches, and which value of the graph paths start from."""

import dataclasses
import difflib
import re
from collections.abc import Mapping

from torch import fx, nn

from rank_collapse.torch.exporting import Exported, describe_place, module_calls
from rank_collapse.torch.operators import MOVES
from rank_collapse.torch.values import is_floating


@dataclasses.dataclass(frozen=True)
class Branch:
    """One call of a module that is a branch, counted along one axis of path lengths."""

    call: str
    axis: int


class Branches:
    """The modules whose calls are branches.

    A module inside another that matches belongs to the outer one's branch.

    Attributes:
        axes: The names of the axes of path lengths; ("",) where there is one pattern.
    """

    def __init__(self, model: nn.Module, branches: str | Mapping[str, str]):
        """Find the modules that match.

        Args:
            model: Model whose module paths are matched in full.
            branches: A regular expression, or several by the name of their axis.

        Raises:
            ValueError: A pattern that is none or matches no module; a module that two match.
        """
        patterns = {"": branches} if isinstance(branches, str) else branches
        if not isinstance(patterns, Mapping) or not patterns:
            raise ValueError(
                f"branches={branches!r} is neither a regular expression of module paths nor a dict "
                "of them, such as {'attention': r'layers\\.\\d+\\.self_attn'}"
            )
        self.axes = tuple(patterns)
        self._patterns = [_compile(name, pattern) for name, pattern in patterns.items()]
        named = model.named_modules(remove_duplicate=False)
        modules = {path: module for path, module in named if path}
        self._paths = list_paths(model)
        for name, pattern in zip(self.axes, self._patterns, strict=True):
            if not any(pattern.fullmatch(path) for path in modules):
                raise ValueError(_no_match(name, pattern.pattern, list(modules)))
        for path, module in modules.items():
            matching = [p.pattern for p in self._patterns if p.fullmatch(path)]
            if len(matching) > 1:
                raise ValueError(f"branches: module {path!r} matches several patterns: {matching}")
            if matching and isinstance(module, nn.Identity):
                raise ValueError(
                    f"branches matches {path!r}, an nn.Identity, which computes nothing to count"
                )

    def check_used(self, exported: Exported) -> None:
        """Check that along every axis some branch computes something in this pass.

        Raises:
            ValueError: The only matching modules are never called.
        """
        for block, node in exported.blocks:
            if self.find(node) != self.find(block):
                raise ValueError(
                    f"branches: {describe_place(node)} is inside of a torch.autocast block, in "
                    "which torch.export forgets the names of modules: put the block around the "
                    "call of the model, or inside of the branch"
                )
        branches = [self.find(node) for node in _list_nodes(exported.program.graph_module)]
        used = {branch.axis for branch in branches if branch is not None}
        for axis, pattern in enumerate(self._patterns):
            if axis not in used:
                paths = [path for path in self._paths if pattern.fullmatch(path)]
                raise ValueError(
                    f"branches: {pattern.pattern!r} matches {', '.join(paths[:3])}, whose forward "
                    "is not called in this pass, or computes nothing: name the module around it"
                )

    def find(self, node: fx.Node) -> Branch | None:
        """Return the branch in which a node is computed: the outermost that matches, or None."""
        for call, path in module_calls(node):
            for axis, pattern in enumerate(self._patterns):
                if any(pattern.fullmatch(p) for p in self._paths.get(path, (path,))):
                    return Branch(call, axis)
        return None


def _list_nodes(graph):
    """Lists the nodes of a graph, and those of the graphs that it calls, such as by `torch.cond`.

    Args:
        graph: The `GraphModule`.
    """
    inner = [module for module in graph.modules() if isinstance(module, fx.GraphModule)]
    return [node for module in inner for node in module.graph.nodes]


def list_paths(model: nn.Module) -> dict[str, list[str]]:
    """List for each path of a module all paths of that module, which may be shared."""
    paths: dict[int, list[str]] = {}
    named = list(model.named_modules(remove_duplicate=False))
    for path, module in named:
        paths.setdefault(id(module), []).append(path)
    return {path: paths[id(module)] for path, module in named}


def _compile(name, pattern):
    """Compiles a pattern of `branches`; a wrong one raises a ValueError."""
    label = f"branches[{name!r}]" if name else "branches"
    if not isinstance(pattern, str):
        raise ValueError(f"{label}={pattern!r} is not a regular expression in a string")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{label}={pattern!r} is not a regular expression: {error}") from None


def _no_match(name, pattern, paths):
    """Return the message that a pattern of `branches` matches no module, with the nearest paths.

    Paths that differ in layer numbers alone are one suggestion, with `\\d+` for the number.

    Args:
        name: Kind of the branches, "" for a single pattern.
        pattern: The pattern.
        paths: Paths of the model's modules.
    """
    label = f"branches[{name!r}]" if name else "branches"
    shapes = list(dict.fromkeys(re.sub(r"(^|\\\.)\d+", r"\1\\d+", re.escape(p)) for p in paths))
    nearest = difflib.get_close_matches(pattern, shapes, n=3, cutoff=0) or shapes[:3]
    return (
        f"{label}={pattern!r} matches no module's path in full; the nearest are "
        f"{', '.join(nearest) or 'none: the model has no modules'}"
    )


def find_start(model: nn.Module, exported: Exported, start: str | None) -> tuple[str, set[fx.Node]]:
    """Find the value that paths start from.

    Args:
        model: The model.
        exported: Graph of the model.
        start: The name of an argument, or of a module for its output; None for the only argument
            of floating point.

    Returns:
        Its name, and the nodes that hold it.

    Raises:
        ValueError: No such argument or module, or one that makes no single floating-point tensor.
    """
    nodes = {node.name: node for node in exported.program.graph.nodes}
    arguments = exported.arguments
    if start is None:
        distinct: dict[int, str] = {}
        for name, tensor in arguments.items():
            if is_floating(tensor):
                distinct.setdefault(id(tensor), name)
        if len(distinct) != 1:
            count = "several arguments" if distinct else "no argument"
            raise ValueError(
                f"start=None: {count} of floating point; {_candidates(model, arguments)}"
            )
        (start,) = distinct.values()
    if start in arguments:
        state = arguments[start]
        if not is_floating(state):
            raise ValueError(
                f"start={start!r} is an argument of {state.dtype}, and paths start from a "
                f"floating-point state; {_candidates(model, arguments)}"
            )
        return start, {nodes[n] for n, tensor in exported.inputs.items() if tensor is state}
    paths = list_paths(model)
    if start not in paths or not start:
        names = [*arguments, *filter(None, paths)]  # the model itself has the empty path
        near = difflib.get_close_matches(str(start), names, n=3)
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise ValueError(
            f"start={start!r} is neither an argument of the call nor a module{hint}; "
            f"{_candidates(model, arguments)}"
        )
    return start, {_module_output(exported, start, paths[start])}


def _candidates(model, arguments):
    """List arguments and embeddings that start= may name, as the end of a message."""
    floating = [name for name, tensor in arguments.items() if is_floating(tensor)]
    embeddings = [
        n for n, module in model.named_modules() if isinstance(module, nn.Embedding) and n
    ]
    named = [repr(name) for name in (*floating, *embeddings[:4])]
    return f"name one with start=, such as {', '.join(named) or 'the module that makes the state'}"


def _module_output(exported, start, paths):
    """Return the node of a module's output: it is computed inside the module and read outside.

    Args:
        exported: The exported model.
        start: The name that the user wrote, for messages.
        paths: Paths of the module; several if it is shared.

    Returns:
        The node.
    """
    calls: dict[str, list[fx.Node]] = {}
    for node in exported.program.graph.nodes:
        for call, path in module_calls(node):
            if path in paths:
                calls.setdefault(call, []).append(node)
    if not calls:
        is_hidden = any(p in paths for _, n in exported.blocks for _, p in module_calls(n))
        raise ValueError(
            f"start={start!r}: this module is inside of a torch.autocast block, in which "
            "torch.export forgets the names of modules: put the block around the call of the model"
            if is_hidden
            else f"start={start!r}: this module computes nothing in this pass"
        )
    if len(calls) > 1:
        raise ValueError(
            f"start={start!r}: this module is called {len(calls)} times; name a module that is "
            "called once"
        )
    inside = set(next(iter(calls.values())))
    leaving = [n for n in inside if _is_floating_node(n) and set(n.users) - inside]

    def is_copy(node):
        """Whether a node holds the entries of another one that leaves the module."""
        return any(other is not node and _is_moved(node, other) for other in leaving)

    first = [node for node in leaving if not is_copy(node)]
    if len(first) != 1:
        count = f"{len(first)} tensors leave it" if first else "nothing that it computes is used"
        raise ValueError(f"start={start!r}: {count}; name a module with one output that is used")
    return first[0]


def _is_floating_node(node):
    return is_floating(node.meta.get("val"))


def _is_moved(node, origin):
    """Whether a node holds the entries of another, viewed or copied."""
    while node is not origin:
        name = str(getattr(node.target, "_opname", ""))
        if name not in MOVES or not node.args or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return True
