"""Weights of the paper's published code, by its parameter names, as (config, params, classifier).

A PyTorch module of that code named its tensors as below; linear maps are [d_out, d_in], values
have blocks of rows per head, output projections blocks of columns per head.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig, EmbeddingParams
from rank_collapse.network.layers import MLPParams, NormParams
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.paths.sets import Classifier


def load_reference(
    tensors: Mapping[str, Any], num_heads: int, norm_eps: float = 1e-12
) -> tuple[TransformerConfig, TransformerParams, Classifier]:
    """The network of a state dictionary of the published code.

    Args:
        tensors: Arrays by parameter name, such as "bert.encoder.layer.0.attention.self.value".
        num_heads: H, called width there.
        norm_eps: Added to variances.

    Returns:
        A post-norm network with attention skips, and an MLP where the dictionary has one;
        its parameters; and the token classifier.

    Raises:
        ValueError: A missing tensor, or a width that num_heads does not divide.
    """
    state = {name: jnp.asarray(value) for name, value in tensors.items()}

    def get(name):
        if name not in state:
            raise ValueError(f"tensor {name!r} is missing")
        return state[name]

    prefix = "bert.encoder.layer."
    depth = len({n[len(prefix) :].split(".")[0] for n in state if n.startswith(prefix)})
    if not depth:
        raise ValueError(f"no tensor begins with {prefix!r}")
    blocks = [_block(get, f"{prefix}{l}.", num_heads, state) for l in range(depth)]
    embedding_config, embedding = _embedding(get, state, norm_eps)
    d = embedding.norm.gain.shape[0]
    mlp = blocks[0].mlp
    config = TransformerConfig(
        depth=depth,
        num_heads=num_heads,
        d_model=d,
        d_ff=None if mlp is None else mlp.w_in.shape[1],
        mlp="none" if mlp is None else "gelu",
        attention_skip=True,
        mlp_skip=mlp is not None,
        norm_placement="post",
        norm_eps=norm_eps,
        embedding=embedding_config,
        init="reference",
    )
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    classifier = Classifier(get("classifier.weight").T, get("classifier.bias"))
    return config, TransformerParams(layers=stack, embedding=embedding), classifier


class CircleRun(NamedTuple):
    """One run of the published circle code.

    Attributes:
        config, params, classifier: The network; see `load_reference`.
        skip: Whether a skip leads around the recurrence (circle_skip).
        trajectory: The two walkers by step [t, 2, 2].
    """

    config: TransformerConfig
    params: TransformerParams
    classifier: Classifier
    skip: bool
    trajectory: Any


def load_circle(arrays: Mapping[str, Any], num_heads: int = 2) -> dict[str, CircleRun]:
    """{"base/2": run} of the published circle code's runs.

    Args:
        arrays: "<base, skip or mlp>/<seed>/param/<name>", weights by the published code's names,
            and "<...>/<seed>/traj", the walkers' four coordinates [t, 4].
        num_heads: H; the published commands have 2.

    Raises:
        ValueError: No such array, a missing tensor or trajectory.
    """
    names = sorted({name.split("/param/")[0] for name in arrays if "/param/" in name})
    if not names:
        raise ValueError("no array is named <variant>/<seed>/param/<name>")
    runs = {}
    for name in names:
        if f"{name}/traj" not in arrays:
            raise ValueError(f"trajectory {name + '/traj'!r} is missing")
        prefix = f"{name}/param/"
        tensors = {n.removeprefix(prefix): arrays[n] for n in arrays if n.startswith(prefix)}
        trajectory = jnp.asarray(arrays[f"{name}/traj"]).reshape(-1, 2, 2)
        network = load_reference(tensors, num_heads)
        runs[name] = CircleRun(*network, skip=name.startswith("skip"), trajectory=trajectory)
    return runs


def _norm(get, name):
    return NormParams(gain=get(f"{name}.weight"), bias=get(f"{name}.bias"))


def _block(get, prefix, h, state):
    own, out = f"{prefix}attention.self.", f"{prefix}attention.output."
    d = get(f"{own}value").shape[1]
    if d % h:
        raise ValueError(f"num_heads={h} does not divide d_model={d}")

    def heads(name):
        return get(name).reshape(h, -1, d).transpose(0, 2, 1)

    def bias(name):
        return get(name).reshape(h, -1)

    attention = AttentionParams(
        w_q=heads(f"{own}query.weight"),
        b_q=bias(f"{own}query.bias"),
        w_k=heads(f"{own}key.weight"),
        b_k=bias(f"{own}key.bias"),
        w_v=heads(f"{own}value"),
        b_v=bias(f"{own}value_bias"),
        w_o=get(f"{out}dense").reshape(d, h, -1).transpose(1, 2, 0),
        b_o=get(f"{out}dense_bias"),
    )
    mlp = mlp_norm = None
    if f"{prefix}intermediate.dense.weight" in state:
        mlp = MLPParams(
            w_in=get(f"{prefix}intermediate.dense.weight").T,
            b_in=get(f"{prefix}intermediate.dense.bias"),
            w_out=get(f"{prefix}output.dense.weight").T,
            b_out=get(f"{prefix}output.dense.bias"),
        )
        mlp_norm = _norm(get, f"{prefix}output.LayerNorm")
    return BlockParams(
        attention=attention,
        attention_norm=_norm(get, f"{out}LayerNorm"),
        mlp=mlp,
        mlp_norm=mlp_norm,
    )


def _embedding(get, state, norm_eps):
    tables = "bert.embeddings."
    if f"{tables}word_embeddings.weight" not in state:
        w = get("bert.embed_ffn.weight")
        hidden = "bert.embed_ffn2.weight" in state
        config = EmbeddingConfig(
            d_input=w.shape[1], d_embed=w.shape[0], hidden_layer=hidden, norm_eps=norm_eps
        )
        more = {}
        if hidden:
            more["w_hidden"] = get("bert.embed_ffn2.weight").T
            more["b_hidden"] = get("bert.embed_ffn2.bias")
        return config, EmbeddingParams(
            w_in=w.T, b_in=get("bert.embed_ffn.bias"), norm=_norm(get, "bert.embed_LN"), **more
        )
    tokens = get(f"{tables}word_embeddings.weight")
    positions = state.get(f"{tables}position_embeddings.weight")
    config = EmbeddingConfig(
        vocab_size=tokens.shape[0],
        d_embed=tokens.shape[1],
        positions="none" if positions is None else "learned",
        num_positions=0 if positions is None else positions.shape[0],
        projection="before_norm",
        norm_eps=norm_eps,
    )
    return config, EmbeddingParams(
        tokens=tokens,
        positions=positions,
        w_project=get(f"{tables}lin.weight").T,
        b_project=get(f"{tables}lin.bias"),
        norm=_norm(get, f"{tables}LayerNorm"),
    )
