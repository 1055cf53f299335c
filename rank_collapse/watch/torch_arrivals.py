"""Whether the gradients of a forward pass have come, and were then dropped without a step.

`GradScaler` does not call the optimizer where gradients overflow. The loop then drops them, and the
next forward pass makes those of the step. Passes whose gradients add up (accumulation) drop none.
"""

import threading
import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge


class Arrivals:
    """The gradients of one forward pass.

    Autograd says that a gradient has come, by a hook on the node that adds it to its parameter; the
    parameters have no hooks.
    """

    def __init__(self):
        self._nodes: list[object] = []  # which live, with their hooks, as long as this object
        self._arrived: dict[int, tuple[weakref.ref, threading.Event]] = {}

    def expect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Waits for the gradients of parameters, after the forward pass."""
        for parameter in parameters:
            if not parameter.requires_grad or id(parameter) in self._arrived:
                continue
            node, has_come = get_gradient_edge(parameter).node, threading.Event()
            node.register_hook(_make_hook(has_come))
            self._nodes.append(node)
            self._arrived[id(parameter)] = weakref.ref(parameter), has_come

    def are_dropped(self) -> bool:
        """Returns whether gradients have come, and now are all None or 0, or are not all finite, so
        that no step can use them; False inside of a backward pass."""
        if torch._C._current_graph_task_id() != -1:
            return False
        parameters = [r() for r, has_come in self._arrived.values() if has_come.is_set()]
        if not parameters:
            return False
        gradients = [p.grad for p in parameters if p is not None and p.grad is not None]
        dense = [g for g in gradients if g.layout is torch.strided]
        if len(dense) < len(gradients):
            return False
        return not any(g.any() for g in dense) or not all(g.isfinite().all() for g in dense)


def _make_hook(has_come):
    """Returns a hook of a node that sets an event, and changes no gradient."""
    return lambda *gradients: has_come.set()
