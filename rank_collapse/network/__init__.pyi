"""Names of `rank_collapse.network`."""

from . import encoder_decoder as encoder_decoder, surgery as surgery
from .added_branches import compute_added_branches as compute_added_branches
from .admin import admin_profile as admin_profile
from .attention import (
    AttentionParams as AttentionParams,
    multi_head_attention as multi_head_attention,
)
from .attention_config import Mixing as Mixing
from .attention_weights import AttentionContext as AttentionContext
from .config import (
    TransformerConfig as TransformerConfig,
    san as san,
    san_mlp as san_mlp,
    san_skip as san_skip,
)
from .decoding import Decoded as Decoded, greedy_decode as greedy_decode
from .designs import DESIGNS as DESIGNS, design as design
from .embedding import (
    EmbeddingConfig as EmbeddingConfig,
    EmbeddingParams as EmbeddingParams,
    embed as embed,
)
from .encoder_decoder import (
    EncoderDecoderConfig as EncoderDecoderConfig,
    EncoderDecoderParams as EncoderDecoderParams,
    EncoderDecoderTrace as EncoderDecoderTrace,
)
from .layers import MLPParams as MLPParams, NormParams as NormParams
from .measured.influence import (
    layer_influence as layer_influence,
    layer_removal as layer_removal,
)
from .measured.monitored import monitored as monitored
from .measured.updates import output_change as output_change
from .parameters import (
    BlockParams as BlockParams,
    TransformerParams as TransformerParams,
    init as init,
    layer_params as layer_params,
)
from .residual import Gains as Gains
from .trace import LayerTrace as LayerTrace, Trace as Trace
from .transformer import apply as apply, apply_batch as apply_batch
from .variants import VARIANTS as VARIANTS, init_variant as init_variant, variant as variant
