"""Batches of the PyTorch baseline."""

import io
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest


def test_batches_of_pytorch_end_at_their_longest_text():
    pytest.importorskip("torch")
    from experiments.benchmarks import torch_baseline

    lengths = np.array([3, 5, 2, 4, 1])
    mask = np.arange(8) < lengths[:, None]
    tokens = np.where(mask, 10 * np.arange(5)[:, None] + np.arange(8), -1)
    task = SimpleNamespace(device="cpu", arrays=[tokens, tokens, mask], shuffle=False, batch_size=2)
    batches = torch_baseline.list_batches(task)
    shapes = [tuple(next(batches)[0].shape) for _ in range(4)]
    assert shapes == [(2, 5), (2, 4), (1, 1), (2, 5)]
    inputs, labels, batch_mask = next(batches)
    assert inputs[1].tolist() == labels[1].tolist() == [30, 31, 32, 33]
    assert batch_mask.sum(1).tolist() == [2, 4]


def make_task(is_text=True, **changes):
    rng = np.random.default_rng(0)
    lengths = np.array([4, 2, 3, 4, 1, 2])
    mask = np.arange(4) < lengths[:, None]
    embedding = {
        "vocab_size": 9 if is_text else 0,
        "d_input": 3,
        "d_embed": 8,
        "hidden_layer": True,
    }
    embedding |= {"positions": "learned" if is_text else "none", "num_positions": 5}
    points = rng.normal(size=(6, 4, 3)).astype(np.float32)
    task = {
        "device": "cpu",
        "arrays": [rng.integers(0, 9, (6, 4)), rng.integers(0, 3, (6, 4)), mask]
        if is_text
        else [points, points[..., :2] ** 2],
        "config": SimpleNamespace(
            depth=2, num_heads=2, d_model=8, mlp="gelu", embedding=SimpleNamespace(**embedding)
        ),
        "num_outputs": 3 if is_text else 2,
        "batch_size": 4,
        "shuffle": False,
        "loss": "cross_entropy" if is_text else "squared_error",
        "clip_norm": None,
        "learning_rate": 0.01,
        "weight_decay": 0.0,
        "dropout": 0.0,
    }
    return SimpleNamespace(**task | changes)


def normalise(x):
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-12)


@pytest.mark.parametrize("is_text", [True, False])
def test_a_network_of_pytorch_is_embedding_norm_layers_and_classifier(is_text):
    """Without layers by NumPy; with them no token depends on padding, and all have a post-norm."""
    torch = pytest.importorskip("torch")
    from experiments.benchmarks import torch_baseline

    task = make_task(is_text)
    inputs, _, *mask = (torch.from_numpy(array) for array in task.arrays)
    task.config.depth = 0
    torch.manual_seed(1)
    network = torch_baseline.make_network(task)
    assert network.training
    weights = {name: p.detach().double().numpy() for name, p in network.named_parameters()}
    if is_text:
        x = weights["embed.weight"][task.arrays[0]] + weights["positions"][:4]
        x = x @ weights["project.weight"].T + weights["project.bias"]
    else:
        x = task.arrays[0] @ weights["embed.0.weight"].T + weights["embed.0.bias"]
        x = x * np.vectorize(math.erf)(x / np.sqrt(2)) / 2 + x / 2
        x = x @ weights["embed.2.weight"].T + weights["embed.2.bias"]
    expected = normalise(x) @ weights["classifier.weight"].T + weights["classifier.bias"]
    logits = network(inputs, *mask).detach().numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    for kind in ("none", "gelu"):
        task.config.depth, task.config.mlp = 2, kind
        network = torch_baseline.make_network(task)
        assert [layer.mlp is not None for layer in network.layers] == [kind == "gelu"] * 2
        x = torch.from_numpy(normalise(np.random.default_rng(2).normal(size=(1, 4, 8)))).float()
        (layer, _), hidden = network.layers, torch.tensor([[False, False, True, True]])
        y = layer(x, hidden).detach().numpy()
        assert np.abs(y - normalise(y)).max() < 1e-4
        other = torch.cat([x[:, :2], -3 * x[:, 2:]], dim=1)
        np.testing.assert_allclose(
            layer(other, hidden).detach()[:, :2], y[:, :2], rtol=1e-5, atol=1e-6
        )
        if kind == "none":
            mixed = layer.attention(x, x, x, need_weights=False)[0]
            expected = normalise((x + mixed).detach().numpy())
            np.testing.assert_allclose(layer(x).detach().numpy(), expected, rtol=1e-5, atol=1e-5)
    if is_text:
        changed = torch.where(mask[0], inputs, (inputs + 4) % 9)
        before, after = (network(ids, mask[0]).detach()[mask[0]] for ids in (inputs, changed))
        torch.testing.assert_close(before, after)


def test_dropout_is_behind_the_embedding_and_in_every_layer():
    torch = pytest.importorskip("torch")
    from experiments.benchmarks import torch_baseline

    task = make_task(dropout=0.25)
    network = torch_baseline.make_network(task)
    dropped = [part.p for part in network.modules() if isinstance(part, torch.nn.Dropout)]
    assert dropped == [0.25] * 3 == [0.25, *(layer.attention.dropout for layer in network.layers)]
    task.config.depth, task.dropout = 0, 0.9
    network = torch_baseline.make_network(task)
    ids = torch.from_numpy(task.arrays[0])
    assert not torch.equal(network(ids), network(ids))  # of embeddings alone


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("is_text", [True, False])
def test_stacked_seeds_of_pytorch_make_the_steps_of_one(is_text, clip_norm):
    """The loss is a mean over tokens that exist, or a sum of squares; gradients are clipped."""
    torch = pytest.importorskip("torch")
    from experiments.benchmarks import torch_baseline

    task = make_task(is_text, clip_norm=clip_norm)
    batch = next(torch_baseline.list_batches(task))
    single, stacked = torch_baseline.Training(task), torch_baseline.StackedTraining(task, 2)
    with torch.no_grad():
        logits = single.network(batch[0], *batch[2:]).double().numpy()
    if is_text:
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        chosen = np.take_along_axis(logs, batch[1].numpy()[..., None], axis=-1)[..., 0]
        loss = -chosen[batch[2].numpy()].mean()
    else:
        loss = ((logits - batch[1].numpy()) ** 2).sum()
    start = {name: weight.detach().clone() for name, weight in stacked.weights.items()}
    single.step(*batch)
    assert single.loss.item() == pytest.approx(loss, rel=1e-4)
    stacked.step(*batch)
    for name, weight in single.network.named_parameters():
        torch.testing.assert_close(stacked.weights[name].grad[0], weight.grad, rtol=1e-3, atol=1e-5)
        slope = stacked.weights[name].grad
        moved = (start[name] - stacked.weights[name])[slope.abs() > 1e-3]
        expected = 0.01 * slope[slope.abs() > 1e-3].sign()  # Adam's first step is the rate
        torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-5)
    grads = [w.grad[1] for w in stacked.weights.values()]
    norm = torch.cat([grad.flatten() for grad in grads]).norm().item()
    assert (norm > 0.1) if clip_norm is None else norm == pytest.approx(clip_norm, rel=1e-3)


def test_each_step_of_pytorch_has_the_slopes_of_its_batch_alone():
    torch = pytest.importorskip("torch")
    from experiments.benchmarks import torch_baseline

    training = torch_baseline.Training(make_task(learning_rate=0.0))
    batch = next(torch_baseline.list_batches(training.task))
    training.step(*batch)
    slopes = [w.grad.clone() for w in training.network.parameters()]
    training.step(*batch)
    for weight, slope in zip(training.network.parameters(), slopes, strict=True):
        torch.testing.assert_close(weight.grad, slope)


def test_stacked_seeds_of_pytorch_drop_entries_of_their_own():
    torch = pytest.importorskip("torch")
    from experiments.benchmarks import torch_baseline

    stacked = torch_baseline.StackedTraining(make_task(dropout=0.5), 2)
    batch = next(torch_baseline.list_batches(stacked.task))
    equal = {
        name: w.detach()[:1].repeat(2, *[1] * (w.ndim - 1)) for name, w in stacked.weights.items()
    }
    with torch.no_grad(), torch_baseline.sdpa_kernel(torch_baseline.SDPBackend.MATH):
        _, losses = stacked._differentiate(equal, batch)
    assert abs(losses[0] - losses[1]) > 1e-3


def test_lines_ask_for_threads_seeds_and_steps(monkeypatch, capsys):
    """Each training is prepared once, and warmed up; then all its steps are timed."""
    torch = pytest.importorskip("torch")
    from experiments.benchmarks import torch_baseline

    made, threads, waits = [], [], []

    class Steps:
        def __init__(self, task, num_seeds=0):
            self.count, self.seeds = 0, num_seeds
            self.loss = SimpleNamespace(item=lambda: waits.append(self.count))
            made.append(self)

        def step(self, *batch):
            assert len(batch) == 3
            self.count += 1
            clock[0] += 0.5 if self.seeds else 2.0

    clock = [0.0]
    monkeypatch.setattr(torch_baseline.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch_baseline, "Training", Steps)
    monkeypatch.setattr(torch_baseline, "StackedTraining", Steps)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    lines = pickle.dumps(make_task()) + b"2 0 3\n1 4 5\n1 0 1\n"
    monkeypatch.setattr(torch_baseline.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines)))
    torch_baseline.main()
    assert capsys.readouterr().out.split() == ["6.0", "2.5", "2.0"] and threads == [2, 1, 1]
    warm = torch_baseline.WARM_UP
    # the device has ended the steps before, and those that are timed
    assert waits == [warm, warm + 3, warm, warm + 5, warm + 3, warm + 4]
    assert [(steps.seeds, steps.count) for steps in made] == [(0, warm + 4), (4, warm + 5)]


def test_batches_are_drawn_in_another_order_only_where_the_recipe_does():
    torch = pytest.importorskip("torch")
    from experiments.benchmarks import torch_baseline

    def read_epochs(shuffle):
        torch.manual_seed(0)
        numbers = np.arange(6)[:, None]
        task = make_task(shuffle=shuffle, arrays=[numbers, numbers], batch_size=4)
        batches = torch_baseline.list_batches(task)
        return [[next(batches)[0].flatten().tolist() for _ in range(2)] for _ in range(2)]

    assert read_epochs(False) == [[[0, 1, 2, 3], [4, 5]]] * 2
    drawn = read_epochs(True)
    assert all(sorted(epoch[0] + epoch[1]) == list(range(6)) for epoch in drawn)
    assert drawn[0] != drawn[1] and [len(batch) for batch in drawn[0]] == [4, 2]
    optimizer = torch_baseline.make_optimizer(
        make_task(weight_decay=0.25), [torch.zeros(2, requires_grad=True)]
    )
    assert isinstance(optimizer, torch.optim.Adam)
    assert {name: optimizer.defaults[name] for name in ("lr", "weight_decay")} == {
        "lr": 0.01,
        "weight_decay": 0.25,
    }
