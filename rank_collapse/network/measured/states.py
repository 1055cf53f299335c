"""`rc.profile` of a network's hidden states, in one pass over it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.measures import spikes
from rank_collapse.measures.arrays import as_floats
from rank_collapse.measures.profiles import Profile, measure_states, profile_of, rounding_of
from rank_collapse.measures.table import MeasureName, named
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import PreparedInputs, prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import States, WalkResult, run_pass
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import LayerValues
from rank_collapse.network.walk import Layer


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
    """`profile` of a network's hidden states on one example.

    Args:
        params, x, config, **inputs: As in `apply`; a mask [n] says which tokens exist.
        measures: Names out of `MEASURES`.
        tokens, exclude, threshold: As in `profile`; "read" is what attention reads in each layer,
            and after the last the output, after the final norm where there is one.
    """
    params, prepared = prepare_inputs(params, x, config, **inputs)
    layer_pass = ProfilePass(named(measures), tokens, exclude, threshold)
    return run_pass(layer_pass, params, prepared, config)


@dataclasses.dataclass(frozen=True)
class ProfilePass(States):
    """`network_profile` layer by layer, of names out of `MEASURES`."""

    measures: tuple[str, ...] = ("residual_ratio",)
    tokens: spikes.TokenKind = "raw"
    exclude: spikes.Excluded | None = None
    threshold: float = spikes.SPIKE

    def streamed(self) -> "StreamedProfile":
        """By NumPy: programs of all measures take longer to compile than to measure some texts."""
        return StreamedProfile(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    def measure(self, x: Any, mask: Any = None, read: Any = None) -> dict[str, Any]:
        """Of one layer's states, and of what is read of them."""
        choice = {"tokens": self.tokens, "exclude": self.exclude, "threshold": self.threshold}
        return measure_states(self.measures, x, mask, read, **choice)

    def init_carry(self, prepared: PreparedInputs, config: TransformerConfig) -> Any:
        """The measure of X^0, or where they are measured as they are read, X^0."""
        return prepared.x if self.tokens == "read" else super().init_carry(prepared, config)

    def measure_layer(self, layer: Layer, x: Any, seen: LayerValues, carry: Any) -> tuple[Any, Any]:
        """The measure after the layer, or of what the layer reads."""
        if self.tokens != "read":
            return super().measure_layer(layer, x, seen, carry)
        read, mask = seen.sublayers["attention"].branch_input, layer.inputs.token_mask
        return seen.trace.hidden, self.measure(carry, mask, read)

    def build_result(self, walked: WalkResult) -> Profile:
        """By layer."""
        if self.tokens == "read":
            last = self.measure(walked.carry, walked.prepared.token_mask, walked.output)
            found = jax.tree.map(
                lambda a, b: jnp.append(a, b[None], axis=0), walked.layer_results, last
            )
        else:
            found = super().build_result(walked)
        return profile_of(found, rounding_of(walked.prepared.x.dtype))


class StreamedProfile(ProfilePass):
    """`ProfilePass` on the host: of each layer its program gives the tokens alone."""

    def init_carry(self, prepared: PreparedInputs, config: TransformerConfig) -> Any:
        """X^0."""
        return prepared.x

    def measure_layer(self, layer: Layer, x: Any, seen: LayerValues, carry: Any) -> tuple[Any, Any]:
        """What the layer takes in."""
        read = seen.sublayers["attention"].branch_input if self.tokens == "read" else None
        return seen.trace.hidden, {"x": carry, "mask": layer.inputs.token_mask, "read": read}

    def build_result(self, walked: WalkResult) -> Any:
        """Measures of X^0 .. X^{L−1} [L], and X^L."""
        read = walked.output if self.tokens == "read" else None
        last = {"x": walked.carry, "mask": walked.prepared.token_mask, "read": read}
        return {"layers": walked.layer_results, "last": last}

    def on_host(self, found: Any) -> Any:
        """Measures [b] of tokens, or in the end the profile [b, L + 1]."""
        if "last" not in found:
            return _on_numpy(self.measure)(**found)
        last = _on_numpy(self.measure)(**found["last"])
        both = {name: np.append(a, last[name][:, None], 1) for name, a in found["layers"].items()}
        return profile_of(both, rounding_of(found["last"]["x"].dtype))


def _on_numpy(measure):
    """A measure of NumPy's arrays, of which those in 16 bits come to float32."""

    def measured(**given):
        with np.errstate(all="ignore"):
            return measure(**{name: a if a is None else _wide(a) for name, a in given.items()})

    return measured


def _wide(a):
    return a if a.dtype == bool else as_floats(a)
