"""Published names of models and their curves: what is no name has no suggestion."""

import pytest

from rank_collapse.pretrained.loading import config_of
from rank_collapse.pretrained.published import PUBLISHED, published_curves, suggest_names


@pytest.mark.parametrize("name", ["", "/no/such", "./gpt2", "a/b/gpt2", "~/gpt2"])
def test_a_path_is_no_name_of_a_model(name):
    assert suggest_names(name) == ""


@pytest.mark.parametrize("name", PUBLISHED)
def test_curves_are_of_the_same_family_width_and_depth(name):
    """And of no other model, whose family alone is published."""
    settings = PUBLISHED[name]
    curves = published_curves(settings, 12)
    assert curves.keys() == {"init", "pretrained"}
    others = [published_curves(PUBLISHED[other], 12) for other in PUBLISHED if other != name]
    assert all(len(curves["init"]["SAN"]) == 13 and curves != other for other in others)
    assert published_curves(settings, 6) == {}
    for entry in {"model_type", "hidden_size", "d_model"} & settings.keys():
        wrong = "gpt2" if entry == "model_type" else 1024
        assert published_curves(settings | {entry: wrong}, 12) == {}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("bert-base-cased", (28996, 768, 3072)),
        ("albert-base-v2", (30000, 128, 3072)),
        ("xlnet-base-cased", (32000, 768, 3072)),
    ],
)
def test_sizes_are_those_of_the_papers(name, sizes):
    """Words and their widths (of ALBERT less than the width), and the width of the MLP."""
    config = config_of(f"random:{name}")
    tables = config.embedding
    assert (tables.vocab_size, tables.d_embed, config.d_ff) == sizes
    assert (config.depth, config.num_heads, config.d_model) == (12, 12, 768)
