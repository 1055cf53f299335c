"""How deep a model really is: the numbers that compare models, from what was measured by length."""

from typing import Any

import numpy as np

from rank_collapse.paths.next_token import effective_depth

SAME, WITHIN, COSINE = 0.99, 0.01, 0.99  # of positions, of the loss, with the output


def depths_of(results: Any, kind: str) -> dict[str, Any]:
    """Effective depths and mean path lengths of one kind of weights, as far as they were measured.

    The effective depth is the least k such that the paths of lengths up to k, and up to any longer
    length, give the same next token on 99 % of positions ("same next token"), the same loss within
    1 % ("same loss"), or a mean cosine of 0.99 with the output ("same direction"). Means are over
    texts. "mean length" weighs each length by ‖C_k‖, "of the gradient" by ‖G_k‖.

    Args:
        results: `results.Results` of a model.
        kind: Of its weights.
    """

    def mean(name):
        values = results.get(kind, name)
        return None if values is None else values.mean(axis=0, dtype=np.float64)

    found: dict[str, Any] = {"layers": results.model.config.depth}
    cosine, size = mean("lengths/cosine_up_to"), mean("lengths/size")
    if cosine is not None:
        found["same direction"] = int(effective_depth(cosine >= COSINE))
        found["mean length"] = float(np.arange(len(size)) @ size / size.sum())
    same, loss = mean("next_token/same_up_to"), mean("next_token/loss")
    if same is not None:
        near = np.abs(mean("next_token/loss_up_to") - loss) <= WITHIN * abs(loss)
        found["same next token"] = int(effective_depth(same >= SAME))
        found["same loss"] = int(effective_depth(near))
        found["loss, nats"] = float(loss)
    share = mean("gradients/gradient_share")
    if share is not None:
        found["mean length of the gradient"] = float(np.arange(len(share)) @ share)
    influence = mean("layers/block_influence")
    if influence is not None:
        found["least influential layer"] = int(np.argmin(influence)) + 1
        found["its 1 − cos"] = float(influence.min())
    return found
