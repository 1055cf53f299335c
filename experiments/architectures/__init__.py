"""The residual of BERT, ALBERT and XLNet by layer: run_architectures."""
