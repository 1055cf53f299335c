"""What run_stability measures on one seed of one network, and what the one law expects of it."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.lab.executor import Executor
from experiments.lab.flags import Flags
from experiments.lab.folder import RunFolder
from experiments.note.stability import dependency, networks
from experiments.note.stability.networks import Case
from rank_collapse.network import layers
from rank_collapse.network.measured import updates
from rank_collapse.struct import refuse_if

PROFILED = 8  # examples of the batch that Admin's gains are profiled on


def draw(options: Flags, key: Any, config: rc.TransformerConfig) -> dict[str, Any]:
    """Weights and what else is random of one seed.

    Returns:
        "params"; "x" and "batch", states [n, d] and [b, n, d]; "target" [n, d], the cotangent of
        the output; "direction", matrices to move the weights in.
    """
    key_params, key_tokens, key_target, key_direction = jax.random.split(key, 4)
    # Gaussian weights of their own as the direction; only directions count.
    both = jax.vmap(lambda k: rc.init(k, config))(jnp.stack([key_params, key_direction]))
    params, other = (jax.tree.map(lambda a, i=i: a[i], both) for i in (0, 1))
    shape = options.num_tokens, options.d_model
    tokens = jax.vmap(lambda key: layers.apply_norm(None, jax.random.normal(key, shape)))
    return {
        "params": params,
        "x": tokens(key_tokens[None])[0],
        "batch": tokens(jax.random.split(jax.random.fold_in(key_tokens, 1), PROFILED)),
        "target": jax.random.normal(key_target, shape),
        "direction": updates.get_weight_matrices(other),
    }


def measure(options: Flags, profiled: bool, key: Any, floats: Any) -> Any:
    """One seed of one network: {measure: ...}.

    Args:
        options: The flags.
        profiled: Whether a network may be one whose gains are profiled.
        key: Of the seed.
        floats: The network, and ‖W* − W‖/‖W‖.
    """
    config, size = floats
    drawn = draw(options, key, config)
    params, x, target = drawn["params"], drawn["x"], drawn["target"]
    if profiled:
        config = networks.with_omega(params, drawn["batch"], config)

    def loss(params):
        trace = rc.apply(params, x, config)
        return jnp.sum(target * trace.output), trace

    gradients, trace = networks.gradients(loss, params)
    law = networks.expected(params, x, config, size)
    moves = {"random": drawn["direction"], "gradient": jax.tree.map(jnp.negative, gradients)}
    found = of_network(params, x, config, trace, law, moves, size)
    found["change"]["sgd"] = networks.sgd_change(params, x, config, gradients)
    found["gradient_bound"] = networks.gradient_bound(params, gradients, target, size)
    return found


def of_network(
    params: Any, x: Any, config: Any, trace: Any, law: Any, directions: Any, size: Any
) -> dict[str, Any]:
    """Output change, dependency and token cosines, measured and expected.

    Args:
        params, x, config, trace: The network, its tokens [n, d] and its forward pass.
        law: Of `networks.expected`.
        directions, size: As of `networks.changes`.
    """
    output = networks.normalised_output(trace, config)
    return {
        "shares": dependency.branch_shares(params, trace, config),
        "expected_shares": law.shares,
        "apart": jax.vmap(one_minus_cosine)(trace.hidden),
        "expected_log_apart": law.log_one_minus_cosine,
        "change": networks.changes(params, x, config, output, directions, size),
        "expected_change": law.output_change[-1],
    }


def one_minus_cosine(x: jax.Array) -> jax.Array:
    """1 − the mean cosine of two tokens, as Σ_i |x̂_i − mean|²/(n − 1): in float32 to 1e-13."""
    unit = x / jnp.linalg.norm(x, axis=1, keepdims=True)
    return jnp.sum(jnp.square(unit - unit.mean(axis=0, keepdims=True))) / (len(x) - 1)


def measure_all(
    options: Flags, configs: Mapping[Case, Any], run: RunFolder
) -> dict[Case, dict[str, np.ndarray]]:
    """{case: {measure: [s, ...]}}, names joined by a dot; resumes from the run.

    Raises:
        ValueError: A network whose output is no number.
    """
    found: dict[str, Any] = {}
    named = {case.name: config for case, config in configs.items()}
    with Executor(options, run, "stability", options.num_seeds * len(named)) as executor:
        for cells in networks.by_program(named):
            profiled = any(np.isnan(a).any() for a in jax.tree.leaves(list(cells.values())))
            one = partial(measure, options, profiled)

            def cells_of(own, cells=cells):
                return {n: (config, np.float32(own.update_size)) for n, config in cells.items()}

            found |= executor.measure(one, cells_of)
    results = {case: cut(found[case.name], case.depth) for case in configs}
    for case, own in results.items():
        refuse_if(
            not np.isfinite(own["change.random"]).all(),
            f"--designs={case.design} at depth {case.depth}: NaN or overflow in the network",
        )
    return results


def cut(found: Mapping[str, np.ndarray], depth: int) -> dict[str, np.ndarray]:
    """What belongs to the network's own layers, without those after them."""
    size, own = found["apart"].shape[1] - 1, {}
    for name, values in found.items():
        if values.ndim > 1:  # [s, k L] or [s, k L + 1]
            count, rest = divmod(values.shape[1], size)
            values = values[:, : count * depth + rest]
        own[name.replace("/", ".")] = values
    return own
