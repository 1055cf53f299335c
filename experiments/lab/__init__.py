"""The lab of all experiments: flags, run folders, seeds in chunks, processes, tables and figures."""
