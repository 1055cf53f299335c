"""Text as tokens: the shipped text, tokenizers of checkpoint folders, pairs of sentences."""

from rank_collapse.text.encoders import Encoder, tokenizer_of, trained_tokenizer
from rank_collapse.text.files import read_table, read_utf8
from rank_collapse.text.pairs import TASKS, encode_pairs, load_tokenizer, read_pairs
from rank_collapse.text.tokens import Tokens, encode, join, pad, read_ids, read_texts
from rank_collapse.text.vocabulary import train_wordpiece
from rank_collapse.text.words import default_text, read_text, token_ids, tokenize, windows

__all__ = [
    "TASKS",
    "Encoder",
    "Tokens",
    "default_text",
    "encode",
    "encode_pairs",
    "join",
    "load_tokenizer",
    "pad",
    "read_ids",
    "read_pairs",
    "read_table",
    "read_text",
    "read_texts",
    "read_utf8",
    "token_ids",
    "tokenize",
    "tokenizer_of",
    "train_wordpiece",
    "trained_tokenizer",
    "windows",
]
