"""Weights of the paper's published code, by its parameter names, as (config, params, classifier).

A PyTorch module of that code named its tensors as below; linear maps are [d_out, d_in], values
have blocks of rows per head, output projections blocks of columns per head.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import rank_collapse as rc


def load_reference(tensors, num_heads, norm_eps=1e-12):
    """Reads the network of a state dictionary; the published code calls num_heads its width."""
    state = {name: jnp.asarray(value) for name, value in tensors.items()}
    prefix = "bert.encoder.layer."
    depth = len({n.removeprefix(prefix).split(".")[0] for n in state if n.startswith(prefix)})
    blocks = [_block(state, f"{prefix}{l}.", num_heads) for l in range(depth)]
    tables, embedding = _embedding(state, norm_eps)
    d, mlp = embedding.norm.gain.shape[0], blocks[0].mlp
    config = rc.TransformerConfig(
        depth=depth,
        num_heads=num_heads,
        d_model=d,
        d_ff=mlp and mlp.w_in.shape[1],
        mlp="gelu" if mlp else "none",
        attention_skip=True,
        mlp_skip=mlp is not None,
        norm_placement="post",
        norm_eps=norm_eps,
        embedding=tables,
        init="reference",
    )
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    classifier = rc.paths.Classifier(state["classifier.weight"].T, state["classifier.bias"])
    return config, rc.network.TransformerParams(layers=stack, embedding=embedding), classifier


class CircleRun(NamedTuple):
    """One run of the circle: the network, whether a skip leads around the recurrence
    (circle_skip), and the two walkers by step [t, 2, 2]."""

    config: rc.TransformerConfig
    params: rc.network.TransformerParams
    classifier: rc.paths.Classifier
    skip: bool
    trajectory: Any


def load_circle(arrays, num_heads=2):
    """{"base/2": run} from "<base, skip or mlp>/<seed>/param/<name>" and "<...>/<seed>/traj"."""
    runs = {}
    for name in sorted({name.split("/param/")[0] for name in arrays if "/param/" in name}):
        prefix = f"{name}/param/"
        tensors = {n.removeprefix(prefix): arrays[n] for n in arrays if n.startswith(prefix)}
        trajectory = jnp.asarray(arrays[f"{name}/traj"]).reshape(-1, 2, 2)
        runs[name] = CircleRun(
            *load_reference(tensors, num_heads), name.startswith("skip"), trajectory
        )
    return runs


def _norm(state, name):
    return rc.network.NormParams(gain=state[f"{name}.weight"], bias=state[f"{name}.bias"])


def _block(state, prefix, h):
    self_prefix, output_prefix = f"{prefix}attention.self.", f"{prefix}attention.output."
    d = state[f"{self_prefix}value"].shape[1]
    maps = {"q": ("query.weight", "query.bias"), "k": ("key.weight", "key.bias")}
    maps["v"] = ("value", "value_bias")
    fields = {"b_o": state[f"{output_prefix}dense_bias"]}
    fields["w_o"] = state[f"{output_prefix}dense"].reshape(d, h, -1).transpose(1, 2, 0)
    for letter, (w, b) in maps.items():
        fields[f"w_{letter}"] = state[self_prefix + w].reshape(h, -1, d).transpose(0, 2, 1)
        fields[f"b_{letter}"] = state[self_prefix + b].reshape(h, -1)
    mlp = mlp_norm = None
    if f"{prefix}intermediate.dense.weight" in state:
        into, back = f"{prefix}intermediate.dense.", f"{prefix}output.dense."
        mlp = rc.network.MLPParams(
            w_in=state[f"{into}weight"].T,
            b_in=state[f"{into}bias"],
            w_out=state[f"{back}weight"].T,
            b_out=state[f"{back}bias"],
        )
        mlp_norm = _norm(state, f"{prefix}output.LayerNorm")
    return rc.network.BlockParams(
        attention=rc.network.AttentionParams(**fields),
        attention_norm=_norm(state, f"{output_prefix}LayerNorm"),
        mlp=mlp,
        mlp_norm=mlp_norm,
    )


def _embedding(state, norm_eps):
    """Reads the embedding of vectors (the circle), or of tokens.

    A linear map makes tokens as wide as the network.
    """
    tables = "bert.embeddings."
    if f"{tables}word_embeddings.weight" not in state:
        w, has_hidden_layer = state["bert.embed_ffn.weight"], "bert.embed_ffn2.weight" in state
        config = rc.EmbeddingConfig(
            d_input=w.shape[1], d_embed=w.shape[0], hidden_layer=has_hidden_layer, norm_eps=norm_eps
        )
        hidden_layer = {}
        if has_hidden_layer:
            hidden_layer["w_hidden"] = state["bert.embed_ffn2.weight"].T
            hidden_layer["b_hidden"] = state["bert.embed_ffn2.bias"]
        norm = _norm(state, "bert.embed_LN")
        return config, rc.network.EmbeddingParams(
            w_in=w.T, b_in=state["bert.embed_ffn.bias"], norm=norm, **hidden_layer
        )
    tokens = state[f"{tables}word_embeddings.weight"]
    positions = state.get(f"{tables}position_embeddings.weight")
    config = rc.EmbeddingConfig(
        vocab_size=tokens.shape[0],
        d_embed=tokens.shape[1],
        projection="before_norm",
        positions="none" if positions is None else "learned",
        num_positions=0 if positions is None else positions.shape[0],
        norm_eps=norm_eps,
    )
    return config, rc.network.EmbeddingParams(
        tokens=tokens,
        positions=positions,
        w_project=state[f"{tables}lin.weight"].T,
        b_project=state[f"{tables}lin.bias"],
        norm=_norm(state, f"{tables}LayerNorm"),
    )
