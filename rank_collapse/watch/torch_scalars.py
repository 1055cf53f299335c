"""Scalars of the tokens and of the attention weights of one layer; a document is an example.

Axis letters: e examples, h heads, r measured queries, n tokens, m keys, d width.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rank_collapse.measures.documents import split_documents
from rank_collapse.measures.monitor import ATTENTION, monitor
from rank_collapse.measures.table import MEASURES
from rank_collapse.watch.recorder import LeftOut
from rank_collapse.watch.torch_products import SUM, Weights, is_distribution


@contextlib.contextmanager
def compute_plainly() -> Iterator[None]:
    """Computes without gradients, without `torch.autocast`, and unseen by modes of functions."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if device is None else device.type
    exact = torch.autocast("cpu", enabled=False), torch.autocast(kind, enabled=False)
    with torch._C.DisableTorchFunction(), torch.no_grad(), exact[0], exact[1]:
        yield


def measure_tokens(x: Tensor, documents: Tensor, kind: str) -> dict[str, Tensor]:
    """Measures tokens by `monitor`, means over documents.

    Args:
        x: Tokens [e, n, d].
        documents: Int [e, n], the document of each token, −1 for those that do not exist.
        kind: "unit" for tokens divided by their norms.

    Raises:
        LeftOut: No example, or fewer than two tokens.
    """
    if x.shape[0] == 0 or x.shape[1] < 2:
        raise LeftOut(f"{x.shape[0]} examples of {x.shape[1]} tokens")
    options: dict[str, Any] = {"tokens": "unit" if kind == "unit" else "raw"}
    if not torch.equal(documents, documents[:, :1].clamp(min=0).expand_as(documents)):
        options |= {"mask": documents >= 0, "segments": documents}
    return monitor(x, **options)


def measure_weights(weights: Weights, documents: Tensor) -> dict[str, Tensor]:
    """Measures weights by document and head [k, h], of documents that have a measured query.

    Args:
        weights: In the order of examples, `p` [e · h, r, m].
        documents: Int [e, n], as `measure_tokens` takes them.

    Raises:
        LeftOut: They are of no distribution.
    """
    e, rows = len(documents), weights.rows
    p = weights.p.unflatten(0, (e, -1))
    r, m = p.shape[-2:]
    if not is_distribution(p):
        raise LeftOut("its weights are no distribution over keys")
    numbers = documents[:, rows]
    packed = split_documents(numbers, (numbers >= 0) & (p.sum(dim=(1, 3)) != 0), (e, r))
    p, is_query = packed.split_heads(p), torch.as_tensor(packed.exists, device=p.device)
    keys = None
    if weights.allowed is not None:
        allowed = packed.split_tokens(weights.allowed[:, rows].expand(e, r, m))
        keys = (allowed & is_query[..., None]).any(dim=1)
    missing = (1 - p.sum(dim=-1, keepdim=True)).clamp(min=0) * is_query[:, None, :, None]
    has_sink = bool((missing > SUM).any())
    if has_sink:  # what goes to no key is one key more
        p = torch.cat([p, missing], dim=-1)
        keys = torch.ones(len(p), m, dtype=torch.bool, device=p.device) if keys is None else keys
        keys = torch.nn.functional.pad(keys, (0, 1), value=False)
    scalars = {}
    for name in ATTENTION:
        options = {"key_mask": keys} if name == "sink_rate" else {}
        scalars[name] = MEASURES[name](p, mask=is_query, **options)
    if has_sink:
        counts = is_query.sum(dim=-1).clamp(min=1)[:, None]
        scalars["missing_mass"] = missing[..., 0].sum(dim=-1) / counts
    return scalars
