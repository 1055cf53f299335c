"""Networks over a grid of two of their floats: what is measured, and the theory that holds."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.initial import kept_and_gradients, limits_of, measures_of, tokens
from experiments.phase.diagrams import (
    Diagram,
    Results,
    Theory,
    order_by_theory,
    values_of_axes,
)
from experiments.shell.options import Flags
from experiments.shell.statements import row_of
from experiments.small_task import Network
from rank_collapse.measures.updates import with_matrices
from rank_collapse.network.layers import ACTIVATIONS
from rank_collapse.theory import phases

# Floats of every network: {name: (value where it is not swept, label)}. A score_scale of None is
# 1/√ln n, the library's own initialisation.
AXES = {
    "score_scale": (None, r"scores' standard deviation / $\sqrt{\ln n}$"),
    "skip_gain": (1.0, r"gain $\alpha$ of the skips"),
    "branch_gain": (1.0, "gain of the branches"),
    "attention_gain": (1.0, r"gain $\alpha_A$ of attention"),
    "mlp_gain": (1.0, r"gain $\alpha_M$ of the MLP"),
    "mlp_scale": (1.0, r"size $\sigma_w$ of the MLP's first weights"),
    "value_scale": (1.0, "size of the value weights"),
    "cosine": (0.0, r"cosine $\rho$ of the input's tokens"),
}
MEASURES = {
    "log10_residual": r"$\log_{10}$ residual kept",
    "log10_gradient": r"$\log_{10}$ gradient of queries / values",
    "entropy": r"entropy of attention / $\ln n$",
}
LABELS = MEASURES | {"accuracy": "accuracy"} | {n: text for n, (_, text) in AXES.items()}
LABELS |= {name: rf"$\{name}$" for name in ("alpha", "beta", "gamma")}
ANGLES = "λ_a = 0"  # the boundary of Cowsik et al.


def networks_of(options: Flags) -> Diagram:
    """The networks, the grid and the theory of the flags.

    Raises:
        ValueError: An unknown float, or a network that a variant refuses.
    """
    if options.x == options.y:
        raise ValueError(f"--x={options.x} and --y={options.y} are the same axis")
    own = rc.VARIANTS[options.variant].values_of(config_of(options))
    floats = {name: options[name].value for name in AXES}
    floats |= {n: float(np.mean(v)) for n, v in own.items() if v is not None}
    if floats["score_scale"] is None:
        floats["score_scale"] = 1 / math.sqrt(math.log(options.num_tokens))
    names = [name for name in floats if name not in without_effect(options)]
    for flag in ("x", "y"):
        if options[flag].value not in names:
            known = f"not one of {', '.join(names)}, which have an effect on this network"
            raise ValueError(f"--{flag}={options[flag].value} is {known}")
    (a, b), (xs, ys) = (options.x, options.y), values_of_axes(options)
    cosines = [*{a: xs, b: ys}.get("cosine", ()), options.cosine]
    if not 0 <= min(cosines) <= max(cosines) < 1:
        raise ValueError(f"a cosine of {max(cosines, key=abs):g} is not in [0, 1)")
    network_of(options, floats, options.num_tokens)  # what a variant refuses is refused here
    cells = {
        f"{b}={v:.6g}, {a}={u:.6g}": floats | {a: float(u), b: float(v)} for v in ys for u in xs
    }
    grid = dict(zip((a, b), np.meshgrid(xs, ys), strict=True))
    start = functools.partial(scaled, options, options.train_tokens)

    def trained(floats):
        return Network(network_of(options, floats, options.train_tokens), start, floats)

    def claims(results):
        orders = [order_by_theory(results, v) for v in np.moveaxis(results["log10_residual"], 2, 0)]
        return [row_of("phase order", f"{a} and {b}: {ANGLES}", orders)]

    return Diagram(
        options,
        (a, xs),
        (b, ys),
        LABELS,
        cells,
        functools.partial(of_one_seed, options),
        functools.partial(tables, options),
        functools.partial(theory_of, options, floats | grid),
        "the residual kept",
        claims if law_of(options) == "angle" else lambda results: [],
        {f"trained {name}": trained(f) for name, f in cells.items()} if options.train else {},
        options.level != options["level"].default or options.figure is not None,
    )


def config_of(options: Flags) -> rc.TransformerConfig:
    """The network, without what is swept."""
    return rc.TransformerConfig(
        options.depth,
        options.num_heads,
        options.d_model,
        mlp=options.mlp,
        mask=options.mask,
        norm=options.norm_kind,
        norm_placement=options.norm_placement,
        attention_skip=options.attention_skip,
        mlp_skip=options.mlp != "none",
    )


def tables(options: Flags, measured: Results) -> dict[str, np.ndarray]:
    """What is shown of the cells [y, x, s], of `kept_and_gradients` and --train's accuracy."""
    shape = options.num_y, options.num_x
    found = {n: values.reshape(*shape, *values.shape[1:]) for n, values in measured.items()}
    found |= measures_of(found) | {"limit": limits_of(found).astype(float)}
    found["effective_rank"] = found["rank"]
    names = (*MEASURES, "accuracy", "effective_rank", "limit")
    return {name: found[name] for name in names if name in found}


def without_effect(options: Flags) -> set[str]:
    """The floats of `AXES` that the network of the flags does not have."""
    found = {"score_scale"} if options.variant == "critical" else set()
    if options.mlp == "none":
        found |= {"mlp_gain", "mlp_scale"}
    if options.convex or (options.mlp == "none" and not options.attention_skip):
        found |= {"skip_gain"}
    return found


def network_of(options: Flags, floats: Mapping[str, Any], num_tokens: int) -> rc.TransformerConfig:
    """The configuration of a cell; its floats may be traced."""
    gains = {n: floats["branch_gain"] * floats[f"{n}_gain"] for n in ("attention", "mlp")}
    skips = dict.fromkeys(gains, floats["skip_gain"])
    if options.convex:
        skips = {n: jnp.sqrt(jnp.maximum(1 - jnp.square(g), 0)) for n, g in gains.items()}
    own = {name: floats[name] for name in (options.x, options.y) if name not in AXES}
    if options.variant == "a_perp":
        own["num_tokens"] = num_tokens
    config = rc.variant(config_of(options), options.variant, **own)
    return config.replace(skip_gain=rc.Gains(**skips), branch_gain=rc.Gains(**gains))


def of_one_seed(options: Flags, key: Any, floats: Mapping[str, Any]) -> dict[str, Any]:
    """`kept_and_gradients` of one seed of a cell."""
    config = network_of(options, floats, options.num_tokens)
    key_params, key_x, key_goal = jax.random.split(key, 3)
    params = scaled(options, options.num_tokens, rc.init(key_params, config), floats)
    x = tokens(key_x, options.num_tokens, config.d_model, floats["cosine"])
    return kept_and_gradients(params, x, config, key_goal)


def scaled(options: Flags, num_tokens: int, params: Any, floats: Mapping[str, Any]) -> Any:
    """Parameters as drawn with weights of the sizes of a cell; may be traced.

    Not as a variant's authors start it, where that hides what is swept (W_Q = 0), but for critical
    scaling, whose weights are the identity and whose law is its own.
    """
    start = "critical" if options.variant == "critical" else "softmax"
    attention, mlp = rc.VARIANTS[start].start(params.layers.attention), params.layers.mlp
    own = {"w_v": floats["value_scale"] * attention.w_v}
    if start == "softmax":
        own["w_q"] = floats["score_scale"] * jnp.sqrt(jnp.log(num_tokens)) * attention.w_q
    sizes = {} if mlp is None else {"mlp": {"w_in": floats["mlp_scale"] * mlp.w_in}}
    params = params.replace(layers=params.layers.replace(attention=attention))
    return with_matrices(params, {"attention": own} | sizes)


def law_of(options: Flags) -> str | None:
    """Which closed theory holds for the network.

    "critical" is the scale of critical attention, "angle" the exponent of Cowsik et al., and "kept"
    the residual that post-norm networks keep, whose level --level is. None holds where a float that
    it does not have is swept or set.
    """
    if options.variant == "critical" and options.depth == 1:
        return "critical"
    if options.variant != "softmax" or options.mask != "none" or not options.attention_skip:
        return None
    moved = {n for n, (start, _) in AXES.items() if options[n].value != start}
    moved = (moved | {options.x, options.y}) - without_effect(options)
    if options.convex:
        smooth = options.mlp not in ("none", "relu", "identity") and options.mlp in ACTIVATIONS
        holds = smooth and options.norm_placement == "pre"
        return "angle" if holds and not moved & {"score_scale", "value_scale"} else None
    holds = options.norm_placement == "post" and options.mlp in ("none", "relu")
    return "kept" if holds and not moved & {"value_scale", "attention_gain", "mlp_gain"} else None


def theory_of(options: Flags, floats: Mapping[str, Any]) -> Theory | None:
    """The closed theory that holds for the networks over the grid, as of `Diagram.law`.

    Args:
        options: The flags.
        floats: Of all cells, numbers or [y, x].
    """
    law, f = law_of(options), dict(zip(floats, np.broadcast_arrays(*floats.values()), strict=True))
    if law is None:
        return None
    if law == "critical":
        return f["gamma"] * (1 - f["cosine"]), 1.0, "γ = 1/(1 − ρ)"
    if law == "angle":
        gains = [f["branch_gain"] * f[n] for n in ("attention_gain", "mlp_gain")]
        of = jax.jit(
            functools.partial(phases.angle_exponent, activation=ACTIVATIONS[options.mlp].fn)
        )
        found = np.vectorize(lambda *own: float(of(*own)))(*gains, f["mlp_scale"])
        return found, 0.0, ANGLES

    @jax.vmap
    def left(beta, skip, weight, rho):
        _, rho_left = phases.phase_profile(
            beta,
            options.depth,
            attention_skip=skip,
            start=(1.0, rho),
            weight=weight,
            mlp_skip=skip if options.mlp == "relu" else None,
            num_tokens=options.num_tokens,
        )
        return jnp.sqrt(jnp.maximum(1 - rho_left[-1], 0) / (1 - rho))

    skip = f["skip_gain"] / f["branch_gain"]
    own = (abs(f["score_scale"]), skip, f["mlp_scale"], f["cosine"])
    found = np.asarray(left(*(jnp.asarray(values).ravel() for values in own))).reshape(skip.shape)
    kept = np.log10(np.maximum(found, 1e-8))
    return kept, math.log10(options.level), f"theory keeps {options.level:g}"
