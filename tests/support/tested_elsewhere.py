"""Modules of the library without a test file of their name, and the file that tests them.

A module gets a test file of its name as soon as a test calls it alone. The modules below are steps
of one computation, and their tests call the whole of it. `BUILD.md` has the command that lists the
tests that run a line.
"""

TESTED_IN = {  # {test file: modules, or packages that end in a slash, in rank_collapse/}
    # One comparison of two recordings; each step is named in its answer.
    "agree/test_comparison.py": (
        "agree/alignment agree/differences agree/kinds agree/outputs agree/sentence agree/verdict"
    ),
    "command/test_check.py": "command/checkpoint command/progress",
    "command/test_agree.py": "command/recorded report/agreement",
    "runs/test_drawn.py": "extras",
    "behaviour/test_public_arrays.py": "annotations",  # names of types alone
    "measures/test_profiles.py": "measures/layer_arrays measures/layer_measures",
    # Fields and parameters of attention, by name, by shape and by what they compute.
    "network/test_config.py": "network/attention_config",
    "network/test_parameters.py": "network/attention_weights",
    "network/measured/test_influence.py": "network/measured/heads",
    # Every field of the configuration with every algebra and pass.
    "behaviour/test_algebras.py": "network/covers network/passes network/walk",
    "network/test_transformer.py": "network/trace",
    "paths/test_sets.py": "paths/frozen paths/steps",
    # The interpreter of functions and its rules, by the sums of the paths that they trace.
    "paths/test_functions.py": "paths/traced/",
    # Every family: states, attention weights and logits of transformers.
    "pretrained/test_family_forms.py": "pretrained/families/ pretrained/entries",
    "pretrained/test_streaming.py": "pretrained/opened",
    "report/test_figures.py": "report/style",
    "theory/test_bounds.py": "theory/bound_constants theory/reports",
    "theory/test_transverse.py": "theory/tangent",
    # The export of a model and the rules of its operators, alone and in whole models.
    "torch/test_frozen.py": (
        "torch/frozen_entries torch/frozen_norms torch/frozen_products torch/frozen_values"
    ),
    "torch/test_operators.py": "torch/calls torch/refusals torch/values",
    "torch/test_path_lengths.py": (
        "torch/exporting torch/graph torch/inner_skips torch/scopes torch/sums"
    ),
    "torch/test_recording.py": "agree/other_inputs torch/replacing",
    # A sweep: whole, interrupted, resumed, on any devices.
    "training/test_sweep.py": "training/engine/",
    "watch/test_gradients.py": "watch/names",
    # A watched model: its scalars are compared with formulas on the same arrays.
    "watch/test_torch_watch_loops.py": "watch/recorder",
    "watch/test_torch_watch_own.py": (
        "watch/torch_frames watch/torch_maps watch/torch_pieces "
        "watch/torch_runs watch/torch_scores watch/torch_tag_table watch/torch_tags "
        "watch/torch_weights"
    ),
}


def list_modules() -> dict[str, str]:
    """Returns {module or package: the file in tests/ that tests it}."""
    return {name: file for file, names in TESTED_IN.items() for name in names.split()}
