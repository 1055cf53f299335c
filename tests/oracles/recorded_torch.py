"""A model of three layers whose stream and branches are recorded."""

import torch


class Block(torch.nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = torch.nn.LayerNorm(d)
        self.attn = torch.nn.MultiheadAttention(d, 2, batch_first=True)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(d, 8), torch.nn.GELU(), torch.nn.Linear(8, d)
        )

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attn(y, y, y)[0]
        return x + self.mlp(self.norm(x))


class Model(torch.nn.Module):
    def __init__(self, depth=3, d=8):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(10, d)
        self.blocks = torch.nn.ModuleList(Block(d) for _ in range(depth))

    def forward(self, ids, attention_mask=None):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


IDS = torch.arange(6).reshape(2, 3)
