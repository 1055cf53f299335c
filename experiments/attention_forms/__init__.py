"""Dot products, scaled or not, and additive attention: run_attention_forms."""
