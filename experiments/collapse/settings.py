"""What run_collapse's flags ask for: the networks, and the values that are swept."""

from collections.abc import Sequence

from absl import flags

import rank_collapse as rc

VARIANTS = {
    "san": rc.san,
    "san_mlp": rc.san_mlp,
    "san_skip": rc.san_skip,
    "transformer": rc.transformer,
}


def sweep_of(options: flags.FlagValues) -> list[tuple[float, float]]:
    """All pairs (weight scale, skip gain) of the two lists."""
    for name in ("weight_scale", "skip_gain"):
        values = options[name].value
        if not values or len(set(values)) < len(values):
            raise ValueError(f"--{name} needs different numbers, not {values}")
    return [(scale, gain) for scale in options.weight_scale for gain in options.skip_gain]


def configs_of(
    options: flags.FlagValues, norm: str, variants: Sequence[str]
) -> dict[str, rc.TransformerConfig]:
    """The configuration of every variant.

    Raises:
        ValueError: Unknown variant or norm; sizes that do not fit.
    """
    unknown = [v for v in variants if v not in VARIANTS]
    if unknown or not variants:
        raise ValueError(f"variant {''.join(unknown[:1])!r} is not one of {', '.join(VARIANTS)}")
    fields = {name: options[name].value for name in ("d_ff", "mask", "window", "init")}
    fields |= {"norm_placement": norm, "norm": options.norm_kind}
    configs = {}
    for variant in variants:
        own = {}
        if variant in ("san_mlp", "transformer"):
            own["mlp"] = options.mlp
        if variant == "san_mlp":
            own["mlp_skip"] = options.san_mlp_skip
        configs[variant] = VARIANTS[variant](
            options.depth, options.num_heads, options.d_model, **fields, **own
        )
    return configs


def gains_of(options: flags.FlagValues) -> list[float]:
    """The gains of the MLPs that are swept, ascending; none by default.

    Raises:
        ValueError: One that is not above 0, or a sweep without san_mlp.
    """
    values = sorted(set(options.mlp_gain))
    if any(v <= 0 for v in values):
        raise ValueError(f"--mlp_gain needs numbers above 0, not {options.mlp_gain}")
    if values and "san_mlp" not in options.variants:
        raise ValueError(f"--mlp_gain={options.mlp_gain} needs san_mlp in --variants")
    return values


def gain_name(gain: float) -> str:
    """The name that a gain's curve is kept under."""
    return f"log10_residual_at_{gain:g}"
