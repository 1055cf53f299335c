"""What run_architectures measures on one set of weights, in one pass over its layers.

A part of the results needs passes over some variants of the network (`passes_of`), and makes named
arrays of what they found (`ARRAYS`); to add one, write both.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lab.flags import Flags, check_names
from experiments.lab.progress import Progress
from experiments.paper.architectures.models import Model, Weights, inputs_of, models_of, weights_of
from experiments.paper.architectures.results import Results
from experiments.paper.architectures.resume import resumed
from rank_collapse import pretrained
from rank_collapse.measures.attention import attention_measures
from rank_collapse.measures.influence import InfluencePass, RemovalPass
from rank_collapse.measures.profiles import ProfilePass
from rank_collapse.network import surgery
from rank_collapse.network.passes import Each, LayerPass, States
from rank_collapse.paths import next_token
from rank_collapse.paths.contributions import LengthPass
from rank_collapse.paths.effects import ChainPass, sizes_of
from rank_collapse.paths.gradients import gradient_effects
from rank_collapse.pretrained.gradients import stream_gradients
from rank_collapse.pretrained.next_token import loss_gradient, next_tokens, targets_of
from rank_collapse.runs.folder import RunFolder
from rank_collapse.theory.logdomain import LogPass
from rank_collapse.theory.reports import BoundPass, effects_of

BY_VARIANT = ("residuals", "log", "bounds")
OF_LANGUAGE = ("next_token", "gradients")  # models
OF_WHOLE = ("lengths", "chains", "attention", "layers", "removal")
PARTS = (
    "residuals",
    "ranks",
    "log",
    "lengths",
    "chains",
    "bounds",
    "attention",
    "layers",
    "removal",
    *OF_LANGUAGE,
)
BESIDE = ("ranks", "read")  # more measures of the same states; of what attention reads of them
IN_ORDER = (*BY_VARIANT, *OF_WHOLE, *OF_LANGUAGE)  # as their arrays are kept
WHOLE = ("Transformer", "published")


class Part(NamedTuple):
    """One part of the results: of which variant, and by what names it goes."""

    name: str
    ablation: tuple[str, str]  # variant and reading

    @property
    def stored(self) -> str:
        """Where its arrays are among those of a set of weights."""
        return "/".join((self.name, *self.ablation)) if self.name in BY_VARIANT else self.name

    @property
    def group(self) -> str:
        """Of the passes that it shares with others; residuals are of all texts."""
        return "/".join((*self.ablation, *["residuals"] * (self.name == "residuals")))


class Setup(NamedTuple):
    """What the flags ask for."""

    models: list[Model]  # That are measured
    batches: dict[str, dict[str, Any]]  # {label of a model: its inputs}


def setup_of(options: Flags) -> Setup:
    """The models of the flags and their inputs.

    Raises:
        ValueError: Unknown parts, or parts that suit no model; checkpoints and texts that
            cannot be read.
    """
    check_names(options, "parts", (*PARTS, "read"))
    models = models_of(options)
    setup = Setup(models, {model.label: inputs_of(model, options) for model in models})
    if options["parts"].using_default_value:  # all, of which each model takes what suits it
        return setup
    taken = {
        part.name
        for weights in sets_of(options, setup)
        if not weights.seed
        for part in parts_of(weights)
    }
    taken.update(BESIDE)  # go with residuals, which suit all
    if missing := [name for name in options.parts if name not in taken]:
        labels = ", ".join(setup.batches)
        raise ValueError(f"--parts={','.join(missing)} cannot be measured on {labels}")
    return setup


def sets_of(options: Flags, setup: Setup) -> list[Weights]:
    """All sets of weights."""
    each = zip(setup.models, setup.batches.values(), strict=True)
    return [weights for model, batch in each for weights in weights_of(model, options, batch)]


def measure_all(options: Flags, setup: Setup, run: RunFolder) -> list[Results]:
    """Everything asked for of every model and set of weights, resumed from the run.

    A set of weights is a cell of the run, with texts in the place of seeds, which `Executor.map`
    would cut into chunks: here they go through a layer together, since a model may be larger than
    memory, and an interrupted cell resumes from its layers (`resumed`).
    """
    sets = sets_of(options, setup)
    with Progress(len(sets), "architectures", log=run.log) as progress:
        for weights in sets:
            if run.part(weights.name) is None and (wanted := parts_of(weights)):
                run.cached(weights.name, partial(measure, run, weights, wanted, progress))
                run.drop_checkpoints()
            progress.advance()
    return [Results(run.arrays, model) for model in setup.models]


def parts_of(weights: Weights) -> list[Part]:
    """What is asked for and suits the network; of later seeds the residuals alone."""
    options, config = weights.options, weights.model.config
    asked = set(options.parts) if weights.seed < options.num_path_seeds else {"residuals"}
    if asked.intersection(BESIDE):
        asked.add("residuals")
    of_whole = set(OF_WHOLE)
    if asked.intersection(OF_LANGUAGE) and weights.source.is_causal_lm:
        of_whole.update(OF_LANGUAGE)
    # Of a network with skips "log" is as "residuals".
    in_logs = {"SAN": config.replace(num_experts=0, d_shared=0), "SAN+MLP": config}
    found = []
    for ablation in surgery.variants_of(weights.model.family):
        variant, fits = ablation[0], {"residuals"}
        if variant in in_logs and LogPass.covers.refusal(in_logs[variant]) is None:
            fits.add("log")
        if ablation in (WHOLE, ("SAN", "published")) and BoundPass.covers.refusal(config) is None:
            fits.add("bounds")
        if ablation == WHOLE:
            fits |= of_whole
        found += [Part(name, ablation) for name in IN_ORDER if name in fits & asked]
    return found


def passes_of(part: Part, weights: Weights) -> dict[str, LayerPass]:
    """The passes that a part is made from; parts that share one share its result."""
    measures = ("residual_ratio", "token_cosine")
    if "ranks" in weights.options.parts:
        measures += ("effective_rank", "stable_rank")
    states = {"residuals": ProfilePass(measures)}
    if "read" in weights.options.parts:
        states["read"] = ProfilePass(measures, tokens="read")
    sums = {"sums": LengthPass(weights.source.biased)}
    return {
        "residuals": states,
        "log": {"log": LogPass()},
        "bounds": {"bounds": BoundPass()},
        "chains": {"chains": ChainPass()},
        "attention": {"attention": Each(attention_measures)},
        "layers": {"layers": InfluencePass()},
        "removal": {"removal": RemovalPass()},
        "lengths": sums,
        "next_token": sums,
        "gradients": sums | {"states": States()},
    }[part.name]


def measure(
    run: RunFolder, weights: Weights, wanted: list[Part], progress: Progress
) -> dict[str, Any]:
    """{"part/measure": [texts, ...]} of the wanted parts of one set of weights.

    Residuals are of all texts, all else is of the first few.
    """
    label, options, inputs = weights.model.label, weights.options, weights.inputs()
    label += "" if weights.kind == "pretrained" else f", {weights.kind} {weights.seed}"
    progress.say(label)
    few = min(options.num_path_texts, len(inputs["x"]))
    passes: dict[str, dict[str, LayerPass]] = {}
    for part in wanted:
        passes.setdefault(part.group, {}).update(passes_of(part, weights))
    groups = {}
    for name, own in passes.items():
        if "bounds" in own:  # which go through the same logarithms
            own.pop("log", None)
        spec = pretrained.AblationSpec(*name.split("/")[:2])
        last = None if "residuals" in own else few
        groups[name] = pretrained.Group(tuple(own.items()), spec, last=last)
    with Progress(
        weights.model.config.depth, f"{label}: layers", log=run.log, interval=1.0
    ) as layers:
        found = resumed(run, weights.name, weights.source, inputs, groups, options.chunk, layers)
    inputs = {k: v if v is None else v[:few] for k, v in inputs.items()}
    arrays: dict[str, Any] = {}
    for part in wanted:
        result, make = found[part.group], ARRAYS.get(part.name)
        own = make(weights, result, inputs) if make else result[part.name]
        arrays |= {f"{part.stored}/{name}": values for name, values in own.items()}
    return arrays


def removal(weights: Weights, found: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """What is lost without each layer; of a language model its loss, and the share of positions
    that keep their next token."""
    measures = dict(found["removal"])
    whole, without = (measures.pop(name) for name in ("output", "outputs"))  # [b, (l,) n, d]
    if not weights.source.is_causal_lm:
        return measures
    states = np.concatenate([np.asarray(whole)[:, None], without], axis=1)
    loss, same = read_out(next_token.agreement, weights, states, jnp.eye(states.shape[1]), inputs)
    own = {"loss": loss[:, 0], "loss_without": loss[:, 1:], "same_without": same[:, 1:]}
    return measures | own


def by_length(weights: Weights, found: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Loss and next token of lengths up to k, and of all lengths but k."""
    sums = jax.tree.map(jnp.asarray, found["sums"])
    parts = jax.vmap(lambda own: next_token.sums_by_length(own)[0])(sums)
    _, chosen = next_token.sums_by_length(jax.tree.map(lambda a: a[0], sums))
    return read_out(next_token.by_length, weights, parts, chosen, inputs)


def read_out(
    measure: Callable, weights: Weights, parts: Any, chosen: Any, inputs: dict[str, Any]
) -> Any:
    """A measure of the next tokens that sums of parts [b, p, n, d] give, of each text."""
    targets, keep = targets_of(np.asarray(inputs["x"]), inputs["mask"])
    known = next_tokens(weights.source.unembedding, parts, chosen, targets)
    return jax.vmap(measure)(known, jnp.asarray(keep))


def gradients(weights: Weights, found: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Share of the loss's gradient at the input that comes along paths of each length."""
    source = weights.source
    targets, keep = targets_of(np.asarray(inputs["x"]), inputs["mask"])
    output = jnp.asarray(found["sums"].output)
    known = next_tokens(source.unembedding, output[:, None], jnp.eye(1), targets)
    pull = loss_gradient(source.unembedding, output, known, targets, keep)
    split = stream_gradients(source, inputs, found["states"], pull)
    return jax.vmap(gradient_effects)(split)


# part: (weights, {pass: its result}, inputs) -> arrays [texts, ...] by name; of the others what
# the pass of their name found
ARRAYS: dict[str, Callable[..., dict[str, Any]]] = {
    "residuals": lambda weights, found, inputs: (
        found["residuals"] | {f"read_{name}": a for name, a in found.get("read", {}).items()}
    ),
    "log": lambda weights, found, inputs: {
        "log10_residual": (
            found["log"].profile if "log" in found else found["bounds"].log10_residual
        )
    },
    "bounds": lambda weights, found, inputs: jax.vmap(effects_of)(found["bounds"]),
    "removal": removal,
    # What the paths of each length add to the output, exactly
    "lengths": lambda weights, found, inputs: jax.vmap(
        lambda sums, keep: sizes_of(sums, mask=keep)
    )(found["sums"], inputs["mask"]),
    "next_token": by_length,
    "gradients": gradients,
}
