"""Pairs of sentences, as the memorization experiment learns them: read, tokenized and padded."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from rank_collapse.text.text_files import read_table
from rank_collapse.text.tokens import Tokens, pad_sequences
from rank_collapse.text.vocabulary import (
    call_tokenizers,
    read_tokenizer,
    read_wordpiece,
    train_wordpiece,
)
from rank_collapse.text.words import default_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY_SIZE = 30522  # at most, of a vocabulary trained on the data
TASKS = ("RTE", "shipped")


def read_pairs(task: str, data_dir: str, count: int) -> list[tuple[str, str]]:
    """Reads the first `count` pairs of sentences of a task's training file.

    Args:
        task: "RTE": data_dir/train.tsv with the columns sentence1 and sentence2, tab separated;
            "shipped": neighbouring sentences of the package's own short text.
        count: Pairs to take; all where the file has fewer.

    Raises:
        FileNotFoundError: No such file.
        ValueError: An unreadable file, a missing column, or no pairs.
    """
    if task == "shipped":
        sentences = [s.strip() for s in default_text().replace("\n", " ").split(".") if s.strip()]
        return list(itertools.pairwise(sentences))[:count]
    path = Path(data_dir) / "train.tsv"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: take it from GLUE's RTE task (index, sentence1, sentence2, "
            "label; tab separated)"
        )
    table = read_table(path)
    missing = [c for c in ("sentence1", "sentence2") if c not in table]
    if missing:
        raise ValueError(f"{path} has no column {' or '.join(missing)}")
    rows = zip(table["sentence1"], table["sentence2"], strict=True)
    pairs = [(first, second) for first, second in rows if first and second]
    if not pairs:
        raise ValueError(f"{path} has no rows")
    return pairs[:count]


def load_tokenizer(name_or_path: str, pairs: list[tuple[str, str]]) -> tuple["Tokenizer", str]:
    """Loads a tokenizer, or trains one on the data.

    Args:
        name_or_path: A folder with tokenizer.json or vocab.txt, or such a file. For any other name
            a lower-case WordPiece vocabulary is trained on the data, since nothing is downloaded.
        pairs: The data.

    Returns:
        (the tokenizer, a line that says where it comes from).

    Raises:
        ValueError: `tokenizers` is not installed, or a path that holds no vocabulary.
    """
    path = Path(name_or_path)
    if path.exists():
        candidates = [path] if path.is_file() else [path / "tokenizer.json", path / "vocab.txt"]
        for candidate in candidates:
            if candidate.is_file():
                read = read_tokenizer if candidate.suffix == ".json" else read_wordpiece
                return read(candidate), f"tokenizer from {candidate.name}"
        raise ValueError(f"{path} holds neither tokenizer.json nor vocab.txt")
    texts = [sentence for pair in pairs for sentence in pair]
    tokenizer = train_wordpiece(texts, VOCABULARY_SIZE, lowercase=True)
    return tokenizer, (
        f"{name_or_path} is not a local path: trained a WordPiece vocabulary of "
        f"{tokenizer.get_vocab_size()} on the data"
    )


def encode_pairs(tokenizer: "Tokenizer", pairs: list[tuple[str, str]], max_length: int) -> Tokens:
    """Encodes pairs as [CLS] first [SEP] second [SEP], the longer sentence cut first.

    A vocabulary trained here has no rule for [CLS] and [SEP]; its texts are the first sentence and
    then the second.

    Args:
        tokenizer: Tokenizer from `load_tokenizer`.
        pairs: The sentences.
        max_length: Largest number of tokens in a text.

    Returns:
        Ids and mask [b, n], where n is the length of the longest text.

    Raises:
        ValueError: A vocabulary that cannot encode them.
    """
    tokenizer.enable_truncation(max_length, strategy="longest_first")
    tokenizer.no_padding()
    encodings = call_tokenizers("the tokenizer encodes no text", tokenizer.encode_batch, pairs)
    return pad_sequences(encoded.ids for encoded in encodings)
