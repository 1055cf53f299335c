"""Looped networks: one layer passed N times, with a gain of 1/√N or 1/N of its branch.

With weights of its own for every layer a gain of 1/√N keeps states at one size. With tied weights
what the loops add is of the same sign, and states grow; 1/N holds them (Wang et al. 2026, arXiv
2606.18524). Beside the growth it is asked whether the tokens align. Pre-norm attention on Gaussian
tokens at initialisation.

    python -m experiments.run_loops --depth=8,64 --tied=true,false --gain_power=0.5,1

Two CPU cores: a minute of one. Expected at 64 loops: root mean square 5 and cosine 0.9 with tied
weights and 1/√N, 1.06 and 0.02 otherwise.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import xarray as xr

import rank_collapse as rc
from experiments.lab import cli, labelled, vocabulary
from experiments.lab.executor import Executor
from experiments.lab.experiment import Experiment, Shown, name_figures, open_run
from experiments.lab.flags import Flags
from experiments.lab.labelled import statement_rows
from experiments.verdicts.claims import Row
from rank_collapse.report import figures

AXES = ("tied", "gain_power", "depth")
COLUMNS = ("rms", "token_cosine", "residual_ratio", "fixed_point", "transverse", "path_length")

FLAGS = cli.make_flags("loops", num_seeds=8, shows="token_cosine,loop=last", traced=("gain_power",))
define = cli.definer(FLAGS)
define("boolean", "tied", True, "Whether all layers are one.")
define("float", "gain_power", 0.5, "The branch is multiplied by depth^-power.")
vocabulary.define(
    FLAGS, depth=64, num_heads=4, d_model=64, num_tokens=32, mask="none", seed_chunk=0
)


def network(options: Any) -> rc.TransformerConfig:
    """Pre-norm attention; untied, the stack of all layers is passed once."""
    depth, fields = options.depth, {"norm_placement": "pre", "mask": options.mask}
    rows = (0,) * depth if options.tied else tuple(range(depth))
    return rc.san_skip(depth, options.num_heads, options.d_model, layer_map=rows, **fields)


def measure(options: Any, config: rc.TransformerConfig, run: Any) -> xr.Dataset:
    """States by layer of one network at one gain; gains share a program."""

    def one(key: Any, gain: Any) -> dict[str, jax.Array]:
        key_tokens, key_params = jax.random.split(key)
        x = jax.random.normal(key_tokens, (options.num_tokens, options.d_model))
        own = config.replace(branch_gain=gain)
        params = rc.init(key_params, own)
        if options.tied:
            return rc.loop_report(params, x, own)._asdict()
        hidden = rc.apply(params, x, own).hidden
        rms = jax.numpy.sqrt(jax.numpy.mean(hidden**2, axis=(1, 2)))
        measures = rc.profile(hidden, measures=("token_cosine", "residual_ratio"))
        return {"rms": rms} | dict(measures.measures)

    with Executor(options, run, f"depth {options.depth}") as executor:
        found = executor.measure(one, lambda own: {"": own.depth**-own.gain_power})[""]
    if "path_size" in found:
        sizes = found.pop("path_size")
        lengths = np.arange(sizes.shape[-1])
        found["path_length"] = sizes @ lengths / sizes.sum(axis=-1)
        found |= {
            n: np.pad(found[n], ((0, 0), (1, 0)), constant_values=np.nan)
            for n in ("fixed_point", "transverse")
        }
    data = labelled.make_dataset(found, ("loop",))
    return data.assign_coords(loop=np.arange(options.depth + 1))


def claims(found: xr.Dataset, config: Any) -> Iterator[Row]:
    """Growth and alignment after the last loop, by depth and gain."""
    for depth in found.depth.values:
        ends = found.sel(depth=depth, loop=[0, depth])
        growth = np.log10(ends.rms).diff("loop").squeeze("loop", drop=True)
        cosine, what = ends.token_cosine.isel(loop=-1, drop=True), f"{depth} loops"
        if True in found.tied and {0.5, 1.0} <= set(found.gain_power.values):
            tied = growth.sel(tied=True, drop=True)
            yield from statement_rows("loops grow", tied.sel(gain_power=0.5, drop=True), what)
            yield from statement_rows("loops stay", tied.sel(gain_power=1.0, drop=True), what)
            own = cosine.sel(tied=True, drop=True)
            apart = own.sel(gain_power=0.5, drop=True) - own.sel(gain_power=1.0, drop=True)
            yield from statement_rows("loops align", apart, what)


def states_figure(found: xr.Dataset, config: Any):
    """Root mean square of the states by loop at the largest depth; with tied weights, without, and
    by the gain. Geometric mean over seeds, a deviation of the logarithm."""
    return by_loop(found, "rms", "root mean square of the state", draw=figures.log_band)


def tokens_figure(found: xr.Dataset, config: Any):
    """The mean cosine of two tokens by loop, of the same networks."""
    return by_loop(found, "token_cosine", "mean cosine of two tokens")


def by_loop(found: xr.Dataset, name: str, ylabel: str, **how: Any):
    """A measure of the largest depth, a panel for tied and for untied weights."""
    deep = found[name].isel(depth=-1).sel(loop=slice(0, int(found.depth[-1])))
    how |= {"ylabel": ylabel, "sharey": True, "style": lambda *_: {"marker": ""}}
    fig, axes = labelled.plot_facets(deep, "loop", "gain_power", "tied", **how)
    axes[0, 0].legend(title="gain 1/N to the power of")
    return fig


EXPERIMENT = Experiment(
    order=76,
    title="Looped networks",
    brief="one layer passed 64 times, gains 1/√N and 1/N: growth and alignment of tokens",
    claim="With tied weights a gain of 1/√N lets states grow with the number of loops, 1/N does "
    "not (Wang et al. 2026). Whether tokens align no paper says.",
    presets={
        "quick": "--depth=16 --tied=true,false --gain_power=0.5,1",
        "paper": "--depth=16,64 --tied=true,false --gain_power=0.5,1 --num_seeds=16",
        "tiny": "--depth=2 --tied=true,false --gain_power=0.5,1 --num_seeds=2 --num_heads=2 "
        "--d_model=8 --num_tokens=4",
    },
)
FIGURES = name_figures(states_figure, tokens_figure)


def table(found: xr.Dataset, config: Any) -> Iterator[dict[str, Any]]:
    """Makes a row for each network, seed and loop."""
    return labelled.table_rows(found, (*AXES, "seed", "loop"), COLUMNS)


def main(options: Flags) -> Shown:
    """Measures what the run lacks, and shows it."""
    with open_run(options, network) as run:
        points = run.measure(measure, over=AXES)
        return run.publish(
            points,
            table=table,
            figures=FIGURES,
            claims=claims,
        )


if __name__ == "__main__":
    cli.run(main, FLAGS)
