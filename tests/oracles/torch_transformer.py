"""`torch.nn.Transformer` with drawn weights, what it computes, and its weights as ours.

Building and running one needs torch; `ours` and `config` do not.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig, EmbeddingParams
from rank_collapse.network.encoder_decoder import EncoderDecoderConfig, EncoderDecoderParams
from rank_collapse.network.layers import MLPParams, NormParams
from rank_collapse.network.parameters import BlockParams, TransformerParams

PLACEMENTS = ("post", "pre")
VOCAB, D, HEADS, FF, DEPTH = 11, 12, 3, 20, 2
SOURCE = np.array([[3, 4, 5, 6, 7, 8], [9, 10, 3, 5, 0, 0]])
TARGET = np.array([[1, 8, 7, 6, 5], [1, 5, 3, 0, 0]])


def golden_name(placement: str) -> str:
    """The stored file of one norm placement."""
    return f"torch-transformer-{placement}.npz"


def run(placement: str) -> dict[str, np.ndarray]:
    """{"weight/<name>": array, "memory" [b, m, d], "output" [b, n, d]}, by torch."""
    import torch

    torch.manual_seed(3)
    model = torch.nn.Transformer(
        D, HEADS, DEPTH, DEPTH, FF, dropout=0.0, batch_first=True, norm_first=placement == "pre"
    )
    model = torch.nn.ModuleDict(
        {
            "core": model,
            "source": torch.nn.Embedding(VOCAB, D),
            "target": torch.nn.Embedding(VOCAB, D),
            "output": torch.nn.Linear(D, VOCAB),
        }
    )
    with torch.no_grad():
        for parameter in model.parameters():  # biases and gains too
            parameter.add_(0.3 * torch.randn_like(parameter))
        source, target = torch.tensor(SOURCE), torch.tensor(TARGET)
        n = target.shape[1]
        padding = {"src_key_padding_mask": source == 0, "tgt_key_padding_mask": target == 0}
        future = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)
        x, y = (
            model[name](ids) * math.sqrt(D)
            for name, ids in (("source", source), ("target", target))
        )
        core = model["core"].train()  # without dropout; in eval mode torch takes another path
        memory = core.encoder(x, src_key_padding_mask=padding["src_key_padding_mask"])
        output = core(x, y, tgt_mask=future, memory_key_padding_mask=source == 0, **padding)
        logits = model["output"](output)
    weights = {f"weight/{k}": v.numpy() for k, v in model.state_dict().items()}
    return weights | {
        name: a.numpy() for name, a in (("memory", memory), ("output", output), ("logits", logits))
    }


def config(placement: str, **fields) -> EncoderDecoderConfig:
    """The network that `run` builds."""
    embedding = EmbeddingConfig(vocab_size=VOCAB, d_embed=D, norm=False, scale=math.sqrt(D))
    half = TransformerConfig(
        depth=DEPTH,
        num_heads=HEADS,
        d_model=D,
        d_ff=FF,
        mlp="relu",
        attention_skip=True,
        mlp_skip=True,
        norm_placement=placement,
        norm_eps=1e-5,
        final_norm=True,
        embedding=embedding,
    )
    decoder = half.replace(cross_attention=True, mask="causal")
    return EncoderDecoderConfig(half, decoder, **fields)


def ours(arrays: dict[str, np.ndarray]) -> EncoderDecoderParams:
    """The weights of `run` as ours."""
    w = {k.removeprefix("weight/"): jnp.asarray(v) for k, v in arrays.items()}

    def attention(name):
        def heads(a):  # rows of torch's matrix are outputs, head after head
            return a.reshape(HEADS, D // HEADS, *a.shape[1:])

        weights, biases = (jnp.split(w[f"{name}.in_proj_{kind}"], 3) for kind in ("weight", "bias"))
        fields = {
            f"w_{part}": heads(a).transpose(0, 2, 1) for part, a in zip("qkv", weights, strict=True)
        } | {f"b_{part}": heads(a) for part, a in zip("qkv", biases, strict=True)}
        w_o = w[f"{name}.out_proj.weight"].T.reshape(HEADS, D // HEADS, D)
        return AttentionParams(**fields, w_o=w_o, b_o=w[f"{name}.out_proj.bias"])

    def norm(name):
        return NormParams(w[f"{name}.weight"], w[f"{name}.bias"])

    def half(side, embedding):
        def layer(l):
            name = f"core.{side}.layers.{l}"
            cross = side == "decoder"
            return BlockParams(
                attention=attention(f"{name}.self_attn"),
                attention_norm=norm(f"{name}.norm1"),
                cross=attention(f"{name}.multihead_attn") if cross else None,
                cross_norm=norm(f"{name}.norm2") if cross else None,
                mlp=MLPParams(
                    w_in=w[f"{name}.linear1.weight"].T,
                    b_in=w[f"{name}.linear1.bias"],
                    w_out=w[f"{name}.linear2.weight"].T,
                    b_out=w[f"{name}.linear2.bias"],
                ),
                mlp_norm=norm(f"{name}.norm{3 if cross else 2}"),
            )

        return TransformerParams(
            layers=jax.tree.map(lambda *a: jnp.stack(a), *map(layer, range(DEPTH))),
            final_norm=norm(f"core.{side}.norm"),
            embedding=EmbeddingParams(tokens=w[f"{embedding}.weight"]),
        )

    return EncoderDecoderParams(
        encoder=half("encoder", "source"),
        decoder=half("decoder", "target"),
        w_output=w["output.weight"].T,
        b_output=w["output.bias"],
    )
