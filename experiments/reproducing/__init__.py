"""The report and the pages of `experiments.reproduce`, from the run folders of all experiments."""
