"""Text as tokens: the shipped text, tokenizers of checkpoint folders, pairs of sentences."""

from rank_collapse.text.words import default_text, read_text, token_ids, tokenize

__all__ = [
    "default_text",
    "read_text",
    "token_ids",
    "tokenize",
]
