"""Scalars of the tokens and of the attention weights of one layer; a document is an example.

Axis letters: e examples, h heads, r measured queries, n tokens, m keys, d width; l documents, k the
longest of them.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

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


def split_documents(exists: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gives (index into [e · n], Bool: which are tokens), both [l, k], of each document.

    Args:
        exists: Bool [e, n].
        starts: Bool [e, n], where a new document begins; None for one a row.
    """
    e, n = exists.shape
    number = torch.arange(e, device=exists.device)[:, None] * (n + 1)
    number = (number + (0 if starts is None else starts.cumsum(dim=1))).expand(e, n)
    index = exists.flatten().nonzero()[:, 0]
    _, document, counts = number.flatten()[index].unique(return_inverse=True, return_counts=True)
    if not len(index):
        raise LeftOut("no token exists")
    within = torch.arange(len(index), device=index.device) - (counts.cumsum(0) - counts)[document]
    places = index.new_zeros(len(counts), int(counts.max()))
    shown = torch.zeros_like(places, dtype=torch.bool)
    places[document, within], shown[document, within] = index, True
    return places, shown


def measure_tokens(
    x: Tensor, exists: Tensor | None, starts: Tensor | None, kind: str
) -> dict[str, Tensor]:
    """Measures tokens [e, n, d] by `monitor`, means over documents.

    Raises:
        LeftOut: No document has two tokens.
    """
    if exists is None and starts is not None:
        exists = torch.ones_like(starts)
    if exists is not None:
        places, exists = split_documents(exists, starts)
        x = x.flatten(0, 1)[places]
    if x.shape[0] == 0 or x.shape[1] < 2:
        raise LeftOut(f"{x.shape[0]} examples of {x.shape[1]} tokens")
    return monitor(x, mask=exists, tokens="unit" if kind == "unit" else "raw")


def measure_weights(
    weights: Weights, shape: tuple[int, int], exists: Tensor | None, starts: Tensor | None
) -> dict[str, Tensor]:
    """Measures weights by head [h], means over documents that have a measured query.

    Args:
        weights: In the order of examples, `p` [e · h, r, m].
        shape: (e, h).
        exists, starts: Bool [e, n], which queries exist, and where documents begin.

    Raises:
        LeftOut: Fewer than two keys, or no weights.
    """
    (e, h), rows = shape, weights.rows
    p = weights.p.unflatten(0, (e, h))
    r, m = p.shape[-2:]
    if e == 0 or m < 2:
        raise LeftOut(f"{e} examples of {m} keys")
    if not is_distribution(p):
        raise LeftOut("its weights are no distribution over keys")
    allowed = weights.allowed
    if allowed is not None:
        allowed = allowed[:, rows].expand(e, r, m)
    if exists is None and starts is not None:
        exists = torch.ones_like(starts)
    shown = p.sum(dim=(1, 3)) != 0  # [e, r]
    shown = shown if exists is None else shown & exists[:, rows]
    numbers = None
    if starts is not None:
        document = starts.cumsum(dim=1)[:, rows]
        numbers = torch.zeros_like(document, dtype=torch.bool)
        numbers[:, 1:] = document.diff(dim=1) > 0
    keys = None if allowed is None else (allowed & shown[..., None]).any(dim=1)
    if not shown.all() or numbers is not None:
        places, shown = split_documents(shown, numbers)
        p = p.transpose(1, 2).flatten(0, 1)[places].transpose(1, 2)
        if allowed is not None:
            keys = (allowed.flatten(0, 1)[places] & shown[..., None]).any(dim=1)
    missing = (1 - p.sum(dim=-1, keepdim=True)).clamp(min=0) * shown[:, None, :, None]
    lacks = bool((missing > SUM).any())
    if lacks:  # what goes to no key is one key more
        p = torch.cat([p, missing], dim=-1)
        keys = torch.ones(len(p), m, dtype=torch.bool, device=p.device) if keys is None else keys
        keys = torch.nn.functional.pad(keys, (0, 1), value=False)
    scalars = {}
    for name in ATTENTION:
        options = {"key_mask": keys} if name == "sink_rate" else {}
        scalars[name] = MEASURES[name](p, mask=shown, **options).mean(dim=0)
    if lacks:
        counts = shown.sum(dim=-1).clamp(min=1)[:, None]
        scalars["missing_mass"] = (missing[..., 0].sum(dim=-1) / counts).mean(dim=0)
    return scalars
