"""Frozen sums by length of an eager PyTorch model, by repeating what its first pass computed.

The model runs once and keeps its softmax weights, norm statistics, choices and gates; runs with the
branches times t use them again. The part of the state is then a polynomial in t.
"""

import re

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

F = torch.nn.functional
KEPT = {torch.softmax, F.softmax, torch.Tensor.softmax, torch.rsqrt, torch.Tensor.rsqrt}
KEPT |= {torch.sqrt, torch.Tensor.sqrt}
GATES = {F.gelu, F.silu, F.relu, torch.relu, torch.tanh, torch.sigmoid}
ACTIVATIONS = re.compile("gelu|activation|silu|relu|tanh", re.IGNORECASE)


class Replay(TorchFunctionMode):
    """Keeps frozen values of the first run and uses them in later ones, in the same order.

    Attributes:
        freezes_gates: Whether an activation multiplies another state, and is frozen whole.
    """

    def __init__(self, freezes_gates: bool):
        super().__init__()
        self.kept, self.place, self.freezes_gates = [], None, freezes_gates

    def keep(self, value):
        if self.place is None:
            self.kept.append(value)
            return value
        self.place += 1
        return self.kept[self.place - 1]

    def bend(self, x, out):
        return self.keep(out) if self.freezes_gates else x * self.keep(out / x)

    def normalise(self, x, shape, weight=None, bias=None, eps=1e-5):
        axes = tuple(range(-len(shape), 0))
        scale = self.keep((x.var(axes, unbiased=False, keepdim=True) + eps) ** -0.5)
        x = (x - x.mean(axes, keepdim=True)) * scale
        x = x if weight is None else x * weight
        return x if bias is None else x + bias

    def __torch_function__(self, fn, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if fn is F.layer_norm:
            shape = {"normalized_shape": "shape"}
            return self.normalise(*args, **{shape.get(k, k): v for k, v in kwargs.items()})
        assert fn is not F.scaled_dot_product_attention, "build the model with eager attention"
        out = fn(*args, **kwargs)
        if fn in GATES:
            return self.bend(args[0], out)
        return self.keep(out) if fn in KEPT else out


def replayed_sums(model, inputs, start, branches, *, freezes_gates=False):
    """Computes (C_k, output) of the paths through branches, from the output of a module.

    Args:
        model, inputs: Run as model(**inputs).last_hidden_state.
        start: The module.
        branches: Modules, each called once.
        freezes_gates: See `Replay`.
    """
    replay, scales = Replay(freezes_gates), {"branch": 1.0, "start": 1.0}

    def scale(name):
        def hook(module, args, out):
            if isinstance(out, tuple):
                return (out[0] * scales[name], *out[1:])
            return out * scales[name]

        return hook

    def bend(module, args, out):
        return replay.bend(args[0], out)

    hooks = [m.register_forward_hook(scale("branch")) for m in branches]
    hooks.append(start.register_forward_hook(scale("start")))
    hooks += [
        m.register_forward_hook(bend)
        for m in model.modules()
        if ACTIVATIONS.search(type(m).__name__) and not list(m.children())
    ]

    def run(t, s):
        scales.update(branch=t, start=s)
        replay.place = 0
        out = model(**inputs).last_hidden_state
        assert replay.place == len(replay.kept)
        return out

    times = np.linspace(0.0, 1.5, len(branches) + 1)
    try:
        with torch.no_grad(), replay:
            output = model(**inputs).last_hidden_state
            values = [(run(float(t), 1.0) - run(float(t), 0.0)).numpy() for t in times]
    finally:
        for hook in hooks:
            hook.remove()
    powers = np.linalg.inv(np.vander(times, increasing=True))
    return np.einsum("kt,t...->k...", powers, np.stack(values)), output.numpy()
