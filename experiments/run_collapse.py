"""Rank collapse with depth: residual of the tokens, layer by layer, at initialisation.

Reproduces the residual figures of Dong, Cordonnier and Loukas (2021) on random networks, without a
checkpoint. Draws the relative residual by layer for attention alone (san), with MLPs (san_mlp),
with skips (san_skip) and for the full model (transformer), with any placement of norms. Also draws
the logarithm of the residual to any depth, with the 3^L law and the bound of the theorems.

    python -m experiments.run_collapse
    python -m experiments.run_collapse --depth=32 --num_seeds=64 --norm_placement=none,post,pre
    python -m experiments.run_collapse --weight_scale=0.25,0.5,1,2 --skip_gain=0,0.5,1

Takes half a minute on two cores at the defaults, most of it for compiling. Expect the ratio of san
and san_mlp to be 0 after three layers, and the local rate of san to be 3. With skips more of the
ratio remains, the more the smaller the weights are (--weight_scale).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax.typing import ArrayLike

import rank_collapse as rc
from experiments.collapse.collapse_claims import compare_results, judge_claims, make_finding
from experiments.collapse.collapse_figures import (
    TIGHTNESS,
    bounds_and_constant_figure,
    depth_figure,
    local_rate_figure,
    log_residual_figure,
    mlp_gain_figure,
    residual_ratio_figure,
    sweep_skip_gain_figure,
    sweep_weight_scale_figure,
)
from experiments.collapse.layer_residuals import (
    describe_gaps,
    local_rates,
    measure_chunk,
    measure_laws,
    measure_plain,
)
from experiments.lab import (
    SEEDS,
    Executor,
    Experiment,
    Flags,
    Mapped,
    Options,
    Run,
    RunFolder,
    check_names,
    cli,
    describe_figures,
    initial_tokens,
    labelled,
    open_run,
    shared_flags,
)
from experiments.verdicts import TableRow
from rank_collapse.measures.rounding import rounding_limit
from rank_collapse.network.layers import MLP_KINDS
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.residual import Gains
from rank_collapse.theory import logdomain

NETWORKS = {
    "san": rc.san,
    "san_mlp": rc.san_mlp,
    "san_skip": rc.san_skip,
    "transformer": rc.transformer,
}
AXES = ("norm_placement", "weight_scale", "skip_gain")
COLUMNS = (
    "ratio",
    "log10_residual",
    "plain_log10_residual",
    "rounding",
    "log10_bound",
    "log10_layer_bound",
    "log10_published_bound",
    "admissible",
    *TIGHTNESS,
    "log10_cubic",
    "log10_c",
    "local_rate",
)

FLAGS = cli.make_flags(
    "collapse",
    num_seeds=8,
    can_grow=True,
    shows="ratio,variant=last,layer=last",
    traced=("weight_scale", "skip_gain"),
    execution=("seed_chunk",),
)
FLAGS.define("list", "variants", list(NETWORKS), f"Networks, out of {', '.join(NETWORKS)}.")
shared_flags.define(
    FLAGS,
    norm_placement="none",
    weight_scale=1.0,
    skip_gain=1.0,
    norm_kind="layer",
    depth=12,
    num_heads=4,
    d_model=64,
    d_ff=None,
    mask="none",
    window=2,
    init="lecun",
    bias_scale=0.0,
)
shared_flags.define_alias(FLAGS, norm="norm_placement")
FLAGS.define("enum", "mlp", "gelu", "MLP of san_mlp and transformer.", MLP_KINDS[1:])
FLAGS.define("boolean", "san_mlp_skip", False, "Keep the MLP's own skip in san_mlp, as published.")
shared_flags.define_numbers(
    FLAGS,
    "mlp_gain",
    [],
    "Gains of the MLPs at which san_mlp is measured too, without norms: where they begin to slow "
    "the collapse. With 1 among them, post-norm with the MLPs' own skip too, as published.",
    kind=float,
)
initial_tokens.define_flags(FLAGS)
FLAGS.define(
    "enum", "dtype", "float32", "Arithmetic of the forward pass.", list(initial_tokens.DTYPES)
)
FLAGS.define("integer", "seed_chunk", 16, "Largest number of seeds in memory.", lower_bound=1)

Configs = dict[str, rc.TransformerConfig]


class Networks(NamedTuple):
    """What the flags ask for."""

    networks: Configs  # By variant
    gains: list[float]  # Of the MLPs, ascending; none by default
    ids: np.ndarray | None  # Token ids of the text; None for Gaussian tokens
    source: dict[str, str]  # What identifies the input
    rounding: float  # Residual ratio at which rounding decides the ordinary forward pass


def make_setup(options: Options) -> Networks:
    """Makes the networks of the flags, and reads their tokens.

    Args:
        options: The flags.

    Raises:
        ValueError: Flags that do not fit each other, or a text that cannot be read.
    """
    check_names(options, "variants", NETWORKS)
    ids, source = initial_tokens.read_tokens(options)
    gains = sorted(set(options.mlp_gain))
    if any(gain <= 0 for gain in gains):
        raise ValueError(f"--mlp_gain needs numbers above 0, not {options.mlp_gain}")
    if gains and "san_mlp" not in options.variants:
        raise ValueError(f"--mlp_gain={options.mlp_gain} needs san_mlp in --variants")
    networks = make_configs(options, options.norm_placement, options.variants)
    limit = rounding_limit(initial_tokens.DTYPES[options.dtype])
    return Networks(networks, gains, ids, source, limit)


def make_configs(options: Options, norm: str, variants: Sequence[str]) -> Configs:
    """Makes the configuration of every variant.

    Args:
        options: Sizes and parts of the networks.
        norm: Placement of the norms.
        variants: Names of `NETWORKS`.

    Raises:
        ValueError: Unknown norm; sizes that do not fit.
    """
    sizes = options.depth, options.num_heads, options.d_model
    fields = {name: options[name] for name in ("d_ff", "mask", "window", "init")}
    fields |= {"norm_placement": norm, "norm": options.norm_kind}
    mlps = {
        "san_mlp": {"mlp": options.mlp, "mlp_skip": options.san_mlp_skip},
        "transformer": {"mlp": options.mlp},
    }
    return {name: NETWORKS[name](*sizes, **fields, **mlps.get(name, {})) for name in variants}


def measure(options: Options, setup: Networks, folder: RunFolder) -> xr.Dataset:
    """Measures all variants and seeds by layer, resuming from the run.

    Args:
        options: The flags.
        setup: The networks and tokens.
        folder: The run folder; results that it already holds are not computed again.

    Returns:
        A Dataset over "variant", "seed" and "layer"; "swept" has the gains of the MLPs instead of
        variants.
    """
    most, draw_seed = min(options.seed_chunk, options.num_seeds), partial(draw, options, setup)
    with Executor(options, folder, "collapse") as executor:
        progress, single = executor.progress, partial(measure_seed, options, setup)

        def make_cells(point):
            return {SEEDS: (point.weight_scale, point.skip_gain)}

        mapped, norm = (
            Mapped(single, executor.mesh, progress, draw=draw_seed),
            options.norm_placement,
        )
        for chunk in executor.chunks(make_cells, mapped, most=most):
            results = measure_chunk(mapped, chunk, setup.networks, norm, progress)
            executor.save(chunk, results)
        arrays = executor.read(make_cells)[SEEDS]
        results = labelled.make_dataset(arrays, ("variant", "layer"), swept=("mlp_gain", "layer"))
        if not folder.summary:
            for line in describe_gaps(results):
                progress.say(line)
    return results.assign(local_rate=local_rates(results.log10_residual))


Draws = tuple[jax.Array, TransformerParams]  # tokens [n, d] and weights


def draw(
    options: Options, setup: Networks, key: jax.Array, floats: tuple[ArrayLike, ArrayLike]
) -> Draws:
    """Draws one seed: tokens, and one set of parameters for every variant and norm placement.

    The parameters are those of a network with all norms ("sandwich") and, if a variant has one, the
    MLP; each variant reads those that it needs, so all have the same weights.

    Args:
        options: The flags.
        setup: The networks.
        key: Random key of the seed.
        floats: Scale of the weights, and gain of the skips.

    Returns:
        (tokens [n, d], parameters).
    """
    key_tokens, key_params = jax.random.split(key)
    configs = list(make_configs(options, "sandwich", options.variants).values())
    largest = next((c for c in configs if c.mlp != "none"), configs[0])
    x = initial_tokens.input_tokens(key_tokens, setup.ids, options)
    return x, rc.init(key_params, largest, floats[0], options.bias_scale)


def measure_seed(
    options: Options, setup: Networks, draws: Draws, floats: tuple[ArrayLike, ArrayLike]
) -> dict[str, dict[str, jax.Array]]:
    """Measures one seed.

    Networks that differ only in gains share a program: a network without a skip has a skip of gain
    0.

    Args:
        options: The flags.
        setup: The networks.
        draws: Draws from `draw`.
        floats: Scale of the weights, and gain of the skips.

    Returns:
        {measure: {variant: [L + 1]}}; "swept" has the logarithms of the residual at each gain of
        the MLPs.
    """
    x, params = draws
    results, configs, norm = {}, setup.networks, options.norm_placement
    for kind in dict.fromkeys(c.mlp for c in configs.values()):
        group = {variant: c for variant, c in configs.items() if c.mlp == kind}
        gains = [
            (floats[1] * c.attention_skip, floats[1] * c.mlp_skip, 1.0) for c in group.values()
        ]
        swept = choose_gains(setup.gains, norm) if "san_mlp" in group else []
        gains += [(0.0, float(group["san_mlp"].mlp_skip or norm != "none"), g) for g in swept]
        network = next(iter(group.values())).replace(attention_skip=True, mlp_skip=True)

        def measure_gains(gains, network=network):
            """Measures one network with gains of the skips of attention and MLPs, and of the MLPs.

            Returns:
                (the measurement in plain numbers, the trace in logarithms).
            """
            skip, branch = Gains(attention=gains[0], mlp=gains[1]), Gains(mlp=gains[2])
            config = network.replace(skip_gain=skip, branch_gain=branch)
            plain = measure_plain(params, x, config, initial_tokens.DTYPES[options.dtype])
            return plain, logdomain.log_trace(params, x, config)

        plains, logs = jax.lax.map(measure_gains, jnp.asarray(gains))
        for i, (variant, config) in enumerate(group.items()):
            plain, log = jax.tree.map(lambda a, i=i: a[i], (plains, logs))
            for name, values in (plain | measure_laws(params, x, config, log)).items():
                results.setdefault(name, {})[variant] = values
        if swept:
            curves = zip(swept, logs.profile[len(group) :], strict=True)
            results["swept"] = {f"{gain:g}": curve for gain, curve in curves}
    return results


def choose_gains(gains: list[float], norm: str) -> list[float]:
    """Chooses the gains of MLPs at which san_mlp is also measured.

    Post-norm undoes the gain of MLPs without their own skip. There they are measured as published,
    with their skip and a gain of 1, if this is requested. Pre-norm is left out.

    Args:
        gains: The requested gains.
        norm: Placement of the norms.
    """
    if norm == "none":
        return gains
    return [gain for gain in gains if gain == 1 and norm != "pre"]


def make_rows(results: xr.Dataset, setup: Networks) -> Iterator[TableRow]:
    """Makes a row for each network, seed and layer."""
    by_variant = results.drop_dims("mlp_gain", errors="ignore")
    is_rounding = (by_variant.ratio <= setup.rounding).astype(float)
    by_variant = by_variant.assign(rounding=is_rounding.where(by_variant.ratio.notnull()))
    return labelled.table_rows(by_variant, (*AXES, "variant", "seed", "layer"), COLUMNS)


EXPERIMENT = Experiment(
    order=10,
    title="Rank collapse with depth",
    brief="how the residual changes with depth in four kinds of networks, without norms, with "
    "Post-LN or with Pre-LN, on text or Gaussian tokens, compared with the bounds and the law "
    "3^L; also for several scales of the weights and gains of the skips",
    claim="In attention alone, without skips and MLPs, the residual falls doubly exponentially "
    "with depth (Theorems 2.2 and 2.3). MLPs can slow this collapse: the bound is larger if "
    "their Lipschitz constant is larger (Corollary 3.2). Skips stop the collapse, and LayerNorm "
    "does not (section 3; figures with residuals of BERT, ALBERT and XLNet).",
    presets={
        # Gains beside which MLPs begin to slow the collapse, and that of the published form.
        "quick": "--norm_placement=none,post --weight_scale=0.55,1 --num_seeds=8 "
        "--mlp_gain=1,2,4,8 --num_tokens=32",
        "reported": "--seed=3000 --norm_placement=none,post --weight_scale=0.55,1 --num_seeds=8 "
        "--d_model=768 --num_heads=12 --num_tokens=32 --seed_chunk=2 --mlp_gain=1,2,4,8",
        "tiny": "--num_seeds=2 --depth=2 --num_heads=2 --d_model=4 --d_ff=4 --num_tokens=4",
    },
    figures=describe_figures(
        depth_figure,
        residual_ratio_figure,
        log_residual_figure,
        local_rate_figure,
        bounds_and_constant_figure,
        mlp_gain_figure,
        sweep_weight_scale_figure,
        sweep_skip_gain_figure,
    ),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    with open_run(options, make_setup, lambda setup: setup.source) as run:
        for point in run.measure(measure, over=AXES):
            results = point.results
            point.save_table(make_rows(results, point.setup))
            point.save_figure("depth", depth_figure, results)
            point.save_figure("residual_ratio", residual_ratio_figure, results)
            point.save_figure("log_residual", log_residual_figure, results)
            point.save_figure("local_rate", local_rate_figure, results)
            point.save_figure("bounds_and_constant", bounds_and_constant_figure, results)
            point.save_figure("mlp_gain", mlp_gain_figure, results)
            point.save_figure("sweep_weight_scale", sweep_weight_scale_figure, results)
            point.save_figure("sweep_skip_gain", sweep_skip_gain_figure, results)
            point.save_claims(judge_claims(results))
            point.save_comparisons(compare_results(results))
            point.save_finding(make_finding(results))
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
