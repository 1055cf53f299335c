"""Networks at initialisation as experiments on residual designs share them, and what is measured.

Axis letters: n tokens, d width, L layers, s seeds.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.shell.options import Flags
from experiments.small_task import Network
from rank_collapse.measures.updates import norms_of, with_matrices
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.passes import run
from rank_collapse.paths.channels import ByLength
from rank_collapse.paths.contributions import LengthPass

FLOOR = 1e-6  # a share of the residual that float32 rounds away


def network_of(options: Flags, depth: int, **fields: Any) -> rc.TransformerConfig:
    """The network of the flags, without a design.

    Args:
        options: --num_heads, --d_model, --mlp and --mask.
        fields: Of the configuration, in place of the flags' too.
    """
    plain = {name: options[name].value for name in ("num_heads", "d_model", "mlp", "mask")}
    return rc.transformer(depth, **plain | {"mlp_skip": options.mlp != "none"} | fields)


def by_program(networks: Mapping[str, Network]) -> list[dict[str, Any]]:
    """{name: configuration of float32 numbers} of networks that differ in numbers alone: these are
    arguments of one program."""
    found: dict[Any, dict[str, Any]] = {}
    for name, network in networks.items():
        cells = found.setdefault(network.program, {})
        cells[name] = jax.tree.map(np.float32, network.config)
    return list(found.values())


def tokens(key: Any, n: int, d: int, cosine: Any) -> Any:
    """[n, d] Gaussian, of mean square 1 and mean product ρ."""
    drawn = jax.random.normal(key, (n + 1, d))
    return jnp.sqrt(cosine) * drawn[:1] + jnp.sqrt(1 - cosine) * drawn[1:]


def kept_and_gradients(
    params: Any, x: Any, config: rc.TransformerConfig, key: Any
) -> dict[str, Any]:
    """What a network keeps of its tokens, by layer, and its gradients of Σ G ∘ output.

    Args:
        params, x, config: The network and its tokens [n, d].
        key: Of the Gaussian G [n, d].

    Returns:
        "residual" [L + 1], ‖res(X)‖_F/‖X‖_F; "entropy" [L], of rows |M_ij|/Σ_j |M_ij| over ln n,
        mean of the heads; "query", "value" [L], ‖∂/∂W_Q‖_F and ‖∂/∂W_V‖_F; "rank", the effective
        rank of the centred output over min(n − 1, d).
    """
    goal, attention = jax.random.normal(key, x.shape), params.layers.attention

    def run(own):
        trace = rc.apply(with_matrices(params, own), x, config)
        return jnp.sum(goal * trace.output), trace

    own = {"attention": {name: getattr(attention, name) for name in ("w_q", "w_v")}}
    gradients, trace = jax.grad(run, has_aux=True)(own)
    sizes = norms_of(gradients)["attention"]
    weights = jnp.abs(trace.attention)
    weights = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    return {
        "residual": jax.vmap(lambda h: rc.residual_ratio(h, norm="frobenius"))(trace.hidden),
        "entropy": jax.vmap(rc.attention_entropy)(weights).mean(axis=1) / math.log(len(x)),
        "query": sizes["w_q"],
        "value": sizes["w_v"],
        "rank": rc.effective_rank_share(trace.hidden[-1]),
    }


def mean_path_length(params: Any, x: Any, config: rc.TransformerConfig) -> Any:
    """Σ_k k ‖C_k‖_F / Σ_k ‖C_k‖_F over the exact sums C_k of all paths of length k.

    NaN where no sum of paths covers the network.
    """
    if ByLength.covers.refusal(config) is not None:
        return jnp.full((), jnp.nan)
    params, prepared = prepare_inputs(params, x, config)
    found = run(LengthPass(), params, prepared, config)
    sizes = jnp.linalg.norm(found.by_attention_length, axis=(1, 2))
    return jnp.arange(len(sizes)) @ sizes / jnp.sum(sizes)


def kept_of(residual: np.ndarray) -> np.ndarray:
    """The residual [..., L + 1] over that of the input, `FLOOR` from the first layer that is below:
    what follows there is rounding, and where tokens shrink to 0 their ratio is noise."""
    kept = residual.astype(np.float64) / residual[..., :1]
    return np.where(np.logical_or.accumulate(kept <= FLOOR, axis=-1), FLOOR, kept)


def measures_of(found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Numbers [...] of what `kept_and_gradients` gives, arrays [..., L] and "rank" [...].

    NaN where float32 rounds the output's residual away: its effective rank, and the gradients,
    which come from differences of tokens.
    """
    kept, lost = np.log10(kept_of(found["residual"])[..., -1]), limits_of(found)
    return {
        "log10_residual": kept,
        "log10_gradient": np.where(lost, np.nan, log10_gradient_ratio(found)),
        "entropy": found["entropy"].mean(axis=-1),
    } | ({"rank": np.where(lost, np.nan, found["rank"])} if "rank" in found else {})


def limits_of(found: Mapping[str, np.ndarray]) -> np.ndarray:
    """Whether the residual kept [...] is an upper limit: float32 rounds it away below `FLOOR`."""
    return kept_of(found["residual"])[..., -1] <= FLOOR


def log10_gradient_ratio(found: Mapping[str, np.ndarray]) -> np.ndarray:
    """log10 of the gradient of all query weights over that of all value weights.

    NaN where one of them is 0, as after a gain of 0.

    Args:
        found: "query" and "value" [..., L] of `kept_and_gradients`.
    """
    query, value = (
        np.sqrt(np.sum(np.square(found[name], dtype=float), axis=-1)) for name in ("query", "value")
    )
    known = (query > 0) & (value > 0)
    return np.where(known, np.log10(np.where(known, query, 1) / np.where(known, value, 1)), np.nan)
