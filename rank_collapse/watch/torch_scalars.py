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


def split_documents(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Splits rows into documents.

    Args:
        documents: Int [e, n], the document of each token, −1 for those that do not exist.

    Returns:
        (index into [e · n], Bool: which are tokens), both [l, k].

    Raises:
        LeftOut: No token exists.
    """
    numbers = documents.flatten()
    index = (numbers >= 0).nonzero()[:, 0]
    if not len(index):
        raise LeftOut("no token exists")
    _, document, counts = numbers[index].unique(return_inverse=True, return_counts=True)
    order = document.argsort(stable=True)
    index, document = index[order], document[order]
    within = torch.arange(len(index), device=index.device) - (counts.cumsum(0) - counts)[document]
    places = index.new_zeros(len(counts), int(counts.max()))
    is_token = torch.zeros_like(places, dtype=torch.bool)
    places[document, within], is_token[document, within] = index, True
    return places, is_token


def measure_tokens(x: Tensor, documents: Tensor | None, kind: str) -> dict[str, Tensor]:
    """Measures tokens by `monitor`, means over documents.

    Args:
        x: Tokens [e, n, d].
        documents: Int [e, n], see `split_documents`; None where each row is one.
        kind: "unit" for tokens divided by their norms.

    Raises:
        LeftOut: No document has two tokens.
    """
    mask = None
    if documents is not None:
        places, mask = split_documents(documents)
        x = x.flatten(0, 1)[places]
    if x.shape[0] == 0 or x.shape[1] < 2:
        raise LeftOut(f"{x.shape[0]} examples of {x.shape[1]} tokens")
    return monitor(x, mask=mask, tokens="unit" if kind == "unit" else "raw")


def measure_weights(
    weights: Weights, shape: tuple[int, int], documents: Tensor | None
) -> dict[str, Tensor]:
    """Measures weights by head [h], means over documents that have a measured query.

    Args:
        weights: In the order of examples, `p` [e · h, r, m].
        shape: (e, h).
        documents: Int [e, n], see `split_documents`; None where each row is one.

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
    examples = torch.arange(e, device=p.device)[:, None]
    documents = (examples if documents is None else documents[:, rows]).expand(e, r)
    places, is_query = split_documents(documents.masked_fill(p.sum(dim=(1, 3)) == 0, -1))
    p, keys = p.transpose(1, 2).flatten(0, 1)[places].transpose(1, 2), None
    if weights.allowed is not None:
        allowed = weights.allowed[:, rows].expand(e, r, m).flatten(0, 1)[places]
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
        scalars[name] = MEASURES[name](p, mask=is_query, **options).mean(dim=0)
    if has_sink:
        counts = is_query.sum(dim=-1).clamp(min=1)[:, None]
        scalars["missing_mass"] = (missing[..., 0].sum(dim=-1) / counts).mean(dim=0)
    return scalars
