"""The attention functions that are compared, as fields of the one network's configuration."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Form:
    """One attention function: its score, and the power of √d_k that multiplies it.

    Attributes:
        label: In figures.
        score: Of the configuration.
        power: −1 scales dot products as usual, 0 leaves scores as they are.
    """

    label: str
    score: str
    power: int = 0

    def options(self, d_k: int) -> dict[str, Any]:
        """Keyword arguments of `attention_scores` at a width."""
        return {"score": self.score, "scale": False, "temperature": math.sqrt(d_k) ** -self.power}


# The note compares the first three. The fourth tells the tanh from the size of what it is weighed
# with: the library draws v with variance 1/d_k, which holds additive scores small as 1/√d_k does
# dot products; √d_k times that is v of unit variance.
FORMS = {
    "dot": Form("dot product", "dot"),
    "scaled_dot": Form(r"dot product $/\sqrt{d_k}$", "dot", -1),
    "additive": Form("additive", "additive"),
    "additive_unscaled": Form(r"additive $\times\sqrt{d_k}$", "additive", 1),
}
