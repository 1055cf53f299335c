"""Text as tokens: the shipped text, tokenizers of checkpoint folders, pairs of sentences."""
