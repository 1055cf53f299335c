"""Attention functions against the width of queries and keys: run_attention_forms."""
