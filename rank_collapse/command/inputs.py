"""The source of a checkpoint command, and the tokens, images or features to measure."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rank_collapse import pretrained
from rank_collapse.checks import refuse_if
from rank_collapse.command.folders import check_folder
from rank_collapse.pretrained.loading import hub_folder, is_hub_name
from rank_collapse.pretrained.published import RANDOM_WEIGHTS, is_random_name
from rank_collapse.printed import escape_text, format_count, print_lines
from rank_collapse.regular import open_regular
from rank_collapse.text import encoders, tokens, words

NUM_TEXTS, MAX_TOKENS = 4, 64  # of texts; ids that are given are not cut
UNKNOWN = 0.1  # share of unknown tokens from which on the numbers are of these
DRAWN = "Drawn inputs, standard normal: no {}; --inputs=FILE.npy measures real ones."


class Opened(NamedTuple):
    """A checkpoint before it is measured.

    Attributes:
        name: Name as in the command, without control characters.
        source: The open checkpoint.
        folder: Its folder; None where its weights are drawn.
    """

    name: str
    source: pretrained.OpenCheckpoint
    folder: Path | None

    @property
    def half(self) -> str:
        """Return "encoder" or "decoder" for half of an encoder-decoder, else ""."""
        part = self.source.settings.get("part")
        return f"its {part}" if part else ""

    @property
    def weights(self) -> str:
        """Return a description of the weights for the page, the table and the JSON."""
        return RANDOM_WEIGHTS if self.source.has_random_weights else "of the checkpoint"

    @property
    def about(self) -> str:
        """Return the beginning of its verdict, such as "random weights: "; or ""."""
        parts = [RANDOM_WEIGHTS] * self.source.has_random_weights + [self.half]
        return "".join(f"{part}: " for part in parts if part)


class Inputs(NamedTuple):
    """What is measured.

    Attributes:
        x: Tokens [b, n], or vectors [b, n, d_input].
        mask: Bool [b, n], the tokens that exist; None for vectors.
        description: A sentence that says what they are.
        kind: "ids", "texts", "random" or "arrays".
    """

    x: np.ndarray
    mask: np.ndarray | None
    description: str
    kind: str

    @property
    def lengths(self) -> np.ndarray:
        """Return the tokens or vectors of each text or array, [b]."""
        return np.full(len(self.x), self.x.shape[1]) if self.mask is None else self.mask.sum(axis=1)

    @property
    def counts(self) -> str:
        """Return a description such as "4 texts of 12 to 64 tokens"."""
        noun, unit = ("input", "vectors") if self.mask is None else ("text", "tokens")
        shortest, longest = self.lengths.min(), self.lengths.max()
        span = f"{longest}" if shortest == longest else f"{shortest} to {longest}"
        return f"{format_count(len(self.x), noun)} of {span} {unit}"


def open_source(name: str) -> Opened:
    """Open a checkpoint.

    Args:
        name: A folder, a name on the hub, or "random:" and a name, for weights drawn at random.

    Raises:
        FileNotFoundError, ValueError: A source that cannot be read, or that takes neither tokens
            nor vectors.
    """
    escaped_name = escape_text(name)
    if is_random_name(name):
        return Opened(escaped_name, pretrained.open_random(name, jax.random.key(0)), None)
    folder = hub_folder(name) if is_hub_name(name) else Path(name)
    check_folder(folder)
    return Opened(escaped_name, pretrained.open_checkpoint(folder), folder)


def read_inputs(flags: argparse.Namespace, checkpoint: Opened) -> Inputs:
    """Read or draw the inputs on which a command measures a checkpoint.

    Args:
        flags: Parsed flags, from `checkpoint.add_arguments`.
        checkpoint: The checkpoint that reads the inputs.

    Raises:
        FileNotFoundError, ValueError: Missing texts, arrays or tokenizer files, or tokens that the
            model does not have.
    """
    source, embedding = checkpoint.source, checkpoint.source.config.embedding
    if embedding.d_input:
        _refuse_text_flags(flags, checkpoint.name, embedding)
        return _read_arrays(flags, source.settings, embedding)
    refuse_if(
        flags.inputs, f"--inputs={flags.inputs} does not fit {checkpoint.name}, which reads tokens"
    )
    read = _read_ids if flags.ids or flags.token_ids else _read_texts
    rows, description, kind = read(flags, checkpoint)
    batch = tokens.pad_sequences(rows, vocab_size=embedding.vocab_size)
    shortest, longest = batch.lengths.argmin(), batch.lengths.argmax()
    refuse_if(batch.lengths[shortest] < 2, f"text {shortest} has fewer than 2 tokens")
    limit, length = embedding.num_positions, batch.lengths[longest]
    refuse_if(
        limit and length > limit,
        f"text {longest} has {length} tokens, but the model has "
        f"{format_count(limit, 'position')}: give "
        f"--max_tokens={limit}",
    )
    return Inputs(batch.ids, batch.mask, escape_text(description), kind)


def check_comparable(sources: Sequence[Opened], batches: Sequence[Inputs]) -> None:
    """Check that all checkpoints are measured on texts, or all on random ids.

    Args:
        sources: Checkpoints.
        batches: Inputs of each.

    Raises:
        ValueError: The message names two checkpoints that cannot be compared.
    """
    kinds = {batch.kind: source.name for source, batch in zip(sources, batches, strict=True)}
    if "random" in kinds and len(kinds) > 1:
        other = next(kind for kind in kinds if kind != "random")
        raise ValueError(
            f"{kinds['random']} would be measured on random token ids, {kinds[other]} on {other}: "
            "give --tokenizer=FOLDER or --ids=5,8,13, or measure each alone"
        )


def _refuse_text_flags(flags, name, embedding):
    """Raise a ValueError for a flag that selects text, if the model reads images or sound.

    Args:
        flags: Parsed flags.
        name: Name of the checkpoint.
        embedding: The embedding of its inputs.
    """
    noun = "spectrograms" if embedding.convolutions else "images"
    for flag in ("text", "ids", "token_ids", "tokenizer"):
        refuse_if(
            getattr(flags, flag, None),
            f"--{flag} does not fit {name}, which reads {noun}: give --inputs=FILE.npy",
        )


def _read_ids(flags, checkpoint):
    """Read token ids, cut where the flags say so; returns (ids, description, kind)."""
    refuse_if(
        flags.text or flags.tokenizer or (flags.ids and flags.token_ids),
        "--ids excludes --text and --tokenizer, and so does --token_ids",
    )
    name = flags.token_ids or "--ids"
    rows = tokens.read_ids(name) if flags.token_ids else tokens.parse_ids(flags.ids, name)
    rows, description = _select_first(rows, flags.num_texts, f"The ids of {name}")
    limit = flags.max_tokens or max(map(len, rows))
    return [row[:limit] for row in rows], f"{description}{_describe_cut(rows, limit)}.", "ids"


def _read_texts(flags, checkpoint):
    """Tokenize texts, or draw random ids where there is no tokenizer; returns as `_read_ids`.

    Args:
        flags, checkpoint: See `read_inputs`.
    """
    embedding, folder = checkpoint.source.config.embedding, flags.tokenizer or checkpoint.folder
    count, limit = flags.num_texts or NUM_TEXTS, flags.max_tokens or MAX_TOKENS
    if embedding.num_positions:
        limit = min(limit, embedding.num_positions)
    if flags.text:
        texts, description = _select_first(tokens.read_texts(flags.text), count, flags.text)
    else:
        texts = words.cut_windows(words.default_text(), count, limit)
        description = "The shipped English text"
    description += f", “{' '.join(texts[0].split()[:5])} …”, by "
    if folder is None:
        encoder = encoders.trained_tokenizer(texts, embedding.vocab_size)
        description += "a vocabulary of the texts"
    else:
        encoder = encoders.load_tokenizer(folder, checkpoint.source.settings)
        description += f"the tokenizer of {folder}"
    if encoder is None:
        absent = f"{folder} has none of {encoders.FILES}"
        refuse_if(
            flags.text or flags.tokenizer, f"{absent}; give --tokenizer=FOLDER or --ids=5,8,13"
        )
        draw = np.random.default_rng(0)
        rows = draw.integers(embedding.vocab_size, size=(count, limit)).tolist()
        description = f"Random token ids, since {absent}; --tokenizer=FOLDER or --ids=5,8,13."
        return rows, description, "random"
    with hide_native_errors():
        rows = [encoder(text) for text in texts]
    description += _describe_cut(rows, limit)
    rows = [tokens.cut_text(row, limit) for row in rows]
    return rows, f"{description}{_describe_unknown(encoder, rows)}", "texts"


@contextlib.contextmanager
def hide_native_errors() -> Iterator[None]:
    """Hide the messages that a library writes directly to the process's standard error, such as
    Rust's panics.

    The exception contains the same message in one line.
    """
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _select_first(
    texts: Sequence[object], count: int | None, name: str
) -> tuple[Sequence[Any], str]:
    """Select the first `count` texts (all without a count), and a name that mentions the cut."""
    if count is None or count >= len(texts):
        return texts, name
    return texts[:count], f"{name}, the first {count} of {len(texts)} texts"


def _describe_cut(rows, limit):
    """Describe how many texts are longer than `limit` tokens and are cut."""
    count = sum(len(row) > limit for row in rows)
    return f", {count} of {len(rows)} cut to {limit} tokens" if count else ""


def _describe_unknown(encoder, rows):
    """Describe the share of tokens that the tokenizer does not know; warn above a tenth."""
    unknown = getattr(encoder, "unknown", None)
    if unknown is None:
        return "."
    share = float((np.concatenate(rows) == unknown).mean())
    if share <= UNKNOWN:
        return f", {share:.0%} of them unknown to it."
    text = f"warning: {share:.0%} of the tokens are unknown to the tokenizer"
    print_lines(text, file=sys.stderr)
    about = "The numbers describe the unknown token: give a --text that it knows, or --token_ids."
    return f", {share:.0%} of them unknown to it. {about}"


def _read_arrays(flags, settings, embedding):
    """Read or draw images, cut into patches, or features [b, frames, bins].

    Args:
        flags: See `read_inputs`.
        settings, embedding: Settings and embedding of the model.
    """
    count = flags.num_texts or NUM_TEXTS
    if embedding.convolutions:
        noun, shape = "spectrogram", (2 * embedding.num_positions, embedding.d_input)
    else:
        side = settings["image_size"]
        sides = (side, side) if isinstance(side, int) else tuple(side)
        noun, shape = "image", (settings["num_channels"], *sides)
    if flags.inputs:
        x = _read_array(flags.inputs, count)
        description = f"The first {len(x)} of {flags.inputs}."
    else:
        x = np.random.default_rng(0).standard_normal((count, *shape), np.float32)
        description = DRAWN.format(noun)
    if not embedding.convolutions:
        return Inputs(
            pretrained.image_patches(x, settings), None, escape_text(description), "arrays"
        )
    # as feature extractors of transformers give them
    x = x.swapaxes(1, 2) if x.ndim == 3 and x.shape[1:] == shape[::-1] else x
    refuse_if(
        x.ndim != 3 or x.shape[2] != embedding.d_input,
        f"{flags.inputs} of shape {x.shape} is not [b, *, {embedding.d_input}]",
    )
    if x.shape[1] < shape[0]:
        description += (
            f" They have {x.shape[1]} frames. In transformers this model accepts only {shape[0]} "
            "frames and pads shorter sound to that length, so that its states differ from these."
        )
    return Inputs(x, None, escape_text(description), "arrays")


def _read_array(path, count):
    """Read the first `count` entries of an .npy file as float32."""
    try:
        with open_regular(path) as file:
            array = np.asarray(np.load(file)[:count], np.float32)
        refuse_if(not array.size, f"its shape is {array.shape}")
    except OSError:
        raise
    except Exception as error:  # zipfile and numpy raise nearly any on other files
        raise ValueError(f"{path} is not an array of numbers (.npy): {error}") from None
    return array
