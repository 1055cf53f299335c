"""Code of run_attention_forms: scaled and unscaled dot products, and additive attention."""
