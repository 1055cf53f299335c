"""Text to token ids with the tokenizer files of a checkpoint folder, or a vocabulary made here.

Texts are cut to a number of tokens and padded to a common length; `Tokens.mask` says which tokens
exist, and every measurement takes it.
"""

import csv
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from rank_collapse.pretrained.checkpoint import read_json

SENTENCEPIECE_FILES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model")


class Tokens(NamedTuple):
    """A batch of texts as token ids; `mask` is False on padding."""

    ids: Int[np.ndarray, "b n"]
    mask: Bool[np.ndarray, "b n"]

    @property
    def lengths(self) -> Int[np.ndarray, "b"]:
        """Tokens of each text."""
        return self.mask.sum(axis=1)


def read_texts(
    path: str | os.PathLike, columns: Sequence[str] = (), limit: int | None = None
) -> list[str]:
    """Texts of a file: one per paragraph, or one per row of a table.

    Args:
        path: A .tsv with a header, or plain text whose paragraphs (separated by empty lines, or
            else lines) are the texts.
        columns: Columns of the table whose contents are joined; the text columns of RTE
            (sentence1, sentence2) by default.
        limit: Number of texts at most.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Not UTF-8, no text in it, or a column that the table does not have.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"text file {path} does not exist")
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    if path.suffix.lower() == ".tsv":
        texts = _rows(path, content, columns)
    else:
        blocks = content.split("\n\n") if "\n\n" in content.strip() else content.splitlines()
        texts = [" ".join(block.split()) for block in blocks]
    texts = [text for text in texts if text]
    if not texts:
        raise ValueError(f"{path} holds no text")
    return texts[:limit]


def windows(text: str, count: int, words: int) -> list[str]:
    """Pieces of `words` words, their beginnings spread evenly over the text; they may overlap."""
    split = text.split()
    last = max(len(split) - words, 0)
    starts = np.unique(np.linspace(0, last, count).astype(int))
    return [" ".join(split[s : s + words]) for s in starts]


def join(
    texts: Sequence[str], encoder: Callable[[str], list[int]], min_tokens: int, limit: int
) -> list[str]:
    """Consecutive texts joined until each has `min_tokens`; what is left at the end is dropped.

    Raises:
        ValueError: All texts together are too short for one.
    """
    joined, parts, length = [], [], 0
    for text in texts:
        parts.append(text)
        length += len(encoder(text))
        if length >= min_tokens and len(encoder(" ".join(parts))) >= min_tokens:
            joined.append(" ".join(parts))
            parts, length = [], 0
        if len(joined) == limit:
            break
    if not joined:
        raise ValueError(f"all texts together have fewer than {min_tokens} tokens")
    return joined


def _rows(path, content, columns):
    table = csv.reader(content.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    header = next(table, [])
    columns = columns or [c for c in ("sentence1", "sentence2", "sentence", "text") if c in header]
    absent = [c for c in columns if c not in header]
    if absent or not columns:
        wanted = repr(absent[0]) if absent else "of text"
        raise ValueError(f"{path} has no column {wanted}; its columns are {header}")
    places = [header.index(c) for c in columns]
    return [" ".join(row[p] for p in places if p < len(row)) for row in table if row]


def pad(
    sequences: Iterable[Sequence[int]], *, vocab_size: int | None = None, pad_id: int = 0
) -> Tokens:
    """Sequences of token ids, padded on the right to the longest.

    Raises:
        ValueError: No sequence, an empty one, or an id outside the vocabulary.
    """
    sequences = [list(s) for s in sequences]
    if not sequences:
        raise ValueError("there are no texts")
    for i, s in enumerate(sequences):
        if not s:
            raise ValueError(f"text {i} has no tokens")
        worst = max(s) if min(s) >= 0 else min(s)
        if vocab_size is not None and not 0 <= worst < vocab_size:
            raise ValueError(f"token id {worst} of text {i} is not below vocab_size={vocab_size}")
    longest = max(map(len, sequences))
    ids = np.full((len(sequences), longest), pad_id, np.int32)
    mask = np.zeros(ids.shape, bool)
    for i, s in enumerate(sequences):
        ids[i, : len(s)] = s
        mask[i, : len(s)] = True
    return Tokens(ids, mask)


def read_ids(path: str | os.PathLike, limit: int | None = None) -> list[list[int]]:
    """Ready token ids: one text per line, ids separated by spaces or commas.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A line with anything but integers, or no line at all.
    """
    texts = read_texts(path, limit=None)
    try:
        sequences = [[int(t) for t in text.replace(",", " ").split()] for text in texts]
    except ValueError as error:
        raise ValueError(f"{path} does not hold token ids: {error}") from None
    return sequences[:limit]


def encode(
    texts: Sequence[str],
    encoder: Callable[[str], list[int]],
    *,
    max_tokens: int,
    num_positions: int = 0,
    vocab_size: int | None = None,
) -> Tokens:
    """Texts as padded token ids, each cut to `max_tokens`, its last token kept.

    Args:
        texts: At least one.
        encoder: From `tokenizer_of` or `trained_tokenizer`.
        max_tokens: Tokens kept of each text.
        num_positions: Positions that the model has; 0 for any number.
        vocab_size: Ids must be below this.

    Raises:
        ValueError: An empty text, or more tokens asked for than there are positions.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} is not positive")
    if num_positions and max_tokens > num_positions:
        raise ValueError(f"max_tokens={max_tokens} is more than the {num_positions} positions")
    sequences = []
    for i, text in enumerate(texts):
        if not text.strip():
            raise ValueError(f"text {i} is empty")
        ids = encoder(text)
        # A text that is cut keeps its last token, which closes it in most models.
        sequences.append(ids if len(ids) <= max_tokens else [*ids[: max_tokens - 1], ids[-1]])
    return pad(sequences, vocab_size=vocab_size)


def tokenizer_of(
    folder: str | os.PathLike, settings: dict[str, Any]
) -> Callable[[str], list[int]] | None:
    """text -> token ids, special tokens included, by the files in a folder; None without any.

    Looked for in this order: tokenizer.json, vocab.json with merges.txt (byte-level BPE),
    vocab.txt (WordPiece), a sentencepiece model.

    Args:
        folder: The checkpoint folder.
        settings: From `settings_of`; the family decides on the special tokens.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        return _from_json(folder / "tokenizer.json")
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _byte_level(folder, settings)
    if (folder / "vocab.txt").is_file():
        return _wordpiece(folder)
    for name in SENTENCEPIECE_FILES:
        if (folder / name).is_file():
            return _sentencepiece(folder / name, settings)
    return None


def _from_json(path):
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises plain Exception
        raise ValueError(f"{path} is not a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: tokenizer.encode(text).ids


def _byte_level(folder, settings):
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    first, last = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    if settings["model_type"] == "gpt2" or None in (first, last):
        return lambda text: tokenizer.encode(text).ids
    return lambda text: [first, *tokenizer.encode(text).ids, last]


def _wordpiece(folder):
    from tokenizers import BertWordPieceTokenizer

    options = {}
    if (folder / "tokenizer_config.json").is_file():
        options = read_json(folder / "tokenizer_config.json")
    tokenizer = BertWordPieceTokenizer(
        str(folder / "vocab.txt"),
        lowercase=bool(options.get("do_lower_case", True)),
        strip_accents=options.get("strip_accents"),
        handle_chinese_chars=bool(options.get("tokenize_chinese_chars", True)),
    )
    return lambda text: tokenizer.encode(text).ids


def _sentencepiece(path, settings):
    import sentencepiece

    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path} is not a sentencepiece model: {error}") from None
    kind = settings["model_type"]
    if kind in ("camembert", "xlm-roberta"):
        raise ValueError(f"a {kind} model shifts its sentencepiece ids; give tokenizer.json")
    options = {}
    if (path.parent / "tokenizer_config.json").is_file():
        options = read_json(path.parent / "tokenizer_config.json")

    def ids(*pieces):
        found = [model.piece_to_id(p) for p in pieces]
        return [i for i in found if i != model.unk_id()]

    before, after = {
        "albert": (ids("[CLS]"), ids("[SEP]")),
        "xlnet": ([], ids("<sep>", "<cls>")),
        "t5": ([], ids("</s>")),
        "mt5": ([], ids("</s>")),
        "llama": (ids("<s>"), []),
        "mistral": (ids("<s>"), []),
    }.get(kind, ([], []))
    lower = kind == "albert" and bool(options.get("do_lower_case", True))
    return lambda text: [*before, *model.encode(text.lower() if lower else text), *after]


def trained_tokenizer(texts: Sequence[str], vocab_size: int) -> Callable[[str], list[int]]:
    """A cased WordPiece vocabulary made from the texts themselves, for random embeddings.

    With random embeddings only the pattern of repeated tokens matters, which any sensible
    vocabulary gives. Texts are framed by [CLS] and [SEP].

    Args:
        texts: What to make it from.
        vocab_size: Tokens at most.
    """
    from tokenizers import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer(lowercase=False)
    tokenizer.train_from_iterator(
        list(texts), vocab_size=vocab_size, min_frequency=1, show_progress=False
    )
    first, last = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    return lambda text: [first, *tokenizer.encode(text, add_special_tokens=False).ids, last]
