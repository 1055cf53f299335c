"""The encoders of run_stability, by design and depth, and what is computed of one.

A network of l layers is the deepest one whose layers after l have skips of 1 and branches of 0:
they change nothing, and one compiled program serves every depth and every design of its norms.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.lab.flags import Flags, check_names
from rank_collapse import struct
from rank_collapse.network import layers
from rank_collapse.network.designs import count_branches
from rank_collapse.network.measured import updates
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
        """Of its arrays."""
        return f"encoder {self.design}, L={self.depth}"


def base_config(options: Flags, depth: int) -> rc.TransformerConfig:
    """The network that designs are applied to."""
    flags = ("num_heads", "d_model", "d_ff", "mlp", "mask")
    sizes = {name: options[name].value for name in flags}
    return rc.transformer(depth, **sizes, mlp_skip=options.mlp != "none")


def configs_of(options: Flags) -> dict[Case, rc.TransformerConfig]:
    """All designs at all depths, ascending, as deep as the deepest; see `padded`.

    Raises:
        ValueError: A design that there is not or that the one law does not cover, fewer than two
            depths, or an update of nothing.
    """
    check_names(options, "designs", rc.network.DESIGNS)
    if options.training:  # before the networks at initialisation are measured
        check_names(options, "train_designs", rc.network.DESIGNS)
    depths = sorted(set(options.depths))
    struct.refuse(
        (len(depths) < 2, f"--depths={','.join(map(str, depths))} is fewer than two depths"),
        (
            not options.update_size > 0,
            f"--update_size={options.update_size} is no update of the weights",
        ),
    )
    found = {}
    for name, depth in itertools.product(options.designs, depths):
        config = rc.design(base_config(options, depth), name, learned=False)
        expectation.COVERS.check(config)
        found[Case(name, depth, count_branches(config))] = padded(config, depths[-1])
    return found


def padded(config: rc.TransformerConfig, size: int) -> rc.TransformerConfig:
    """The network with `size` layers, of which those past its own change nothing.

    Initial weights are compared alike: by one rule, with the gain of the design's own.
    """
    if isinstance(config.skip_gain, Unprofiled):
        config = config.replace(skip_gain=np.nan)  # until `with_omega`
    gains, ones = layer_gains(config, jnp.float32), np.ones(config.depth, np.float32)

    def longer(of, rest):
        wide = (0, size - config.depth)
        return jax.tree.map(lambda a: np.pad(a, wide, constant_values=rest), of)

    return config.replace(
        depth=size,
        init="lecun",
        skip_gain=longer(gains.skip, 1.0),
        branch_gain=longer(gains.branch, 0.0),
        norm_gain=longer(gains.norm or Gains(ones, ones, ones), 1.0),
    )


def by_program(configs: Mapping[str, rc.TransformerConfig]) -> list[dict[str, Any]]:
    """{name: config of float32 numbers} of networks that differ in numbers alone: these are
    arguments of one program."""
    found: dict[Any, dict[str, Any]] = {}
    for name, config in configs.items():
        leaves, structure = jax.tree.flatten(config)
        shapes = tuple(map(np.shape, leaves))
        found.setdefault((structure, shapes), {})[name] = jax.tree.map(np.float32, config)
    return list(found.values())


def expected(params: Any, x: Any, config: Any, size: Any) -> expectation.ExpectedTrace:
    """What the one law expects of a pass, with an update of that relative size."""
    sizes = expectation.update_sizes(config, size)
    return expectation.expected_pass(params, x, config, sizes=sizes)


def gradients(loss: Callable[[Any], tuple[Any, Any]], params: Any) -> tuple[Any, Any]:
    """(∂loss/∂W of every matrix, as `updates.matrices_of`, what else loss(params) returns)."""
    return jax.grad(lambda own: loss(updates.replace_weight_matrices(params, own)), has_aux=True)(
        updates.get_weight_matrices(params)
    )


def normalised_output(trace: rc.Trace, config: rc.TransformerConfig) -> jax.Array:
    """x̂ of the last layer, [n, d]."""
    return layers.apply_norm(None, trace.hidden[-1], config.norm, config.norm_eps)


def changes(
    params: Any, x: Any, config: Any, before: Any, directions: Mapping[str, Any], size: Any
) -> dict[str, Any]:
    """{name: |x̂ − x̂*|²/d of the normalised output} after an update of all matrices.

    Args:
        before: x̂.
        directions: {name: matrices}; each matrix moves by the same relative size.
        size: ‖W* − W‖/‖W‖.
    """

    def change(direction):
        trace = rc.apply(updates.moved(params, direction, size), x, config)
        return jnp.mean(jnp.square(normalised_output(trace, config) - before))

    together = jax.tree.map(lambda *a: jnp.stack(a), *directions.values())
    return dict(zip(directions, jax.lax.map(change, together), strict=True))


def sgd_change(params: Any, x: Any, config: Any, gradients: Any) -> jax.Array:
    """|δx̂|²/(d η²) of an SGD step W − η ∂loss/∂W of all matrices, to first order in η."""

    def output(own):
        return normalised_output(
            rc.apply(updates.replace_weight_matrices(params, own), x, config), config
        )

    tangent = jax.jvp(output, (updates.get_weight_matrices(params),), (gradients,))[1]
    return jnp.mean(jnp.square(tangent))


def gradient_bound(params: Any, gradients: Any, target: Any, size: Any) -> jax.Array:
    """e² (Σ‖W‖‖∂W‖)²/‖u‖², per entry of x̂: what a step of relative size e along every matrix's
    gradient changes the output by at least, since it changes the loss u·x̂ by e Σ‖W‖‖∂W‖,
    u the target [n, d].
    """
    norms = map(updates.compute_matrix_norms, (updates.get_weight_matrices(params), gradients))
    total = jax.tree.reduce(jnp.add, jax.tree.map(lambda w, g: jnp.sum(w * g), *norms))
    return jnp.square(size * total) / (jnp.sum(jnp.square(target)) * target.size)


def with_omega(params: Any, batch: Any, config: rc.TransformerConfig) -> rc.TransformerConfig:
    """The network, with Admin's ω profiled on a batch of states where its skips are NaN."""

    def profiled():
        found = rc.network.admin_profile(params, batch, config)
        return layer_gains(found, jnp.float32).skip

    skips = config.skip_gain
    gains = jax.lax.cond(jnp.isnan(skips.attention[0]), profiled, lambda: skips)
    return config.replace(skip_gain=gains)
