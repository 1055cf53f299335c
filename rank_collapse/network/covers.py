"""The networks that a pass supports, as lists of allowed values; any other value raises an error.

A field that no list names is covered only at its default value, so every pass refuses a new field
until somebody lists it.
"""

import dataclasses
from collections.abc import Mapping

from rank_collapse.network.config import DEFAULTS, SWEPT, TransformerConfig, flat
from rank_collapse.network.layers import MLP_KINDS, NORM_KINDS

ANY = "any value"


def at_any_value(*names: str) -> dict[str, object]:
    """Allow these fields at any value."""
    return dict.fromkeys(names, ANY)


# Without effect unless another field is set, which has to be covered itself.
INERT = at_any_value(
    "cross_skip",
    "experts_per_token",
    "router",
    "d_shared",
    "window",
    "local_theta",
    "rotary_theta",
    "rotary_scaling",
    "rotary_tables",
    "rotary_width",
    "rotary_factor",
    "num_buckets",
    "max_distance",
    "clamp_distance",
    "learned_per_feature",
)
# Shapes, initial values, and what `prepare_inputs` and the scan over layers take care of.
SIZES = INERT | at_any_value(
    "depth",
    "num_heads",
    "num_kv_heads",
    "d_model",
    "d_qk",
    "d_v",
    "d_ff",
    "layer_map",
    "embedding",
    "init",
    "init_gain",
    "unroll",
    "norm_eps",
    "family",
)
STREAM = at_any_value(
    "attention_skip",
    "mlp_skip",
    "norm_placement",
    "final_norm",
    "first_norm",
    "skip_gain",
    "branch_gain",
    "norm_gain",
    "learned_skip_gain",
    "learned_branch_gain",
) | {"norm": NORM_KINDS}
PARALLEL = at_any_value("parallel")
MASKS = at_any_value("mask", "windows")
POSITIONS = at_any_value("position", "rotary_layers")
SCORES = at_any_value("score", "scale_scores", "temperature", "qk_norm")
MIXING = at_any_value("mixing")
MLPS = {"mlp": MLP_KINDS}
CALLER_FUNCTIONS = at_any_value("mlp", "norm", "normalise", "mix")
EXPERTS = at_any_value("num_experts")
CROSS = at_any_value("cross_attention")
ATTENTION = MASKS | POSITIONS | SCORES | MIXING | at_any_value("score_cap")


@dataclasses.dataclass(frozen=True)
class Covers:
    """The networks and edits that a pass covers.

    Attributes:
        name: Name of the pass, as errors call it.
        fields: {field of `TransformerConfig`: its allowed values, or `ANY`}.
        edits: Names of the edit points whose edits are carried, or `ANY`.
    """

    name: str
    fields: Mapping[str, object]
    edits: object = ()

    def refusal(self, config: TransformerConfig) -> str | None:
        """Return why a network is not covered; None where it is.

        Args:
            config: The network.
        """
        for name, value in flat(config).items():
            allowed = self.fields.get(name, (DEFAULTS[name],))
            if allowed == ANY:
                continue
            # A swept value may be traced: it is its default or it is not covered.
            is_allowed = value is DEFAULTS[name] if name in SWEPT else value in allowed
            if not is_allowed:
                return f"{name}={value!r}"
        return None

    def check(self, config: TransformerConfig, edit: Mapping[str, object] | None = None) -> None:
        """Check that a network, and an edit from `edits.trace_edits`, are covered.

        Args:
            config: The network.
            edit: {name: `edits.Edit`}, or None.

        Raises:
            ValueError: A value of a field, or an edit, is not covered.
        """
        reason = self.refusal(config)
        if reason:
            raise ValueError(f"{self.name} does not cover {reason}")
        for name in edit or ():
            if self.edits != ANY and name not in self.edits:
                raise ValueError(f"{self.name} does not cover an edit of {name!r}")


EVERYTHING = Covers(
    "a forward pass",
    SIZES | STREAM | PARALLEL | ATTENTION | MLPS | EXPERTS | CROSS | CALLER_FUNCTIONS,
    edits=ANY,
)


def all_fields_but(*names: str) -> dict[str, object]:
    """List the fields of `EVERYTHING` without these fields."""
    return {name: allowed for name, allowed in EVERYTHING.fields.items() if name not in names}
