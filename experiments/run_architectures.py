"""Architectures: rank collapse of BERT, ALBERT, XLNet and others, pretrained and at initialisation.

Reproduces the residual figures of BERT, ALBERT and XLNet of Dong, Cordonnier and Loukas (2021):
||res(X)||/||X|| by layer for SAN, SAN+MLP, SAN+skip and the whole Transformer, on the same
weights. Beside them, on the same weights and texts: what all paths of each length add to the
output, exactly; token cosine and ranks; the theory's constants, its condition and bound per
layer and head; chained attention; the size of paths that alpha predicts.

    python -m experiments.run_architectures
    python -m experiments.run_architectures --checkpoints=bert-base-cased,gpt2 --text_file=texts.txt

Without --checkpoints: the three published models at random initialisation, about 2 minutes on two
cores. Otherwise folders as Hugging Face saves them (BERT, RoBERTa, ALBERT, XLNet, DistilBERT, T5,
GPT-2, ViT, Llama, Mistral, Qwen2); nothing is downloaded. To get one on a machine with internet:
`hf download bert-base-cased --local-dir bert-base-cased`. A 110M model on 32 texts
of 128 tokens takes about 20 seconds for the residuals and a minute for the rest, in memory of less
than three times the checkpoint. Expect SAN to collapse within 3 to 6 layers, and skips to stop it.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

import rank_collapse as rc
from experiments.architectures import report
from experiments.shell import cli
from experiments.shell.progress import Progress
from rank_collapse import pretrained
from rank_collapse import text as texts_of
from rank_collapse.measures import profiles
from rank_collapse.network import surgery
from rank_collapse.paths import effects

PARTS = ("residuals", "ranks", "log", "lengths", "chains", "bounds")

FLAGS = cli.make_flags("architectures", num_seeds=1)
FLAGS["num_devices"].default = 1  # one device whose matrix products use all cores
flags.DEFINE_list(
    "checkpoints", [], "Checkpoint folders; none for random initialisations.", flag_values=FLAGS
)
flags.DEFINE_list(
    "models", list(pretrained.PUBLISHED), "Published models to initialise without --checkpoints, "
    f"out of {', '.join(pretrained.PUBLISHED)}.", flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_string(
    "text_file", None, "Texts: a .tsv with a header (RTE), or paragraphs; default: overlapping "
    "pieces of a text shipped with the package.", flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_list("columns", [], "Columns of the .tsv that hold text.", flag_values=FLAGS)
flags.DEFINE_string(
    "token_ids", None, "Ready token ids in place of --text_file, one text a line.",
    flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_string(
    "images", None, "Inputs of a ViT: .npy of normalised images [b, channels, height, width].",
    flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_integer("num_texts", 32, "Texts.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("max_tokens", 128, "Tokens kept of each.", lower_bound=2, flag_values=FLAGS)
flags.DEFINE_boolean(
    "join", False, "Join texts until each has --max_tokens, as the published ones had.",
    flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_enum(
    "part", "encoder", ["encoder", "decoder"], "Which half of a T5; the decoder looks at the "
    "encoder's output on the same text.", flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_list("parts", list(PARTS), f"What to measure, out of {', '.join(PARTS)}.",
                  flag_values=FLAGS)  # fmt: skip
flags.DEFINE_integer(
    "num_path_texts", 8, "Texts for path sums, bounds and chains.", lower_bound=1,
    flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_boolean(
    "initialisation", True, "Also measure each checkpoint's own random initialisation.",
    flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_integer("chunk", 8, "Texts at once: memory.", lower_bound=1, flag_values=FLAGS)


@dataclasses.dataclass(frozen=True)
class Model:
    """One architecture: a folder, or the name of a published one."""

    label: str
    source: str
    settings: dict[str, Any]
    has_weights: bool


def main(options: flags.FlagValues) -> None:
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown or not options.parts:
        raise ValueError(f"--parts={','.join(options.parts)} is not out of {', '.join(PARTS)}")
    models = models_of(options)
    batches = {m.label: inputs_of(m, options) for m in models}
    digest = b"".join(v.tobytes() for b in batches.values() for v in b.values() if v is not None)
    settings = json.dumps([m.settings for m in models], sort_keys=True, default=str).encode()
    extra = {"inputs": cli.content_hash(digest), "settings": cli.content_hash(settings)}
    with cli.open_run(options, "architectures", extra=extra, execution=("chunk",)) as run:
        if run.summary is None or not (run.path / "report.html").exists():
            jobs = [(m, w, s) for m in models for w, s in weights_of(m, options)]
            with Progress(len(jobs), "architectures", log=run.log) as progress:
                for i, (model, weights, seed) in enumerate(jobs):
                    progress.say(f"{model.label}, {weights} {seed}".replace(" pretrained 0", ""))
                    measure(run, model, weights, seed, batches[model.label], options)
                    progress.update(i + 1)
            report.write(run, models, batches, options)
        report.show(run)


def models_of(options: flags.FlagValues) -> list[Model]:
    """The folders of --checkpoints, or the published models.

    Raises:
        FileNotFoundError, ValueError: See `pretrained.settings_of`.
    """
    sources = options.checkpoints or options.models
    if not options.checkpoints:
        unknown = [m for m in options.models if m not in pretrained.PUBLISHED]
        if unknown or not sources:
            known = ", ".join(pretrained.PUBLISHED)
            raise ValueError(f"--models={','.join(options.models)} is not out of {known}")
    models, labels = [], set()
    for source in sources:
        has_weights = bool(options.checkpoints)
        label = Path(source).resolve().name if has_weights else source
        while label in labels:
            label += "+"
        labels.add(label)
        settings = pretrained.settings_of(Path(source) if has_weights else source)
        if "part" in settings:
            settings["part"] = options.part
        models.append(Model(label, source, settings, has_weights))
    return models


def inputs_of(model: Model, options: flags.FlagValues) -> dict[str, Any]:
    """The batch a model is measured on, as arguments of `rank_collapse.apply`: x and mask.

    Raises:
        FileNotFoundError, ValueError: A file that is missing, empty or does not suit the model.
    """
    config = pretrained.config_of(model.settings, model.settings.get("part"))
    if config.embedding.d_input:
        return {"x": images_of(model, options), "mask": None}
    limits = {"num_positions": config.embedding.num_positions}
    limits |= {"vocab_size": config.embedding.vocab_size, "max_tokens": options.max_tokens}
    if options.token_ids:
        sequences = texts_of.read_ids(options.token_ids, options.num_texts)
        longest = max(map(len, sequences))
        if limits["num_positions"] and longest > limits["num_positions"]:
            raise ValueError(
                f"{options.token_ids}: a text of {longest} tokens is longer than the "
                f"{limits['num_positions']} positions of {model.label}"
            )
        tokens = texts_of.pad(
            [s[: options.max_tokens] for s in sequences], vocab_size=limits["vocab_size"]
        )
    else:
        tokens = tokens_of(model, options, limits)
    if int(tokens.lengths.min()) < 2:
        raise ValueError(f"text {int(tokens.lengths.argmin())} has fewer than 2 tokens")
    return {"x": tokens.ids, "mask": tokens.mask}


def tokens_of(model: Model, options: flags.FlagValues, limits: dict[str, int]) -> texts_of.Tokens:
    """The texts of the flags as this model's tokens."""
    if options.text_file:
        texts = texts_of.read_texts(options.text_file, options.columns)
    else:
        texts = texts_of.windows(texts_of.default_text(), options.num_texts, options.max_tokens)
    encoder = None
    if model.has_weights:
        encoder = texts_of.tokenizer_of(model.source, model.settings)
        if encoder is None:
            raise ValueError(f"{model.source} holds no tokenizer files; give --token_ids")
    if encoder is None:
        encoder = texts_of.trained_tokenizer(texts, limits["vocab_size"])
    if options.join:
        texts = texts_of.join(texts, encoder, options.max_tokens, options.num_texts)
    return texts_of.encode(texts[: options.num_texts], encoder, **limits)


def images_of(model: Model, options: flags.FlagValues) -> np.ndarray:
    """Images as rows of patches [b, n, d_input]."""
    if options.images is None:
        raise ValueError(f"{model.label} is a vit: give --images=FILE.npy")
    if not Path(options.images).is_file():
        raise FileNotFoundError(f"--images={options.images} does not exist")
    images = np.load(options.images, allow_pickle=False)[: options.num_texts]
    return pretrained.vit.image_patches(np.asarray(images, np.float32), model.settings)


def weights_of(model: Model, options: flags.FlagValues) -> list[tuple[str, int]]:
    """(kind of weights, seed): the checkpoint, then its initialisations."""
    jobs = [("pretrained", 0)] if model.has_weights else []
    if options.initialisation or not model.has_weights:
        jobs += [("init", seed) for seed in range(options.num_seeds)]
    return jobs


def measure(
    run: Any, model: Model, weights: str, seed: int, inputs: dict, options: flags.FlagValues
) -> None:
    """Everything asked for on one set of weights, part by part into the run's cache."""
    load = _Loader(model, weights, seed, options, inputs)
    family = model.settings["model_type"]
    few = options.num_path_texts
    prefix = f"{model.label}/{weights}{seed}"

    def once(name: str, compute: Callable, needs: str) -> None:
        if needs in options.parts:
            run.cached(f"{prefix}/{name}", compute)

    measures = ("residual_ratio", "token_cosine")
    if "ranks" in options.parts:
        measures += ("effective_rank", "stable_rank")
    for variant, reading in effects.variants_of(family):
        cut = (variant, reading, family)
        once(
            f"residuals/{variant}/{reading}",
            lambda cut=cut: effects.variant_profiles(
                load.config, load.params, *cut, load.inputs(),
                measures=measures, chunk=options.chunk,
            ),
            "residuals",
        )  # fmt: skip
        # With skips nothing leaves the range of floating point: the logarithm has nothing to add.
        if variant in ("SAN", "SAN+MLP") and not load.config.cross_attention:
            once(
                f"log/{variant}/{reading}",
                lambda cut=cut: {
                    "log10_residual": effects.log_ratio_profiles(
                        load.config, load.params, *cut, load.inputs(few), chunk=options.chunk
                    )
                },
                "log",
            )

    def batch(effects, variant="Transformer", chunk=2):
        config, params = surgery.variant(load.config, load.params, variant, family=family)
        return profiles.measure_batch(effects, params, config, load.inputs(few), chunk=chunk)

    once("lengths", lambda: batch(effects.length_effects), "lengths")
    once("chains", lambda: batch(effects.chain_effects), "chains")
    if effects.has_bounds(load.config):
        for variant in ("Transformer", "SAN"):
            once(
                f"bounds/{variant}/published",
                lambda v=variant: batch(effects.bound_effects, v),
                "bounds",
            )


class _Loader:
    """One set of weights, read when first asked for: a run that is resumed may not need them."""

    def __init__(self, model, weights, seed, options, inputs):
        self.model, self.weights, self.options = model, weights, options
        self.seed = seed
        self._inputs, self._params, self._memory = inputs, None, None
        self.config = pretrained.config_of(model.settings, model.settings.get("part"))

    @property
    def params(self):
        if self._params is None:
            self._params = self._read(self.model.settings.get("part"))
        return self._params

    def _read(self, part):
        if self.weights == "pretrained":
            return pretrained.load(self.model.source, part=part)[1]
        key = jax.random.fold_in(jax.random.key(self.options.seed), self.seed)
        settings = {k: v for k, v in self.model.settings.items() if k != "part"}
        return pretrained.random_like(settings, key, part=part)[1]

    def inputs(self, count=None):
        """The batch, or its first texts; with the encoder's output for a decoder."""
        batch = dict(self._inputs)
        if self.config.cross_attention:
            if self._memory is None:
                self._memory = self._encoded()
            batch |= {"memory": self._memory, "memory_mask": batch["mask"]}
        return {k: v if v is None else v[:count] for k, v in batch.items()}

    def _encoded(self):
        config = pretrained.config_of(self.model.settings, "encoder")
        params = self._read("encoder")

        chunk = self.options.chunk
        return profiles.measure_batch(_output, params, config, self._inputs, chunk=chunk)


def _output(params, x, config, mask=None):
    """What a decoder looks at."""
    return rc.apply(params, x, config, mask=mask).output


ENTRY = report.ENTRY

if __name__ == "__main__":
    cli.run(main, FLAGS)
