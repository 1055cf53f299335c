"""The public interface: names at the top and in four packages; errors that name what is meant."""

import importlib
import operator
import re
from typing import get_args

import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures.table import MeasureName
from rank_collapse.network.designs import DesignName
from rank_collapse.network.variants import VariantName
from rank_collapse.training.recipe import Loss
from rank_collapse.training.tasks.examples import LOSSES
from tests.support.folders import REPOSITORY
from tests_docs.guide import BLOCK as EXAMPLE_CHANGE
from tests_docs.site_pages import DOCS, load_exports

HIDDEN = np.random.default_rng(0).normal(size=(3, 5, 4))
CONFIG = rc.transformer(depth=1, num_heads=2, d_model=8)
PACKAGES = ("measures", "network", "paths", "theory")
# fmt: off
TOP = {
    "residual_ratio", "residual", "token_cosine", "effective_rank", "participation_ratio",
    "stable_rank", "rank_one_ratio", "composite_norm", "attention_entropy", "sink_rate",
    "attention_rows", "profile", "Profile", "MEASURES", "plot",
    "monitor", "monitored", "monitor_gradients",
    "TransformerConfig", "EmbeddingConfig", "Gains", "san", "san_mlp", "san_skip", "transformer",
    "init", "apply", "Trace", "design", "variant", "surgery",
    "path_contributions", "PathContributions", "head_contributions", "direct_contributions",
    "function_contributions",
    "logit_attribution", "truncated", "shapley_values", "count_paths",
    "bound_report", "BoundReport", "log_residual_profile", "local_rate", "collapse_law",
    "transverse_exponents",
    "depth_report", "coord_check", "depth_rule", "loop_report", "pretrained", "training",
    "branch_shares", "path_length_law", "rollout", "duplicates", "spikes", "record",
    "record_function",
}
# fmt: on


def test_the_names_at_the_top_are_these():
    assert set(rc.__all__) == {*TOP, *PACKAGES} and len(TOP) == 59


@pytest.mark.parametrize("package", ["", *PACKAGES])
def test_every_name_is_the_object_of_its_module(package):
    """After all modules were imported: a name must not be that of a module too."""
    package = f"rank_collapse.{package}".removesuffix(".")
    exports = [full.rpartition(".") for full in load_exports(package)]
    homes = {home: importlib.import_module(home) for home, _, _ in exports}
    module = importlib.import_module(package)
    wrong = [n for home, _, n in exports if getattr(module, n) is not getattr(homes[home], n)]
    assert exports and not wrong


def is_name(path):
    """Whether `rc.path` is an attribute, or a module that is imported by its own name."""
    try:
        operator.attrgetter(path)(rc)
    except AttributeError:
        return (REPOSITORY / "rank_collapse" / f"{path.replace('.', '/')}.py").exists()
    return True


def test_every_name_on_a_page_exists():
    texts = [path.read_text("utf-8") for path in (*DOCS.rglob("*.md"), *DOCS.glob("*.ipynb"))]
    texts.append((REPOSITORY / "README.md").read_text("utf-8"))
    written = EXAMPLE_CHANGE.sub("", "".join(texts))  # names that extending.md adds as examples
    names = set(re.findall(r"\brc\.(\w+(?:\.\w+)*)", written))
    assert len(names) > 100 and [name for name in sorted(names) if not is_name(name)] == []


@pytest.mark.parametrize(
    ("choices", "table"),
    [
        (MeasureName, rc.MEASURES),
        (DesignName, rc.network.DESIGNS),
        (VariantName, rc.network.VARIANTS),
        (Loss, LOSSES),
    ],
)
def test_choices_are_the_keys_of_their_table(choices, table):
    assert get_args(choices) == tuple(table)


@pytest.mark.parametrize(
    ("guess", "answer"),
    [
        (
            lambda: rc.network.NormParams(np.ones(4)).scale,
            "has no 'scale'; its fields are gain, ",
        ),
        (lambda: CONFIG.skip_gian, "TransformerConfig has no 'skip_gian'.* skip_gain, "),
    ],
)
def test_a_wrong_attribute_is_answered_with_the_right_one(guess, answer):
    with pytest.raises(AttributeError, match=answer):
        guess()


@pytest.mark.parametrize(
    ("guess", "answer"),
    [
        (lambda: rc.profile(HIDDEN, measures="residual"), "nearest: 'residual_ratio'"),
        (lambda: rc.variant(CONFIG, "san"), r"'san' is a network, .*: use rc.san\("),
        (lambda: rc.variant(CONFIG, "SAN+skip"), r"variant 'SAN\+skip' is not one of"),
        (lambda: rc.variant(CONFIG, "shapd"), "nearest: 'shaped'"),
        (lambda: rc.design(CONFIG, "postt"), "nearest: 'post'"),
        (lambda: CONFIG.replace(mask="casual"), r"mask='casual' .*; nearest: 'causal'"),
        (lambda: CONFIG.replace(mask="x"), r"mask='x' is not one of \([^;]*\)$"),
        (lambda: CONFIG.replace(mlpp=1), "TransformerConfig.mlpp .*; nearest: 'mlp', "),
    ],
)
def test_a_wrong_choice_is_answered_with_the_nearest(guess, answer):
    with pytest.raises(ValueError, match=answer):
        guess()
