"""The one network: its parts, its configuration, its parameters, and `apply`.

What other packages use of it is imported from here; each name stands in the module that defines it.
"""

from rank_collapse.network.attention import (
    AttentionContext as AttentionContext,
    Mixing as Mixing,
    own_mix as own_mix,
)
from rank_collapse.network.config import (
    DEFAULTS as DEFAULTS,
    SWEPT as SWEPT,
    TransformerConfig as TransformerConfig,
    flat as flat,
)
from rank_collapse.network.covers import (
    CROSS as CROSS,
    EVERYTHING as EVERYTHING,
    FORWARD as FORWARD,
    Covers as Covers,
    everything_but as everything_but,
)
from rank_collapse.network.decoding import (
    Decoded as Decoded,
    greedy_decode as greedy_decode,
)
from rank_collapse.network.dropout import (
    dropout_branches as dropout_branches,
)
from rank_collapse.network.embedding import (
    EmbeddingConfig as EmbeddingConfig,
    EmbeddingParams as EmbeddingParams,
)
from rank_collapse.network.encoder_decoder import (
    EncoderDecoderConfig as EncoderDecoderConfig,
    EncoderDecoderParams as EncoderDecoderParams,
    decoder_params as decoder_params,
)
from rank_collapse.network.gains import (
    Gains as Gains,
    LayerGains as LayerGains,
    LearnedGains as LearnedGains,
    layer_gains as layer_gains,
    scaled as scaled,
)
from rank_collapse.network.inputs import (
    PreparedInputs as PreparedInputs,
    as_batch as as_batch,
    as_mask as as_mask,
    at_least_float32 as at_least_float32,
    input_states as input_states,
    prepare_inputs as prepare_inputs,
)
from rank_collapse.network.layers import (
    GATED as GATED,
    MLPParams as MLPParams,
    NormParams as NormParams,
    norm as norm,
)
from rank_collapse.network.padding import (
    cut as cut,
    pad_inputs as pad_inputs,
)
from rank_collapse.network.parameters import (
    BlockParams as BlockParams,
    TransformerParams as TransformerParams,
    layer_params as layer_params,
    stack_layers as stack_layers,
)
from rank_collapse.network.passes import (
    Each as Each,
    LayerPass as LayerPass,
    Output as Output,
    States as States,
    Walked as Walked,
    one_row as one_row,
    row_of as row_of,
    run as run,
    through as through,
)
from rank_collapse.network.precision import (
    P as P,
    R as R,
    full_precision as full_precision,
)
from rank_collapse.network.projections import (
    AttentionParams as AttentionParams,
    RelativeParams as RelativeParams,
    head_norm as head_norm,
    relative_scores as relative_scores,
    repeat_groups as repeat_groups,
    rotate as rotate,
)
from rank_collapse.network.recorded import replay as replay
from rank_collapse.network.residual import (
    ResidualSpec as ResidualSpec,
    final_spec as final_spec,
    lone_norm as lone_norm,
    summands as summands,
    token_norm as token_norm,
    token_sum as token_sum,
)
from rank_collapse.network.streams import (
    Connection as Connection,
)
from rank_collapse.network.transformer import (
    Forward as Forward,
    Tokens as Tokens,
    Trace as Trace,
    apply as apply,
    forward as forward,
)
from rank_collapse.network.variant_heads import (
    differential as differential,
    gated as gated,
    with_sink as with_sink,
)
from rank_collapse.network.walk import (
    Algebra as Algebra,
    Layer as Layer,
    Passage as Passage,
    final_norm as final_norm,
    walk as walk,
    walk_layer as walk_layer,
    walk_through as walk_through,
)
