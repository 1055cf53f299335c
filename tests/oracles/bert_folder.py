"""A small BERT and its checkpoint folder."""

BERT = {
    "model_type": "bert",
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 16,
}
