"""Pairs of sentences for the memorization experiment: read, tokenized and padded.

Files and tokenizers are read here, not in the library.
"""

import csv
import itertools
from pathlib import Path

import numpy as np

from rank_collapse.text.words import default_text

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY_SIZE = 30522  # at most, of a vocabulary trained on the data
TASKS = ("RTE", "shipped")


def read_pairs(task: str, data_dir: str, count: int) -> list[tuple[str, str]]:
    """The first `count` pairs of sentences of a task's training file.

    Args:
        task: "RTE": data_dir/train.tsv with the columns sentence1 and sentence2, tab separated;
            "shipped": neighbouring sentences of the package's own short text.
        data_dir: Folder of the data.
        count: Pairs to take; all where the file has fewer.

    Raises:
        ValueError: A missing or unreadable file, a missing column, or no pairs.
    """
    if task == "shipped":
        sentences = [s.strip() for s in default_text().replace("\n", " ").split(".") if s.strip()]
        return list(itertools.pairwise(sentences))[:count]
    path = Path(data_dir) / "train.tsv"
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.start} of it") from error
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): --data_dir must be the folder of GLUE's "
            "RTE task, with its train.tsv (index, sentence1, sentence2, label; tab separated)"
        ) from error
    reader = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    missing = {"sentence1", "sentence2"} - set(reader.fieldnames or ())
    if missing:
        raise ValueError(f"{path} has no column {' or '.join(sorted(missing))}")
    pairs = [(r["sentence1"], r["sentence2"]) for r in reader if r["sentence2"]]
    if not pairs:
        raise ValueError(f"{path} has no rows")
    return pairs[:count]


def load_tokenizer(name_or_path: str, pairs: list[tuple[str, str]]):
    """(tokenizer, line that says where it is from).

    Args:
        name_or_path: A folder with tokenizer.json or vocab.txt, such a file, or else any name:
            then a lower-case WordPiece vocabulary is trained on the data, as nothing is downloaded.
        pairs: The data.

    Raises:
        ValueError: `tokenizers` is not installed, or a path that holds no vocabulary.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError("this needs the package `tokenizers`: pip install tokenizers") from error
    path = Path(name_or_path)
    if path.exists():
        candidates = [path] if path.is_file() else [path / "tokenizer.json", path / "vocab.txt"]
        for candidate in candidates:
            if candidate.is_file():
                return _from_file(tokenizers, candidate), f"tokenizer from {candidate.name}"
        raise ValueError(f"{path} holds neither tokenizer.json nor vocab.txt")
    tokenizer = tokenizers.BertWordPieceTokenizer(lowercase=True)
    texts = [sentence for pair in pairs for sentence in pair]
    # The trainer numbers the letters inside words in the order of a randomly seeded hash map, and
    # breaks ties between merges by those numbers: given in advance, they make it deterministic.
    letters = sorted({letter for text in texts for letter in tokenizer.normalize(text)} - {" "})
    given = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    tokenizer.train_from_iterator(
        texts, vocab_size=VOCABULARY_SIZE, min_frequency=1, special_tokens=given,
        show_progress=False,
    )  # fmt: skip
    # Anew, because a given token would be cut out of the middle of words.
    vocabulary = tokenizer.get_vocab()
    tokenizer = tokenizers.BertWordPieceTokenizer(lowercase=True)
    tokenizer._tokenizer.model = tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]")
    return tokenizer, (
        f"{name_or_path} is no local path: trained a WordPiece vocabulary of "
        f"{tokenizer.get_vocab_size()} on the data"
    )


def encode(
    tokenizer, pairs: list[tuple[str, str]], max_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """([CLS] first [SEP] second [SEP], the longer sentence cut first) → ids and mask [b, n].

    A vocabulary trained here has no rule for [CLS] and [SEP]: its texts are first second.
    n is the longest text's length, at most `max_length`.
    """
    tokenizer.enable_truncation(max_length, strategy="longest_first")
    tokenizer.no_padding()
    encoded = [e.ids for e in tokenizer.encode_batch(pairs)]
    longest = max(len(ids) for ids in encoded)
    mask = np.array([[i < len(ids) for i in range(longest)] for ids in encoded])
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate([np.array(ids) for ids in encoded])
    return tokens, mask


def _from_file(tokenizers, path):
    try:
        if path.suffix == ".json":
            return tokenizers.Tokenizer.from_file(str(path))
        return tokenizers.BertWordPieceTokenizer(str(path), lowercase=True)
    except Exception as error:  # the package raises plain Exceptions
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
