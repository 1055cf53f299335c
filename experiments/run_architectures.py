"""Architectures: rank collapse of BERT, ALBERT, XLNet and others, pretrained and at initialisation.

Reproduces the residual figures of BERT, ALBERT and XLNet of Dong, Cordonnier and Loukas (2021):
||res(X)||/||X|| by layer for SAN, SAN+MLP, SAN+skip and the whole Transformer, on the same
weights. Beside them, on the same weights and texts: what all paths of each length add to the
output, to a language model's next token and to its gradient, exactly; the effective depth; each
layer's influence and what is lost without it; token cosine and ranks; attention's entropy and
sinks; the theory's constants, its condition and bound per layer and head; chained attention; the
size of paths that alpha predicts.

    python -m experiments.run_architectures
    python -m experiments.run_architectures --checkpoints=bert-base-cased,gpt2 --text_file=texts.txt

Without --checkpoints: the three published models at random initialisation, about 2 minutes on two
cores. Otherwise folders as Hugging Face saves them (BERT, RoBERTa, ALBERT, XLNet, DistilBERT, T5,
GPT-2, GPT-NeoX, ViT, DeiT, DINOv2, Llama, Mistral, Mixtral, Qwen2, Qwen3, Phi-3, OLMo 2, Gemma 2
and 3, ModernBERT, Whisper's encoder). To get one on a machine with internet: `hf download
bert-base-cased --local-dir bert-base-cased`, or --checkpoints=hf:bert-base-cased with the package
huggingface_hub. Weights are read layer by layer, so that a model may be larger than memory; an
interrupted run goes on at the layer where it was. Folders of one model by step (step1000,
checkpoint-500) also give curves over its training. Expect SAN to collapse within 3 to 6 layers, and
skips to stop it.
"""

from functools import partial

from absl import flags

from experiments.architectures.entry import ENTRY, reading
from experiments.architectures.figures import figures_of
from experiments.architectures.inputs import identity, inputs_of
from experiments.architectures.measure import PARTS, measure_all, require_parts
from experiments.architectures.models import models_of
from experiments.architectures.page import page
from experiments.architectures.results import Results, rows_of, summary_of
from experiments.architectures.training import training_figures
from experiments.shell import cli
from experiments.shell.inputs import precision
from rank_collapse.pretrained import PUBLISHED

KNOWN = ", ".join(PUBLISHED)

FLAGS = cli.make_flags("architectures", num_seeds=1, shows="mean,measure=last")
FLAGS["num_devices"].default = 1  # one device whose matrix products use all cores
define = cli.definer(FLAGS)
define(
    "list",
    "checkpoints",
    [],
    "Checkpoint folders, or hf:NAME or hf:NAME@REVISION of the Hugging Face hub; none for random "
    "initialisations.",
)
define(
    "list",
    "models",
    list(PUBLISHED),
    f"Published models to initialise without --checkpoints, out of {KNOWN}.",
)
define(
    "string",
    "text_file",
    None,
    "Texts: a .tsv with a header (RTE), or paragraphs; default: "
    "overlapping pieces of a text shipped with the package.",
)
define("list", "columns", [], "Columns of the .tsv that hold text.")
define("string", "token_ids", None, "Ready token ids in place of --text_file, one text a line.")
define(
    "string",
    "images",
    None,
    "Inputs of a ViT, DeiT or DINOv2: .npy of normalised images [b, channels, height, width].",
)
define(
    "string",
    "features",
    None,
    "Inputs of Whisper's encoder: .npy of log-mel spectrograms [b, mel bins, frames].",
)
define("integer", "num_texts", 32, "Texts.", lower_bound=1)
define("integer", "max_tokens", 128, "Tokens kept of each.", lower_bound=2)
define(
    "boolean", "join", False, "Join texts until each has --max_tokens, as the published ones had."
)
define(
    "enum",
    "part",
    "encoder",
    "Which half of a T5; the decoder looks at the encoder's output on the same text.",
    ("encoder", "decoder"),
)
define("list", "parts", list(PARTS), f"What to measure, out of {', '.join(PARTS)}.")
define("integer", "num_path_texts", 8, "Texts for path sums, bounds and chains.", lower_bound=1)
define(
    "integer",
    "num_path_seeds",
    4,
    "Initialisations on which more than the residuals is measured.",
    lower_bound=1,
)
define(
    "boolean", "initialisation", True, "Also measure each checkpoint's own random initialisation."
)
define("integer", "chunk", 8, "Texts at once: memory.", lower_bound=1)
define(
    "enum",
    "dtype",
    "float32",
    "What is computed in; weights stay as they are on disk.",
    ("float32", "float64"),
)


def main(options: flags.FlagValues) -> None:
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown or not options.parts:
        raise ValueError(f"--parts={','.join(options.parts)} is not out of {', '.join(PARTS)}")
    with precision(options):
        measured(options)


def measured(options: flags.FlagValues) -> None:
    """The run, in its precision."""
    models = models_of(options)
    batches = {model.label: inputs_of(model, options) for model in models}
    require_parts(models, batches, options)
    extra = identity(models, batches)
    with cli.open_run(options, "architectures", extra=extra, execution=("chunk",)) as run:
        measure_all(run, models, batches, options)
        results = [Results(run.arrays, model) for model in models]
        summary = partial(summary_of, results, batches)
        numbers = run.publish(
            rows=partial(rows_of, results),
            figures=figures_of(results) | training_figures(results),
            files={
                "report.html": lambda: page(
                    results, summary(), run.path / "figures", cli.command_line()
                )
            },
            summary=summary,
        )
        for line in reading(numbers).removesuffix(".").split(". "):
            print(line)
        print(f"written to {run.path}; page: {run.path / 'report.html'}")


__all__ = ["ENTRY", "FLAGS", "main"]

if __name__ == "__main__":
    cli.run(main, FLAGS)
