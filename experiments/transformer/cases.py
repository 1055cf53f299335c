"""The encoder-decoder and the tasks of run_transformer."""

from typing import Any

import jax
from absl import flags

from experiments.trained.training import Setup
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.network.encoder_decoder import EncoderDecoderConfig
from rank_collapse.training.recipe import Recipe
from rank_collapse.training.tasks import examples, grammar, sequences

TASKS = (*sequences.TASKS, "translation")
# The first of these is the headline; "loss" and "accuracy" are also measured after each epoch.
METRICS = {
    "accuracy": examples.token_accuracy,
    "exact_forced": examples.exact_match,
    "loss": examples.loss_metric,
}


def make_setup(options: flags.FlagValues) -> Setup:
    """The experiment of the flags.

    Raises:
        ValueError: Sizes of letter sequences given to a translation.
    """
    for name in ("seq_len", "num_labels", "min_len"):
        if options.task == "translation" and options[name].present:
            raise ValueError(
                f"--{name}={options[name].value}: a translation's sentences are as its grammar says"
            )
    task, vocab_size = options.task, vocabulary(options)
    title = f"{task.capitalize()} {options.seq_len} of {options.num_labels} letters"
    return Setup(
        name="transformer",
        title="Translation between two made-up languages" if task == "translation" else title,
        recipe=Recipe(
            config=network(options, vocab_size),
            num_outputs=vocab_size,
            batch_size=options.batch_sz,
            num_epochs=options.n_epochs,
            shuffle=True,
            schedule=options.schedule,
            optimizer=options.optimizer,
            unroll=1,
        ),
        make_data=lambda key: make_data(options, key),
        metrics=METRICS,
        published={},
        curves=("accuracy", "loss"),
    )


def vocabulary(options: flags.FlagValues) -> int:
    """Token ids of source and target."""
    if options.task == "translation":
        return grammar.vocab_size()
    return sequences.NUM_MARKS + options.num_labels


def network(options: flags.FlagValues, vocab_size: int) -> EncoderDecoderConfig:
    """Encoder and decoder of the same depth and width, as in Vaswani et al. 2017."""
    longest = grammar.TARGET_LENGTH if options.task == "translation" else options.seq_len + 2
    embedding = EmbeddingConfig(
        vocab_size=vocab_size,
        d_embed=options.hidden_dim,
        positions="learned",
        num_positions=longest,
    )
    half = TransformerConfig(
        depth=options.depth,
        num_heads=options.width,
        d_model=options.hidden_dim,
        d_ff=2 * options.hidden_dim,
        mlp="relu" if options.do_mlp else "none",
        attention_skip=True,
        mlp_skip=True,
        norm_placement=options.norm,
        norm_eps=1e-5,
        final_norm=options.norm == "pre",
        embedding=embedding,
    )
    decoder = half.replace(cross_attention=True, mask="causal")
    return EncoderDecoderConfig(
        half, decoder, shared_embedding=options.tie, tied_output=options.tie
    )


def make_data(options: flags.FlagValues, key: Any) -> dict[str, sequences.SequencePairs]:
    """Training and held-out pairs of one seed; a translation's seed has its own lexicon."""
    key_lexicon, *keys = jax.random.split(key, 3)
    counts = (options.n_train_data, options.n_eval_data)
    if options.task == "translation":
        lexicon = grammar.make_lexicon(key_lexicon)
        pairs = (grammar.make_pairs(k, n, lexicon) for k, n in zip(keys, counts, strict=True))
    else:
        pairs = (
            sequences.make_pairs(
                k, n, options.seq_len, options.num_labels, options.task, options.min_len
            )
            for k, n in zip(keys, counts, strict=True)
        )
    return dict(zip(("train", "eval"), pairs, strict=True))
