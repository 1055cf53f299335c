"""The networks of run_stability: encoders and encoder-decoders, by design and depth, handled alike.

What belongs to the stacks of a network is a tuple: of a stack alone, or of encoder and decoder; the
last is the one that puts the output out.

A network of l layers is the deepest one whose layers after l have skips of 1 and branches of 0:
they change nothing, and one compiled program serves every depth and every design of its norms.
"""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments import initial
from experiments.shell.options import Flags, check_names
from rank_collapse.measures import updates
from rank_collapse.network import encoder_decoder, layers
from rank_collapse.network.designs import count_branches
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.network.encoder_decoder import EncoderDecoderConfig
from rank_collapse.network.gains import Gains, layer_gains
from rank_collapse.theory import encoder_decoder as theory_of_both, stability

# {design: the law of Liu et al. of Σ β_ii², to which what independent updates do to its output is
# proportional}
LAW_OF = {
    "post": "O(N)",
    "pre": "O(log N)",
    "admin": "O(log N)",
    "admin_log": "O(log N)",
    "admin_const": "O(1)",
}
DESIGNS = (*LAW_OF, "deepnorm", "depth_scaled", "layernorm_scaling")
KINDS = ("encoder", "encoder_decoder")
PARTS = ("encoders", "encoder_decoders", "training")
HALVES = ("encoder", "decoder")


class Case(NamedTuple):
    """One network: a design at a depth."""

    kind: str  # Of `KINDS`
    design: str  # A name of `rc.DESIGNS`
    depth: int  # Layers, of each half
    branches: int  # N of all of it

    @property
    def name(self) -> str:
        """Of its arrays."""
        return f"{self.kind} {self.design}, L={self.depth}"


class Part(NamedTuple):
    """Networks of which the same is measured."""

    by_layer: bool  # Whether each layer is measured too
    configs: Mapping[Case, Any]  # All as deep as the deepest of them, see `padded`


def base_config(options: Flags, depth: int, kind: str) -> Any:
    """The network that designs are applied to."""
    encoder = initial.network_of(options, depth, d_ff=options.d_ff)
    if kind == "encoder":
        return encoder
    # Both halves are given states: the decoder's vocabulary is there because it must have one.
    embedding = EmbeddingConfig(vocab_size=1, d_embed=options.d_model)
    decoder = encoder.replace(cross_attention=True, mask="causal", embedding=embedding)
    return EncoderDecoderConfig(encoder, decoder)


def depths_of(options: Flags, flag: str) -> list[int]:
    """The depths that a flag asks for, ascending; raises ValueError for fewer than two."""
    depths = sorted(set(options[flag].value))
    if len(depths) < 2:
        raise ValueError(f"--{flag}={','.join(map(str, depths))} is fewer than two depths")
    return depths


def parts_of(options: Flags) -> list[Part]:
    """The networks at initialisation that the flags ask for; see `measure.measure_all`.

    Raises:
        ValueError: A part or a design that there is not, none, or an update of nothing.
    """
    check_names(options, "parts", PARTS)
    check_names(options, "designs", rc.DESIGNS)
    if "training" in options.parts:  # before the networks of other parts are measured
        check_names(options, "train_designs", rc.DESIGNS)
    if not options.update_size > 0:
        raise ValueError(f"--update_size={options.update_size} is no update of the weights")
    parts = []
    for kind, flag in zip(KINDS, ("", "pair_"), strict=True):
        layered, depths = (depths_of(options, f"{flag}{n}") for n in ("layer_depths", "depths"))
        if f"{kind}s" in options.parts:
            parts.append(Part(True, configs_of(options, layered, kind)))
            others = [depth for depth in depths if depth not in layered]
            parts += [Part(False, configs_of(options, others, kind))] if others else []
    if not parts:
        raise ValueError(f"--parts={','.join(options.parts)} measures no network at initialisation")
    return parts


def configs_of(options: Flags, depths: list[int], kind: str = "encoder") -> dict[Case, Any]:
    """All designs at all depths, ascending, as deep as the deepest."""
    found, longer = {}, partial(padded, size=depths[-1])
    for name, depth in itertools.product(options.designs, depths):
        config = rc.design(base_config(options, depth, kind), name, learned=False)
        branches = sum(map(count_branches, halves(config)))
        found[Case(kind, name, depth, branches)] = mapped(longer, config)
    return found


def padded(config: rc.TransformerConfig, size: int) -> rc.TransformerConfig:
    """The network with `size` layers, of which those past its own change nothing.

    Initial weights are compared alike: by one rule, with the gain of the design's own.
    """
    gains, ones = layer_gains(config, jnp.float32), np.ones(config.depth, np.float32)

    def longer(of, rest):
        wide = (0, size - config.depth)
        return jax.tree.map(lambda a: np.pad(a, wide, constant_values=rest), of)

    return config.replace(
        depth=size,
        init="lecun",
        skip_gain=longer(gains.skip, 1.0),
        branch_gain=longer(gains.branch, 0.0),
        norm_gain=longer(gains.norm or Gains(ones, ones, ones), 1.0),
    )


def halves(network: Any) -> tuple[Any, ...]:
    """What belongs to each stack of a config, of parameters, of traces, or of what is expected."""
    parts = network if isinstance(network, dict) else {}
    parts = parts or {half: getattr(network, half) for half in HALVES if hasattr(network, half)}
    return tuple(parts[half] for half in HALVES) if "decoder" in parts else (network,)


def mapped(fn: Callable, network: Any, *others: tuple[Any, ...]) -> Any:
    """The config or parameters with fn(stack, *others of that half) in the place of each stack."""
    new = [fn(*given) for given in zip(halves(network), *others, strict=True)]
    return network.replace(**dict(zip(HALVES, new, strict=True))) if len(new) > 1 else new[0]


def library(config: Any) -> tuple[Any, Any]:
    """(what initialises and applies such a network, its one law)."""
    both = isinstance(config, EncoderDecoderConfig)
    return (encoder_decoder, theory_of_both) if both else (rc, stability)


def traces(params: Any, inputs: tuple[Any, ...], config: Any) -> tuple[rc.Trace, ...]:
    """The pass on states [n, d] of each half; the decoder attends to the encoder's output."""
    return halves(library(config)[0].apply(params, *inputs, config))


def expected(
    params: Any, inputs: tuple[Any, ...], config: Any, size: Any, *, gradients: bool
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(what the one law expects of each half, and of gradients where that is asked for).

    NaN of networks that it does not cover, as where branches see tokens that no norm has scaled.
    """
    if any(stability.COVERS.refusal(stack) for stack in halves(config)):
        other = mapped(lambda stack: stack.replace(norm_placement="none"), config)
        shapes = jax.eval_shape(lambda: expected(params, inputs, other, size, gradients=gradients))
        return jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), shapes)
    theory = library(config)[1]
    given, sizes = (params, *inputs, config), theory.update_sizes(config, size)
    if not gradients:
        return halves(theory.expected_pass(*given, sizes=sizes)), ()
    found, law = theory.expected_gradient_norms(*given, sizes=sizes)
    return halves(law), halves(found)


def matrices_of(params: Any) -> tuple[Any, ...]:
    """`updates.matrices_of` each half."""
    return tuple(map(updates.matrices_of, halves(params)))


def gradients(loss: Callable[[Any], tuple[Any, Any]], params: Any) -> tuple[Any, Any]:
    """(∂loss/∂W of every matrix, as `matrices_of`, what else loss(params) returns)."""
    return jax.grad(lambda own: loss(mapped(updates.with_matrices, params, own)), has_aux=True)(
        matrices_of(params)
    )


def normalised_output(passed: tuple[rc.Trace, ...], config: Any) -> jax.Array:
    """x̂ of the last layer, [n, d], of `traces`."""
    stack = halves(config)[-1]
    return layers.norm(None, passed[-1].hidden[-1], stack.norm, stack.norm_eps)


def changes(
    params: Any, inputs: tuple[Any, ...], config: Any, before: Any, directions: Any, size: Any
) -> dict[str, Any]:
    """{name: |x̂ − x̂*|²/d of the normalised output} after an update of all matrices.

    Args:
        before: x̂.
        directions: {name: matrices of each half}; each matrix moves by the same relative size.
        size: ‖W* − W‖/‖W‖.
    """

    def change(direction):
        moved = mapped(lambda part, u: updates.moved(part, u, size), params, direction)
        after = normalised_output(traces(moved, inputs, config), config)
        return jnp.mean(jnp.square(after - before))

    together = jax.tree.map(lambda *a: jnp.stack(a), *directions.values())
    return dict(zip(directions, jax.lax.map(change, together), strict=True))


def sgd_change(params: Any, inputs: tuple[Any, ...], config: Any, gradients: Any) -> jax.Array:
    """|δx̂|²/(d η²) of an SGD step W − η ∂loss/∂W of all matrices, to first order in η."""

    def output(own):
        moved = mapped(updates.with_matrices, params, own)
        return normalised_output(traces(moved, inputs, config), config)

    return jnp.mean(jnp.square(jax.jvp(output, (matrices_of(params),), (gradients,))[1]))


def gradient_bound(params: Any, gradients: Any, target: Any, size: Any) -> jax.Array:
    """e² (Σ‖W‖‖∂W‖)²/‖u‖², per entry of x̂: what a step of relative size e along every matrix's
    gradient changes the output by at least, since it changes the loss u·x̂ by e Σ‖W‖‖∂W‖,
    u the target [n, d].
    """
    norms = ([updates.norms_of(half) for half in own] for own in (matrices_of(params), gradients))
    total = jax.tree.reduce(jnp.add, jax.tree.map(lambda w, g: jnp.sum(w * g), *norms))
    return jnp.square(size * total) / (jnp.sum(jnp.square(target)) * target.size)


def with_omega(params: Any, batch: tuple[Any, ...], config: Any) -> Any:
    """The network, with Admin's ω profiled on a batch of states of each half where its skips are
    NaN."""
    skips = tuple(stack.skip_gain for stack in halves(config))

    def profiled():
        found = library(config)[0].admin_profile(params, *batch, config)
        return tuple(layer_gains(stack, jnp.float32).skip for stack in halves(found))

    gains = jax.lax.cond(jnp.isnan(skips[-1].attention[0]), profiled, lambda: skips)
    return mapped(lambda stack, skip: stack.replace(skip_gain=skip), config, gains)
