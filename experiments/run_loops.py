"""Looped networks: one layer applied N times, with its branch multiplied by 1/√N or 1/N.

If every layer has its own weights, a gain of 1/√N keeps the size of the states constant. With tied
weights all loops add similar vectors, and states grow; a gain of 1/N prevents this (Wang et al.
2026, arXiv 2606.18524). The experiment also measures whether the tokens align. It uses pre-norm
attention on Gaussian tokens at initialisation.

    python -m experiments.run_loops --depth=8,64 --tied=true,false --gain_power=0.5,1

Takes one minute of CPU time. Expect states to grow and tokens to align only with tied weights and a
gain of 1/√N.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import xarray as xr

import rank_collapse as rc
from experiments.lab import (
    Executor,
    Experiment,
    Flags,
    Options,
    Run,
    RunFolder,
    cli,
    describe_figures,
    labelled,
    open_run,
    shared_flags,
)
from experiments.verdicts import Row, TableRow
from rank_collapse.report import figures
from rank_collapse.report.wording import name_axis

AXES = ("tied", "gain_power", "depth")
COLUMNS = ("rms", "token_cosine", "residual_ratio", "fixed_point", "transverse", "path_length")

FLAGS = cli.make_flags(
    "loops", num_seeds=8, can_grow=True, shows="token_cosine,loop=last", traced=("gain_power",)
)
FLAGS.define("boolean", "tied", True, "Whether all layers are one.")
FLAGS.define("float", "gain_power", 0.5, "The branch is multiplied by depth^-power.")
shared_flags.define(
    FLAGS, depth=64, num_heads=4, d_model=64, num_tokens=32, mask="none", seed_chunk=0
)


def make_config(options: Options) -> rc.TransformerConfig:
    """Makes pre-norm attention; without tied weights, the stack of all layers is applied once."""
    depth, fields = options.depth, {"norm_placement": "pre", "mask": options.mask}
    rows = (0,) * depth if options.tied else tuple(range(depth))
    return rc.san_skip(depth, options.num_heads, options.d_model, layer_map=rows, **fields)


def measure(options: Options, config: rc.TransformerConfig, folder: RunFolder) -> xr.Dataset:
    """Measures states by loop of one network at one gain; gains share a program.

    Args:
        options: The flags.
        config: The network.
        folder: The run folder; results that it already holds are not computed again.
    """

    def measure_seed(key: jax.Array, gain: jax.Array) -> dict[str, jax.Array]:
        """Measures one seed, loop by loop if weights are tied, else layer by layer."""
        key_tokens, key_params = jax.random.split(key)
        x = jax.random.normal(key_tokens, (options.num_tokens, options.d_model))
        network = config.replace(branch_gain=gain)
        params = rc.init(key_params, network)
        if options.tied:
            return rc.loop_report(params, x, network)._asdict()
        hidden = rc.apply(params, x, network).hidden
        rms = jax.numpy.sqrt(jax.numpy.mean(hidden**2, axis=(1, 2)))
        profile = rc.profile(hidden, measures=("token_cosine", "residual_ratio"))
        return {"rms": rms} | dict(profile.measures)

    with Executor(options, folder, f"depth {options.depth}") as executor:
        arrays = executor.measure(measure_seed, lambda p: {"": p.depth**-p.gain_power})[""]
    if options.tied:
        sizes = arrays.pop("path_size")
        arrays["path_length"] = sizes @ np.arange(sizes.shape[-1]) / sizes.sum(axis=-1)
        for name in ("fixed_point", "transverse"):  # of a loop, and not of the input
            arrays[name] = np.pad(arrays[name], ((0, 0), (1, 0)), constant_values=np.nan)
    results = labelled.make_dataset(arrays, ("loop",))
    return results.assign_coords(loop=np.arange(options.depth + 1))


def make_rows(results: xr.Dataset) -> Iterator[TableRow]:
    """Makes a row for each network, seed and loop."""
    return labelled.table_rows(results, (*AXES, "seed", "loop"), COLUMNS)


@figures.styled
def states_figure(results: xr.Dataset):
    """Size of the states (root mean square of their entries, vertical axis) after each loop
    (horizontal axis). The networks are those with the most loops. In one panel all loops share one
    set of weights (tied). In the other panel each loop has its own weights (untied). A gain
    multiplies the attention branch in each loop. It is 1/N to a power, where N is the number of
    loops. Each line has one power. Lines are geometric means over seeds, and bands are one standard
    deviation of the logarithm."""
    label = "root mean square of the state"
    return plot_by_loop(results, "rms", label, draw=figures.log_band)


@figures.styled
def tokens_figure(results: xr.Dataset):
    """Mean cosine of two tokens (vertical axis) after each loop (horizontal axis), in the networks
    of the first figure. In one panel all loops share one set of weights (tied). In the other panel
    each loop has its own weights (untied). Each line has one power of 1/N as its gain. Lines are
    means over seeds, and bands are one standard deviation."""
    return plot_by_loop(results, "token_cosine", "mean cosine of two tokens")


def plot_by_loop(results: xr.Dataset, name: str, ylabel: str, **options: Any):
    """Plots a measure of the largest depth, a panel for tied and for untied weights.

    Args:
        results: Results of `measure`.
        name: Name of the measure.
        ylabel: Label on the y axis.
        **options: See `labelled.plot_facets`.
    """
    deep = results[name].sel(depth=results.depth.max(), drop=True)
    options |= {"ylabel": ylabel, "sharey": True, "style": lambda *_: {"marker": ""}}
    fig, axes = labelled.plot_facets(deep, "loop", "gain_power", **options)
    axes[0, 0].legend(title=name_axis("gain_power"))
    return fig


def judge_claims(results: xr.Dataset) -> Iterator[Row]:
    """Tests growth and alignment after the last loop with tied weights, by depth and gain.

    Args:
        results: Over tied, gain_power, depth, seed and loop.
    """
    if True not in results.tied or not {0.5, 1.0} <= set(results.gain_power.values):
        return
    tied = results.sel(tied=True, drop=True)
    for depth in results.depth.values:
        ends, text = tied.sel(depth=depth, loop=[0, depth]), f"{depth} loops"
        growth = np.log10(ends.rms).diff("loop").squeeze("loop", drop=True)
        yield from labelled.statement_rows(
            "loops grow", growth.sel(gain_power=0.5, drop=True), text
        )
        yield from labelled.statement_rows(
            "loops stay", growth.sel(gain_power=1.0, drop=True), text
        )
        cosine = ends.token_cosine.isel(loop=-1, drop=True)
        difference = cosine.sel(gain_power=0.5, drop=True) - cosine.sel(gain_power=1.0, drop=True)
        yield from labelled.statement_rows("loops align", difference, text)


EXPERIMENT = Experiment(
    order=76,
    title="Looped networks",
    brief="one layer applied N times, up to 64, with a branch gain of 1/√N or 1/N: how the states "
    "grow, and how similar tokens become",
    claim="A looped network with tied weights applies the same layer N times. A gain multiplies "
    "the output of the attention before it is added to the states. With a gain of 1/√N, the "
    "states grow with the number N of loops. With a gain of 1/N they do not grow (Wang et al. "
    "2026). No paper says whether the tokens align, that is, whether they get the same direction.",
    presets={
        "quick": "--depth=16 --tied=true,false --gain_power=0.5,1",
        "reported": "--seed=3000 --depth=16,64 --tied=true,false --gain_power=0.5,1 --num_seeds=16",
        "tiny": "--depth=2 --tied=true,false --gain_power=0.5,1 --num_seeds=2 --num_heads=2 "
        "--d_model=8 --num_tokens=4",
    },
    figures=describe_figures(states_figure, tokens_figure),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    with open_run(options, make_config) as run:
        for point in run.measure(measure, over=AXES):
            results = point.results
            point.save_table(make_rows(results))
            point.save_figure("states", states_figure, results)
            point.save_figure("tokens", tokens_figure, results)
            point.save_claims(judge_claims(results))
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
