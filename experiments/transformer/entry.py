"""How run_transformer stands in the report."""

from typing import Any

from experiments.shell.entry import Entry
from rank_collapse.report.page import Comparison


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """Tokens and whole sequences; no number is published for these tasks."""
    tokens, exact = summary["whole"]["accuracy"], summary["exact"]
    note = f"± {{:.3f}} over {summary['seeds']} seed(s), task {summary['task']}"
    return [
        Comparison(
            "token accuracy, teacher forced", tokens["mean"], note=note.format(tokens["std"])
        ),
        Comparison(
            "sequences written exactly, decoded greedily", exact["mean"],
            note=note.format(exact["std"]),
        ),
    ]  # fmt: skip


def reading(summary: dict[str, Any]) -> str:
    """What was learned, and what the halves make of their tokens."""
    last = {half: values["mean"][-1] for half, values in summary["residual"].items()}
    return (
        f"{summary['whole']['accuracy']['mean']:.3f} of the tokens are right under teacher forcing "
        f"and {summary['exact']['mean']:.3f} of the sequences when the network reads what it wrote "
        f"itself. The trained tokens stay apart: residual ratio {last['encoder']:.2f} after the "
        f"encoder, {last['decoder']:.2f} after the decoder."
    )


ENTRY = Entry(
    title="An encoder-decoder at work",
    claim="Three uses of attention in one network (Vaswani et al. 2017, section 3.2.3): within the "
    "source, within the target so far, and from target to source. No number is published for "
    "these made-up tasks.",
    presets={
        "quick": (
            "--task=reverse", "--num_seeds=2", "--seq_len=5", "--n_train_data=1000",
            "--n_epochs=10", "--batch_sz=32", "--n_eval_data=100",
        ),
        "paper": ("--task=translation", "--num_seeds=8", "--n_epochs=60"),
    },
    compare=compare,
    reading=reading,
    captions={
        "curves": "Loss and accuracy after each epoch, mean and standard deviation over seeds; the "
        "point at the end: sequences decoded greedily that are right in every token.",
        "attention": "Attention weights on one held-out pair, mean over heads: within the source, "
        "within the target so far, from target to source.",
        "residual": "Residual of the tokens by layer of the trained halves, bands over seeds.",
    },
)  # fmt: skip
