"""Modules without a test file of their name, the file that tests them, and why.

A module gets a test file of its name as soon as a test calls it alone, and then leaves this list.
The list only becomes shorter: `test_architecture.py` compares its length with `MOST_LISTED`.
`BUILD.md` has the command that lists the tests that run a line.
"""

MOST_LISTED = 31

# Folders of tables. Every family has a case that compares states, weights and logits with
# transformers, which `test_every_family_has_a_case` in pretrained/test_family.py demands.
TABLES = {"pretrained/families/": "pretrained/test_family_forms.py"}
# {test file: modules}; those of the library without "rank_collapse/"
TESTED_IN = {
    # One comparison of two recordings; each step is named in its answer.
    "agree/test_comparison.py": "agree/alignment",
    "command/test_check.py": "command/checkpoint",
    "behaviour/test_public_arrays.py": "annotations",  # names of types alone
    # Fields of attention, by name and by what they compute.
    "network/test_config.py": "network/attention_config",
    "network/measured/test_influence.py": "network/measured/heads",
    # Every field of the configuration with every algebra and pass.
    "behaviour/test_algebras.py": "network/passes network/walk",
    "paths/test_sets.py": "paths/frozen paths/steps",
    # The interpreter of functions and its rules, by the sums of the paths that they trace.
    "paths/test_functions.py": (
        "paths/traced/channels paths/traced/equation paths/traced/interpreter "
        "paths/traced/layers paths/traced/linear_rules paths/traced/programs "
        "paths/traced/replaying paths/traced/rules paths/traced/values"
    ),
    "report/test_figures.py": "report/style",  # a table of colours and sizes
    "theory/test_transverse.py": "theory/tangent",
    # The export of a model and the rules of its operators, alone and in whole models.
    "torch/test_frozen.py": "torch/frozen_values",
    "torch/test_operators.py": "torch/calls torch/refusals torch/values",
    "torch/test_path_lengths.py": "torch/graph torch/scopes",
    "watch/test_gradients.py": "watch/names",  # a table of names
    # Figures, whose data the contract of a run compares, and what whole runs measure.
    "behaviour/test_contract.py": "experiments/lens/lens_figures",
    "experiments/test_run_sort.py": "experiments/path_accuracy/accuracy_figures",
    # Scripts that answer a wrong command.
    "experiments/lab/test_suggestions.py": "experiments/experiments experiments/rank_collapse",
}


def list_modules() -> dict[str, str]:
    """Returns {module: the file in tests/ that tests it}."""
    return {name: file for file, names in TESTED_IN.items() for name in names.split()}
