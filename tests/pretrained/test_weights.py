"""The tensors of a checkpoint under the names that a model class has put prefixes before."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rank_collapse.pretrained.weights import CheckpointWeights


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (["shared.weight"], ""),
        (["model.shared.weight", "model.encoder.w"], "model."),
        (["a.b.shared.weight"], "a.b."),
        (["model.shared.weight", "unshared.weight"], "model."),  # the end of another word
        (["decoder.shared.weight", "model.decoder.shared.weight"], "decoder."),
        (["model.tokens.weight", "retokens.weight"], "model."),
    ],
)
def test_a_prefix_is_of_whole_names(names, prefix):
    checkpoint = SimpleNamespace(names=names, folder=Path("folder"), file="a.safetensors")
    weights = CheckpointWeights(checkpoint, ("shared.weight", "tokens.weight"))
    assert weights.prefix == prefix


def test_the_end_of_a_longer_name_is_not_the_tensor():
    checkpoint = SimpleNamespace(names=["unshared.weight"], folder=Path("folder"), file="a.bin")
    with pytest.raises(ValueError, match=r"folder/a\.bin: tensor 'shared\.weight' is missing"):
        CheckpointWeights(checkpoint, ("shared.weight",))
