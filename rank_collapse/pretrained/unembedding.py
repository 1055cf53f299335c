"""The unembedding of a causal language model: from the output of its network to logits."""

from typing import Any, NamedTuple


class Unembedding(NamedTuple):
    """Logits z = Y Wᵀ + b of the output Y [n, d]; with a cap c, c tanh(z/c).

    Attributes:
        table: W [vocab, d], an array or a `lazy.Table`.
        bias: b [vocab]; None for none.
        softcap: c; None for none.
    """

    table: Any
    bias: Any = None
    softcap: float | None = None
