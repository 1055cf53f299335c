"""Effects of the paths of each length on one example: contributions, chained attention.

Axis letters: n tokens, d width, l layers;
k is a path length, 0 .. L.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from experiments.train import path_sizes
from rank_collapse.measures.norms import composite_norm
from rank_collapse.measures.residuals import residual
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import PreparedInputs
from rank_collapse.network.passes import LayerPass, WalkResult
from rank_collapse.network.walk import Layer
from rank_collapse.paths.sets import sample_path_sets


@dataclasses.dataclass(frozen=True)
class ChainPass(LayerPass):
    """Measures chained attention of random paths by length, and the sizes of skips and branches.

    Layer by layer; every path's product is carried. With N = ‖.‖_{1,∞} it gives

        chain_residual  ‖P_path − 1pᵀ‖/‖P_path‖ of the product of the path's attention [L, p]
        chain_rank_one  the same against the best rank one [L, p]
        skip, branch    N(x) and N(SA(x)) of every layer as they are added, from which α comes [L]
                        (`path_sizes.branch_sizes`, `skip_share`)
        initial         N(res X^0), with which its law begins (`path_sizes.alpha_law`)

    Source: chained attention and α in the published code of Dong et al. 2021.
    """

    num_paths: int = 5  # Paths of each length 1 .. L, their layers and heads drawn uniformly
    seed: int = 0  # Of the paths

    def init_carry(
        self, prepared: PreparedInputs, config: TransformerConfig
    ) -> tuple[Array, path_sizes.Chain]:
        """Draws the paths, and makes the empty product of each."""
        lengths = jnp.arange(1, config.depth + 1)
        sizes = (lengths, 1, self.num_paths, config.depth, config.num_heads)
        paths = sample_path_sets(jax.random.key(self.seed), *sizes).reshape(-1, config.depth)
        empty = path_sizes.empty_chain(prepared.existing_tokens, prepared.x.dtype)
        return paths, jax.tree.map(lambda a: jnp.broadcast_to(a, (len(paths), *a.shape)), empty)

    def measure_layer(self, layer: Layer, x: Any, layer_values: Any, carry: Any) -> tuple[Any, Any]:
        """Extends the products with the heads that the paths take here; measures N(x) and
        N(SA(x)).
        """
        paths, products = carry
        weights, token_mask = layer_values.trace.attention, layer.inputs.existing_tokens
        products = jax.lax.map(
            lambda a: path_sizes.extend_chain(weights, *a, token_mask),
            (paths[:, layer.index], products),
        )
        mask = layer.inputs.token_mask
        return (paths, products), path_sizes.measure_summand_sizes(
            layer_values.sublayers["attention"], mask=mask
        )

    def build_result(self, walked: WalkResult) -> dict[str, Float[Array, "..."]]:
        """Computes the measures by name from the products of all layers."""
        mask, (skip, branch) = walked.prepared.token_mask, walked.layer_results
        shape = walked.config.depth, self.num_paths
        # One product after another: singular values of all together would hold them twice.
        keep = walked.prepared.existing_tokens
        ratios = jax.lax.map(
            lambda chain: path_sizes.chain_residual_ratios(chain, keep), walked.carry[1]
        )
        residuals, rank_one = (ratio.reshape(shape) for ratio in ratios)
        initial = composite_norm(residual(walked.prepared.x, mask=mask), mask=mask)
        return {
            "chain_residual": residuals,
            "chain_rank_one": rank_one,
            "skip": skip,
            "branch": branch,
            "initial": initial,
        }
