"""Watching a PyTorch model while it trains.

    from rank_collapse.torch import watch

    watched = watch(model, every=100, log="run/metrics.jsonl")   # or log=wandb.log

Measured on the device, as scalars alone: the tokens that each layer's attention reads, the weights
of some of its queries, and the gradients of queries, keys and values. Training is the same to the
bit. `rank-collapse watch` draws the file.
"""

from rank_collapse.torch.recording import record as record
from rank_collapse.watch.torch_watch import Watch as Watch, watch as watch
