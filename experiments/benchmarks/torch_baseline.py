"""The trained experiments' model in PyTorch: one seed in a loop, or seeds stacked by torch.func.

`torch_processes` runs this file as a program, in processes that have no JAX. Each process reads a
pickled task, then a line for each measurement, "threads seeds steps". PyTorch is not a dependency
of the package.
"""

import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

WARM_UP = 3  # steps before those that are timed


class Layer(nn.Module):
    """Post-norm attention sublayer, with an MLP sublayer if the task has one."""

    def __init__(self, width: int, heads: int, dropout: float, mlp: bool):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        self.norm, self.drop = nn.LayerNorm(width, eps=1e-12), nn.Dropout(dropout)
        self.mlp = None
        if mlp:
            self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            self.mlp_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x, padding=None):
        mixed, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        x = self.norm(x + self.drop(mixed))
        return x if self.mlp is None else self.mlp_norm(x + self.drop(self.mlp(x)))


class Network(nn.Module):
    """Embedding as our config says, layers, and a linear classifier of every token."""

    def __init__(self, config: SimpleNamespace, num_outputs: int, dropout: float):
        super().__init__()
        e, width = config.embedding, config.d_model
        self.positions = None
        if e.vocab_size:
            self.embed = nn.Embedding(e.vocab_size, e.d_embed)
            self.project = nn.Linear(e.d_embed, width)
            if e.positions == "learned":
                self.positions = nn.Parameter(0.02 * torch.randn(e.num_positions, e.d_embed))
        else:
            maps = [nn.GELU(), nn.Linear(e.d_embed, e.d_embed)] if e.hidden_layer else []
            self.embed = nn.Sequential(nn.Linear(e.d_input, e.d_embed), *maps)
            self.project = nn.Identity()
        self.norm, self.drop = nn.LayerNorm(width, eps=1e-12), nn.Dropout(dropout)
        mlp = config.mlp != "none"
        layers = (Layer(width, config.num_heads, dropout, mlp) for _ in range(config.depth))
        self.layers = nn.ModuleList(layers)
        self.classifier = nn.Linear(width, num_outputs)

    def forward(self, inputs, mask=None):
        """Returns the logits of a batch of inputs; mask is True where a token exists."""
        x = self.embed(inputs)
        if self.positions is not None:
            x = x + self.positions[: x.shape[1]]
        x = self.drop(self.norm(self.project(x)))
        for layer in self.layers:
            x = layer(x, None if mask is None else ~mask)
        return self.classifier(x)


class Training:
    """Training of one seed, as a loop over batches.

    Args:
        task: Task from `torch_processes.describe_task`.
        seed: Seed of the weights and of the order of the examples.
    """

    def __init__(self, task: SimpleNamespace, seed: int = 0):
        torch.manual_seed(seed)
        self.task, self.network = task, make_network(task)
        self.optimizer = make_optimizer(task, self.network.parameters())

    def step(self, *batch: torch.Tensor) -> None:
        """Updates the weights once."""
        self.loss = compute_loss(self.network, self.task, *batch)
        self.optimizer.zero_grad()
        self.loss.backward()
        if self.task.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.task.clip_norm)
        self.optimizer.step()


class StackedTraining:
    """Training of several seeds together, whose weights are stacked: torch.func.

    All seeds see the same batch, which is less work than a batch for each.

    Args:
        task: Task from `torch_processes.describe_task`.
        num_seeds: How many.
    """

    def __init__(self, task: SimpleNamespace, num_seeds: int):
        torch.manual_seed(0)
        self.task, networks = task, [make_network(task) for _ in range(num_seeds)]
        self.weights, buffers = stack_module_state(networks)
        self.optimizer = make_optimizer(task, self.weights.values())

        def compute(weights, *batch):
            def call(*arguments):
                return functional_call(networks[0], (weights, buffers), arguments)

            return compute_loss(call, task, *batch)

        self._differentiate = vmap(
            lambda weights, batch: grad_and_value(compute)(weights, *batch),
            in_dims=(0, None),
            randomness="different",
        )

    def step(self, *batch: torch.Tensor) -> None:
        """Updates the weights of all seeds once."""
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # others are slower under vmap
            slopes, losses = self._differentiate(self.weights, batch)
            if self.task.clip_norm is not None:
                squares = [slope.flatten(1).square().sum(1) for slope in slopes.values()]
                norms = torch.stack(squares).sum(0).sqrt()
                scale = (self.task.clip_norm / (norms + 1e-6)).clamp(max=1)
                for slope in slopes.values():
                    slope.mul_(scale.view(-1, *(1,) * (slope.ndim - 1)))
        for name, slope in slopes.items():  # the fused Adam takes both in the order of memory
            self.weights[name].grad = slope.contiguous()
        self.optimizer.step()
        self.loss = losses.mean()


def make_network(task: SimpleNamespace) -> Network:
    """Makes the network of a task on its device, with dropout on."""
    network = Network(task.config, task.num_outputs, task.dropout)
    return network.to(task.device).train()


def make_optimizer(task: SimpleNamespace, weights: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Makes Adam in one kernel, PyTorch's fastest."""
    rates = {"lr": task.learning_rate, "weight_decay": task.weight_decay}
    return torch.optim.Adam(list(weights), **rates, fused=True)


def list_batches(task: SimpleNamespace) -> Iterator[Sequence[torch.Tensor]]:
    """Lists batches without end: (inputs, labels), and the mask where there is one.

    Texts are padded to the longest of their batch.

    Args:
        task: The task, with its arrays as NumPy arrays.
    """
    arrays = [torch.from_numpy(array).to(task.device) for array in task.arrays]
    lengths = torch.from_numpy(task.arrays[2].sum(axis=1)) if len(arrays) > 2 else None
    count = len(arrays[0])
    while True:
        order = torch.randperm(count) if task.shuffle else torch.arange(count)
        for rows in order.split(task.batch_size):
            longest = arrays[0].shape[1] if lengths is None else int(lengths[rows].max())
            rows = rows.to(task.device)
            yield [arrays[0][rows, :longest], *(array[rows, :longest] for array in arrays[1:])]


def time_steps(
    training: Training | StackedTraining, batches: Iterator[Sequence[torch.Tensor]], num_steps: int
) -> float:
    """Measures the seconds of some steps.

    Args:
        training: `Training` or `StackedTraining`, which has made a step.
        batches: Batches from `list_batches`.
        num_steps: Number of steps.
    """
    training.loss.item()  # waits for the device
    start = time.perf_counter()
    for _ in range(num_steps):
        training.step(*next(batches))
    training.loss.item()
    return time.perf_counter() - start


def compute_loss(
    network: Callable,
    task: SimpleNamespace,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the loss of a batch: the sum of squared errors, or the mean cross-entropy.

    Args:
        network: Function of (inputs, mask).
        task: The task, with the name of its loss.
        inputs, labels: The batch.
        mask: Bool, tokens that exist; None for all. The others do not count in the cross-entropy.
    """
    logits = network(inputs, mask)
    if task.loss == "squared_error":
        return F.mse_loss(logits, labels, reduction="sum")
    if mask is not None:
        labels = labels.masked_fill(~mask, -100)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    """Answers each line "threads seeds steps" with seconds; 0 seeds mean one seed in a loop."""
    task = pickle.load(sys.stdin.buffer)
    trainings: dict[int, Training | StackedTraining] = {}
    batches = list_batches(task)
    for line in sys.stdin.buffer:
        threads, num_seeds, num_steps = map(int, line.split())
        torch.set_num_threads(threads)
        if num_seeds not in trainings:
            training = StackedTraining(task, num_seeds) if num_seeds else Training(task)
            trainings[num_seeds] = training
            for _ in range(WARM_UP):
                training.step(*next(batches))
        print(time_steps(trainings[num_seeds], batches, num_steps), flush=True)


if __name__ == "__main__":
    main()
