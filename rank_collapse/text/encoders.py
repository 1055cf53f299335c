"""Functions text -> token ids, by a checkpoint folder's tokenizer files or made from the texts."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rank_collapse.checks import refuse_if
from rank_collapse.extras import import_package
from rank_collapse.text.growth import check_growth
from rank_collapse.text.text_files import read_json
from rank_collapse.text.vocabulary import (
    call_tokenizers,
    read_byte_level,
    read_tokenizer,
    read_wordpiece,
    train_wordpiece,
)

Encoder = Callable[[str], list[int]]


@dataclasses.dataclass(frozen=True)
class VocabularyEncoder:
    """An `Encoder` of a vocabulary that is known.

    Attributes:
        ids: text → token ids.
        unknown: The id of words outside of the vocabulary; None where there is none.
    """

    ids: Encoder
    unknown: int | None = None

    def __call__(self, text: str) -> list[int]:
        return self.ids(text)


# Families that split texts into words as GPT-2 does, which vocab.json and merges.txt do not say.
_SPLIT_AS_GPT2 = ("gpt2", "gptj", "phi", "roberta", "bart")
_SPECIAL = ("<|endoftext|>", "<s>", "</s>", "<pad>", "<unk>")
SENTENCEPIECE_FILES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
FILES = f"tokenizer.json, vocab.json with merges.txt, vocab.txt, {', '.join(SENTENCEPIECE_FILES)}"


def load_tokenizer(folder: str | os.PathLike, settings: dict[str, Any]) -> VocabularyEncoder | None:
    """Load a tokenizer by the files in a folder: text → token ids, special tokens included.

    Returns None if there are no such files. They are looked for in the order of `FILES`:
    tokenizer.json, vocab.json with merges.txt (byte-level BPE), vocab.txt (WordPiece), a
    sentencepiece model.

    Args:
        folder: The checkpoint folder.
        settings: Settings from `pretrained.settings_of`; the family decides on the special tokens.

    Raises:
        ValueError: A file that is damaged, or whose package is not installed.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        return _encode_with(folder / "tokenizer.json", read_tokenizer(folder / "tokenizer.json"))
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _byte_level(folder, settings)
    if (folder / "vocab.txt").is_file():
        return _encode_with(folder / "vocab.txt", read_wordpiece(folder / "vocab.txt"))
    for name in SENTENCEPIECE_FILES:
        if (folder / name).is_file():
            return _read_sentencepiece(folder / name, settings)
    return None


def trained_tokenizer(texts: Sequence[str], vocab_size: int) -> Encoder:
    """Train a cased WordPiece vocabulary on the texts themselves, for random embeddings.

    With random embeddings only the pattern of repeated tokens matters, which any sensible
    vocabulary gives. Texts are framed by [CLS] and [SEP].

    Args:
        texts: Texts to learn from.
        vocab_size: Words at most.
    """
    tokenizer = train_wordpiece(texts, vocab_size, lowercase=False)
    first, last = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    return lambda text: [first, *tokenizer.encode(text).ids, last]


def _encode_with(path, tokenizer):
    """Makes an encoder from a `tokenizers.Tokenizer`."""
    names = [getattr(getattr(tokenizer, "model", None), "unk_token", None), "[UNK]", "<unk>"]
    unknown = [tokenizer.token_to_id(name) for name in names if name]

    def encode(text):
        message = f"{path} encodes no text"
        call_tokenizers(message, check_growth, tokenizer, text)
        return call_tokenizers(message, tokenizer.encode, text).ids

    return VocabularyEncoder(encode, next((i for i in unknown if i is not None), None))


def _byte_level(folder, settings):
    """Makes the encoder of a byte-level BPE, with <s> and </s> where the family has them.

    Raises:
        ValueError: Only the tokenizer.json of this family says how it splits texts into words.
    """
    kind = settings["model_type"]
    refuse_if(
        kind not in _SPLIT_AS_GPT2,
        f"{folder / 'vocab.json'} does not say how a {kind} model splits texts; give "
        "tokenizer.json",
    )
    tokenizer = read_byte_level(folder / "vocab.json", folder / "merges.txt")
    tokenizer.add_special_tokens([t for t in _SPECIAL if tokenizer.token_to_id(t) is not None])
    first, last = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    ids = _encode_with(folder / "vocab.json", tokenizer)
    if kind == "gpt2" or None in (first, last):
        return ids
    return VocabularyEncoder(lambda text: [first, *ids(text), last], ids.unknown)


def _read_sentencepiece(path, settings):
    """Makes the encoder of a sentencepiece model, with the special tokens of the family."""
    sentencepiece = import_package("sentencepiece", str(path), "pretrained")
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
        indices = [model.piece_to_id(p) for p in pieces]
        return [i for i in indices if i != model.unk_id()]

    def frame(first, last):
        """Frames a text as the settings of the tokenizer ask for; by default only at its begin."""
        begins, ends = options.get("add_bos_token", True), options.get("add_eos_token", False)
        return ids(first) if begins else [], ids(last) if ends else []

    frames = {
        "albert": (ids("[CLS]"), ids("[SEP]")),
        "xlnet": ([], ids("<sep>", "<cls>")),
        **dict.fromkeys(("t5", "mt5"), ([], ids("</s>"))),
        **dict.fromkeys(("llama", "mistral", "mixtral", "phi3"), frame("<s>", "</s>")),
        **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), frame("<bos>", "<eos>")),
    }
    refuse_if(
        kind not in frames,
        f"{path} does not say which special tokens a {kind} model reads; give tokenizer.json",
    )
    before, after = frames[kind]
    lower = kind == "albert" and bool(options.get("do_lower_case", True))
    return VocabularyEncoder(
        lambda text: [*before, *model.encode(text.lower() if lower else text), *after],
        model.unk_id(),
    )
