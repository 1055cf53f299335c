"""Norms in one kernel: their statistics are frozen, their mean is linear."""

import torch

from rank_collapse.torch.frozen_values import make_scores, make_value
from rank_collapse.torch.refusals import refuse_argument


def apply_norm(call, result):
    """Return a norm's results, with functions that pass path sums: statistics are frozen constants,
    and the mean is linear, so that centring acts on path sums, too.

    Args:
        call: var_mean, or a layer, group, RMS or batch norm (of stored statistics), with its
            arguments.
        result: Its results: the normed tensor and its statistics, in the operator's order.
    """
    value = call.get(0)
    if len(call.dependent) != 1 or call.dependent[0] is not value:
        refuse_argument(call)
    if value.degree == 2:
        return [make_scores(call, result[0]), *call.constant(result[1:], product=value.product)]
    push_first, push_mean = None, None
    gain = call.argument(1, None)
    if call.name == "var_mean":
        dims, keepdim = call.argument(1, None), call.kwargs.get("keepdim", False)
        dims = list(range(value.array.ndim)) if dims is None else dims

        def push_mean(tangent):
            return tangent.mean(dims, keepdim)

    elif call.name == "native_layer_norm":
        gain, dims = call.argument(2, None), list(range(-len(call.argument(1, [])), 0))

        def push_mean(tangent):
            return tangent.mean(dims, keepdim=True)

        def push_first(tangent):
            return _times((tangent - push_mean(tangent)) * result[2], gain)

    elif call.name == "native_group_norm":
        batch, groups = call.argument(3, 1), call.argument(6, 1)

        def push_mean(tangent):
            return tangent.reshape(batch, groups, -1).mean(-1)

        def push_first(tangent):
            grouped = tangent.reshape(batch, groups, -1)
            centred = (grouped - grouped.mean(-1, keepdim=True)) * result[2][..., None]
            return _times(centred.reshape(value.shape), _channels(gain, value.shape))

    elif call.name == "_fused_rms_norm":
        gain = call.argument(2, None)

        def push_first(tangent):
            return _times(tangent * result[1], gain)

    else:
        scale = torch.rsqrt(call.argument(4, None) + call.argument(6, 0.0))

        def push_first(tangent):
            scaled = tangent * _channels(scale, value.shape)
            return _times(scaled, _channels(gain, value.shape))

    values = call.constant(result)
    for index, push in enumerate((push_first, push_mean)):
        if push is not None:
            values[index] = make_value(call, result[index], sources=(value,), push=push)
    return values


def _channels(array, shape):
    """Shape a number per channel (the second axis) so that it broadcasts over arrays of `shape`.

    Args:
        array: [channels]; None stays None.
        shape: Shape of the arrays.
    """
    return None if array is None else array.reshape(1, -1, *(1,) * (len(shape) - 2))


def _times(array, gain):
    """Multiply by a gain; None leaves the array as it is."""
    return array if gain is None else array * gain
