"""A checkpoint that a command is given, and the tokens, images or features that it measures."""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from rank_collapse import pretrained
from rank_collapse.pretrained.hub import hub_folder, is_hub_name
from rank_collapse.text import encoders, tokens, words

UNKNOWN = 0.1  # share of unknown tokens from which on the numbers are of these
DRAWN = "Drawn inputs, standard normal: no {}; --inputs=FILE.npy measures real ones."


class Opened(NamedTuple):
    """A checkpoint before it is measured."""

    name: str  # What it was asked for as
    source: pretrained.OpenCheckpoint
    folder: Path | None  # None where it is drawn anew

    @property
    def half(self) -> str:
        """Which half of an encoder-decoder it is, or ""."""
        part = self.source.settings.get("part")
        return f"its {part}" if part else ""


class Inputs(NamedTuple):
    """What is measured."""

    x: np.ndarray  # Tokens [b, n], or vectors [b, n, d_input]
    mask: np.ndarray | None  # [b, n]
    made: str  # A sentence: what they are
    kind: str  # "ids", "texts", "random" or "arrays"

    @property
    def counts(self) -> str:
        """ "4 texts of 12 to 64 tokens"."""
        if self.mask is None:
            return f"{_several(len(self.x), 'input')} of {self.x.shape[1]} vectors"
        lengths = self.mask.sum(axis=1)
        least = "" if lengths.min() == lengths.max() else f"{lengths.min()} to "
        return f"{_several(len(self.x), 'text')} of {least}{lengths.max()} tokens"


def _several(count, noun):
    return f"{count} {noun}{'s' * (count != 1)}"


def opened(name: str) -> Opened:
    """A checkpoint and its folder; None where it is drawn anew.

    Raises:
        FileNotFoundError, ValueError: What cannot be read, or takes in neither tokens nor vectors.
    """
    if name in pretrained.PUBLISHED and not Path(name).is_dir():
        return Opened(name, pretrained.open_random(name, jax.random.key(0)), None)
    folder = hub_folder(name) if is_hub_name(name) else Path(name)
    return Opened(name, pretrained.open_checkpoint(folder), folder)


def inputs_of(given: argparse.Namespace, one: Opened) -> Inputs:
    """What a command asks to measure of a checkpoint.

    Raises:
        FileNotFoundError, ValueError: Texts, arrays or tokenizer files that are not there, or
            tokens that the model does not have.
    """
    source, embedding = one.source, one.source.config.embedding
    if embedding.d_input:
        return _arrays(given, source)
    if given.inputs:
        raise ValueError(f"--inputs={given.inputs}: {one.name} takes in tokens")
    known = {"vocab_size": embedding.vocab_size}
    longest = min(given.max_tokens, embedding.num_positions or given.max_tokens)
    kind = "ids" if given.ids or given.token_ids else "texts"
    if kind == "ids":
        if given.text or given.tokenizer or (given.ids and given.token_ids):
            raise ValueError("--ids excludes --text and --tokenizer, and so does --token_ids")
        read = tokens.read_ids(given.token_ids, given.num_texts) if given.token_ids else None
        rows = [row[:longest] for row in read] if read else tokens.ids_of(given.ids, "--ids")
        batch = tokens.pad(rows, **known)
        made = f"The ids of {given.token_ids or '--ids'}."
    else:
        if given.text:
            texts = tokens.read_texts(given.text, limit=given.num_texts)
        else:
            texts = words.windows(words.default_text(), given.num_texts, given.max_tokens)
        place = given.tokenizer or one.folder
        which = f"{given.text or 'The shipped English text'}, “{' '.join(texts[0].split()[:5])} …”"
        if place is None:
            encoder = encoders.trained_tokenizer(texts, **known)
            made = f"{which}, by a vocabulary of the texts."
        else:
            encoder = encoders.tokenizer_of(place, source.settings)
            made = f"{which}, by the tokenizer of {place}"
        if encoder is None:
            none = f"{place} has none of {encoders.FILES}"
            if given.text or given.tokenizer:
                raise ValueError(f"{none}; give --tokenizer=FOLDER or --ids=5,8,13")
            made = f"Random token ids, since {none}; --tokenizer=FOLDER or --ids=5,8,13."
            drawn_ids = np.random.default_rng(0).integers(
                embedding.vocab_size, size=(given.num_texts, longest)
            )
            batch, kind = tokens.pad(drawn_ids.tolist(), **known), "random"
        else:
            batch = tokens.encode(texts, encoder, max_tokens=longest, **known)
            made += _unknown(encoder, batch) if place is not None else ""
    if int(batch.lengths.min()) < 2:
        raise ValueError(f"text {int(batch.lengths.argmin())} has fewer than 2 tokens")
    return Inputs(batch.ids, batch.mask, made, kind)


def _unknown(encoder, batch):
    """The share of tokens that the tokenizer does not know, in words; a warning above a tenth."""
    if encoder.unknown is None:
        return "."
    share = float((batch.ids == encoder.unknown)[batch.mask].mean())
    said = f", {share:.0%} of them unknown to it."
    if share > UNKNOWN:
        said += " The numbers are of the unknown token: give --text of its kind, or --token_ids."
        print(f"warning: {share:.0%} of the tokens are unknown to the tokenizer", file=sys.stderr)
    return said


def _arrays(given, source):
    """Images as patches, or features [b, frames, bins]: read, or drawn."""
    settings, embedding = source.settings, source.config.embedding
    if embedding.convolutions:
        what, frames = "spectrogram", 2 * embedding.num_positions
        shape = (given.num_texts, frames, embedding.d_input)
    else:
        what, side = "image", settings["image_size"]
        sides = (side, side) if isinstance(side, int) else tuple(side)
        shape = (given.num_texts, settings["num_channels"], *sides)
    made = DRAWN.format(what)
    if given.inputs:
        try:
            x = np.asarray(np.load(given.inputs)[: given.num_texts], np.float32)
        except (EOFError, TypeError, ValueError, IndexError) as error:
            raise ValueError(f"{given.inputs} is no array of numbers (.npy): {error}") from None
        made = f"The first {len(x)} of {given.inputs}."
    else:
        x = np.random.default_rng(0).standard_normal(shape, np.float32)
    if embedding.convolutions:
        # as feature extractors of transformers give them
        x = x.swapaxes(1, 2) if x.ndim == 3 and x.shape[1:] == shape[:0:-1] else x
        if x.ndim != 3 or x.shape[2] != embedding.d_input:
            raise ValueError(f"{given.inputs} of shape {x.shape} is not [b, *, {shape[2]}]")
    else:
        x = pretrained.image_patches(x, settings)
    return Inputs(x, None, made, "arrays")
