"""What run_stability measures on one seed of one network, and what the one law expects of it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments import initial
from experiments.shell.executor import Executor
from experiments.shell.options import Flags
from experiments.small_task import Network
from experiments.stability import networks
from experiments.stability.networks import Case, Part, halves
from rank_collapse.measures import dependency, updates
from rank_collapse.network import layers
from rank_collapse.paths.direct import variance_shares
from rank_collapse.runs.folder import RunFolder
from rank_collapse.theory.logdomain import log_residual_profile

PROFILED = 8  # examples of the batch that Admin's gains are profiled on


def draw(options: Flags, key: Any, config: Any) -> dict[str, Any]:
    """Weights and what else is random of one seed.

    Returns:
        "params"; "inputs" and "batch", states [n, d] and [b, n, d] of each half; "target" [n, d],
        the cotangent of the output; "direction", matrices of each half to move the weights in.
    """
    key_params, key_tokens, key_target, key_direction = jax.random.split(key, 4)
    init = networks.library(config)[0].init
    # Gaussian weights of their own as the direction; only directions count.
    drawn = jax.vmap(lambda k: init(k, config))(jnp.stack([key_params, key_direction]))
    params, other = (jax.tree.map(lambda a, i=i: a[i], drawn) for i in (0, 1))
    shape = options.num_tokens, options.d_model
    # The decoder's tokens are drawn as those of a stack alone.
    keys = [jax.random.fold_in(key_tokens, 0), key_tokens][-len(halves(config)) :]
    of_batch = [jax.random.split(jax.random.fold_in(key, 1), PROFILED) for key in keys]
    tokens = jax.vmap(lambda key: layers.norm(None, jax.random.normal(key, shape)))
    return {
        "params": params,
        "inputs": tuple(tokens(key[None])[0] for key in keys),
        "batch": tuple(map(tokens, of_batch)),
        "target": jax.random.normal(key_target, shape),
        "direction": networks.matrices_of(other),
    }


def measure(options: Flags, by_layer: bool, profiled: bool, key: Any, floats: Any) -> Any:
    """One seed of one network: {measure: ...}, of the encoder of an encoder-decoder in "encoder".

    Args:
        options: The flags.
        by_layer: Whether also what costs most: exact shares, residuals, expected gradients.
        profiled: Whether the config may have skips of NaN, which a batch decides.
        key: Of the seed.
        floats: The network, and ‖W* − W‖/‖W‖.
    """
    config, size = floats
    drawn = draw(options, key, config)
    params, inputs, target = drawn["params"], drawn["inputs"], drawn["target"]
    if profiled:
        config = networks.with_omega(params, drawn["batch"], config)

    def loss(params):
        passed = networks.traces(params, inputs, config)
        return jnp.sum(target * passed[-1].output), passed

    gradients, passed = networks.gradients(loss, params)
    law, of_gradients = networks.expected(params, inputs, config, size, gradients=by_layer)
    moves = {"random": drawn["direction"], "gradient": jax.tree.map(jnp.negative, gradients)}
    found = of_network(params, inputs, config, passed, law, moves, size)
    found["change"]["sgd"] = networks.sgd_change(params, inputs, config, gradients)
    found["gradient_bound"] = networks.gradient_bound(params, gradients, target, size)
    if not by_layer:
        return found
    places = [found["encoder"], found] if len(inputs) > 1 else [found]
    by_half = places, halves(config), halves(params), inputs, passed, law, gradients, of_gradients
    for place, stack, part, x, trace, expected, gradient, of_gradient in zip(*by_half, strict=True):
        log10_residual = jnp.log10(
            jax.vmap(lambda h: rc.composite_norm(rc.residual(h)))(trace.hidden)
        )
        if options.log_residual and len(inputs) == 1:
            log10_residual = log_residual_profile(part, x, stack)
        memory = {"memory": passed[0].output} if stack.cross_attention else {}
        place |= {
            "ratio": jax.vmap(rc.residual_ratio)(trace.hidden),
            "frobenius": jax.vmap(partial(rc.residual_ratio, norm="frobenius"))(trace.hidden),
            "expected_frobenius": expected.residual_ratio,
            "log10_residual": log10_residual,
            "exact_shares": variance_shares(part, x, stack, **memory),
            "gradients": updates.norms_of(gradient),
            "expected_gradients": of_gradient,
            "omega": {kind: getattr(stack.skip_gain, kind) for kind in stack.kinds},
        }
    return found


def of_network(
    params: Any, inputs: Any, config: Any, passed: Any, law: Any, directions: Any, size: Any
) -> dict[str, Any]:
    """Output change, dependency and token cosines, measured and expected; those of an encoder that
    a decoder reads under "encoder".

    Args:
        params, inputs, config, passed: As of `networks.traces`, and these traces.
        law: Of `networks.expected`.
        directions, size: As of `networks.changes`.
    """
    by_half = zip(halves(params), passed, halves(config), law, strict=True)
    *before, found = (
        {
            "shares": dependency.branch_shares(part, trace, stack),
            "expected_shares": expected.shares,
            "apart": jax.vmap(one_minus_cosine)(trace.hidden),
            "expected_log_apart": expected.log_one_minus_cosine,
        }
        for part, trace, stack, expected in by_half
    )
    output = networks.normalised_output(passed, config)
    found["change"] = networks.changes(params, inputs, config, output, directions, size)
    found["expected_change"] = law[-1].output_change[-1]
    return found | {"encoder": before[0]} if before else found


def one_minus_cosine(x: jax.Array) -> jax.Array:
    """1 − the mean cosine of two tokens, as Σ_i |x̂_i − mean|²/(n − 1): in float32 to 1e-13."""
    unit = x / jnp.linalg.norm(x, axis=1, keepdims=True)
    return jnp.sum(jnp.square(unit - unit.mean(axis=0, keepdims=True))) / (len(x) - 1)


def measure_all(
    options: Flags, parts: Sequence[Part], run: RunFolder
) -> dict[Case, dict[str, np.ndarray]]:
    """{case: {measure: [s, ...]}}, names joined by a dot; resumes from the run.

    Raises:
        ValueError: No design whose networks' outputs are all numbers.
    """
    found: dict[str, Any] = {}
    total = options.num_seeds * sum(len(part.configs) for part in parts)
    with Executor(options, run, "stability", total) as executor:
        for part in parts:
            named = {case.name: Network(config) for case, config in part.configs.items()}
            for cells in initial.by_program(named):
                leaves = jax.tree.leaves(list(cells.values()))
                profiled = any(np.isnan(leaf).any() for leaf in leaves)
                one = partial(measure, options, part.by_layer, profiled)

                def cells_of(own, cells=cells):
                    return {n: (config, np.float32(own.update_size)) for n, config in cells.items()}

                found |= executor.measure(one, cells_of)
        cases = [case for part in parts for case in part.configs]
        results = {case: cut(found[case.name], case.depth) for case in cases}
        return without_overflow(results, executor.progress.say)


def without_overflow(results: dict[Case, Any], say: Callable[[str], None]) -> dict[Case, Any]:
    """The results of designs all of whose networks' outputs are numbers; the others are named.

    Raises:
        ValueError: There is no such design.
    """
    lost = {
        case[:2]: f"{case.design} at depth {case.depth}: NaN or overflow in the network"
        for case in reversed(results)  # of each design its first one
        if not np.isfinite(results[case]["change.random"]).all()
    }
    left = {case: found for case, found in results.items() if case[:2] not in lost}
    if not left:
        raise ValueError("; ".join(lost.values()))
    for why in lost.values():
        say(f"{why}; the design is kept apart")
    return left


def cut(found: Mapping[str, np.ndarray], depth: int) -> dict[str, np.ndarray]:
    """What belongs to the network's own layers, without those after them."""
    size, own = found["apart"].shape[1] - 1, {}
    for name, values in found.items():
        if values.ndim > 1:  # [s, k L] or [s, k L + 1]
            count, rest = divmod(values.shape[1], size)
            values = values[:, : count * depth + rest]
        if values.ndim > 2:  # exact shares [s, N + 1, N + 2], the last of the biases
            values = np.concatenate([values[..., : values.shape[1]], values[..., -1:]], axis=2)
        own[name.replace("/", ".")] = values
    return own
