"""The measurements of run_stability: of one encoder, and of all designs and depths by seed."""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

import rank_collapse as rc
from experiments.lab import Executor, Options, RunFolder
from experiments.stability import dependency
from experiments.stability.padded_designs import Case, group_by_program
from experiments.train.weight_matrices import (
    Matrices,
    compute_matrix_norms,
    get_weight_matrices,
    replace_weight_matrices,
)
from rank_collapse.network import layers
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.residual import layer_gains
from rank_collapse.theory import expectation

NUM_PROFILED = 8  # examples of the batch that Admin's gains are profiled on


def measure_all(
    options: Options, configs: Mapping[Case, rc.TransformerConfig], folder: RunFolder
) -> dict[Case, dict[str, np.ndarray]]:
    """Measures all networks at initialisation, resumed from the run.

    Args:
        options: The flags.
        configs: The networks by case or name.
        folder: The run folder; results that it already holds are not computed again.

    Returns:
        {case: {measure: [s, ...]}}, names joined by a dot.

    Raises:
        ValueError: Each design has a network whose output is NaN or infinite.
    """
    arrays: dict[str, dict[str, np.ndarray]] = {}
    by_name = {case.name: config for case, config in configs.items()}
    with Executor(options, folder, "stability", options.num_seeds * len(by_name)) as executor:
        for group in group_by_program(by_name):
            is_profiled = any(np.isnan(a).any() for a in jax.tree.leaves(list(group.values())))

            def make_cells(point, group=group):
                return {n: (config, np.float32(point.update_size)) for n, config in group.items()}

            arrays |= executor.measure(partial(measure_seed, options, is_profiled), make_cells)
        results = {case: cut_padding(arrays[case.name], case.depth) for case in configs}
        return keep_finite_designs(results, executor.progress.say)


def keep_finite_designs(
    results: Mapping[Case, dict[str, np.ndarray]], say: Callable[[str], None]
) -> dict[Case, dict[str, np.ndarray]]:
    """Keeps the designs whose networks all have finite outputs, and reports which are left out.

    Args:
        results: Measures [s, ...] of each network.
        say: Prints a line for each design that is left out.

    Returns:
        The results of the remaining designs.

    Raises:
        ValueError: No design has finite outputs.
    """
    reasons: dict[str, str] = {}
    for case, measures in results.items():
        if not np.isfinite(measures["change.random"]).all():
            network = f"--designs={case.design} at depth {case.depth}"
            reasons.setdefault(case.design, f"{network}: NaN or overflow in the network")
    finite = {case: m for case, m in results.items() if case.design not in reasons}
    if not finite:
        raise ValueError("; ".join(reasons.values()))
    for reason in reasons.values():
        say(f"{reason}; the design is kept apart")
    return finite


def cut_padding(arrays: Mapping[str, np.ndarray], depth: int) -> dict[str, np.ndarray]:
    """Cuts arrays [s, k L] or [s, k L + 1] to the layers of the network's own depth.

    Args:
        arrays: Arrays of one network.
        depth: Number of layers of the network.
    """
    size, cut = arrays["apart"].shape[1] - 1, {}
    for name, values in arrays.items():
        if values.ndim > 1:
            per_layer, extra = divmod(values.shape[1], size)
            values = values[:, : per_layer * depth + extra]
        cut[name.replace("/", ".")] = values
    return cut


def draw(
    options: Options, key: jax.Array, config: rc.TransformerConfig
) -> dict[str, PyTree[Array]]:
    """Draws the weights and other random inputs of one seed.

    Args:
        options: The flags.
        key: Random key of the seed.
        config: The network.

    Returns:
        "params"; "x" and "batch", states [n, d] and [b, n, d]; "target" [n, d], the cotangent of
        the output; "direction", matrices to move the weights in.
    """
    key_params, key_tokens, key_target, key_direction = jax.random.split(key, 4)
    # Gaussian weights of their own as the direction; only directions count.
    both = jax.vmap(lambda k: rc.init(k, config))(jnp.stack([key_params, key_direction]))
    params = jax.tree.map(lambda a: a[0], both)
    direction = jax.tree.map(lambda a: a[1], both)
    shape = options.num_tokens, options.d_model
    draw_tokens = jax.vmap(lambda key: layers.apply_norm(None, jax.random.normal(key, shape)))
    batch_keys = jax.random.split(jax.random.fold_in(key_tokens, 1), NUM_PROFILED)
    return {
        "params": params,
        "x": draw_tokens(key_tokens[None])[0],
        "batch": draw_tokens(batch_keys),
        "target": jax.random.normal(key_target, shape),
        "direction": get_weight_matrices(direction),
    }


def measure_seed(
    options: Options,
    is_profiled: bool,
    key: jax.Array,
    floats: tuple[rc.TransformerConfig, jax.Array],
) -> dict[str, PyTree[Array]]:
    """Measures one seed of one network, {measure: ...}.

    Args:
        options: The flags.
        is_profiled: Whether the network may be one whose gains are profiled.
        key: Random key of the seed.
        floats: The network, and ‖W* − W‖/‖W‖.
    """
    config, size = floats
    draws = draw(options, key, config)
    params, x, target = draws["params"], draws["x"], draws["target"]
    if is_profiled:
        config = profile_omega(params, draws["batch"], config)

    def compute_loss(params):
        trace = rc.apply(params, x, config)
        return jnp.sum(target * trace.output), trace

    gradients, trace = matrix_gradients(compute_loss, params)
    sizes = expectation.update_sizes(config, size)
    law = expectation.expected_pass(params, x, config, sizes=sizes)
    moves = {"random": draws["direction"], "gradient": jax.tree.map(jnp.negative, gradients)}
    results = measure_network(params, x, config, trace, law, moves, size)
    results["change"]["sgd"] = sgd_change(params, x, config, gradients)
    results["gradient_bound"] = gradient_bound(params, gradients, target, size)
    return results


def measure_network(
    params: TransformerParams,
    x: Array,
    config: rc.TransformerConfig,
    trace: rc.Trace,
    law: expectation.ExpectedTrace,
    directions: Mapping[str, Matrices],
    size: ArrayLike,
) -> dict[str, PyTree[Array]]:
    """Measures output change, dependency and token cosines, and the law's predictions of them.

    Args:
        params, x, config, trace: The network, its tokens [n, d] and its forward pass.
        law: Law from `expectation.expected_pass`.
        directions, size: See `output_changes`.
    """
    output = normalised_output(trace, config)
    return {
        "shares": dependency.branch_shares(params, trace, config),
        "expected_shares": law.shares,
        "apart": jax.vmap(one_minus_cosine)(trace.hidden),
        "expected_log_apart": law.log_one_minus_cosine,
        "change": output_changes(params, x, config, output, directions, size),
        "expected_change": law.output_change[-1],
    }


def one_minus_cosine(x: jax.Array) -> jax.Array:
    """Computes 1 − the mean cosine of two tokens as Σ_i |x̂_i − mean|²/(n − 1), to 1e-13."""
    unit = x / jnp.linalg.norm(x, axis=1, keepdims=True)
    return jnp.sum(jnp.square(unit - unit.mean(axis=0, keepdims=True))) / (len(x) - 1)


def matrix_gradients(
    loss: Callable[[TransformerParams], tuple[Array, rc.Trace]], params: TransformerParams
) -> tuple[Matrices, rc.Trace]:
    """Computes ∂loss/∂W of every matrix; also returns the further results of loss(params)."""

    def loss_of_matrices(matrices):
        return loss(replace_weight_matrices(params, matrices))

    return jax.grad(loss_of_matrices, has_aux=True)(get_weight_matrices(params))


def normalised_output(trace: rc.Trace, config: rc.TransformerConfig) -> jax.Array:
    """Computes x̂ of the last layer, [n, d]."""
    return layers.apply_norm(None, trace.hidden[-1], config.norm, config.norm_eps)


def output_changes(
    params: TransformerParams,
    x: Array,
    config: rc.TransformerConfig,
    before: Array,
    directions: Mapping[str, Matrices],
    size: ArrayLike,
) -> dict[str, Array]:
    """Computes |x̂ − x̂*|²/d of the normalised output after an update of all matrices, by name.

    Args:
        params, x, config: The network and its tokens.
        before: x̂.
        directions: {name: matrices}; each matrix moves by the same relative size.
        size: ‖W* − W‖/‖W‖.
    """

    def compute_change(direction):
        trace = rc.apply(move_weights(params, direction, size), x, config)
        return jnp.mean(jnp.square(normalised_output(trace, config) - before))

    stacked = jax.tree.map(lambda *a: jnp.stack(a), *directions.values())
    return dict(zip(directions, jax.lax.map(compute_change, stacked), strict=True))


def move_weights(
    params: TransformerParams, direction: Matrices, size: ArrayLike
) -> TransformerParams:
    """Moves every matrix of every layer by the same relative size: W* = W + size ‖W‖_F U/‖U‖_F.

    Args:
        params: Parameters of the network.
        direction: U, a tree as `get_weight_matrices` returns; where U = 0 nothing moves.
        size: ‖W* − W‖_F/‖W‖_F.
    """

    def move(w, u):
        """Moves weights w along u, row by row, by `size` times the norm of the row."""
        axes = tuple(range(1, w.ndim))
        norms = [jnp.sqrt(jnp.sum(jnp.square(a), axis=axes, keepdims=True)) for a in (w, u)]
        unit = u / jnp.where(norms[1] == 0, 1, norms[1])
        return w + jnp.asarray(size, w.dtype) * norms[0] * unit

    matrices = jax.tree.map(move, get_weight_matrices(params), direction)
    return replace_weight_matrices(params, matrices)


def sgd_change(
    params: TransformerParams, x: Array, config: rc.TransformerConfig, gradients: Matrices
) -> Array:
    """Computes |δx̂|²/(d η²) of an SGD step W − η ∂loss/∂W of all matrices, to first order in η.

    Args:
        params: Parameters of the network.
        x: Tokens [n, d].
        config: The network.
        gradients: ∂loss/∂W of every matrix.
    """

    def compute_output(matrices):
        new_params = replace_weight_matrices(params, matrices)
        return normalised_output(rc.apply(new_params, x, config), config)

    matrices = get_weight_matrices(params)
    tangent = jax.jvp(compute_output, (matrices,), (gradients,))[1]
    return jnp.mean(jnp.square(tangent))


def gradient_bound(
    params: TransformerParams, gradients: Matrices, target: Array, size: ArrayLike
) -> Array:
    """Compute e² (Σ‖W‖‖∂W‖)²/‖u‖² per entry, the smallest possible squared change of the output by
    a gradient step.

    A step of relative size e along the gradient of every matrix changes the loss u·x̂ by e
    Σ‖W‖‖∂W‖; the output x̂ cannot change less than this change over ‖u‖.

    Args:
        params: Parameters of the network.
        gradients: ∂loss/∂W of every matrix.
        target: u [n, d].
        size: e.
    """
    norms = map(compute_matrix_norms, (get_weight_matrices(params), gradients))
    total = jax.tree.reduce(jnp.add, jax.tree.map(lambda w, g: jnp.sum(w * g), *norms))
    return jnp.square(size * total) / (jnp.sum(jnp.square(target)) * target.size)


def profile_omega(
    params: TransformerParams, batch: Array, config: rc.TransformerConfig
) -> rc.TransformerConfig:
    """Profiles Admin's ω, the gain of each skip, on a batch of states.

    A gain of NaN means that the network is not profiled yet; `padded_designs` sets it. Gains that
    are numbers stay as they are.

    Args:
        params: Parameters of the network.
        batch: States [b, n, d].
        config: The network.

    Returns:
        The network with the profiled gains as its `skip_gain`, or with its own gains.
    """

    def profile():
        profiled = rc.network.admin_profile(params, batch, config)
        return layer_gains(profiled, jnp.float32).skip

    skips = config.skip_gain
    gains = jax.lax.cond(jnp.isnan(skips.attention[0]), profile, lambda: skips)
    return config.replace(skip_gain=gains)
