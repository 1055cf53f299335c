"""A configuration with many forms of attention and of an MLP at once."""

N, D, DEPTH, H, K = 6, 8, 3, 2, 6


FORM = {
    "depth": DEPTH,
    "num_heads": H,
    "d_model": D,
    "d_qk": K,
    "d_v": 3,
    "d_ff": 12,
    "mlp": "gelu",
    "attention_skip": True,
    "mlp_skip": True,
    "norm_placement": "pre",
    "norm": "rms",
    "mask": "causal",
    "windows": (1, 0, 2),
    "score_cap": 0.7,
    "position": "rotary",
    "rotary_width": 4,
    "rotary_theta": 50.0,
    "local_theta": 3.0,
    "rotary_factor": 1.2,
    "parallel": True,
    "first_norm": False,
    "num_experts": 4,
    "experts_per_token": 2,
    "final_norm": True,
}
