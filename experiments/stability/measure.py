"""What run_stability measures on one seed of one network, and what the one law expects of it."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh

import rank_collapse as rc
from experiments.shell.progress import Progress
from experiments.stability.cases import Group, with_gains
from rank_collapse.measures import dependency, updates
from rank_collapse.network import layers
from rank_collapse.paths.dependency import variance_shares
from rank_collapse.runs import seeds
from rank_collapse.runs.folder import RunFolder
from rank_collapse.theory import stability
from rank_collapse.theory.logdomain import log_residual_profile

GAINED = {"attention": ("w_v", "w_o"), "mlp": ("w_in", "w_gate", "w_out")}  # by a design's β


def make_draw(config: rc.TransformerConfig, options: flags.FlagValues) -> Callable:
    """draw(key, None) → weights, tokens, a target, and a direction to move the weights in.

    The weights are those of every group: norms, which are not drawn, are added by `with_norms`.
    """
    plain = config.replace(norm_placement="none", final_norm=False, qk_norm="none")

    def draw(key, _):
        key_params, key_tokens, key_target, key_direction = jax.random.split(key, 4)
        shape = (options.num_tokens, options.d_model)
        # Gaussian weights of their own as the direction; only directions count.
        drawn = jax.vmap(lambda k: rc.init(k, plain))(jnp.stack([key_params, key_direction]))
        params, other = (jax.tree.map(lambda a, i=i: a[i], drawn) for i in (0, 1))
        return {
            "params": params,
            "x": layers.norm(None, jax.random.normal(key_tokens, shape)),
            "target": jax.random.normal(key_target, shape),
            "direction": updates.matrices_of(other),
        }

    return draw


def with_norms(params: rc.TransformerParams, config: rc.TransformerConfig) -> rc.TransformerParams:
    """The parameters with the norms that a config has, as `init` makes them: gains 1, biases 0."""
    shapes = jax.eval_shape(lambda: rc.init(jax.random.key(0), config))
    found = {jax.tree_util.keystr(p): a for p, a in jax.tree_util.tree_leaves_with_path(params)}

    def filled(path, like):
        name = jax.tree_util.keystr(path)
        made = jnp.zeros if name.endswith("bias") else jnp.ones
        return found.get(name, made(like.shape, like.dtype))

    return jax.tree_util.tree_map_with_path(filled, shapes)


def scaled(params: rc.TransformerParams, gain: Any) -> rc.TransformerParams:
    """The parameters with V, O and MLP times a gain, as `init` draws them with `init_gain`."""
    found = updates.matrices_of(params)
    factors = {
        part: {n: (gain if n in GAINED[part] else 1.0) * w for n, w in matrices.items()}
        for part, matrices in found.items()
    }
    return updates.with_matrices(params, factors)


def make_measure(group: Group, options: flags.FlagValues, *, by_layer: bool) -> Callable:
    """measure(drawn, gains of all cases) of one seed: {measure: [case, ...]}.

    Args:
        group: Of one compiled program.
        options: The flags.
        by_layer: Whether to measure what costs most: exact shares, residuals in logarithms, and
            expected gradients.
    """
    size = options.update_size

    def of_case(drawn, gains):
        config = with_gains(group.config, gains)
        params = scaled(with_norms(drawn["params"], config), gains["init"])
        x, target = drawn["x"], drawn["target"]

        def loss(params):
            out = rc.apply(params, x, config).output
            return jnp.sum(target * out)

        trace = rc.apply(params, x, config)
        gradients = updates.matrix_gradients(loss, params)
        downhill = jax.tree.map(jnp.negative, gradients)
        directions = jax.tree.map(lambda *a: jnp.stack(a), drawn["direction"], downhill)
        change = jax.lax.map(
            lambda d: updates.output_change(params, updates.moved(params, d, size), x, config)[-1],
            directions,
        )
        sizes = stability.update_sizes(config, size)
        if by_layer:
            expected_gradients, expected = stability.expected_gradient_norms(
                params, x, config, sizes=sizes
            )
        else:
            expected = stability.expected_pass(params, x, config, sizes=sizes)
        out = {
            "change": {"random": change[0], "gradient": change[1]},
            "expected_change": expected.output_change[-1],
            "shares": dependency.branch_shares(params, trace, config),
            "expected_shares": expected.shares,
            "apart": jax.vmap(one_minus_cosine)(trace.hidden),
            "expected_log_apart": expected.log_one_minus_cosine,
        }
        if not by_layer:
            return out
        if options.log_residual:
            log10_residual = log_residual_profile(params, x, config)
        else:
            size_of = jax.vmap(lambda h: rc.composite_norm(rc.residual(h)))
            log10_residual = jnp.log10(size_of(trace.hidden))
        return out | {
            "ratio": jax.vmap(rc.residual_ratio)(trace.hidden),
            "frobenius": jax.vmap(lambda h: rc.residual_ratio(h, norm="frobenius"))(trace.hidden),
            "expected_frobenius": expected.residual_ratio,
            "log10_residual": log10_residual,
            "exact_shares": variance_shares(params, x, config),
            "gradients": updates.norms_of(gradients),
            "expected_gradients": expected_gradients,
        }

    def measure(drawn, gains):
        return jax.lax.map(lambda own: of_case(drawn, own), gains)

    return measure


def one_minus_cosine(x: jax.Array) -> jax.Array:
    """1 − the mean cosine of two tokens, as Σ_i |x̂_i − mean|²/(n − 1): in float32 to 1e-13."""
    unit = x / jnp.linalg.norm(x, axis=1, keepdims=True)
    return jnp.sum(jnp.square(unit - unit.mean(axis=0, keepdims=True))) / (len(x) - 1)


def measure_all(
    options: flags.FlagValues, parts: Mapping[str, list[Group]], mesh: Mesh, run: RunFolder
) -> dict[str, dict[str, np.ndarray]]:
    """{"design/depth": {measure: [s, ...]}}, resuming from the run group by group.

    Args:
        options: The flags.
        parts: Groups by part: "layers", measured by layer too, and "depths".
        mesh: Of the devices that share the seeds.
        run: Holds what was measured before.

    Raises:
        ValueError: A network whose output is no number.
    """
    total = sum(len(group.cases) for groups in parts.values() for group in groups)
    keys = seeds.seed_keys(options.seed, options.num_seeds)
    results, drawn = {}, {}

    def draw(part):
        """The weights of a part, drawn once for all of its groups."""
        if part not in drawn:
            drawn.clear()
            call = seeds.spread(make_draw(parts[part][0].config, options), mesh)
            drawn[part] = call(seeds.lay_out(keys, mesh), None)
        return drawn[part]

    with Progress(total, "stability", log=run.log) as progress:
        for part, groups in parts.items():
            for index, group in enumerate(groups):
                found = run.cached(
                    f"{part}/{index}",
                    lambda g=group, p=part: _of_group(g, p, draw(p), options, mesh),
                )
                results |= _by_case(group, found)
                progress.advance(len(group.cases))
    return results


def _of_group(group, part, drawn, options, mesh):
    measure = make_measure(group, options, by_layer=part == "layers")
    out = seeds.spread(measure, mesh, at_once=1)(drawn, group.gains)
    found = {
        jax.tree_util.keystr(path, simple=True, separator="."): value
        for path, value in jax.tree_util.tree_leaves_with_path(
            seeds.to_host(out, options.num_seeds)
        )
    }
    for index, case in enumerate(group.cases):
        if not np.isfinite(found["change.random"][:, index]).all():
            raise ValueError(f"{case.design} at depth {case.depth}: NaN or overflow in the network")
    return found


def _by_case(group, found):
    """What belongs to the layers past a network's own is cut away."""
    out = {}
    for index, case in enumerate(group.cases):
        cut = {}
        for name, values in found.items():
            values = values[:, index]
            if name == "exact_shares":
                rows = case.branches + 1
                values = np.concatenate([values[:, :rows, :rows], values[:, :rows, -1:]], axis=2)
            elif name in ("shares", "expected_shares"):
                values = values[:, : case.branches]
            elif values.ndim > 1:  # [s, L] or [s, L + 1]
                values = values[:, : case.depth + values.shape[1] - group.config.depth]
            cut[name] = values
        out[f"{case.design}/{case.depth}"] = cut
    return out
