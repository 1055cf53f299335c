"""Code of run_transformer: the languages that an encoder-decoder translates."""
