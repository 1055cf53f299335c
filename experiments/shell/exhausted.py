"""Whether an error of JAX says that memory ran out: a run too large, not a mistake in the code."""


def out_of_memory(error: Exception) -> bool:
    """Of a `JaxRuntimeError`: whether its message is that of a device without memory left."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()


def one_line(error: Exception) -> str:
    """What is said of such an error: its beginning, without the table of allocations after it."""
    return f"out of memory: {' '.join(str(error).split())}"[:300]
