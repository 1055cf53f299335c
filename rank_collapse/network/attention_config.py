"""The configuration of attention: masks, scores and changes of the weights."""

from typing import Literal, get_args

from jax.tree_util import Partial

from rank_collapse import checks, struct
from rank_collapse.annotations import Number, Tree

Score = Literal["dot", "additive"]
QKNorm = Literal["none", "head", "width"]
MaskKind = Literal["none", "causal", "local"]
SCORES, QK_NORMS, MASKS = get_args(Score), get_args(QKNorm), get_args(MaskKind)


class AttentionConfig(struct.Struct, kw_only=True):
    """Configuration of attention: masks, scores, and changes of the weights.

    Attributes:
        mask, window: "none", "causal", "local" with |i − j| ≤ window.
        windows: The distance that each layer attends to, |i − j| ≤ its entry, on top of the mask.
            An entry of 0 means any distance; () means this for all layers (Gemma, ModernBERT).
        score, scale_scores: "dot" or "additive"; dot products divided by √d_qk.
        qk_norm: RMSNorm with a gain on queries and keys before positions: "none", of each "head"
            (Qwen3, Gemma 3), or over the "width" of all heads (OLMo 2); with norm_eps.
        score_cap: c of c·tanh(scores/c) before biases and mask (Gemma 2); 0 for none.
        temperature: Divides the scores; scalar or [L].
        normalise: The caller's function instead of softmax, normalise(scores, context) -> P, both
            [h, n, m], for one example. The scores already have temperature, cap and bias; the
            function must apply the context's mask. It is traced like `mix`. None for softmax.
        mixing: `Mixing` of the weights with the identity and the mean; None for the weights alone.
        mix: The caller's self-attention, mix(q, k, v, context) -> (M, out), for one example:
            q and k [h, n, k] after norms and rotary positions, v [h, n, v], context an
            `AttentionContext`. M [h, n, n] is what mixes the values, out [h, n, v] its product with
            them; None for M v, as where M alone is returned. Arrays and floats of a
            `jax.tree_util.Partial(fn, *first)`, called as fn(*first, q, k, v, context), are traced.
            None for softmax weights.
    """

    mask: MaskKind = struct.static("none")
    window: int = struct.static(2)
    windows: tuple[int, ...] = struct.static(())
    score: Score = struct.static("dot")
    scale_scores: bool = struct.static(True)
    qk_norm: QKNorm = struct.static("none")
    score_cap: float = struct.static(0.0)
    temperature: Number = 1.0
    normalise: Tree = None
    mixing: Tree = None
    mix: Tree = None

    def __post_init__(self):
        checks.check_choices(self, mask=MASKS, score=SCORES, qk_norm=QK_NORMS)
        for name in ("normalise", "mix"):
            function = getattr(self, name)
            if callable(function) and not isinstance(function, Partial):
                object.__setattr__(self, name, Partial(function))
        if self.mix is not None and (self.mixing is not None or self.normalise is not None):
            raise ValueError(f"mix={self.mix!r} replaces normalise and mixing: set one")


class Mixing(struct.Struct):
    """M = α I + β P + γ C instead of P, with C the weights of equal scores.

    Each is a number, [L] or [L, H]. C is 11ᵀ/n without a mask; under a causal mask row i of C is
    1/i on the prefix. (1, β, 0) is Value-SkipInit (He et al. 2023), (α, β, −γ) shaped attention
    (Noci et al. 2023), (0, 1 + λ, −λ) AttnScale (Wang et al. 2022), (0, 1, −1) centred attention
    (Ali et al. 2023).
    """

    identity: Number = 0.0  # α
    weights: Number = 1.0  # β
    uniform: Number = 0.0  # γ
