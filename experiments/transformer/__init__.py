"""The languages that an encoder-decoder translates: run_transformer."""
