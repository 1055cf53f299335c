"""How libraries name the projections to queries, keys and values: the one table of them."""

import re

_NAMES = {
    ("query",): "w_q wq q query q_proj q_lin to_q query_proj q_a_proj q_b_proj linear_q q_linear "
    "q_attn in_proj_q",
    ("key",): "w_k wk k key k_proj k_lin to_k key_proj linear_k k_linear",
    ("value",): "w_v wv v value v_proj v_lin to_v value_proj linear_v v_linear",
    ("key", "value"): "kv kv_proj to_kv wkv key_value kv_a_proj_with_mqa kv_b_proj",
    ("query", "key", "value"): "c_attn qkv qkv_proj to_qkv wqkv query_key_value w_pack c_qkv "
    "in_proj",
}
# {name in lower case: what the projection's output is, side by side}
PROJECTIONS = {name: parts for parts, names in _NAMES.items() for name in names.split()}
# {part: names of projections to it alone}
PARTS = {part: frozenset(_NAMES[(part,)].split()) for part in ("query", "key", "value")}
ATTENTION_CLASS = re.compile(r"attention|attn", re.IGNORECASE)
