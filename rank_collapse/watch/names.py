"""The names that libraries give to the projections to queries, keys and values."""

PARTS = {
    "query": (
        "w_q", "wq", "q", "query", "q_proj", "q_lin", "to_q", "query_proj", "q_a_proj", "q_b_proj",
        "linear_q", "q_linear", "q_attn", "in_proj_q",
    ),
    "key": ("w_k", "wk", "k", "key", "k_proj", "k_lin", "to_k", "key_proj", "linear_k", "k_linear"),
    "value": (
        "w_v", "wv", "v", "value", "v_proj", "v_lin", "to_v", "value_proj", "linear_v", "v_linear",
    ),
}  # fmt: skip
