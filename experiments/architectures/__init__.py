"""Code of run_architectures: the residual of BERT, ALBERT and XLNet after each layer."""
