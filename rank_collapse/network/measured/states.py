"""`rc.profile` of a network's hidden states while its layers are streamed."""

import dataclasses

import numpy as np
from jaxtyping import Array

from rank_collapse.annotations import Tree
from rank_collapse.measures.arrays import as_floats
from rank_collapse.measures.layer_measures import measure_states
from rank_collapse.measures.profiles import make_profile
from rank_collapse.measures.rounding import rounding_limit
from rank_collapse.measures.spikes import TokenKind
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import PreparedInputs
from rank_collapse.network.passes import States, WalkResult
from rank_collapse.network.transformer import LayerValues
from rank_collapse.network.walk import Layer


@dataclasses.dataclass(frozen=True)
class ProfilePass(States):
    """Measures of X^0 .. X^L for `pretrained.stream`, as `rc.profile` computes them from states.

    The compiled program returns each layer's tokens, which NumPy measures, because programs with
    all measures take longer to compile than to run.

    Attributes:
        measures: Names from `MEASURES`.
        tokens: "raw" for the stream; "read" for the input of attention in each layer, and after the
            last layer for the output, after the final norm if there is one. In a pre-norm network a
            single token of large norm decides the raw measures.
    """

    measures: tuple[str, ...] = ("residual_ratio",)
    tokens: TokenKind = "raw"

    def init_carry(self, prepared: PreparedInputs, config: TransformerConfig) -> Tree:
        return prepared.x

    def measure_layer(
        self, layer: Layer, x: Array, layer_values: LayerValues, carry: Tree
    ) -> tuple[Tree, Tree]:
        """Return the tokens to measure in the input of the layer."""
        attention_input = layer_values.sublayers["attention"].branch_input
        tokens = self._select_tokens(carry, layer.inputs.token_mask, attention_input)
        return layer_values.trace.hidden, tokens

    def build_result(self, walk_result: WalkResult) -> Tree:
        """Return the measures of X^0 .. X^{L−1} [L], and the tokens of X^L to measure."""
        last = self._select_tokens(
            walk_result.carry, walk_result.prepared.token_mask, walk_result.output
        )
        return {"layers": walk_result.layer_results, "last": last}

    def on_host(self, results: Tree) -> Tree:
        """Measure tokens of one layer [b], or at the end make the profile [b, L + 1]."""
        if "last" not in results:
            return self._measure_tokens(results)
        last = self._measure_tokens(results["last"])
        measures = {
            name: np.append(values, last[name][:, None], 1)
            for name, values in results["layers"].items()
        }
        return make_profile(measures, rounding_limit(results["last"]["x"].dtype))

    def _select_tokens(self, x, mask, read):
        """Collect what is measured on the host.

        Args:
            x: State [n, d].
            mask: Bool [n], the tokens that exist; or None.
            read: The state as the next sublayer reads it, after its norm; kept only if
                tokens="read".
        """
        return {"x": x, "mask": mask, "read": read if self.tokens == "read" else None}

    def _measure_tokens(self, tokens):
        """Measure NumPy arrays; 16-bit arrays are converted to float32."""
        arrays = {
            name: a if a is None or a.dtype == bool else as_floats(a) for name, a in tokens.items()
        }
        with np.errstate(all="ignore"):
            return measure_states(self.measures, **arrays, tokens=self.tokens)
