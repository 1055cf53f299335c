"""Ablations of one network: parts removed from the same weights.

Each has two readings. "published" is the version that the published curves measured: SAN+MLP keeps
the skip around the MLP, and ALBERT without MLP keeps the MLP's activation, skip and norm and loses
only its two linear maps. "text" follows the text of the paper: SAN+MLP has no skip at all, and
without MLP the whole sublayer is removed. Attention keeps its norm in all of them.
"""

from typing import Literal, get_args

import jax.numpy as jnp

from rank_collapse import checks
from rank_collapse.network.config import TransformerConfig, check_config
from rank_collapse.network.layers import GATED, MLPParams
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.residual import Gains

Ablation = Literal["SAN", "SAN+MLP", "SAN+skip", "Transformer"]
Reading = Literal["published", "text"]
ABLATIONS, READINGS = get_args(Ablation), get_args(Reading)


def list_ablations(family: str | None) -> list[tuple[str, str]]:
    """List all ablations of a network, as (ablation, reading) pairs that differ.

    A paper's text and its published curves disagree on some ablations; these are listed twice.

    Args:
        family: The `model_type` of a checkpoint, or None.
    """
    pairs = [(name, "published") for name in ABLATIONS]
    if family == "albert":
        return [*pairs, *((name, "text") for name in ABLATIONS[:3])]
    return [*pairs, ("SAN+MLP", "text")]


def skips_left(name: str, reading: str) -> Gains:
    """Return for each kind of sublayer whether an ablation keeps its skip.

    Args:
        name, reading: See `ablate`.
    """
    around_attention = name in ("SAN+skip", "Transformer")
    return Gains(around_attention, around_attention, name != "SAN+MLP" or reading == "published")


def ablate(
    config: TransformerConfig,
    params: TransformerParams,
    name: Ablation,
    reading: Reading = "published",
) -> tuple[TransformerConfig, TransformerParams]:
    """Make one of the four curves of a network with skips and MLPs; the weights are shared.

    SAN: x' = N(SA(x)); SAN+skip: x' = N(x + SA(x)); SAN+MLP: a = N(SA(x)), x' = N(a + MLP(a)) as
    published and N(MLP(a)) as in the text; Transformer: unchanged. Pre-norm networks: the same with
    the norms inside the branches. A cross-attention loses its skip together with the attention.

    Args:
        config, params: The full network, as `rank_collapse.pretrained.load` returns it. With the
            family "albert" the published ablation differs.
        name: One of `ABLATIONS`.
        reading: One of `READINGS`.

    Returns:
        (config, params) of the ablated network.

    Raises:
        ValueError: An unknown ablation or reading, or a network without an MLP or skips to remove.

    Source: Dong et al. 2021, section 4 and its figures of BERT, ALBERT and XLNet.
    """
    check_config(config)
    checks.check_choice(f"ablation {name!r}", name, ABLATIONS)
    checks.check_choice(f"reading {reading!r}", reading, READINGS)
    if name == "Transformer":
        return config, params
    if config.mlp == "none" or not (config.attention_skip and config.mlp_skip):
        raise ValueError(
            f"an ablation needs a network with MLP and skips, not mlp={config.mlp!r}, "
            f"attention_skip={config.attention_skip}, mlp_skip={config.mlp_skip}"
        )
    skips = skips_left(name, reading)
    config = config.replace(
        attention_skip=skips.attention,
        cross_skip=config.cross_skip and skips.cross,
        mlp_skip=skips.mlp,
    )
    if name == "SAN+MLP":
        return config, params
    if reading == "published" and config.family == "albert":
        return identity_maps(config, params)
    no_mlp = dict.fromkeys(("mlp", "mlp_norm", "mlp_branch_norm", "mlp_gains"))
    config = config.replace(mlp="none", mlp_skip=False, num_experts=0, d_shared=0)
    return config, params.replace(layers=params.layers.replace(**no_mlp))


def identity_maps(
    config: TransformerConfig, params: TransformerParams
) -> tuple[TransformerConfig, TransformerParams]:
    """Replace both linear maps of every MLP by the identity, without biases: MLP(a) = φ(a).

    Args:
        config, params: The network.

    Raises:
        ValueError: A gated MLP.
    """
    if config.mlp in GATED:
        raise ValueError(f"mlp={config.mlp!r} is gated: it has three linear maps")
    rows, d = config.num_rows, config.d_model
    dtype = params.layers.attention.w_q.dtype
    eye = jnp.broadcast_to(jnp.eye(d, dtype=dtype)[None], (rows, d, d))
    zero = jnp.zeros((rows, d), dtype)
    mlp = MLPParams(w_in=eye, b_in=zero, w_out=eye, b_out=zero)
    return config.replace(d_ff=d), params.replace(layers=params.layers.replace(mlp=mlp))
