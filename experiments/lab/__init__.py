"""The lab of all experiments: flags, run folders, chunks of seeds, processes, tables, figures."""
