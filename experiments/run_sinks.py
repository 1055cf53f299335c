"""Attention sinks and mixing: tokens of a causal network whose first key is hidden from queries.

Barbero et al. 2025 (arXiv 2504.02732) say that heads attend to the first token to prevent
over-mixing, which is rank collapse. This experiment prevents that attention, from a chosen layer
on, in one of three ways (--how). hidden: the key's score is excluded, and the other weights grow.
dropped: its weight is set to 0. thinned, a control: all keys lose the same weight in proportion, so
that the first key's vector is not removed.

We chose two measures of mixing: the mean cosine of two tokens, and the spread, which is the
relative change of later tokens if one token is replaced. For each text the changed network is
compared with the unchanged one.

    python -m experiments.trained_weights --site=trained/packages
    python -m experiments.run_sinks --start=0,0.4 --how=hidden,dropped,thinned \\
        --key=first,random

Measures every causal network in --folder, and random weights of the same shape. A network with
135 M parameters takes 10 minutes on two cores. Expect tokens to become more similar if the key is
hidden in late layers, and less similar if its weight is dropped. Hiding the key in all layers
changes nothing, because the second token then takes its place.
"""

import itertools
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

import rank_collapse as rc
from experiments.lab import (
    Experiment,
    Finding,
    Flags,
    Options,
    Progress,
    Run,
    RunFolder,
    cli,
    describe_figures,
    extend_part,
    labelled,
    open_run,
    report_activity,
)
from experiments.trained.excluded_keys import Condition, make_edit
from experiments.trained.opened_networks import (
    Network,
    identify_texts,
    load_networks,
    make_untrained,
)
from experiments.verdicts import PROTOCOL, Comparison, Row, TableRow
from rank_collapse import pretrained
from rank_collapse.printed import format_count
from rank_collapse.report import figures

AXES = ("start", "how", "key")
FIRST_MEASURED = 2  # tokens from the third on: neither the sink nor the token that replaces it
READ = 40  # texts read for each one kept, which has enough tokens
LATE = 0.4  # share of the layers after which statements hide the key

FLAGS = cli.make_flags("sinks", shows="token_cosine,layer=last", counts="num_texts", can_grow=True)
FLAGS.define(
    "string", "folder", "trained", "Folder of checkpoint folders, as trained_weights makes it."
)
FLAGS.define("list", "networks", [], "Some of its causal networks, by name; default: all.")
FLAGS.define("boolean", "untrained", False, "A small network at random in their place: for tests.")
FLAGS.define("string", "text", None, "Text: a .tsv with a header (RTE), or paragraphs.")
FLAGS.define("boolean", "last_texts", False, "The last texts of the file, backwards.")
FLAGS.define("integer", "num_texts", 16, "Texts of each network.", lower_bound=2)
text = "Texts of enough tokens that are left out before the first."
FLAGS.define("integer", "skip_texts", 0, text, lower_bound=0)
text = "Tokens of each text; shorter texts are left out."
FLAGS.define("integer", "max_tokens", 64, text, lower_bound=6)  # two are measured, one more hidden
FLAGS.define("integer", "seed", 0, "Seed of random weights and random keys.", lower_bound=0)
text = "Share of the layers that are left as they are."
FLAGS.define("float", "start", LATE, text, lower_bound=0.0, upper_bound=1.0)
FLAGS.define(
    "enum",
    "how",
    "hidden",
    "Other weights grow, the key's weight is lost, or as much of all weights in proportion.",
    ["hidden", "dropped", "thinned"],
)
FLAGS.define(
    "enum", "key", "first", "Which key later tokens cannot attend to.", ["first", "random"]
)


def open_networks(options: Options) -> list[Network]:
    """Opens the causal networks of the folder and reads their texts.

    Args:
        options: The flags.

    Raises:
        FileNotFoundError, ValueError: No folder, no causal network, or no text of enough tokens.
    """
    if options.untrained:
        return [make_untrained("llama", options)]
    opened = load_networks(options, READ * (options.num_texts + options.skip_texts))
    networks = [network for network in opened if network.source.is_causal_lm]
    if not networks:
        raise ValueError(f"--folder={options.folder} has no causal language model")
    return [keep_full_texts(network, options) for network in networks]


def keep_full_texts(network: Network, options: Options) -> Network:
    """Keeps the texts of `max_tokens` tokens after the skipped ones, at most `num_texts`.

    Raises:
        ValueError: Fewer than two texts have so many tokens.
    """
    is_full = network.inputs["mask"].sum(axis=1) == options.max_tokens
    ids = network.inputs["x"][is_full, : options.max_tokens][options.skip_texts :]
    ids = ids[: options.num_texts]
    if len(ids) < 2:
        texts = format_count(len(ids), "text")
        raise ValueError(f"{network.label}: only {texts} of {options.max_tokens} tokens")
    return network._replace(inputs={"x": ids, "mask": np.ones(ids.shape, bool)})


def measure(options: Options, networks: list[Network], folder: RunFolder) -> xr.Dataset:
    """Measures every network at one condition, trained and at random.

    Args:
        options: The flags.
        networks: The networks and their texts.
        folder: The run folder; results that it already holds are not computed again.
    """
    parts = {}
    kinds = list(itertools.product(networks, ("trained", "random")))
    with Progress(len(kinds), "networks, trained and at random", log=folder.log) as progress:
        for network, weights in kinds:
            label = f"{network.label}, {weights} weights"
            measure_from = partial(measure_network, options, network, weights)
            count = len(network.inputs["x"])
            with report_activity(f"measuring {label}", folder.log):
                arrays = extend_part(folder, label, count, measure_from)
            parts |= {f"{name}/{label}": values for name, values in arrays.items()}
            progress.advance()
    deepest = max(network.source.config.depth for network in networks) + 1
    parts = {name: pad_layers(values, deepest) for name, values in parts.items()}
    return labelled.make_dataset(parts, ("network", "layer")).assign_coords(
        layer=np.arange(deepest)
    )


def pad_layers(values: np.ndarray, length: int) -> np.ndarray:
    """Pads the last axis of [texts, layers] with NaN to the layers of the deepest network."""
    missing = [(0, 0)] * (values.ndim - 1) + [(0, length - values.shape[-1])]
    return values if values.ndim == 1 else np.pad(values, missing, constant_values=np.nan)


def measure_network(
    options: Options, network: Network, weights: str, first_text: int
) -> dict[str, np.ndarray]:
    """Measures the texts in the unchanged network and with the key excluded, arrays [texts, ...].

    Args:
        options: The flags.
        network: A network and its texts.
        weights: "trained" or "random", of the same shape.
        first_text: Index of the first measured text.
    """
    config, ids = network.source.config, network.inputs["x"][first_text:]
    key = jax.random.key(options.seed)
    if weights == "trained" and network.folder is not None:
        _, params = pretrained.load(network.folder)
        source = network.source
    else:
        _, params = pretrained.random_like(network.source.settings, key)
        source = pretrained.open_random(network.source.settings, key)
    replaced = options.max_tokens // 8
    other_ids = (ids + 17) % config.embedding.vocab_size
    changed = np.where(np.arange(options.max_tokens) == replaced, other_ids, ids)
    positions = np.setdiff1d(np.arange(FIRST_MEASURED, options.max_tokens // 2), [replaced])
    candidates = positions if options.key == "random" else [0]
    draw = np.random.default_rng(options.seed)  # the keys of the texts, one after another
    keys = np.array([draw.choice(candidates) for _ in network.inputs["x"]])[first_text:]
    hidden, thinned = (jnp.full(len(ids), options.how == mode) for mode in ("hidden", "thinned"))

    arrays = {}
    for prefix, start in {"": round(options.start * config.depth), "whole_": config.depth}.items():
        condition = Condition(jnp.asarray(keys), jnp.full(len(ids), start), hidden, thinned)
        results = measure_texts(params, config, replaced, (ids, changed, condition))
        values = jax.tree.map(np.asarray, results)
        output = values.pop("output")[:, None]
        targets, counted = pretrained.targets_of(ids, network.inputs["mask"][first_text:])
        losses, *_ = pretrained.token_losses(source.unembedding, output, targets, counted)
        values["loss"] = np.asarray(losses)[:, 0]
        arrays |= {f"{prefix}{name}": a for name, a in values.items()}
    return arrays


@partial(jax.jit, static_argnums=(1, 2))
def measure_texts(
    params: rc.network.TransformerParams,
    config: rc.TransformerConfig,
    replaced: int,
    texts: tuple[jax.Array, jax.Array, Condition],
) -> dict[str, jax.Array]:
    """Measures texts one after the other.

    Args:
        params, config: The network.
        replaced: Position of the changed token.
        texts: Token ids [texts, n], ids with the changed token, and the keys that attention leaves
            out [texts].

    Returns:
        {name: [texts, ...]} of the measures of `measure_text`.
    """
    return jax.lax.map(lambda text: measure_text(params, config, replaced, *text), texts)


def measure_text(
    params: rc.network.TransformerParams,
    config: rc.TransformerConfig,
    replaced: int,
    ids: jax.Array,
    changed: jax.Array,
    condition: Condition,
) -> dict[str, jax.Array]:
    """Measures one text by layer [L + 1], from the third token on.

    Args:
        replaced: Position at which `changed` has another token.
        ids, changed: Int [n].
        condition: The key to exclude.

    Returns:
        token_cosine; spread, the mean relative change of later tokens by the other token;
        second_norm, ‖X_1‖/‖X_0‖; output [n, d].
    """
    edit = make_edit(condition)
    trace = rc.apply(params, ids, config, edit=edit)
    states, other = trace.hidden, rc.apply(params, changed, config, edit=edit).hidden
    norms = jnp.linalg.norm(states, axis=-1)
    change = jnp.linalg.norm(other - states, axis=-1) / norms
    is_measured = jnp.arange(len(ids)) >= FIRST_MEASURED
    profile = rc.profile(states, mask=is_measured, measures=("token_cosine",))
    return {
        "token_cosine": profile["token_cosine"],
        "spread": change[:, replaced + 1 :].mean(axis=1),
        "second_norm": norms[:, 1] / norms[:, 0],
        "output": trace.output,
    }


def make_rows(results: xr.Dataset) -> Iterator[TableRow]:
    """Makes a row for each network, condition, text and layer."""
    names = ("token_cosine", "spread", "second_norm")
    columns = [prefix + name for name in names for prefix in ("", "whole_")]
    return labelled.table_rows(results, (*AXES, "network", "seed", "layer"), columns)


@figures.styled
def cosine_figure(results: xr.Dataset) -> figures.Figure | None:
    """Mean cosine of two tokens (vertical axis) by layer (horizontal axis); the mean is over all
    pairs of tokens from the third token on. Left: trained weights. Right: random weights. The
    dashed line is the unchanged network. The other lines are networks whose attention to the first
    key we change, in all layers (“from 0 L on”) or only after 40 % of the L layers (“from 0.4 L
    on”). “Hidden”: the score of the key is excluded before the softmax. “Dropped”: the weight of
    the key is set to zero after the softmax. “Thinned” is a control: all keys together lose as much
    weight as the first key has, in proportion to their weights. Bands are one standard deviation
    over texts."""
    if "first" not in results.key:
        return None
    first = results.sel(key="first", drop=True)
    labels = [str(label) for label in first.network.values]
    fig, axes = figures.panels(len(labels), 2, width=4.6, height=3.4)
    for ax, label in zip(axes.flat, labels, strict=True):
        network = first.sel(network=label)
        points = labelled.iterate_points(network.token_cosine, "seed", "layer")
        curves = {f"{p['how']} from {p['start']:g} L on": curve for p, curve in points}
        # Last and dashed: the curve "hidden from 0 L on" lies under it.
        curves["as it is"] = network.whole_token_cosine.isel(start=0, how=0)
        for index, (name, curve) in enumerate(curves.items()):
            style = {"linestyle": "--", "color": "black"} if name == "as it is" else {}
            figures.band(
                ax, network.layer.values, curve.transpose("seed", "layer"), name, index, **style
            )
        ax.set(title=label, xlabel="layer", ylabel="mean cosine of two tokens")
        figures.integer_ticks(ax)
    axes[0, 0].legend(fontsize=7)
    return fig


def compute_change(results: xr.Dataset, name: str) -> xr.DataArray:
    """Computes the paired change of a measure, text by text; after the last layer, if it is by
    layer."""
    change = results[name] - results[f"whole_{name}"]
    if "layer" not in change.dims:
        return change
    last = change.notnull().any([d for d in change.dims if d != "layer"]).values.nonzero()[0].max()
    return change.isel(layer=last, drop=True)


def judge_claims(results: xr.Dataset, networks: list[Network]) -> Iterator[Row]:
    """Tests the changes of trained networks, paired by text.

    Args:
        results: Over start, how, key, network, seed (texts) and layer.
        networks: The networks and their texts.
    """
    for network in networks:
        trained = results.sel(network=f"{network.label}, trained weights", drop=True)
        changes = {name: compute_change(trained, name) for name in ("token_cosine", "spread")}
        for statement, name, start, mode, key in (
            ("sinks mix", "token_cosine", LATE, "hidden", "first"),
            ("sinks spread", "spread", LATE, "hidden", "first"),
            ("sinks drop", "token_cosine", LATE, "dropped", "first"),
            ("sinks drop spread", "spread", LATE, "dropped", "first"),
            ("sinks thin", "token_cosine", LATE, "thinned", "first"),
            ("sinks thin spread", "spread", LATE, "thinned", "first"),
            ("sinks move", "token_cosine", 0.0, "hidden", "first"),
            ("sinks control", "token_cosine", LATE, "hidden", "random"),
        ):
            point, values = {"start": start, "how": mode, "key": key}, changes[name]
            if all(value in values[axis] for axis, value in point.items()):
                yield from labelled.statement_rows(
                    statement, values.sel(point, drop=True), network.label
                )


def compare_results(results: xr.Dataset) -> Iterator[Comparison]:
    """Lists paired changes of the last token cosine, the spread and the loss, means over texts.

    Args:
        results: Over start, how, key, network, seed (texts) and layer.
    """
    for name, text in {
        "token_cosine": "change of the last token cosine",
        "spread": "change of the spread of a replaced token",
        "loss": "change of the loss, nats",
    }.items():
        yield from labelled.compare_means(text, compute_change(results, name), interval=True)


def make_finding(results: xr.Dataset, networks: list[Network]) -> Finding | None:
    """Reports the change of the last cosine in the first trained network.

    Args:
        results: Over start, how, key, network, seed (texts) and layer.
        networks: The networks and their texts.

    Returns:
        The finding; None if the first key was not hidden and dropped in the late layers.
    """
    point = {"start": LATE, "key": "first"}
    is_there = all(value in results[axis] for axis, value in point.items())
    if not is_there or not {"hidden", "dropped"} <= {*results.how.values}:
        return None
    label = networks[0].label
    trained = results.sel(point, drop=True).sel(network=f"{label}, trained weights", drop=True)
    change = compute_change(trained, "token_cosine").mean("seed")
    hidden, dropped = float(change.sel(how="hidden")), float(change.sel(how="dropped"))
    spread = compute_change(trained, "spread").mean("seed")
    wider, lost = float(spread.sel(how="hidden")), float(spread.sel(how="dropped"))
    return Finding(
        "cosine",
        f"In {label} the mean cosine of two tokens changes by {hidden:+.3f} where the first key is "
        f"hidden from later layers, and by {dropped:+.3f} where its weight is lost; the spread of "
        f"a changed token by {wider:+.3f} and {lost:+.3f}.",
    )


EXPERIMENT = Experiment(
    order=8,
    title="Sinks and mixing",
    brief="whether the tokens of a causal network become more similar if they cannot attend to the "
    "first token",
    claim="In a language model many heads attend to the first token, which is then called an "
    "attention sink. A head that attends to the sink mixes the other tokens less. Sinks "
    "thus prevent over-mixing, which would make the tokens too similar (Barbero et al. "
    "2025). We measure mixing by two numbers. One is the mean cosine of two tokens. The "
    "other is the spread: how much the later tokens change if one token is replaced.",
    presets={
        "quick": "--start=0,0.4 --how=hidden,dropped --num_texts=4 --max_tokens=32",
        "reported": "--start=0,0.4 --how=hidden,dropped,thinned --key=first,random "
        "--seed=3000 --num_texts=7 --text=data/RTE/train.tsv --last_texts "
        "--skip_texts=16",
        "tiny": "--untrained --start=0,0.4 --how=hidden,dropped,thinned --key=first,random "
        "--num_texts=3 --max_tokens=16",
    },
    needs="trained",
    figures=describe_figures(cosine_figure),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    count = PROTOCOL.rounds[0] if options.grows else None
    with open_run(options, open_networks, partial(identify_texts, count=count)) as run:
        for point in run.measure(measure, over=AXES):
            results, networks = point.results, point.setup
            point.save_table(make_rows(results))
            point.save_figure("cosine", cosine_figure, results)
            point.save_claims(judge_claims(results, networks))
            point.save_comparisons(compare_results(results))
            point.save_finding(make_finding(results, networks))
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
