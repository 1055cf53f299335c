"""Random Transformers in NumPy that round after every operation, and mistakes to plant in them."""

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from scipy.special import erf

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Model:
    """Weights and form of a network of L layers with rotary positions and grouped keys."""

    tokens: np.ndarray  # [n, d]
    weights: list[dict[str, np.ndarray]]
    num_heads: int
    num_kv_heads: int
    causal: bool
    gated: bool
    centered: bool  # LayerNorm, else RMSNorm
    post_norm: bool
    spike: bool

    @property
    def depth(self):
        return len(self.weights)


@dataclass(frozen=True)
class Fault:
    """A mistake: its kind, the layer that has it (None: all), its size."""

    kind: str
    layer: int | None
    size: float = 0.0


# {kind: (sizes that must be found, the part that is at fault)}
FAULTS = {
    "attention scaled": (0.05, "attention"),
    "MLP scaled": (0.05, "mlp"),
    "MLP absent": (1.0, "mlp"),
    "head scaled": (0.5, "attention"),
    "noise": (0.2, "attention"),
    "bias": (0.3, "attention"),
    "temperature": (0.3, "attention"),
    "window": (4, "attention"),
    "theta": (0.1, "attention"),
    "rotary pairs": (0, "attention"),
    "heads repeated in another order": (0, "attention"),
    "output transposed": (0, "attention"),
    "dropout": (0.1, "attention"),
    "norm with 1 + weight": (0, "attention"),
    "no causal mask": (0, "attention"),
    "skip scaled": (0.1, "layer"),
    "input scaled": (0.1, "layer"),
}


def draw_model(seed: int, **form: Any) -> tuple[Model, np.random.Generator]:
    """Draw a network of a random form and size."""
    rng = np.random.default_rng(seed)
    depth, n = int(rng.integers(3, 14)), int(rng.choice([8, 16, 24, 48]))
    d, scale = int(rng.choice([32, 48, 64])), float(rng.choice([0.7, 1, 1.5, 2]))
    heads, kv = 4, 2
    k = d // heads

    def draw(rows, columns, factor=1.0):
        return rng.normal(size=(rows, columns)) * scale * factor / np.sqrt(rows)

    branch = 1.5 / np.sqrt(2 * depth)
    weights = [
        {
            "q": draw(d, heads * k),
            "k": draw(d, kv * k),
            "v": draw(d, kv * k),
            "o": draw(heads * k, d, branch),
            "gate": draw(d, 3 * d),
            "up": draw(d, 3 * d),
            "down": draw(3 * d, d, branch),
            "norm_1": 1 + 0.2 * rng.normal(size=d),
            "norm_2": 1 + 0.2 * rng.normal(size=d),
        }
        for _ in range(depth)
    ]
    bits = rng.integers(2, size=4).astype(bool)
    causal, gated, centered, spike = map(bool, bits)
    post_norm = bool(rng.integers(3) == 0)
    model = Model(
        rng.normal(size=(n, d)), weights, heads, kv, causal, gated, centered, post_norm, spike
    )
    return replace(model, **form), rng


def make_rounding(dtype):
    """Return a function that rounds to a dtype and computes in float64."""
    return lambda a: np.asarray(a).astype(DTYPES[dtype]).astype(np.float64)


def run(
    model: Model,
    dtype: str = "float32",
    stream: str | None = None,
    fault: Fault | None = None,
    inputs: dict[str, np.ndarray] | None = None,
    noise: float = 0.0,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Run a network; returns the arrays of a recording in float32.

    Args:
        model: The network.
        dtype: Of products and branches.
        stream: Of the states; None for that of the products.
        fault: What is planted.
        inputs: Another run, whose states and branches every sublayer takes in.
        noise: Relative size of what is added to those inputs.
        seed: Of the noise.
    """
    draw = np.random.default_rng([9, seed])

    def perturb(y):
        return y * (1 + noise * draw.normal(size=y.shape)) if noise else y

    rounded, stored = make_rounding(dtype), make_rounding(stream or dtype)
    x = stored(model.tokens * (np.sqrt(x_width(model)) if _is(fault, "embedding") else 1))
    states, attention, mlps = [x], [], []
    for index, weights in enumerate(model.weights):
        has = fault if fault is not None and fault.layer in (None, index) else None
        weights = {name: rounded(w) for name, w in weights.items()}

        def norm(y, weight, has=None):
            y = y - y.mean(axis=-1, keepdims=True) if model.centered else y
            unit = rounded(y / np.sqrt((y**2).mean(axis=-1, keepdims=True) + 1e-6))
            return rounded(unit * (weight + (1 if _is(has, "norm with 1 + weight") else 0)))

        x = x if inputs is None else perturb(inputs["residual"][index].astype(float))
        x = stored(x * (1 - has.size)) if _is(has, "input scaled") else x
        y = x if model.post_norm else norm(x, weights["norm_1"], has)
        branch = attend(model, weights, y, rounded, has)
        if inputs is None:
            middle = stored(x + branch)
        else:
            start = inputs["residual"][index].astype(float)
            middle = perturb(start + inputs["attention_branch"][index])
        middle = stored(norm(middle, weights["norm_1"])) if model.post_norm else middle
        y = middle if model.post_norm else norm(middle, weights["norm_2"])
        hidden = rounded(y @ weights["gate"])
        if model.gated:
            hidden = rounded(rounded(hidden / (1 + np.exp(-hidden))) * rounded(y @ weights["up"]))
        else:
            hidden = rounded(0.5 * hidden * (1 + erf(hidden / np.sqrt(2))))
        mlp = rounded(hidden @ weights["down"])
        if has is not None and has.kind in ("MLP scaled", "MLP absent"):
            mlp = rounded(mlp * (1 - has.size))
        if model.spike and index == model.depth // 3:
            mlp[0, 3] += 1500
        kept = 1 - has.size if _is(has, "skip scaled") else 1
        x = stored(middle * kept + (mlp if inputs is None else inputs["mlp_branch"][index]))
        x = stored(norm(x, weights["norm_2"])) if model.post_norm else x
        states.append(x)
        attention.append(branch)
        mlps.append(mlp)
    arrays = {"residual": states, "attention_branch": attention, "mlp_branch": mlps}
    return {name: np.stack(a).astype(np.float32) for name, a in arrays.items()}


def states_alone(arrays):
    """Returns a recording without its branches."""
    return {"residual": arrays["residual"]}


def x_width(model):
    return model.tokens.shape[1]


def _is(fault, kind):
    return fault is not None and fault.kind == kind


def attend(model, weights, y, rounded, fault):
    """Return the attention's branch [n, d]."""
    n, d = y.shape
    k, groups = d // model.num_heads, model.num_heads // model.num_kv_heads
    q, keys, values = (rounded(y @ weights[name]).reshape(n, -1, k) for name in "qkv")
    theta = 1e4 * (fault.size if _is(fault, "theta") else 1)
    q, keys = (rotate(z, theta, _is(fault, "rotary pairs"), rounded) for z in (q, keys))
    repeat = (
        (lambda z: np.tile(z, (1, groups, 1)))
        if _is(fault, "heads repeated in another order")
        else (lambda z: np.repeat(z, groups, axis=1))
    )
    keys, values = repeat(keys), repeat(values)
    scores = np.einsum("ihk,jhk->hij", q, keys) / np.sqrt(k)
    scores = rounded(scores * (1 + fault.size if _is(fault, "temperature") else 1))
    i, j = np.arange(n)[:, None], np.arange(n)
    allowed = (j <= i) if model.causal and not _is(fault, "no causal mask") else (j > -1) & (i > -1)
    if _is(fault, "window"):
        allowed = allowed & (i - j < fault.size)
    scores = np.where(allowed, scores, -np.inf)
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attention = rounded(exponentials / exponentials.sum(axis=-1, keepdims=True))
    heads = rounded(np.einsum("hij,jhk->ihk", attention, values))
    if _is(fault, "head scaled"):
        heads[:, 0] *= 1 - fault.size
    output = weights["o"].T if _is(fault, "output transposed") else weights["o"]
    branch = rounded(heads.reshape(n, -1) @ output)
    size = np.linalg.norm(branch, axis=-1, keepdims=True) / np.sqrt(d)
    rng = np.random.default_rng(7)
    if _is(fault, "attention scaled"):
        branch = branch * (1 - fault.size)
    if _is(fault, "noise"):
        branch = branch + fault.size * size * rng.normal(size=branch.shape)
    if _is(fault, "bias"):
        branch = branch + fault.size * np.median(size) * rng.normal(size=d)
    if _is(fault, "dropout"):
        branch = branch * (rng.random(branch.shape) > fault.size) / (1 - fault.size)
    return rounded(branch)


def rotate(z, theta, in_pairs, rounded):
    """Return queries or keys [n, h, k] with rotary positions, of halves or of pairs."""
    n, _, k = z.shape
    angles = (np.arange(n)[:, None] * theta ** (-np.arange(k // 2) * 2 / k))[:, None]
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = (
        (z[..., ::2], z[..., 1::2]) if in_pairs else (z[..., : k // 2], z[..., k // 2 :])
    )
    turned = first * cos - second * sin, second * cos + first * sin
    if in_pairs:
        return rounded(np.stack(turned, axis=-1).reshape(z.shape))
    return rounded(np.concatenate(turned, axis=-1))
