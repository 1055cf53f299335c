"""Mistakes that a user's editor finds: pyright reports each line marked so, and nobody runs it."""

import numpy as np

import rank_collapse as rc
from rank_collapse.training import Recipe

config = rc.TransformerConfig(depth=2, norm_placement="pre", mlp="gelu", norm="rms")
rc.TransformerConfig(depth=2, norm_placment="pre")  # mistake
rc.TransformerConfig(depth=2, mlpp="gelu")  # mistake
rc.TransformerConfig(depth=2, mlp="gellu")  # mistake
rc.TransformerConfig(depth=2, norm="nuclear")  # mistake
rc.TransformerConfig(depth=2, mask="casual")  # mistake
rc.design(config, "postt")  # mistake
print(rc.design(config, "post").skip_gian)  # mistake

x = np.zeros((4, 8))
rc.residual_ratio(x, norm="frobenius")
rc.residual_ratio(x, norm="nuclear")  # mistake
rc.profile(x[None], measures=["token_cosine"], tokens="unit", exclude="spikes")
rc.profile(x[None], measures="residual")  # mistake
rc.profile(x[None], measures=("token_cosine", "residual"))  # mistake
rc.profile(x[None], tokens="units")  # mistake
rc.profile(x[None], exclude="spike")  # mistake
print(rc.profile(x[None])["residual_ratio"])
print(rc.profile(x[None]).residual_ratio)  # mistake
rc.monitor(x, tokens="units")  # mistake
rc.variant(config, "shaped")
rc.variant(config, "san")  # mistake
print(rc.network.NormParams(x[0]).gain)
print(rc.network.NormParams(x[0]).scale)  # mistake
rc.EmbeddingConfig(vocab_size=3, positions="sinus")  # mistake
Recipe(config, 2, batch_size=1, num_epochs=1, schedule="cosine")  # mistake
