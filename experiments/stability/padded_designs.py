"""The encoders of run_stability, by design and depth, as networks of one depth.

A network of l layers is the deepest one, with skips of 1 and branches of 0 in the layers after l.
These layers change nothing, so one compiled program serves every depth and every design with the
same norms.
"""

import itertools
from collections.abc import Hashable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.lab import Options, check_names
from rank_collapse.network.designs import count_branches
from rank_collapse.network.residual import Gains, Unprofiled, layer_gains
from rank_collapse.theory import expectation

# {design: the law of Liu et al. of Σ β_ii², to which what independent updates do to its output is
# proportional}
LAW_OF = {
    "post": "O(N)",
    "pre": "O(log N)",
    "admin": "O(log N)",
    "admin_log": "O(log N)",
    "admin_const": "O(1)",
}
DESIGNS = (*LAW_OF, "deepnorm", "depth_scaled", "layernorm_scaling")


class Case(NamedTuple):
    """One network: a design at a depth."""

    design: str  # A name of `rc.network.DESIGNS`
    depth: int  # Layers
    branches: int  # N

    @property
    def name(self) -> str:
        """Names its arrays."""
        return f"encoder {self.design}, L={self.depth}"


def base_config(options: Options, depth: int) -> rc.TransformerConfig:
    """Makes the network that designs are applied to."""
    flags = ("num_heads", "d_model", "d_ff", "mlp", "mask")
    sizes = {name: options[name] for name in flags}
    return rc.transformer(depth, **sizes, mlp_skip=options.mlp != "none")


def make_configs(options: Options) -> dict[Case, rc.TransformerConfig]:
    """Makes all designs at all depths, ascending, padded to the deepest; see `pad_layers`.

    Args:
        options: The flags.

    Raises:
        ValueError: An unknown design or one that the one law does not cover, fewer than two depths,
            or an update of size 0.
    """
    check_names(options, "designs", rc.network.DESIGNS)
    depths = sorted(set(options.depths))
    if len(depths) < 2:
        raise ValueError(f"--depths={','.join(map(str, depths))} has fewer than two depths")
    if not options.update_size > 0:
        raise ValueError(f"--update_size={options.update_size} does not change the weights")
    configs = {}
    for name, depth in itertools.product(options.designs, depths):
        config = rc.design(base_config(options, depth), name, learned=False)
        expectation.COVERS.check(config)
        configs[Case(name, depth, count_branches(config))] = pad_layers(config, depths[-1])
    return configs


def pad_layers(config: rc.TransformerConfig, size: int) -> rc.TransformerConfig:
    """Gives a network `size` layers, so that networks of different depths share one compiled
    program.

    Layers after its own have branch gain 0 and skip gain 1: they change nothing. Initial weights
    are comparable: they follow one rule, with the design's own gain.

    Args:
        config: The network.
        size: Layers that it gets.
    """
    if isinstance(config.skip_gain, Unprofiled):
        config = config.replace(skip_gain=np.nan)  # until `profile_omega`
    gains, ones = layer_gains(config, jnp.float32), np.ones(config.depth, np.float32)

    def pad(values, constant):
        width = (0, size - config.depth)
        return jax.tree.map(lambda a: np.pad(a, width, constant_values=constant), values)

    return config.replace(
        depth=size,
        init="lecun",
        skip_gain=pad(gains.skip, 1.0),
        branch_gain=pad(gains.branch, 0.0),
        norm_gain=pad(gains.norm or Gains(ones, ones, ones), 1.0),
    )


def group_by_program(
    configs: Mapping[str, rc.TransformerConfig],
) -> list[dict[str, rc.TransformerConfig]]:
    """Groups networks that one compiled program computes, because they differ in numbers alone.

    A configuration is a tree of arrays: networks whose trees have the same structure and shapes get
    their numbers, as float32, as arguments of the program.

    Args:
        configs: The networks by case or name.

    Returns:
        [{name: configuration whose numbers are float32}], one dictionary for each program.
    """
    groups: dict[Hashable, dict[str, rc.TransformerConfig]] = {}
    for name, config in configs.items():
        leaves, structure = jax.tree.flatten(config)
        shapes = tuple(map(np.shape, leaves))
        groups.setdefault((structure, shapes), {})[name] = jax.tree.map(np.float32, config)
    return list(groups.values())
