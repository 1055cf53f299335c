"""The Lipschitz constant of trained attention by the number of tokens: does it grow like n^¼?

Castin et al. 2024 (2312.14820) prove that the constant of self-attention grows at most like √n, and
report about n^¼ in trained BERT and GPT-2 on real texts. Here it is the largest singular value of
the Jacobian of one layer's attention (all heads, W_O included, no skip, no norm) at the layer's
input, by power iteration. Each text is cut to its first --tokens tokens.

    python -m experiments.trained_weights --site=trained/packages
    python -m experiments.run_lipschitz --text=data/RTE/test.tsv --last_texts

Measures every network in --folder; --untrained measures small random networks instead. All
networks take ten minutes of CPU.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import xarray as xr

from experiments.lab import (
    Experiment,
    Flags,
    Options,
    Progress,
    Run,
    RunFolder,
    check_names,
    cli,
    describe_figures,
    extend_part,
    labelled,
    open_run,
    report_activity,
    shared_flags,
)
from experiments.trained import smoothness
from experiments.trained.opened_networks import (
    UNTRAINED,
    Network,
    identify_texts,
    load_networks,
    make_untrained,
    skip_texts,
)
from experiments.verdicts import PROTOCOL, Comparison, Row, TableRow
from rank_collapse.report import figures

FLAGS = cli.make_flags("lipschitz", shows=None, counts="num_texts", can_grow=True)
FLAGS.define(
    "string", "folder", "trained", "Folder of checkpoint folders, as trained_weights makes it."
)
FLAGS.define("list", "networks", [], "Some of its networks, by name; default: all.")
FLAGS.define("boolean", "untrained", False, "Small networks at random in their place: for tests.")
FLAGS.define("string", "text", None, "Text: a .tsv with a header (RTE), or paragraphs.")
FLAGS.define("boolean", "last_texts", False, "The last texts of each file, backwards.")
shared_flags.define_numbers(FLAGS, "tokens", [8, 16, 32, 64], "Tokens of a text.", lower_bound=2)
for name, default, least, text in (
    ("num_texts", 8, 2, "Texts of each network."),
    ("skip_texts", 0, 0, "Texts of each file that are left out before the first."),
    ("seed", 0, 0, "Of weights at random."),
):
    FLAGS.define("integer", name, default, text, lower_bound=least)


def open_networks(options: Options) -> list[Network]:
    """Opens the networks of the folder, with texts of the measured number of tokens.

    Raises:
        FileNotFoundError, ValueError: Networks or texts that do not exist or cannot be read.
    """
    if len({*options.tokens}) < 3:
        raise ValueError("--tokens needs three numbers or more: a power of n is fitted to them")
    options = options.replace(max_tokens=max(options.tokens))
    if options.untrained:
        check_names(options, "networks", UNTRAINED)
        return [make_untrained(name, options) for name in options.networks or UNTRAINED]
    opened = load_networks(options, options.num_texts + options.skip_texts)
    return [skip_texts(network, options.skip_texts) for network in opened]


def measure(options: Options, networks: list[Network], folder: RunFolder) -> xr.Dataset:
    """Measures every network at every number of tokens.

    Args:
        options: The flags.
        networks: The networks and their texts.
        folder: The run folder; results that it already holds are not computed again.
    """
    tokens, parts = sorted({*options.tokens}), []
    with Progress(len(networks), "constants", log=folder.log) as progress:
        for network in networks:
            arrays, count = [], len(network.inputs["x"])
            for n in tokens:
                with report_activity(f"measuring {network.label}, {n} tokens", folder.log):
                    part = f"{network.label}, {n} tokens"
                    measure_first = partial(measure_texts, network, n)
                    arrays.append(extend_part(folder, part, count, measure_first))
            parts.append(make_dataset(arrays, tokens))
            progress.advance()
    names = xr.Variable("network", [network.label for network in networks])
    return xr.concat(parts, names, data_vars="all", join="outer")


def measure_texts(network: Network, num_tokens: int, first_text: int) -> dict[str, np.ndarray]:
    """Measures the texts of a network from one index on, see `smoothness.measure_texts`."""
    inputs = {n: a if a is None else a[first_text:] for n, a in network.inputs.items()}
    return smoothness.measure_texts(network.source, inputs, num_tokens)


def make_dataset(arrays: list[dict[str, np.ndarray]], tokens: list[int]) -> xr.Dataset:
    """Makes the Dataset of one network over seed (texts), tokens and layer, with powers of n."""
    stacks = {name: np.stack([part[name] for part in arrays]) for name in arrays[0]}
    powers = smoothness.fit_powers(stacks["largest"], tokens)
    axes = ("tokens", "seed", "layer")
    num_texts, depth = powers.shape
    coordinates = {"tokens": tokens, "seed": np.arange(num_texts), "layer": np.arange(1, depth + 1)}
    variables = {name: (axes, values) for name, values in stacks.items()}
    return xr.Dataset(variables | {"power": (axes[1:], powers)}, coordinates)


def judge_claims(results: xr.Dataset, networks: list[Network]) -> Iterator[Row]:
    """Tests the median power of n over the layers of each text, by network."""
    for network in networks:
        power = results.power.sel(network=network.label, drop=True).median("layer")
        yield from labelled.statement_rows("lipschitz growth", power, network.label)


def compare_results(results: xr.Dataset, networks: list[Network]) -> Iterator[Comparison]:
    """Compares the power of n of each layer with ¼, and reports the convergence of the
    iteration."""
    for network in networks:
        values = results.sel(network=network.label, drop=True)
        by_layer = values.power.mean("seed")
        for name, value in (("median", by_layer.median()), ("least", by_layer.min())):
            yield Comparison(f"{network.label}: power of n, {name} layer", value.item(), 0.25)
        yield Comparison(f"{network.label}: power of n, largest layer", by_layer.max().item(), 0.25)
        size = values.largest.mean("seed")
        for n in size.tokens.values:
            text = f"{network.label}: constant at {n} tokens, median layer"
            yield Comparison(text, size.sel(tokens=n).median().item())
        text = f"{network.label}: change in the last step of the iteration, largest"
        yield Comparison(text, values.change.max().item())


def make_rows(results: xr.Dataset) -> Iterator[TableRow]:
    """Makes a row for each network, text, number of tokens and layer."""
    axes = ("network", "seed", "layer", "tokens")
    return labelled.table_rows(results, axes, ("largest", "power", "change"))


@figures.styled
def constants_figure(results: xr.Dataset, networks: list[Network]):
    """Lipschitz constant of each attention layer (vertical axis) by the number of tokens
    (horizontal axis), on logarithmic axes. The constant is the largest singular value of the
    layer's Jacobian. Each panel shows one network, and each curve shows one layer. The first layer
    is dark, and the last layer is light. Curves are geometric means over texts. The dashed line
    shows growth with the exponent ¼, and the dotted line shows growth with the exponent ½."""
    fig, axes = figures.panels(len(networks), min(3, len(networks)))
    for ax, network in zip(axes.flat, networks, strict=False):
        largest = results.largest.sel(network=network.label).dropna("layer", how="all")
        mean = np.exp(np.log(largest).mean("seed")).dropna("tokens", how="all")
        tokens = mean.tokens.values
        for color, layer in zip(figures.shades(mean.layer.size), mean.layer, strict=True):
            ax.plot(tokens, mean.sel(layer=layer), "o-", color=color, lw=0.8, markersize=2.5)
        middle = float(mean.median("layer")[0])
        for power, style in ((0.25, "--"), (0.5, ":")):
            label = f"n^{power:g}"
            ax.plot(tokens, middle * (tokens / tokens[0]) ** power, style, color="k", label=label)
        ax.set(xscale="log", yscale="log", xlabel="tokens n", title=network.label)
        ax.set_xticks(tokens, [str(n) for n in tokens])
        ax.set_xticks([], minor=True)
        ax.legend()
    for row in axes:
        row[0].set_ylabel("largest singular value")
    return fig


@figures.styled
def powers_figure(results: xr.Dataset, networks: list[Network]):
    """For each text and each attention layer, we fit the Lipschitz constant by a power of the
    number n of tokens. The vertical axis is the exponent of n. The horizontal axis is the layer, as
    a share of the depth. Each line is one network. Lines are means over texts, and bands are one
    standard deviation. The dashed line is the published exponent, about ¼. The dotted line is ½,
    the largest exponent that the theorem allows."""
    fig, ((ax,),) = figures.figure(1, 1, 6.0, 3.6)
    for index, network in enumerate(networks):
        power = results.power.sel(network=network.label).dropna("layer", how="all")
        place = power.layer.values / power.layer.size
        values = power.transpose("seed", "layer").values
        figures.band(ax, place, values, network.label, index)
    for power, style in ((0.25, "--"), (0.5, ":")):
        ax.axhline(power, linestyle=style, color="k", lw=1)
    ax.set(xlabel="layer, as a share of the depth", ylabel="power of n")
    figures.legend_below(ax)
    return fig


EXPERIMENT = Experiment(
    order=890,
    title="Lipschitz constants of trained attention",
    brief="trained networks: how the largest singular value of the Jacobian of a layer's attention "
    "grows with the number of tokens",
    claim="The Lipschitz constant of self-attention is the largest factor by which attention can "
    "stretch a small change of its input. It grows at most like √n with the number n of tokens. In "
    "trained BERT and GPT-2 it grows about like n^¼ on real texts (Castin et al. 2024, arXiv "
    "2312.14820).",
    needs="trained",
    presets={
        "quick": "--networks=albert-reactions --num_texts=2 --tokens=8,16,32",
        "reported": "--seed=3000 --num_texts=16 --text=data/RTE/test.tsv --last_texts "
        "--skip_texts=64",
        "tiny": "--untrained --num_texts=3 --tokens=4,6,8",
    },
    figures=describe_figures(powers_figure, constants_figure),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    count = PROTOCOL.rounds[0] if options.grows else None
    with open_run(options, open_networks, partial(identify_texts, count=count)) as run:
        for point in run.measure(measure):
            results, networks = point.results, point.setup
            point.save_table(make_rows(results))
            point.save_figure("powers", powers_figure, results, networks)
            point.save_figure("constants", constants_figure, results, networks)
            point.save_claims(judge_claims(results, networks))
            point.save_comparisons(compare_results(results, networks))
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
