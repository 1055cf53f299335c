"""The networks of run_stability: designs and depths, as gains of the deepest network.

A network of l layers is the deepest one whose layers after l have skips of 1 and branches of 0:
they change nothing, and one compiled program serves every depth and every design of its norms.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import rank_collapse as rc
from rank_collapse.network.designs import count_branches
from rank_collapse.network.gains import Gains, layer_gains

# What designs are said to do to the change of the output after an update: C Σ β_ii².
CLAIMS = {
    "post": ("O(N)", "Liu et al. 2020, theorem 2"),
    "pre": ("O(log N)", "Liu et al. 2020, theorem 2"),
    "admin_log": ("O(log N)", "Liu et al. 2020, without profiling"),
    "admin_const": ("O(1)", "Liu et al. 2020, without profiling"),
    "deepnorm": ("O(1)", "Wang et al. 2022"),
    "depth_scaled": ("O(1)", "Σ β_ii² of Liu et al. 2020 at branches of 1/√L"),
    "layernorm_scaling": (None, "Sun et al. 2025, who state no law of it"),
}


AT_MOST = ("deepnorm",)  # whose law is a bound


class Case(NamedTuple):
    """One network: a design at a depth."""

    design: str
    depth: int
    branches: int


class Group(NamedTuple):
    """Networks of one compiled program.

    Attributes:
        config: The deepest network, without its gains.
        cases: In the order of the gains' leading axis.
        gains: {"skip", "branch", "norm": Gains of [case, L], "init": [case]}.
    """

    config: rc.TransformerConfig
    cases: tuple[Case, ...]
    gains: Mapping[str, Any]


def base_config(options: flags.FlagValues, depth: int) -> rc.TransformerConfig:
    """The network that designs are applied to."""
    fields = {"mlp": options.mlp, "mask": options.mask, "d_ff": options.d_ff}
    if options.mlp == "none":
        fields["mlp_skip"] = False
    return rc.transformer(depth, options.num_heads, options.d_model, **fields)


def depths_of(options: flags.FlagValues, flag: str) -> list[int]:
    """The depths that a flag asks for, ascending.

    Raises:
        ValueError: No positive integers, or fewer than two of them.
    """
    texts = options[flag].value
    bad = [text for text in texts if not text.strip().isdigit() or not int(text)]
    if bad:
        raise ValueError(f"--{flag}={bad[0]} is not a positive integer")
    depths = sorted({int(text) for text in texts})
    if len(depths) < 2:
        raise ValueError(f"--{flag}={','.join(texts)} is fewer than two depths")
    return depths


def groups_of(options: flags.FlagValues, depths: list[int]) -> list[Group]:
    """All designs at all depths, in groups of one compiled program each.

    Raises:
        ValueError: An unknown design, none, or one whose gains the config does not decide.
    """
    if not options.designs:
        raise ValueError("--designs is empty")
    groups = {}
    for name in options.designs:
        for depth in depths:
            config = rc.design(base_config(options, depth), name, learned=False)
            # Compared alike: one rule for the initial weights, whose gains are the design's own.
            config = config.replace(init="lecun")
            gains = gains_at(config, depths[-1])
            if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gains)):
                raise ValueError(f"--designs={name} has gains that a batch decides, not the config")
            plain = dict.fromkeys(("skip_gain", "branch_gain", "norm_gain", "init_gain"), 1.0)
            static = config.replace(depth=depths[-1], **plain)
            case = Case(name, depth, count_branches(config))
            groups.setdefault(static, []).append((case, gains))
    return [
        Group(config, tuple(case for case, _ in found), _stack([gains for _, gains in found]))
        for config, found in groups.items()
    ]


def gains_at(config: rc.TransformerConfig, size: int) -> dict[str, Any]:
    """The gains of a network, with `size` layers of which those past its own change nothing."""
    own = layer_gains(config, jnp.float32)

    def padded(gains, rest):
        return jax.tree.map(
            lambda a: np.pad(a, (0, size - config.depth), constant_values=rest), gains
        )

    ones = np.ones(config.depth, np.float32)
    norm = Gains(ones, ones, ones) if own.norm is None else own.norm
    gains = {"skip": padded(own.skip, 1.0), "branch": padded(own.branch, 0.0)}
    return gains | {"norm": padded(norm, 1.0), "init": np.float32(config.init_gain)}


def with_gains(config: rc.TransformerConfig, gains: Mapping[str, Any]) -> rc.TransformerConfig:
    """The network of one case; its parameters are scaled by `gains["init"]`, see `measure`."""
    names = ("skip", "branch", "norm")
    return config.replace(**{f"{name}_gain": gains[name] for name in names})


def _stack(trees):
    return jax.tree.map(lambda *a: np.stack(a), *trees)
