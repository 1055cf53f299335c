"""Exchange of data between several processes of one run (`jax.distributed`).

Every process runs the same program on its own devices. Process 0, the primary, alone writes; what
decides whether a process computes (what lies on disk, what the clock says) must be the same in
all, or one waits for what the others never begin. With one process nothing here does anything.
"""

import hashlib
from typing import Any

import jax
import numpy as np

from rank_collapse.runs.states import is_key

_TEXT_BYTES = 4096


def is_primary() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def gather(tree: Any) -> Any:
    """Every leaf as a numpy array, whole in every process; random keys as their data.

    Every process must call it, since leaves that are spread over processes are gathered.
    """

    def whole(leaf):
        if is_key(leaf):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            from jax.experimental.multihost_utils import process_allgather

            return process_allgather(leaf, tiled=True)
        return np.asarray(leaf)

    return jax.tree.map(whole, tree)


def from_primary(tree: Any) -> Any:
    """The primary's arrays in every process, bit for bit, as numpy arrays; random keys as keys.

    Args:
        tree: Arrays; of the same structure, shapes and dtypes in every process.
    """
    if jax.process_count() == 1:
        return tree
    from jax.experimental.multihost_utils import broadcast_one_to_all

    arrays = gather(tree)
    # As bytes: arithmetic on the way would turn -0 into 0 and float64 into float32.
    sent = broadcast_one_to_all(
        jax.tree.map(lambda a: np.frombuffer(a.tobytes(), np.uint8), arrays)
    )

    def restored(data, array, leaf):
        array = np.frombuffer(np.asarray(data).tobytes(), array.dtype).reshape(array.shape).copy()
        return like_leaf(array, leaf)

    return jax.tree.map(restored, sent, arrays, tree)


def like_leaf(array: np.ndarray, leaf: Any) -> Any:
    """What `gather` made of a leaf, as a random key again where the leaf was one."""
    if not is_key(leaf):
        return array
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))


def text_from_primary(text: str) -> str:
    """The primary's text in every process, cut to 4096 bytes."""
    if jax.process_count() == 1:
        return text
    data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    sent = from_primary(np.frombuffer(data, np.uint8))
    return sent.tobytes().rstrip(b"\0").decode(errors="ignore")


def same_everywhere(text: str) -> bool:
    """Whether every process holds the same text; the answer is the same in all."""
    return not differing({"": text})


def differing(texts: dict[str, str]) -> list[str]:
    """Names whose texts are not the same in all processes; the answer is the same in all.

    Args:
        texts: By name; of the same names in every process.
    """
    if jax.process_count() == 1:
        return []
    from jax.experimental.multihost_utils import process_allgather

    digests = [hashlib.sha256(text.encode()).digest() for text in texts.values()]
    found = process_allgather(np.frombuffer(b"".join(digests), np.uint8).reshape(len(texts), -1))
    same = (found == found[0]).all(axis=(0, 2))
    return [name for name, alike in zip(texts, same, strict=True) if not alike]
