"""Vocabularies: a WordPiece one trained on given texts, or the file of any other.

The package `tokenizers` is imported where it is used, so that only those who tokenize need it.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rank_collapse.extras import import_package
from rank_collapse.printed import format_one_line
from rank_collapse.text.text_files import MAX_JSON, read_json, read_utf8

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def train_wordpiece(texts: Sequence[str], vocab_size: int, *, lowercase: bool) -> Any:
    """Train a `tokenizers.Tokenizer` with a WordPiece vocabulary on the texts.

    The same texts give the same vocabulary, in every process. Ids 0 to 4 are [PAD], [UNK], [CLS],
    [SEP] and [MASK]; encoding adds none of them.

    Args:
        texts: Texts to learn from.
        vocab_size: Words at most.
        lowercase: Whether letters lose their case, and their accents with it.

    Raises:
        ValueError: The letters of the texts alone are more than `vocab_size`, or `tokenizers` is
            not installed.
    """
    tokenizers = _import_tokenizers()

    def tokenizer(vocabulary):
        """Make a WordPiece tokenizer with a vocabulary, which splits words as BERT does."""
        wordpiece = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
        wordpiece.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
        wordpiece.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        return wordpiece

    learner = tokenizer({})
    # The trainer numbers the letters inside words in the order of a randomly seeded hash map, and
    # breaks ties between merges by those numbers: given in advance, they make it deterministic.
    letters = {letter for text in texts for letter in learner.normalizer.normalize_str(text)}
    letters = sorted(letters - {" "})
    special_tokens = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    if len(special_tokens) > vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size} is less than the {len(special_tokens)} special tokens and "
            "letters"
        )
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=1, special_tokens=special_tokens, show_progress=False
    )
    learner.train_from_iterator(texts, trainer=trainer)
    # Anew, because a given token would be cut out of the middle of words.
    return tokenizer(learner.get_vocab())


def read_wordpiece(path: str | os.PathLike) -> Any:
    """Read the tokenizer of a vocab.txt, with the settings of tokenizer_config.json in the same
    folder.

    Encoding frames a text by [CLS] and [SEP].
    """
    path, options = Path(path), {}
    if (path.parent / "tokenizer_config.json").is_file():
        options = read_json(path.parent / "tokenizer_config.json")
    tokenizers = _import_tokenizers()

    def make(file, **about):
        # A file in the place of its vocabulary is deprecated.
        vocabulary = tokenizers.models.WordPiece.read_file(file)
        return tokenizers.BertWordPieceTokenizer(vocabulary, **about)

    return call_tokenizers(
        f"{path} is not a tokenizer",
        make,
        str(path),
        lowercase=bool(options.get("do_lower_case", True)),
        strip_accents=options.get("strip_accents"),
        handle_chinese_chars=bool(options.get("tokenize_chinese_chars", True)),
    )


def read_byte_level(vocabulary: str | os.PathLike, merges: str | os.PathLike) -> Any:
    """Read the byte-level BPE tokenizer of a vocab.json and a merges.txt."""
    tokenizers = _import_tokenizers()

    def make(*files):
        return tokenizers.ByteLevelBPETokenizer(*tokenizers.models.BPE.read_file(*files))

    return call_tokenizers(f"{vocabulary} is not a tokenizer", make, str(vocabulary), str(merges))


def read_tokenizer(path: str | os.PathLike) -> Any:
    """Read the `tokenizers.Tokenizer` of a tokenizer.json, which then neither cuts nor pads."""
    make = _import_tokenizers().Tokenizer.from_str
    text = read_utf8(path, max_bytes=MAX_JSON)
    tokenizer = call_tokenizers(f"{path} is not a tokenizer", make, text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def call_tokenizers(message: str, function: Callable, *arguments: object, **options: object) -> Any:
    """Call a function of the package `tokenizers`, which raises errors without a class.

    Args:
        message: Beginning of the error message.
        function: Function that is called with the other arguments.

    Raises:
        ValueError: Any error of the package, including a panic of its Rust code, which is not an
            `Exception`.
    """
    try:
        return function(*arguments, **options)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(f"{message}: {format_one_line(error, 300)}") from None


def _import_tokenizers():
    return import_package("tokenizers", "a tokenizer", "pretrained")
