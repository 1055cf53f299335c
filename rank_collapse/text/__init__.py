"""Turns text into tokens: the shipped text, tokenizers of checkpoints, pairs of sentences."""
