"""rank_collapse.torch.record on the inputs of another run: sublayers take in its stream."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.refusals import is_refused

torch = pytest.importorskip("torch")

from rank_collapse.agree.comparison import compare_files  # noqa: E402
from rank_collapse.agree.recording import open_recording  # noqa: E402
from rank_collapse.torch import record  # noqa: E402
from tests.oracles.recorded_torch import IDS, Model  # noqa: E402
from tests.support.closeness import assert_close  # noqa: E402


class Named(Model):
    """The same, whose layers take the stream by its name, and whose result has logits."""

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x=x)
        return SimpleNamespace(logits=x)


@pytest.mark.parametrize("kind", [Model, Named])
def test_sublayers_take_in_another_run(kind, tmp_path):
    """Each adds to the stream of the other run what it makes of it."""
    first, second = kind().eval(), Model().eval()
    with torch.no_grad():
        second.embed.weight *= 1.1 if kind is Named else 1.0
        for block in second.blocks:
            block.attn.out_proj.weight *= 1.3
            block.mlp[2].bias += 0.2
    with record(second, tmp_path / "b.npz"):
        second(IDS)
    with record(first, tmp_path / "a.safetensors", inputs=tmp_path / "b.npz"):
        first(IDS)
    replay, other = (open_recording(tmp_path / name) for name in ("a.safetensors", "b.npz"))
    assert replay.metadata["inputs"] == "b.npz" and "logits" not in replay.arrays
    layers = zip(first.blocks, replay.read_layers(), other.read_layers(), strict=True)
    for block, a, b in layers:
        y = block.norm(torch.tensor(b.before, dtype=torch.float32))
        attention = block.attn(y, y, y)[0].detach()
        assert_close(a.branches["attention_branch"], attention, atol=1e-6)
        middle = torch.tensor(b.before + b.branches["attention_branch"], dtype=torch.float32)
        mlp = block.mlp(block.norm(middle)).detach()
        assert_close(a.branches["mlp_branch"], mlp, atol=1e-6)
        assert_close(a.after, b.after, atol=1e-5)
    answer = compare_files(tmp_path / "a.safetensors", tmp_path / "b.npz")
    assert not answer.agree
    assert kind is Named or answer.first == {"layer": 0, "part": "attention"}


def test_noise_on_other_inputs(tmp_path):
    model = Model().eval()
    with record(model, tmp_path / "b.npz"):
        model(IDS)
    for name, noise, seed in (("0", 0.0, 0), ("1", 1e-3, 0), ("2", 1e-3, 1), ("3", 2e-3, 0)):
        path = tmp_path / f"{name}.safetensors"
        with record(model, path, inputs=tmp_path / "b.npz", noise=noise, seed=seed):
            model(IDS)
    still, *noisy = (
        list(open_recording(tmp_path / f"{k}.safetensors").read_layers()) for k in "0123"
    )
    for branch in ("attention_branch", "mlp_branch"):
        changes = [run[1].branches[branch] - still[1].branches[branch] for run in noisy]
        sizes = [np.linalg.norm(change) for change in changes]
        assert sizes[0] > 0 and np.linalg.norm(changes[0] - changes[1]) > 0.3 * sizes[0]
        np.testing.assert_allclose(sizes[2], 2 * sizes[0], rtol=0.02)


def test_steps_take_in_another_run(tmp_path):
    """Calls with some of the tokens each take in their states."""
    model = Model().eval()
    with record(model, tmp_path / "b.npz"):
        model(IDS)
    model.blocks[1].mlp[2].bias.data += 0.5
    with record(model, tmp_path / "a.safetensors", inputs=tmp_path / "b.npz"):
        for token in range(3):
            model(IDS[:, token : token + 1])
    answer = list(open_recording(tmp_path / "a.safetensors").read_layers())
    for a, b in zip(answer, open_recording(tmp_path / "b.npz").read_layers(), strict=True):
        change = a.branches["mlp_branch"] - b.branches["mlp_branch"]
        assert_close(change, 0.5 * (a.index == 1), atol=1e-5)


def test_inputs_that_do_not_fit_are_one_line(tmp_path):
    model = Model().eval()
    with record(model, tmp_path / "b.safetensors"):
        model(IDS, attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))

    def record_on(model, ids, **arguments):
        path = tmp_path / "c.safetensors"
        with record(model, path, inputs=tmp_path / "b.safetensors"):
            model(ids, **arguments)

    is_refused("2 examples of 3 tokens", record_on, model, torch.arange(8).reshape(2, 4))
    is_refused("2 examples of 3 tokens", record_on, model, IDS[:1])
    is_refused("the model computed 2", record_on, model, IDS[:, :2])
    is_refused("has 3 layers, and the model has more", record_on, Model(4).eval(), IDS)
    is_refused("has 3 layers, and the model has 2", record_on, Model(2).eval(), IDS)
    mask = torch.ones(2, 3, dtype=torch.long)
    is_refused("another mask", record_on, model, IDS, attention_mask=mask)
    is_refused("width 8", record_on, Model(3, 6).eval(), IDS)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@torch.no_grad()
def test_a_branch_that_the_other_run_does_not_have_stays_as_it_is(tmp_path):
    model = Model().eval()
    with record(model, tmp_path / "b.safetensors", mlp="nothing"):
        model(IDS)
    model.blocks[1].mlp[2].bias += 0.5
    with record(model, tmp_path / "a.safetensors", inputs=tmp_path / "b.safetensors"):
        model(IDS)
    layers = open_recording(tmp_path / "a.safetensors").read_layers()
    others = open_recording(tmp_path / "b.safetensors").read_layers()
    for layer, other in zip(layers, others, strict=True):
        middle = torch.tensor(other.before + other.branches["attention_branch"]).float()
        block = model.blocks[layer.index]
        assert_close(layer.branches["mlp_branch"], block.mlp(block.norm(middle)), atol=1e-6)
        assert_close(layer.after - other.after, 0.5 * (layer.index == 1), atol=1e-5)
