"""Rank collapse of BERT, ALBERT, XLNet and others: run_architectures."""
