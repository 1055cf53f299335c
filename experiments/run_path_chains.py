"""Path chains: how products of attention matrices lose rank, and how large paths are by length.

Reproduces the box plots of chained attention in Dong, Cordonnier and Loukas (2021): the residual of
the product P_path along random paths with length 1 .. L, relative to 1pᵀ and to the best
approximation of rank one. Also computes the exact sum over all paths of each length, predicts its
size from the skip's share α, and measures the error of a sum that is estimated from 5 or 20
sampled paths.

    python -m experiments.run_path_chains
    python -m experiments.run_path_chains --depth=12 --num_heads=12 --d_model=192 --num_tokens=128

Takes less than a minute on two cores at the quick size. Expect the residual of products to fall by
a constant factor in each layer, and the residual of contributions to be largest at short lengths.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

import rank_collapse as rc
from experiments.lab import (
    SEEDS,
    Executor,
    Experiment,
    Flags,
    Options,
    Run,
    RunFolder,
    cli,
    describe_figures,
    initial_tokens,
    labelled,
    open_run,
    plots,
    shared_flags,
)
from experiments.train import path_sizes
from experiments.verdicts import Comparison, Row, TableRow, make_row, statistics
from rank_collapse.measures import residuals
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.printed import format_count
from rank_collapse.report import figures
from rank_collapse.runs import seeds

SAMPLES = (5, 20)  # sizes of the published sets of paths
CHAINS = {"chain_mean": "against $1p^T$", "chain_rank_one": "against the best rank one"}
FIELDS = ("mlp", "norm_placement", "mask", "window", "init", "skip_gain")
COLUMNS = (
    "paths",
    "log10_norm",
    "log10_residual",
    "predicted_log10_residual",
    "alpha_of_layer",
    *(f"{name}_median" for name in CHAINS),
    *(f"error_of_{number}_paths" for number in SAMPLES),
)

FLAGS = cli.make_flags("path_chains", num_seeds=4, shows="log10_residual,length=last")
shared_flags.define(
    FLAGS,
    depth=8,
    num_heads=4,
    d_model=64,
    mlp="gelu",
    norm_placement="post",
    norm_kind="layer",
    mask="none",
    window=2,
    init="lecun",
    weight_scale=1.0,
    skip_gain=1.0,
    bias_scale=0.0,
    seed_chunk=0,
)
FLAGS.define("integer", "num_paths", 100, "Random paths per length and seed.", lower_bound=1)
FLAGS.define(
    "integer", "num_repeats", 5, "Sets per length and seed whose error is measured.", lower_bound=1
)
initial_tokens.define_flags(FLAGS)
FLAGS.define("enum", "dtype", "float64", "Arithmetic.", ("float32", "float64"))


def make_setup(options: Options) -> initial_tokens.TokenNetwork:
    """Makes the network of the flags, and reads its tokens.

    Args:
        options: The flags.
    """
    config = rc.transformer(
        options.depth,
        options.num_heads,
        options.d_model,
        norm=options.norm_kind,
        **{name: options[name] for name in FIELDS},
    )
    return initial_tokens.TokenNetwork(config, *initial_tokens.read_tokens(options))


def measure(
    options: Options, setup: initial_tokens.TokenNetwork, folder: RunFolder
) -> dict[str, np.ndarray]:
    """Measures all seeds, and computes the quantities of all seeds together.

    Args:
        options: The flags.
        setup: The network and its tokens.
        folder: The run folder; results that it already holds are not computed again.

    Returns:
        The results of `measure_seed` [s, ...]; the law of α, medians over paths, numbers of paths.

    Raises:
        ValueError: The outputs of all networks are NaN or infinite.
    """
    with Executor(options, folder, "path chains") as executor:
        # A CPU takes its seeds one by one: they are saved as they come.
        most = executor.mesh.size if seeds.is_on_cpu(executor.mesh) else None
        arrays = executor.measure(
            lambda draws, _: measure_seed(setup, draws),
            {SEEDS: None},
            most=most,
            draw=lambda key, _: draw(options, setup, key),
        )[SEEDS]
        arrays = keep_finite_seeds(arrays, executor.progress.say)
    depth, num_heads = setup.config.depth, setup.config.num_heads
    names = ("skip_size", "branch_size", "initial_residual")
    alpha, predicted = jax.jit(path_sizes.alpha_law, static_argnums=4)(
        *map(arrays.get, names), arrays["chain_mean"][:, 0], num_heads
    )
    errors = np.median(arrays["estimate_error"], axis=3)
    with np.errstate(divide="ignore"):  # a product of rank one to the last digit
        falls = np.log10(np.median(arrays["chain_mean"], axis=2))
    return arrays | {
        "length": np.arange(depth + 1),
        "paths": rc.count_paths(depth, num_heads),
        "predicted_log10_residual": np.asarray(predicted),
        "alpha_of_layer": pad_start(alpha),
        **{f"{name}_median": pad_start(np.median(arrays[name], axis=2)) for name in CHAINS},
        **{f"error_of_{n}_paths": pad_start(errors[:, i]) for i, n in enumerate(SAMPLES)},
        "chain_slope": statistics.slope(np.arange(depth), falls),
    }


Draws = tuple[jax.Array, TransformerParams, jax.Array, jax.Array]


def draw(options: Options, setup: initial_tokens.TokenNetwork, key: jax.Array) -> Draws:
    """Draws one seed.

    Args:
        options: The flags.
        setup: The network and its tokens.
        key: Random key of the seed.

    Returns:
        Tokens, parameters, paths [L, p, L] of chains and sets of paths [L, repeats, p, L].
    """
    config, depth = setup.config, setup.config.depth
    key_tokens, key_params, *keys = jax.random.split(key, 4)
    x = initial_tokens.input_tokens(key_tokens, setup.ids, options)
    params = rc.init(key_params, config, options.weight_scale, options.bias_scale)
    repeats, most = options.num_repeats, max(options.num_paths, *SAMPLES)

    def draw_paths(key):
        lengths = range(1, depth + 1)
        return rc.paths.sample_path_sets(key, lengths, repeats, most, depth, config.num_heads)

    # Fewer repeats and paths are the first of more, and random numbers take long to compile.
    paths, sets = jax.vmap(draw_paths)(jnp.stack(keys))
    return x, params, paths[:, 0, : options.num_paths], sets[:, :, : max(SAMPLES)]


def measure_seed(setup: initial_tokens.TokenNetwork, draws: Draws) -> dict[str, jax.Array]:
    """Measures one seed: products of attention matrices along paths, and sums over all paths by
    length.

    Args:
        setup: The network.
        draws: Tokens [n, d]; parameters; p random paths of each length 1 to L, one head or skip for
            each layer [L, p, L]; sets of paths of each length [L, repeats, p, L], from `draw`.

    Returns:
        "chain_mean" and "chain_rank_one" [L, p]: the relative distance of the product along each
        path from equal rows, and from rank one; "log10_norm", "log10_residual" [L + 1]: sizes of
        the exact sums of each length; "skip_size", "branch_size" [L]: sizes of both summands in
        each layer; "estimate_error" [number, L, repeats]: relative error of a sum estimated from
        few paths; "initial_residual", and "sum_error", the relative error of the sum over all
        lengths.
    """
    config, depth = setup.config, setup.config.depth
    x, params, paths, sets = draws
    trace = rc.apply(params, x, config)
    to_mean, to_rank_one = jax.lax.map(
        lambda path: path_sizes.chained_residual(trace.attention, path), paths.reshape(-1, depth)
    )
    sums = rc.path_contributions(params, x, config)
    norm, residual = path_sizes.measured_sizes(sums.by_length)
    skip, branch = path_sizes.branch_sizes(params, trace, config)
    # Sets of one path each: the states of all paths, shared beginnings computed once.
    terms = rc.paths.path_set_states(params, x, config, sets[..., None, :], semantics="frozen")
    counts = jnp.asarray(rc.count_paths(depth, config.num_heads)[1:], x.dtype)[:, None, None, None]

    def estimate_error(number):
        """Computes the relative error of sums that are estimated from the first `number` paths, [L,
        repeats]."""
        exact, estimate = sums.by_length[1:, None], counts * terms[:, :, :number].mean(axis=2)
        error, size = (jnp.linalg.norm(a, axis=(2, 3)) for a in (estimate - exact, exact))
        return error / size

    return {
        "chain_mean": to_mean.reshape(depth, -1),
        "chain_rank_one": to_rank_one.reshape(depth, -1),
        "log10_norm": norm,
        "log10_residual": residual,
        "initial_residual": rc.composite_norm(residuals.residual(x)),
        "skip_size": skip,
        "branch_size": branch,
        "estimate_error": jnp.stack([estimate_error(number) for number in SAMPLES]),
        "sum_error": jnp.linalg.norm(sums.total - trace.output) / jnp.linalg.norm(trace.output),
    }


def keep_finite_seeds(
    arrays: dict[str, np.ndarray], say: Callable[[str], None]
) -> dict[str, np.ndarray]:
    """Keeps the seeds whose networks' outputs are finite, and reports which are left out.

    Args:
        arrays: Measures [s, ...].
        say: Prints a line for each seed that is left out.

    Returns:
        The measures of the remaining seeds; their numbers as "seed" [s].

    Raises:
        ValueError: No seed has finite outputs.
    """
    is_finite = np.isfinite(arrays["sum_error"])
    reason = "NaN or overflow in the network; a smaller --weight_scale or --norm_placement=post"
    reason += " may hold it"
    if not is_finite.any():
        raise ValueError(reason)
    for seed in np.flatnonzero(~is_finite):
        say(f"seed {seed} is kept apart: {reason}")
    finite = {name: values[is_finite] for name, values in arrays.items()}
    return finite | {"seed": np.flatnonzero(is_finite)}


def pad_start(values: ArrayLike) -> np.ndarray:
    """Pads [..., k] of lengths or layers 1 .. k with NaN at 0, [..., k + 1]."""
    return np.insert(np.asarray(values), 0, np.nan, axis=-1)


def make_rows(results: dict[str, np.ndarray]) -> Iterator[TableRow]:
    """Makes a row for each seed and length."""
    return labelled.product_rows(results, ("seed", "length"), COLUMNS)


@figures.styled
def path_chains_figure(results: dict[str, np.ndarray], setup: initial_tokens.TokenNetwork):
    """Products of attention matrices along random paths, by path length (horizontal axis), which is
    the number of matrices in the product. The vertical axis is the distance of the product from a
    simpler matrix, divided by the norm of the product. Left: the simpler matrix has equal rows.
    Right: the simpler matrix is the best approximation of rank one. Boxes show medians, quartiles
    and outliers over paths and seeds."""
    fig, axes = figures.figure(1, 2, sharey=True)
    for ax, (name, title) in zip(axes[0], CHAINS.items(), strict=True):
        values = np.swapaxes(results[name], 0, 1).reshape(setup.config.depth, -1)
        draw_boxes(ax, results["length"][1:], values)
        ax.set(yscale="log", xlabel="path length", title=title)
    symbol = r"$\|\mathrm{res}(P_{path})\|_{1,\infty}\,/\,\|P_{path}\|_{1,\infty}$"
    axes[0, 0].set_ylabel(f"residual ratio of the product\n{symbol}")
    return fig


def draw_boxes(ax: figures.Axes, x: np.ndarray, values: np.ndarray) -> None:
    """Plot a box at each x [k] of values [k, s]: median, quartiles and outliers.

    The axis should be logarithmic: 0 becomes the smallest float.
    """
    boxplot = ax.boxplot(
        list(np.maximum(values, np.finfo(float).tiny)),
        positions=x,
        patch_artist=True,
        flierprops={"marker": ".", "markersize": 2, "markeredgecolor": "#8A8A8A"},
        medianprops={"color": "black"},
    )
    for box in boxplot["boxes"]:
        box.set(facecolor=figures.color(5), linewidth=0.8)


@figures.styled
def path_lengths_figure(results: dict[str, np.ndarray]):
    """We add up the contributions of all paths of length k (horizontal axis); the sum is called
    C_k. Left: log10 of the norm of C_k, and log10 of the norm of its residual. The dashed line is a
    prediction of the norm of the residual; from k = 1 on, this prediction falls doubly
    exponentially. Middle: lines show the share of each length in the total of these norms, and bars
    show the share of each length in the number of paths. Right: relative error if C_k is estimated
    from 5 or 20 sampled paths. On the dashed line, the error is as large as the error of the
    estimate zero. Left and middle, lines are means and bands are standard deviations over seeds.
    Right, lines are medians and bands are quartiles over seeds and repetitions."""
    k, counts = results["length"], np.array([float(count) for count in results["paths"]])
    fig, ((sizes, shares, errors),) = figures.figure(1, 3, width=3.9, height=3.3)
    shares.bar(k, counts / counts.sum(), width=0.85, color=figures.color(5), label="share of paths")
    names = {
        "log10_norm": (r"$\|C_k\|$", "norms"),
        "log10_residual": (r"$\|\mathrm{res}(C_k)\|$", "residuals"),
    }
    for index, (name, (symbol, text)) in enumerate(names.items()):
        logs = results[name]
        figures.band(sizes, k, logs, f"{symbol}, measured", index)
        size = 10 ** (logs - logs.max(axis=1, keepdims=True))
        share = size / size.sum(axis=1, keepdims=True)
        figures.band(shares, k, share, f"share of the {text}", index)
    limits = sizes.get_ylim()  # the predicted sizes fall out of it, doubly exponentially
    law = results["predicted_log10_residual"]
    sizes.plot(k, law, "k--", label="the same, predicted by α of each layer")
    for index, number in enumerate(SAMPLES):
        error = np.moveaxis(results["estimate_error"][:, index], 1, 2).reshape(-1, k[-1])
        plots.quartiles(errors, k[1:], error, f"{number} sampled paths", index)
    errors.axhline(1, color=figures.DARK_GREY, lw=0.9, ls="--")
    label = r"$\log_{10}$ of the size $\|\cdot\|_{1,\infty}$"
    sizes.set(ylabel=label, title="all paths of one length", ylim=limits)
    shares.set(ylabel="share of all lengths", title="counted and weighed")
    errors.set(yscale="log", ylabel="relative error", title="a sum estimated from few paths")
    figures.finish_axes((sizes, shares, errors), "path length")
    for ax in (sizes, shares, errors):
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18))
    return fig


def judge_claims(results: dict[str, np.ndarray], setup: initial_tokens.TokenNetwork) -> list[Row]:
    """Tests whether chains lose rank, and whether short paths are the largest.

    Args:
        results: Results of `measure`.
        setup: The network and its tokens.
    """
    text = format_count(setup.config.depth, "layer")
    most = int(np.argmax([float(count) for count in results["paths"]]))
    shorter = results["log10_residual"].argmax(axis=1) - most  # below 0: short paths are the large
    return [
        make_row("chains", text, results["chain_slope"]),
        make_row("short at first", text, shorter, note=f"most paths have length {most}"),
    ]


def compare_results(
    results: dict[str, np.ndarray], setup: initial_tokens.TokenNetwork
) -> list[Comparison]:
    """Compares the sum of all paths with the output, which must be equal, and lists other numbers.

    Args:
        results: Results of `measure`.
        setup: The network and its tokens.
    """
    chain = np.median(results["chain_mean"], axis=(0, 2))
    error = np.median(results["estimate_error"][:, 0], axis=(0, 2))
    depth = setup.config.depth
    rounding = depth * setup.config.d_model * np.finfo(results["sum_error"].dtype).eps
    return [
        Comparison(
            "‖Σ_k C_k + offset − output‖/‖output‖, the largest over seeds",
            float(results["sum_error"].max()),
            0.0,
            f"theorem 2.1, an identity; rounding is of the order L d eps = {rounding:.1g}",
            source="expected",
        ),
        Comparison(
            f"median residual of chains, length 1 and {depth}",
            f"{chain[0]:.2g}, {chain[-1]:.2g}",
            "falls with length",
            "box plots of chained attention in the published notebook",
        ),
        Comparison(
            "least relative error, over lengths, of a sum estimated from 5 paths",
            f"{error.min():.2g}",
            note="the published sets have 5 or 20 paths",
        ),
    ]


EXPERIMENT = Experiment(
    order=30,
    title="Chained attention and the size of paths",
    brief="products of attention matrices along paths, and the size of the sum of all paths of "
    "each length",
    claim="The longer a path is, the closer is the product of the attention matrices on it to a "
    "matrix of rank one (published box plots of chained attention). Most paths are long, "
    "but the network works mainly through short paths (section 4 on the effectiveness of "
    "paths).",
    presets={
        "quick": "--num_seeds=6 --depth=6 --num_tokens=32 --num_paths=30 --num_repeats=2",
        "reported": "--seed=3000 --num_seeds=4 --depth=12 --num_heads=12 --d_model=192 "
        "--num_tokens=128 --num_paths=30",
        "tiny": "--num_seeds=2 --depth=2 --num_heads=2 --d_model=4 --num_tokens=4 --num_paths=2 "
        "--num_repeats=1",
    },
    figures=describe_figures(path_chains_figure, path_lengths_figure),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    with open_run(options, make_setup, lambda setup: setup.source) as run:
        for point in run.measure(measure):
            results, setup = point.results, point.setup
            point.save_table(make_rows(results))
            point.save_figure("path_chains", path_chains_figure, results, setup)
            point.save_figure("path_lengths", path_lengths_figure, results)
            point.save_claims(judge_claims(results, setup))
            point.save_comparisons(compare_results(results, setup))
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
