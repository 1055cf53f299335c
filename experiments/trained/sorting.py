"""The sorting task of the trained experiments: letters, a network with learned positions."""

import functools
from typing import Any

from absl import flags

import rank_collapse as rc
from experiments.trained import arguments
from experiments.trained.training import Setup, train_and_eval
from rank_collapse.training.tasks import examples, sorting


def make_setup(options: flags.FlagValues) -> Setup:
    """What the flags train.

    Raises:
        ValueError: More distinct letters than there are.
    """
    letters, tokens, repeats = options.num_labels, options.num_tokens, not options.no_repeat
    if not repeats and tokens > letters:
        raise ValueError(f"--no_repeat: num_tokens={tokens} out of num_labels={letters} letters")
    embedding = rc.EmbeddingConfig(
        vocab_size=letters,
        d_embed=options.d_model,
        positions="learned",
        num_positions=tokens,
        projection="before_norm",
    )
    make = functools.partial(
        sorting.make_examples, seq_len=tokens, num_letters=letters, repeats=repeats
    )

    def misordered(logits: Any, _: Any) -> Any:
        return sorting.misordered_pairs(logits.argmax(axis=-1), repeats)

    return Setup(
        options,
        name="sort",
        title=f"Sorting {tokens} of {letters} letters",
        recipe=arguments.recipe(options, embedding),
        make_data=functools.partial(train_and_eval, make, options),
        metrics={
            "accuracy": examples.token_accuracy,
            "exact_match": examples.exact_match,
            "misordered_pairs": misordered,
            "loss": examples.loss_metric,
        },
        published={"whole": 0.98, "baseline": 0.10},
    )
