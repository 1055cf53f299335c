"""Whether a cache of keys stays the same between the calls of a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rank_collapse.checks import refuse_if


class CacheRows:
    """The keys that the last layer of a cache had at the end of a call.

    Beam search continues a hypothesis in the row of another one. It therefore exchanges the rows of
    the cache between two calls, and the steps of one row are not those of one text. Speculative
    decoding drops the tokens that the model rejects.
    """

    def __init__(self):
        self._cache: Any = None
        self._keys: torch.Tensor | None = None

    def begin_call(self, keywords: Mapping[str, object]) -> None:
        """Check that the cache of a call has the rows that it had at the end of the call before.

        Args:
            keywords: Arguments of the call by name.

        Raises:
            ValueError: It has other rows, or lacks the last tokens.
        """
        before = self._keys
        self._cache = keywords.get("past_key_values")
        keys = find_keys(self._cache)
        if before is None or keys is None or keys.shape[:-2] != before.shape[:-2]:
            return
        count, num_before = keys.shape[-2], before.shape[-2]
        if not 0 < count <= num_before:
            return
        first = before[..., :count, :].nan_to_num()
        is_same = torch.equal(first, keys.detach().to(before).nan_to_num())
        refuse_if(
            is_same and count < num_before,
            f"between two calls of the model its cache lost the last {num_before - count} of "
            f"{num_before} tokens, as in speculative decoding: they are no tokens of the text. "
            "Record one call of the model on the whole texts",
        )
        refuse_if(
            not is_same and count == num_before,
            "between two calls of the model the rows of its cache were exchanged, as in beam "
            "search: the steps of one row belong to several hypotheses. Record without beams, or "
            "one call of the model on the whole texts",
        )

    def end_call(self, output: object) -> None:
        """Keep the keys at the end of a call.

        Args:
            output: Output of the model, which may hold the cache.
        """
        keys = find_keys(getattr(output, "past_key_values", None) or self._cache)
        self._keys = None if keys is None else keys.detach().clone()


def find_keys(cache: Any) -> torch.Tensor | None:
    """Find the keys of the last layer of a cache of transformers, or of a tuple of layers.

    Args:
        cache: The cache; None for none.
    """
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", cache)
    if not isinstance(layers, Sequence) or not layers:
        return None
    last = layers[-1]
    keys = last[0] if isinstance(last, tuple) and last else getattr(last, "keys", None)
    return keys if isinstance(keys, torch.Tensor) and keys.ndim > 1 else None
