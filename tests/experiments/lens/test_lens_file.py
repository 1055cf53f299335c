"""The file of a lens is one of jacobian-lens."""

import jax
import numpy as np
import pytest

from experiments.lens import lens_file
from experiments.trained import opened_networks
from rank_collapse import pretrained
from tests.oracles.jacobians import jacobian_by_hand
from tests.support.closeness import assert_close

SETTINGS = opened_networks.UNTRAINED["llama"] | {"initializer_range": 0.5}


@pytest.fixture(scope="module")
def llama():
    return pretrained.random_like(SETTINGS, jax.random.key(0))


def test_the_file_is_one_of_the_jacobian_lens(llama, tmp_path):
    """Means over sources from position 16 on, of sums over later ones but the last."""
    torch = pytest.importorskip("torch")
    config, params = llama
    ids = np.random.default_rng(0).integers(1, 20, (3, 21))
    mask = np.arange(21)[None] < np.array([[21], [20], [17]])  # the last is too short
    inputs = {"x": np.where(mask, ids, 0), "mask": mask}
    jacobians, count = lens_file.mean_jacobians(params, config, inputs)
    assert count == 2 and jacobians.shape == (3, 8, 8)
    for layer in range(3):
        want = []
        for text, valid in zip(ids[:2], (slice(16, 20), slice(16, 19)), strict=True):
            whole = jacobian_by_hand(params, config, text, layer)
            want.append(whole[valid, :, valid].sum(0).mean(1))
        np.testing.assert_allclose(jacobians[layer], np.mean(want, axis=0), rtol=1e-3, atol=1e-5)
    assert_close(jacobians[-1], np.eye(8), atol=1e-6)
    lens_file.write_lens(tmp_path / "a.pt", jacobians, count)
    content = torch.load(tmp_path / "a.pt", map_location="cpu", weights_only=True)
    assert {name: content[name] for name in ("n_prompts", "source_layers", "d_model")} == {
        "n_prompts": 2,
        "source_layers": [0, 1],
        "d_model": 8,
    }
    assert content["J"][0].dtype == torch.float16 and [*content["J"]] == [0, 1]
    np.testing.assert_allclose(content["J"][1].float(), jacobians[1], rtol=1e-2, atol=1e-3)
    with pytest.raises(ValueError, match="no text has 18 tokens"):
        lens_file.mean_jacobians(params, config, {n: a[:, :17] for n, a in inputs.items()})


def test_a_lens_needs_positions_after_its_first_and_pytorch(monkeypatch):
    monkeypatch.setattr(lens_file.importlib.util, "find_spec", lambda name: name)
    lens_file.check_possible(lens_file.FIRST + 2)
    with pytest.raises(ValueError, match=r"--lens_folder needs --max_tokens=18 or more, not 17"):
        lens_file.check_possible(lens_file.FIRST + 1)
    monkeypatch.setattr(lens_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--lens_folder needs PyTorch"):
        lens_file.check_possible(64)
