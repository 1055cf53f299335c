"""Chained attention of random paths by length, of one example.

Axis letters: n tokens, l layers, p paths.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from experiments.train import path_sizes
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import PreparedInputs
from rank_collapse.network.passes import LayerPass, WalkResult
from rank_collapse.network.transformer import LayerValues
from rank_collapse.network.walk import Layer
from rank_collapse.paths.sets import sample_path_sets


@dataclasses.dataclass(frozen=True)
class ChainPass(LayerPass):
    """Measures ‖P_path − 1pᵀ‖/‖P_path‖ for the product of a path's attention, [L, p] by length.

    Layer by layer; every path's product is carried. The norm is ‖.‖_{1,∞}.

    Source: chained attention in the published code of Dong et al. 2021.
    """

    num_paths: int = 5  # Paths of each length 1 .. L, their layers and heads drawn uniformly
    seed: int = 0  # Of the paths

    def init_carry(
        self, prepared: PreparedInputs, config: TransformerConfig
    ) -> tuple[Array, path_sizes.Chain]:
        """Draws the paths: (paths [p, L], the empty product of each)."""
        lengths = jnp.arange(1, config.depth + 1)
        sizes = (lengths, 1, self.num_paths, config.depth, config.num_heads)
        paths = sample_path_sets(jax.random.key(self.seed), *sizes).reshape(-1, config.depth)
        empty = path_sizes.empty_chain(prepared.existing_tokens, prepared.x.dtype)
        return paths, jax.tree.map(lambda a: jnp.broadcast_to(a, (len(paths), *a.shape)), empty)

    def measure_layer(
        self,
        layer: Layer,
        x: Array,
        layer_values: LayerValues,
        carry: tuple[Array, path_sizes.Chain],
    ) -> tuple[tuple[Array, path_sizes.Chain], None]:
        """Extends the products with the heads that the paths take in this layer.

        Returns:
            ((paths, products), no result of the layer: None).
        """
        paths, products = carry
        weights, token_mask = layer_values.trace.attention, layer.inputs.existing_tokens
        products = jax.lax.map(
            lambda a: path_sizes.extend_chain(weights, *a, token_mask),
            (paths[:, layer.index], products),
        )
        return (paths, products), None

    def build_result(self, walk_result: WalkResult) -> Float[Array, "l p"]:
        """Computes the ratios from the products of all layers."""
        # One product after another: singular values of all together would hold them twice.
        token_mask = walk_result.prepared.existing_tokens
        ratios = jax.lax.map(
            lambda chain: path_sizes.chain_residual_ratios(chain, token_mask)[0],
            walk_result.carry[1],
        )
        return ratios.reshape(walk_result.config.depth, self.num_paths)
