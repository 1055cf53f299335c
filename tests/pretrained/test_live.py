"""A model in memory is read as the folder that it would be saved to."""

import warnings

import jax
import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import architectures

from rank_collapse import pretrained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("name", ["bert", "gpt2-head"])
def test_a_model_in_memory_is_its_folder(name, tmp_path):
    model = architectures.build(architectures.CASES[name])
    model.save_pretrained(tmp_path)
    config, params = pretrained.load(model)
    saved_config, saved = pretrained.load(tmp_path)
    found, want = (config, params), (saved_config, saved)
    assert jax.tree.structure(found) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, found, want)


def test_a_model_that_is_damaged():
    model = architectures.build(architectures.CASES["bert"])
    with torch.no_grad():
        next(model.parameters())[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"BertModel: tensor .* not finite"):
        pretrained.load(model)
