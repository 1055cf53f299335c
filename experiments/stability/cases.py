"""The networks of run_stability: designs and depths, as gains of the deepest network.

Encoders, and encoder-decoders whose halves are as deep as each other.

A network of l layers is the deepest one whose layers after l have skips of 1 and branches of 0:
they change nothing, and one compiled program serves every depth and every design of its norms.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import rank_collapse as rc
from experiments.shell.flag_values import check_names
from experiments.stability.networks import halves, mapped
from rank_collapse.network.designs import count_branches
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.network.encoder_decoder import EncoderDecoderConfig
from rank_collapse.network.gains import Gains, layer_gains

# {design: the law of Liu et al. of what independent updates do to its output, C Σ β_ii²}
LAW_OF = {
    "post": "O(N)", "pre": "O(log N)", "admin": "O(log N)", "admin_log": "O(log N)",
    "admin_const": "O(1)",
}  # fmt: skip
DESIGNS = (*LAW_OF, "deepnorm", "depth_scaled", "layernorm_scaling")
KINDS = ("encoder", "encoder_decoder")
PARTS = ("encoders", "encoder_decoders", "training")


class Case(NamedTuple):
    """One network: a design at a depth."""

    kind: str  # Of `KINDS`
    design: str  # A name of `rc.DESIGNS`
    depth: int  # Layers, of each half
    branches: int  # N of all of it


class Group(NamedTuple):
    """Networks of one compiled program."""

    config: Any  # The deepest network, without its gains
    cases: tuple[Case, ...]  # In the order of the gains' leading axis
    # {half: {"skip", "branch", "norm": Gains of [case, L], "init": [case]}}; skips that a batch
    # decides are NaN.
    gains: Mapping[str, Any]


def base_config(options: flags.FlagValues, depth: int, kind: str) -> Any:
    """The network that designs are applied to."""
    fields = {"mlp": options.mlp, "mask": options.mask, "d_ff": options.d_ff}
    if options.mlp == "none":
        fields["mlp_skip"] = False
    encoder = rc.transformer(depth, options.num_heads, options.d_model, **fields)
    if kind == "encoder":
        return encoder
    # Both halves are given states: the decoder's vocabulary is there because it must have one.
    embedding = EmbeddingConfig(vocab_size=1, d_embed=options.d_model)
    decoder = encoder.replace(cross_attention=True, mask="causal", embedding=embedding)
    return EncoderDecoderConfig(encoder, decoder)


def depths_of(options: flags.FlagValues, flag: str) -> list[int]:
    """The depths that a flag asks for, ascending; raises ValueError for fewer than two."""
    depths = sorted(set(options[flag].value))
    if len(depths) < 2:
        given = ",".join(map(str, options[flag].value))
        raise ValueError(f"--{flag}={given} is fewer than two depths")
    return depths


def parts_of(options: flags.FlagValues) -> dict[str, list[Group]]:
    """The networks at initialisation that the flags ask for, by part; see `measure.measure_all`.

    Raises:
        ValueError: A part or a design that there is not, none, or an update of nothing.
    """
    check_names(options, "parts", PARTS)
    check_names(options, "designs", rc.DESIGNS)
    if "training" in options.parts:  # before the networks of other parts are measured
        check_names(options, "train_designs", rc.DESIGNS)
        if not options.train_designs:
            raise ValueError("--train_designs is empty")
    if not options.update_size > 0:
        raise ValueError(f"--update_size={options.update_size} is no update of the weights")
    parts = {}
    for kind, flag in zip(KINDS, ("", "pair_"), strict=True):
        layered, depths = (depths_of(options, f"{flag}{n}") for n in ("layer_depths", "depths"))
        if f"{kind}s" not in options.parts:
            continue
        parts[f"{flag}layers"] = groups_of(options, layered, kind)
        if others := [depth for depth in depths if depth not in layered]:
            parts[f"{flag}depths"] = groups_of(options, others, kind)
    if not parts:
        raise ValueError(f"--parts={','.join(options.parts)} measures no network at initialisation")
    return parts


def groups_of(options: flags.FlagValues, depths: list[int], kind: str = "encoder") -> list[Group]:
    """All designs at all depths, in groups of one compiled program each."""
    if not options.designs:
        raise ValueError("--designs is empty")
    plain = dict.fromkeys(("skip_gain", "branch_gain", "norm_gain", "init_gain"), 1.0)
    plain |= {"depth": depths[-1]}
    groups = {}
    for name in options.designs:
        for depth in depths:
            config = rc.design(base_config(options, depth, kind), name, learned=False)
            # Compared alike: one rule for the initial weights, whose gains are the design's own.
            config = mapped(lambda stack: stack.replace(init="lecun"), config)
            stacks = halves(config)
            gains = {half: gains_at(stack, depths[-1]) for half, stack in stacks.items()}
            static = mapped(lambda stack: stack.replace(**plain), config)
            case = Case(kind, name, depth, sum(map(count_branches, stacks.values())))
            groups.setdefault(static, []).append((case, gains))
    return [
        Group(
            config,
            tuple(case for case, _ in found),
            jax.tree.map(lambda *a: np.stack(a), *(gains for _, gains in found)),
        )
        for config, found in groups.items()
    ]


def gains_at(config: rc.TransformerConfig, size: int) -> dict[str, Any]:
    """The gains of a stack, with `size` layers of which those past its own change nothing."""
    own = layer_gains(config, jnp.float32)

    def padded(gains, rest):
        wide = (0, size - config.depth)
        return jax.tree.map(lambda a: np.pad(a, wide, constant_values=rest), gains)

    ones = np.ones(config.depth, np.float32)
    norm = Gains(ones, ones, ones) if own.norm is None else own.norm
    gains = {"skip": padded(own.skip, 1.0), "branch": padded(own.branch, 0.0)}
    return gains | {"norm": padded(norm, 1.0), "init": np.float32(config.init_gain)}


def with_gains(config: Any, gains: Mapping[str, Any]) -> Any:
    """The network of one case; its parameters are scaled by `gains["init"]`, see `measure`."""

    def gained(stack, own):
        return stack.replace(**{f"{name}_gain": own[name] for name in ("skip", "branch", "norm")})

    return mapped(gained, config, gains)
