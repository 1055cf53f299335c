"""Evaluation of a model's graph on its own inputs; each value records its dependencies.

Values have degree 0 (constant or frozen), 1 (paths pass them) or 2 (a product of two values of
degree 1), see `values`.
"""

import operator
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import OutputKind

from rank_collapse.annotations import Tree
from rank_collapse.torch.calls import Call, list_values, map_nested
from rank_collapse.torch.exact import differentiate_call
from rank_collapse.torch.exporting import Exported, describe_place
from rank_collapse.torch.frozen import freeze_call
from rank_collapse.torch.operators import BATCH_NORMS, KERNELS
from rank_collapse.torch.refusals import (
    refuse_batch_statistics,
    refuse_failure,
    refuse_hidden_modules,
    refuse_kernel,
    refuse_operator,
    refuse_random,
)
from rank_collapse.torch.scopes import Branch, Branches
from rank_collapse.torch.values import Bases, Value


class Evaluation:
    """Runs a graph once and records of every value how it depends on the state.

    Attributes:
        output: The value that the graph returns.
        start: The value that paths start from.
    """

    def __init__(
        self, exported: Exported, branches: Branches, start_nodes: set[fx.Node], freeze: bool
    ):
        """Evaluate the graph.

        Args:
            exported: The model.
            branches: Patterns of the branches.
            start_nodes: Nodes of the state that paths start from; each holds the same tensor.
            freeze: Whether to freeze weights, statistics and gates; False for the exact derivative.

        Raises:
            ValueError: An operation that cannot be frozen, with its module and line.
        """
        self._branches, self._start_nodes, self._freeze = branches, start_nodes, freeze
        self._bases = Bases()
        self._moved: dict[int, Value] = {}
        self.start: Value | None = None
        self._weights = {id(array) for array in exported.weights.values()}
        entering = {name: Value(array) for name, array in exported.weights.items()}
        entering |= {name: Value(array) for name, array in exported.inputs.items()}
        module = exported.program.graph_module
        order = [n for n in module.graph.nodes if n.op == "placeholder"]
        arguments = [entering.get(n.name, Value(None)) for n in order]
        kinds = [spec.kind for spec in exported.program.graph_signature.output_specs]
        results = list_values(self._run(module, arguments, None))
        # The other results are buffers and arguments that the model changes.
        self.output = results[kinds.index(OutputKind.USER_OUTPUT)]

    def _run(self, module: fx.GraphModule, arguments: list[Value], caller: Branch | None) -> Tree:
        """Evaluate a graph, or one that another calls from within a branch.

        Args:
            module: The graph.
            arguments: Its inputs.
            caller: The branch that calls it; None outside of all branches.
        """
        entering = iter(arguments)
        values: dict[fx.Node, Any] = {}
        for node in module.graph.nodes:
            branch = caller or self._branches.find(node)

            def read(leaf, branch=branch):
                if not isinstance(leaf, fx.Node):
                    return leaf
                return map_nested(lambda v: self._enter(v, branch), values[leaf])

            if node.op == "output":
                return map_nested(read, node.args[0])
            if node.op == "placeholder":
                value: Any = next(entering)
            elif node.op == "get_attr":
                attribute = operator.attrgetter(node.target)(module)
                is_graph = isinstance(attribute, torch.nn.Module)
                value = attribute if is_graph else Value(attribute)
            else:
                args, kwargs = map_nested(read, node.args), map_nested(read, node.kwargs)
                value = self._call(node, args, kwargs, branch)
                for result in list_values(value):
                    result.branch = branch
                    if result.node is None:
                        result.operator, result.node = _name_of(node), node
            if node in self._start_nodes:
                value = self._start_at(value)
            values[node] = value
        raise AssertionError("a graph without an output")

    def _start_at(self, value: Value) -> Value:
        """Return the value from which paths start; its other copies in the graph become this
        one."""
        if self.start is None:
            self.start = Value(value.array, 1, base=self._bases.new())
        return self.start

    def _enter(self, value: object, branch: Branch | None) -> Tree:
        """Return a value as a branch reads it: one path length longer if it leaves another branch.

        Args:
            value: The value; other objects and constants stay as they are.
            branch: The branch that reads it; None outside of all branches.
        """
        if not isinstance(value, Value) or not value.degree or value.branch in (None, branch):
            return value
        return self._leave(value, value.branch.axis)

    def _leave(self, value: Value, axis: int) -> Value:
        """Return a value after it left its branch: its path sums belong to paths of one length
        more.

        Args:
            value: The value.
            axis: The axis of path lengths that counts such branches.
        """
        if id(value) not in self._moved:
            self._moved[id(value)] = Value(
                value.array,
                value.degree,
                base=self._bases.after(("leaves", axis), value.base),
                gate_of=None if value.gate_of is None else self._leave(value.gate_of, axis),
                summed_base=self._bases.after(("leaves", axis), value.summed_base),
                at_zero=value.at_zero,
                product=value.product,
                sources=(value,),
                axis=axis,
            )
        return self._moved[id(value)]

    def _call(self, node: fx.Node, args: object, kwargs: object, branch: Branch | None) -> Tree:
        """Evaluate one operator.

        Args:
            node: The node of the graph.
            args, kwargs: Its arguments, values or constants.
            branch: The branch that it is inside of; None for none.

        Returns:
            Its result as a value, or values; numbers of sizes as they are; None if the operator
            returns nothing.
        """
        target, place = node.target, describe_place(node)
        if target is operator.getitem and not isinstance(args[0], Value):
            return args[0][args[1]]
        if isinstance(target, torch._ops.HigherOrderOperator):
            name = target.name()
            return self._call_graph(Call(name, target, args, kwargs, place, self._bases), branch)
        name = _name_of(node)
        args, kwargs = _by_position(target, list(args), dict(kwargs))
        call = Call(name, target, args, kwargs, place, self._bases)
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
            refuse_random(call)
        if name in BATCH_NORMS:
            refuse_batch_statistics(call)
        try:
            result = call.compute()
        except RuntimeError as error:  # such as other numbers than those of the weights
            refuse_failure(call, error)
        if not isinstance(target, torch._ops.OpOverload):
            if call.dependent:
                refuse_operator(call)
            return result  # arithmetic of sizes
        if result is None:
            return None
        return freeze_call(call, result) if self._freeze else differentiate_call(call, result)

    def _call_graph(self, call: Call, branch: Branch | None) -> Tree:
        """Evaluate an operator that calls graphs, such as `torch.cond`; other such operators are
        refused.

        Args:
            call: The operator, with its arguments.
            branch: The branch that it is inside of; None for none.
        """
        if call.name in KERNELS:
            refuse_kernel(call)
        if call.name == "cond":
            has_weights = any(id(value.array) in self._weights for value in call.values)
            if branch is None and has_weights and call.dependent:
                refuse_hidden_modules(call)
            predicate, on_true, on_false, operands = call.args
            chosen = on_true if bool(call.argument(0, predicate)) else on_false
            return self._run(chosen, list_values(operands), branch)
        if call.name == "wrap_with_set_grad_enabled":
            return self._run(call.args[1], list_values(call.args[2:]), branch)
        refuse_operator(call)
        return None


def _name_of(node: fx.Node) -> str:
    """Return the name of an operator, of aten without its namespace."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__name__", str(node.target))
    # Decomposition writes `detach` as an alias; its operator there is a copy.
    original = str(node.meta.get("original_aten"))
    if node.target is torch.ops.aten.alias.default and original == "aten.detach.default":
        return "detach"
    return node.target.name().removeprefix("aten::").split(".")[0]


def _by_position(target: Any, args: list[Any], kwargs: dict[str, Any]) -> Tree:
    """Put arguments in the order of the operator's schema; those by keyword alone stay apart.

    Args:
        target: The operator.
        args, kwargs: Its arguments by position and by keyword; both are changed.

    Returns:
        (positional arguments, keyword arguments).
    """
    if not isinstance(target, torch._ops.OpOverload):
        return args, kwargs
    positional = [a for a in target._schema.arguments if not a.kwarg_only]
    last = max((i for i, a in enumerate(positional) if a.name in kwargs), default=-1)
    for argument in positional[len(args) : last + 1]:
        args.append(kwargs.pop(argument.name, argument.default_value))
    return args, kwargs
