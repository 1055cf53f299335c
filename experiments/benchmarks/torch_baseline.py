"""The trained experiments' model in idiomatic PyTorch, one seed at a time: a baseline for speed.

Imported only by the benchmark with --baseline=torch; PyTorch is no dependency of the package.
"""

import math
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


class Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, mask=None):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Layer(nn.Module):
    """Post-norm attention sublayer, and an MLP sublayer where asked for."""

    def __init__(self, width: int, heads: int, dropout: float, mlp: bool):
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.drop = nn.Dropout(dropout)
        self.mlp = None
        if mlp:
            self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            self.mlp_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x, mask=None):
        x = self.norm(x + self.drop(self.attention(x, mask)))
        return x if self.mlp is None else self.mlp_norm(x + self.drop(self.mlp(x)))


class Network(nn.Module):
    """Embedding as our config says, layers, and a linear read-out of every token."""

    def __init__(self, config: Any, num_outputs: int, dropout: float):
        super().__init__()
        e = config.embedding
        self.config = config
        if e.vocab_size:
            self.words = nn.Embedding(e.vocab_size, e.d_embed)
            if e.positions == "learned":
                self.positions = nn.Parameter(0.02 * torch.randn(e.num_positions, e.d_embed))
            self.project = nn.Linear(e.d_embed, config.d_model)
        else:
            maps = [nn.Linear(e.d_input, e.d_embed)]
            if e.hidden_layer:
                maps += [nn.GELU(), nn.Linear(e.d_embed, e.d_embed)]
            self.points = nn.Sequential(*maps)
        self.norm = nn.LayerNorm(config.d_model, eps=1e-12)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            Layer(config.d_model, config.num_heads, dropout, config.mlp != "none")
            for _ in range(config.depth)
        )
        self.classifier = nn.Linear(config.d_model, num_outputs)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for layer in self.layers:
            bound = 1 / math.sqrt(config.d_model)
            nn.init.uniform_(layer.attention.out.weight, -bound, bound)
            nn.init.uniform_(layer.attention.qkv.weight[2 * config.d_model :], -bound, bound)

    def forward(self, inputs, mask=None):
        e = self.config.embedding
        if e.vocab_size:
            x = self.words(inputs)
            if e.positions == "learned":
                x = x + self.positions[: x.shape[1]]
            x = self.project(x)
        else:
            x = self.points(inputs)
        x = self.drop(self.norm(x))
        attend = None if mask is None else mask[:, None, None, :]
        for layer in self.layers:
            x = layer(x, attend)
        return self.classifier(x)


def step_times(
    recipe: Any, examples: Any, hyper: Any, num_steps: int, warm_up: int = 3, seed: int = 0
) -> tuple[float, float]:
    """Seconds per training step, and the loss of the last one.

    Args:
        recipe: `rank_collapse.training.training.Recipe`.
        examples: `rank_collapse.training.tasks.Examples`.
        hyper: `rank_collapse.training.training.Hyper` of Python floats.
        num_steps: Steps timed, after `warm_up` more.
        seed: Of PyTorch's generator.
    """
    torch.manual_seed(seed)
    network = Network(recipe.config, recipe.num_outputs, hyper.dropout)
    optimizer = torch.optim.Adam(
        network.parameters(), lr=hyper.learning_rate, weight_decay=hyper.weight_decay
    )
    inputs, labels = (torch.from_numpy(np.array(a)) for a in (examples.inputs, examples.labels))
    labels = labels.long() if recipe.loss == "cross_entropy" else labels
    mask = None if examples.mask is None else torch.from_numpy(np.array(examples.mask))
    data = [inputs, labels] + ([] if mask is None else [mask])
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*data), batch_size=recipe.batch_size, shuffle=recipe.shuffle
    )
    network.train()
    done, started, loss = 0, time.perf_counter(), None
    while done < num_steps + warm_up:
        for batch in loader:
            if done == warm_up:
                started = time.perf_counter()
            loss = _loss(network, recipe, *batch)
            optimizer.zero_grad()
            loss.backward()
            if recipe.clip_norm is not None:
                nn.utils.clip_grad_norm_(network.parameters(), recipe.clip_norm)
            optimizer.step()
            done += 1
            if done == num_steps + warm_up:
                break
    return (time.perf_counter() - started) / num_steps, float(loss.detach())


def _loss(network, recipe, inputs, labels, mask=None):
    logits = network(inputs, mask)
    if recipe.loss == "squared_error":
        return F.mse_loss(logits, labels, reduction="sum")
    if mask is not None:
        labels = labels.masked_fill(~mask, -100)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
