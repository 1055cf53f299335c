"""The trained experiments' model in idiomatic PyTorch, one seed at a time: a baseline for speed.

Imported only by the benchmark with --baseline=torch; PyTorch is no dependency of the package.
"""

import itertools
import time
from typing import Any

import numpy as np

try:
    import torch
    import torch.nn.functional as F
    from torch import nn
except ImportError as error:
    raise ValueError(
        "--baseline=torch needs PyTorch, which is not installed: pip install torch"
    ) from error


class Layer(nn.Module):
    """Post-norm attention sublayer, and an MLP sublayer where asked for."""

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

    def __init__(self, config: Any, num_outputs: int, dropout: float):
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
        x = self.embed(inputs)
        if self.positions is not None:
            x = x + self.positions[: x.shape[1]]
        x = self.drop(self.norm(self.project(x)))
        for layer in self.layers:
            x = layer(x, None if mask is None else ~mask)
        return self.classifier(x)


class Training:
    """Training of a recipe's network, timed a few steps at a time.

    Args:
        recipe: `rank_collapse.training.training.Recipe`.
        examples: `rank_collapse.training.tasks.Examples`.
        hyper: `rank_collapse.training.training.Hyper` of Python floats.
        platform: JAX's name of the device to train on: "gpu", or any other for the CPU.
    """

    def __init__(self, recipe: Any, examples: Any, hyper: Any, platform: str = "cpu"):
        torch.manual_seed(0)
        self.recipe, self.device = recipe, "cuda" if platform == "gpu" else "cpu"
        self.network = Network(recipe.config, recipe.num_outputs, hyper.dropout).train()
        self.network.to(self.device)
        self.optimizer = torch.optim.Adam(
            self.network.parameters(), lr=hyper.learning_rate, weight_decay=hyper.weight_decay
        )
        self.loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(*make_tensors(recipe, examples)),
            batch_size=recipe.batch_size,
            shuffle=recipe.shuffle,
        )

    def seconds_per_step(self, num_steps: int, warm_up: int = 3) -> float:
        """Measures the seconds of a step, after a warm-up.

        Args:
            num_steps: Timed steps.
            warm_up: Steps before them.
        """
        epochs = itertools.chain.from_iterable(itertools.repeat(self.loader))
        for i, batch in enumerate(itertools.islice(epochs, num_steps + warm_up)):
            if i == warm_up:
                self.loss.item()  # waits for the device
                start = time.perf_counter()
            self.step(*(tensor.to(self.device) for tensor in batch))
        self.loss.item()
        return (time.perf_counter() - start) / num_steps

    def step(self, *batch: Any) -> None:
        """Updates the weights once."""
        self.loss = compute_loss(self.network, self.recipe, *batch)
        self.optimizer.zero_grad()
        self.loss.backward()
        if self.recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.recipe.clip_norm)
        self.optimizer.step()


def make_tensors(recipe: Any, examples: Any) -> list[Any]:
    """Converts inputs, labels and, where there is one, the mask of a data set."""
    inputs, labels = (torch.from_numpy(np.array(a)) for a in (examples.inputs, examples.labels))
    labels = labels.long() if recipe.loss == "cross_entropy" else labels
    mask = None if examples.mask is None else torch.from_numpy(np.array(examples.mask))
    return [inputs, labels] + ([] if mask is None else [mask])


def compute_loss(network: Any, recipe: Any, inputs: Any, labels: Any, mask: Any = None) -> Any:
    """Computes the recipe's loss of a batch."""
    logits = network(inputs, mask)
    if recipe.loss == "squared_error":
        return F.mse_loss(logits, labels, reduction="sum")
    if mask is not None:
        labels = labels.masked_fill(~mask, -100)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
