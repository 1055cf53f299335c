"""BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019), ALBERT (Lan et al. 2020), DistilBERT
(Sanh et al. 2019): post-norm encoders with learned positions."""

import numpy as np

from rank_collapse.pretrained.family import (
    MAX_LAYERS,
    USUAL_READS,
    Draw,
    Entry,
    Family,
    Initialisation,
    NamedTensor,
    Names,
    Settings,
)

_PADDED = "word_embeddings.weight"


def _bert_fields(settings):
    """Compute the mask, also of a decoder of an encoder-decoder pair, with cross-attention."""
    decoder = settings["is_decoder"]
    cross = bool(decoder and settings["add_cross_attention"])
    return {"mask": "causal" if decoder else "none", "cross_attention": cross}


def _roberta_fields(settings):
    """Count the positions, which begin after the padding token's; earlier rows are unused."""
    rows = settings["max_position_embeddings"] - settings["pad_token_id"] - 1
    return _bert_fields(settings) | {"embedding": {"num_positions": rows}}


_EMBEDDING = {
    "embedding.tokens": "embeddings.word_embeddings.weight",
    "embedding.positions": NamedTensor("embeddings.position_embeddings.weight", "rows e"),
    "embedding.norm": "embeddings.LayerNorm",
}


def _bert_names(weights, settings):
    """Name the tensors of BERT; segments only if the settings have types of tokens."""
    outside = dict(_EMBEDDING)
    if settings["type_vocab_size"]:
        outside["embedding.segments"] = NamedTensor(
            "embeddings.token_type_embeddings.weight", "s e"
        )
    return Names("encoder.layer.{}", _BERT_LAYER, outside)


_BERT_LAYER = {
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "attention.o": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "cross.q": "crossattention.self.query",
    "cross.k": "crossattention.self.key",
    "cross.v": "crossattention.self.value",
    "cross.o": "crossattention.output.dense",
    "cross_norm": "crossattention.output.LayerNorm",
    "mlp.in": "intermediate.dense",
    "mlp.out": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
BERT = Family(
    "bert",
    entries={
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "pad_token_id": Entry(0, (int,), least=-1),
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
    },
    reads=USUAL_READS
    | {"norm_eps": "layer_norm_eps", "vocab_size": "vocab_size"}
    | {"num_positions": "max_position_embeddings", "num_segments": "type_vocab_size"},
    names=_bert_names,
    anchors=("embeddings.word_embeddings.weight",),
    fields={"norm_placement": "post"},
    embedding={"positions": "learned"},
    computed=_bert_fields,
    allowed={"position_embedding_type": ("absolute",)},
    init=Initialisation(padded=(_PADDED,)),
    masked_head=("cls.predictions.transform", "cls.predictions.bias"),
    sizes=lambda settings: {"rows": settings["max_position_embeddings"]},
)
XLM_ROBERTA = BERT.derive(
    "xlm-roberta",
    masked_head=None,
    entries={"pad_token_id": Entry(1, (int,), least=-1)},
    computed=_roberta_fields,
    init=Initialisation(padded=(_PADDED, "position_embeddings.weight")),
)
CAMEMBERT = XLM_ROBERTA.derive("camembert")
ROBERTA = XLM_ROBERTA.derive("roberta", entries={"vocab_size": 50265})


def _albert_rows(settings: Settings):
    """Return the layers that are used, as (group, place in the group), and the row of each depth.

    Each of `num_hidden_layers` steps runs through all inner layers of its group.
    """
    steps, groups = settings["num_hidden_layers"], settings["num_hidden_groups"]
    if steps * settings["inner_group_num"] > MAX_LAYERS:
        raise ValueError(
            f"num_hidden_layers={steps} times inner_group_num={settings['inner_group_num']} is "
            f"more than {MAX_LAYERS} layers"
        )
    sequence = [
        (int(step / (steps / groups)), inner)
        for step in range(steps)
        for inner in range(settings["inner_group_num"])
    ]
    used = sorted(set(sequence))
    return used, tuple(used.index(pair) for pair in sequence)


def _albert_fields(settings):
    _, layer_map = _albert_rows(settings)
    return {"depth": len(layer_map), "layer_map": layer_map}


def _albert_names(weights, settings):
    """Name the tensors of ALBERT, whose embedding is projected to the width."""
    outside = _bert_names(weights, settings).outside
    outside["embedding.project"] = "encoder.embedding_hidden_mapping_in"
    layer = {
        "attention.q": "attention.query",
        "attention.k": "attention.key",
        "attention.v": "attention.value",
        "attention.o": "attention.dense",
        "attention_norm": "attention.LayerNorm",
        "mlp.in": "ffn",
        "mlp.out": "ffn_output",
        "mlp_norm": "full_layer_layer_norm",
    }
    return Names("encoder.albert_layer_groups.{}.albert_layers.{}", layer, outside)


ALBERT = BERT.derive(
    "albert",
    entries={
        "vocab_size": 30000,
        "embedding_size": 128,
        "hidden_size": 4096,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
        "hidden_act": "gelu_new",
        "is_decoder": None,
        "add_cross_attention": None,
    },
    reads={"d_embed": "embedding_size"},
    names=_albert_names,
    embedding={"projection": "after_norm"},
    masked_head=("predictions", "predictions.bias"),
    computed=_albert_fields,
    rows=lambda settings: _albert_rows(settings)[0],
    counted={
        "encoder.albert_layer_groups.{}": "num_hidden_groups",
        "encoder.albert_layer_groups.0.albert_layers.{}": "inner_group_num",
    },
)


def _distilbert_draw(name, settings, depth):
    """Return how a tensor of DistilBERT is initialised: fixed sinusoids for positions that the
    settings ask for, else as in BERT.

    Args:
        name: Name of the tensor.
        settings: Settings of the model.
        depth: Number of layers.
    """
    if settings["sinusoidal_pos_embds"] and name.endswith("position_embeddings.weight"):
        return Draw(value=_interleaved_sinusoids)
    return Initialisation(padded=(_PADDED,))(name, settings, depth)


def _interleaved_sinusoids(rows, width):
    angles = np.arange(rows)[:, None] * 10000.0 ** (-2 * (np.arange(width) // 2) / width)[None, :]
    return np.where(np.arange(width)[None, :] % 2 == 0, np.sin(angles), np.cos(angles))


DISTILBERT = Family(
    "distilbert",
    entries={
        "vocab_size": 30522,
        "dim": 768,
        "n_layers": 6,
        "n_heads": 12,
        "hidden_dim": 3072,
        "activation": "gelu",
        "max_position_embeddings": 512,
        "sinusoidal_pos_embds": False,
        "initializer_range": 0.02,
        "pad_token_id": Entry(0, (int,), least=-1),
    },
    reads={
        "depth": "n_layers",
        "num_heads": "n_heads",
        "d_model": "dim",
        "d_ff": "hidden_dim",
        "mlp": "activation",
        "vocab_size": "vocab_size",
        "num_positions": "max_position_embeddings",
    },
    names=Names(
        "transformer.layer.{}",
        {
            "attention.q": "attention.q_lin",
            "attention.k": "attention.k_lin",
            "attention.v": "attention.v_lin",
            "attention.o": "attention.out_lin",
            "attention_norm": "sa_layer_norm",
            "mlp.in": "ffn.lin1",
            "mlp.out": "ffn.lin2",
            "mlp_norm": "output_layer_norm",
        },
        _EMBEDDING,
    ),
    anchors=("embeddings.word_embeddings.weight",),
    fields={"norm_placement": "post", "norm_eps": 1e-12},  # no entry of its config
    embedding={"positions": "learned"},
    init=_distilbert_draw,
    sizes=lambda settings: {"rows": settings["max_position_embeddings"]},
)
