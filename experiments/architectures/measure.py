"""What run_architectures measures on one set of weights, part by part.

Each part is a function of (weights, flags) that names its measures, {"part/...": what computes its
arrays}; to add one, write the function and its line in `MEASURED`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from absl import flags

from experiments.architectures.models import Model, Weights, weights_of
from experiments.shell.progress import Progress
from rank_collapse.measures import profiles
from rank_collapse.network import surgery
from rank_collapse.paths import effects
from rank_collapse.runs.folder import RunFolder
from rank_collapse.theory.effects import bound_effects, has_bounds
from rank_collapse.theory.logdomain import log_residual_profile

Measures = dict[str, Callable[[], dict[str, Any]]]


def measure_all(
    run: RunFolder,
    models: list[Model],
    batches: dict[str, dict[str, Any]],
    options: flags.FlagValues,
) -> None:
    """Everything asked for of every model and set of weights, into the run's arrays."""
    jobs = [(m, kind, seed) for m in models for kind, seed in weights_of(m, options)]
    with Progress(len(jobs), "architectures", log=run.log) as progress:
        for i, (model, kind, seed) in enumerate(jobs):
            weights = Weights(model, kind, seed, options, batches[model.label])
            missing = {
                name: compute
                for part, measures in MEASURED.items()
                if part in options.parts and (part == "residuals" or seed < options.num_path_seeds)
                for name, compute in measures(weights, options).items()
                if run.part(f"{weights.name}/{name}") is None
            }
            if missing:
                progress.say(f"{model.label}, {kind} {seed}".replace(" pretrained 0", ""))
            for name, compute in missing.items():
                run.cached(f"{weights.name}/{name}", compute)
            progress.update(i + 1)


def on_texts(
    weights: Weights,
    measure: Callable,
    variant: str = "Transformer",
    reading: str = "published",
    *,
    texts: int | None = None,
    chunk: int = 2,
    **static: Any,
) -> dict[str, Any]:
    """A measure of one example on one variant of a network, [texts, ...].

    Args:
        weights: The network's.
        measure: See `profiles.measure_batch`.
        variant, reading: See `surgery.variant`.
        texts: How many of the first texts; all by default.
        chunk: Texts at once.
        **static: Further arguments of `measure`.
    """
    cut = surgery.variant(weights.config, weights.params, variant, reading, weights.family)
    config, params = cut
    inputs = weights.inputs(texts)
    return profiles.measure_batch(measure, params, config, inputs, chunk=chunk, **static)


def residuals(weights: Weights, options: flags.FlagValues) -> Measures:
    """Residual ratio and cosine of all variants by layer; with "ranks" effective and stable rank.

    Ranks take a singular value decomposition of every layer: a part of its own to leave out.
    """
    measures = ("residual_ratio", "token_cosine")
    if "ranks" in options.parts:
        measures += ("effective_rank", "stable_rank")
    given = {"chunk": options.chunk, "measures": measures}
    return {
        f"residuals/{variant}/{reading}": partial(
            on_texts, weights, profiles.network_profile, variant, reading, **given
        )
        for variant, reading in surgery.variants_of(weights.family)
    }


def logarithms(weights: Weights, options: flags.FlagValues) -> Measures:
    """The residual's logarithm by layer, of the variants whose residual leaves floating point.

    With skips it does not; a decoder's cross-attention has no logarithmic pass.
    """
    given = {"texts": options.num_path_texts, "chunk": options.chunk}
    return {
        f"log/{variant}/{reading}": partial(
            on_texts, weights, log_profile, variant, reading, **given
        )
        for variant, reading in surgery.variants_of(weights.family)
        if variant in ("SAN", "SAN+MLP") and not weights.config.cross_attention
    }


def log_profile(params: Any, x: Any, config: Any, **inputs: Any) -> dict[str, Any]:
    """`log_residual_profile` under the name it is stored by."""
    return {"log10_residual": log_residual_profile(params, x, config, **inputs)}


def lengths(weights: Weights, options: flags.FlagValues) -> Measures:
    """What the paths of each length add to the output, exactly."""
    texts = options.num_path_texts
    return {"lengths": partial(on_texts, weights, effects.length_effects, texts=texts)}


def chains(weights: Weights, options: flags.FlagValues) -> Measures:
    """Chained attention of random paths, sizes of skips and branches."""
    texts = options.num_path_texts
    return {"chains": partial(on_texts, weights, effects.chain_effects, texts=texts)}


def bounds(weights: Weights, options: flags.FlagValues) -> Measures:
    """The theory's constants, its condition and bounds, of the whole network and of SAN."""
    if not has_bounds(weights.config):
        return {}
    texts = options.num_path_texts
    return {
        f"bounds/{variant}/published": partial(
            on_texts, weights, bound_effects, variant, texts=texts
        )
        for variant in ("Transformer", "SAN")
    }


MEASURED = {
    "residuals": residuals,
    "log": logarithms,
    "lengths": lengths,
    "chains": chains,
    "bounds": bounds,
}
PARTS = ("residuals", "ranks", "log", "lengths", "chains", "bounds")  # "ranks" adds to residuals
