"""Watches a PyTorch model while it trains, and sums its paths by length.

    from rank_collapse.torch import path_lengths, watch

    watched = watch(model, every=100, log="run/metrics.jsonl")   # or log=wandb.log
    paths = path_lengths(model, x, branches=r"layers\\.\\d+\\.self_attn")

`watch` measures on the device and keeps only scalars: for the tokens that each layer's attention
reads, for the weights of some of its queries, and for the gradients of queries, keys and values.
Training stays bit-identical. `rank-collapse watch` draws the file. `path_lengths` splits one
forward pass.
"""

from rank_collapse.torch.path_lengths import (
    PathLengths as PathLengths,
    path_lengths as path_lengths,
)
from rank_collapse.torch.recording import record as record
from rank_collapse.watch.torch_watch import Watch as Watch, watch as watch
