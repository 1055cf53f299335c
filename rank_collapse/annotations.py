"""Names of kinds of values for annotations: arrays, numbers, keys, number formats, pytrees.

While a program runs, these annotations allow any value, because JAX transformations may replace an
array by a tracer, an axis or a sharding. A type checker reads them as written.
"""

from typing import TYPE_CHECKING, Any

AnyArray = Any  # an array of NumPy, JAX, PyTorch or another framework: the result is of the same
Tree = Any  # a pytree of arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jax

    ArrayLike = jax.typing.ArrayLike | Sequence[Any]
    DType = jax.typing.DTypeLike
    Key = jax.Array  # of `jax.random.key`
    Leaf = jax.Array  # of a parameter, a configuration or a result
    Number = jax.typing.ArrayLike  # a number that may be swept or traced, or one for each layer
else:
    ArrayLike = DType = Key = Leaf = Number = Any
