"""`rc.profile` of a network's hidden states, in one pass over it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.measures import spikes
from rank_collapse.measures.arrays import as_floats
from rank_collapse.measures.profiles import Profile, make_profile, measure_states, rounding_limit
from rank_collapse.measures.table import MeasureName, check_measure_names
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import PreparedInputs, prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import States, WalkResult, run_pass
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import Layer, LayerValues


@full_precision
def network_profile(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    *,
    measures: MeasureName | Sequence[MeasureName] = ("residual_ratio",),
    tokens: spikes.TokenKind = "raw",
    exclude: spikes.Excluded | None = None,
    threshold: float = spikes.SPIKE,
    **inputs: Any,
) -> Profile:
    """Measure a network's hidden states on one example; see `rank_collapse.profile`.

    Raw states (tokens="raw") are those of the stream. In a pre-norm network every layer reads them
    normalised: a token of large norm decides the raw measures alone, and few of the others.

    Args:
        params, x, config, **inputs: As in `apply`; a mask [n] says which tokens exist.
        measures: Names out of `MEASURES`.
        tokens, exclude, threshold: As in `profile`; "read" is what attention reads in each layer,
            and after the last the output, after the final norm where there is one.
    """
    params, prepared = prepare_inputs(params, x, config, **inputs)
    layer_pass = ProfilePass(check_measure_names(measures), tokens, exclude, threshold)
    return run_pass(layer_pass, params, prepared, config)


@dataclasses.dataclass(frozen=True)
class ProfilePass(States):
    """`network_profile` layer by layer, of names out of `MEASURES`."""

    measures: tuple[str, ...] = ("residual_ratio",)
    tokens: spikes.TokenKind = "raw"
    exclude: spikes.Excluded | None = None
    threshold: float = spikes.SPIKE

    def for_streaming(self) -> "StreamedProfile":
        """Measure with NumPy: programs of all measures take longer to compile than to measure."""
        return StreamedProfile(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    def measure(self, x: Any, mask: Any = None, attention_input: Any = None) -> dict[str, Any]:
        options = {"tokens": self.tokens, "exclude": self.exclude, "threshold": self.threshold}
        return measure_states(self.measures, x, mask, attention_input, **options)

    def init_carry(self, prepared: PreparedInputs, config: TransformerConfig) -> Any:
        """Measure X^0; where states are measured as they are read, carry X^0 itself."""
        return prepared.x if self.tokens == "read" else super().init_carry(prepared, config)

    def measure_layer(
        self, layer: Layer, x: Any, layer_values: LayerValues, carry: Any
    ) -> tuple[Any, Any]:
        if self.tokens != "read":
            return super().measure_layer(layer, x, layer_values, carry)
        attention_input = layer_values.sublayers["attention"].branch_input
        measures = self.measure(carry, layer.inputs.token_mask, attention_input)
        return layer_values.trace.hidden, measures

    def build_result(self, walked: WalkResult) -> Profile:
        if self.tokens == "read":
            last = self.measure(walked.carry, walked.prepared.token_mask, walked.output)
            measures = jax.tree.map(
                lambda a, b: jnp.append(a, b[None], axis=0), walked.layer_results, last
            )
        else:
            measures = super().build_result(walked)
        return make_profile(measures, rounding_limit(walked.prepared.x.dtype))


class StreamedProfile(ProfilePass):
    """`ProfilePass` whose compiled program returns each layer's tokens, measured on the host."""

    def init_carry(self, prepared: PreparedInputs, config: TransformerConfig) -> Any:
        return prepared.x

    def measure_layer(
        self, layer: Layer, x: Any, layer_values: LayerValues, carry: Any
    ) -> tuple[Any, Any]:
        """Return the arguments of `measure` for what the layer takes in."""
        attention_input = None
        if self.tokens == "read":
            attention_input = layer_values.sublayers["attention"].branch_input
        arguments = {"x": carry, "mask": layer.inputs.token_mask}
        return layer_values.trace.hidden, arguments | {"attention_input": attention_input}

    def build_result(self, walked: WalkResult) -> Any:
        """Return the measures of X^0 .. X^{L−1} [L], and the arguments of `measure` for X^L."""
        attention_input = walked.output if self.tokens == "read" else None
        arguments = {"x": walked.carry, "mask": walked.prepared.token_mask}
        last = arguments | {"attention_input": attention_input}
        return {"layers": walked.layer_results, "last": last}

    def on_host(self, results: Any) -> Any:
        """Measure tokens of one layer [b], or in the end make the profile [b, L + 1]."""
        if "last" not in results:
            return self._measure_with_numpy(results)
        last = self._measure_with_numpy(results["last"])
        measures = {
            name: np.append(values, last[name][:, None], 1)
            for name, values in results["layers"].items()
        }
        return make_profile(measures, rounding_limit(results["last"]["x"].dtype))

    def _measure_with_numpy(self, arguments):
        """Measure NumPy's arrays, of which those in 16 bits are converted to float32."""
        arrays = {
            name: a if a is None or a.dtype == bool else as_floats(a)
            for name, a in arguments.items()
        }
        with np.errstate(all="ignore"):
            return self.measure(**arrays)
