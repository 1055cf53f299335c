"""Dataclasses that are pytrees: how they are printed, and which names they refuse."""

import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from tests.support.refusals import is_refused


def test_of_a_struct_arrays_are_printed_by_their_form_and_absent_parts_are_not():
    norm = rc.network.NormParams(gain=np.ones((2, 3), np.float32))
    assert repr(norm) == "NormParams(gain=float32[2, 3])"
    assert repr(norm.replace(bias=jnp.zeros(3, jnp.bfloat16))).endswith("bias=bfloat16[3])")
    assert repr(rc.Gains(attention=2.0, mlp=np.float32(1))).startswith("Gains(attention=2.0, cross")
    is_refused("NormParams.gian is not one of .*nearest: 'gain'", norm.replace, gian=1)
    message = "NormParams has no 'scale'; its fields are gain, bias"
    with pytest.raises(AttributeError, match=message) as error:
        _ = norm.scale
    assert error.value.name == "scale" and error.value.obj is norm
