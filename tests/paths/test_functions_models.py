"""Whole models as functions: their sums are those of all paths, or of the library's own pass."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import rank_collapse as rc
from rank_collapse.paths.channels import ByLength
from tests.oracles.field_cases import NETWORKS, covered_parts
from tests.oracles.frozen_paths import frozen_lengths
from tests.oracles.function_paths import (
    contributions,
    ranks_of_others as ranks_of_others,
)
from tests.oracles.jax_layers import tokens
from tests.oracles.jax_models import MODELS
from tests.oracles.library_models import LIBRARY_MODELS
from tests.oracles.path_examples import config_of, example, relative
from tests.support.closeness import assert_close
from tests.support.marks import full_but

EVERY_MODEL = MODELS | LIBRARY_MODELS

FAST = ("squared_relu_alibi",)


@pytest.mark.parametrize("name", full_but(EVERY_MODEL, *FAST))
def test_every_model_equals_the_enumeration_of_its_paths(x64, name):
    model, x = EVERY_MODEL[name](), tokens()
    sums, output = frozen_lengths(jax.tree.map(np.asarray, model.layers), x, **model.options)
    result = contributions(model.fn, x, model.branches)
    is_narrow = name in ("nnx_blocks", "nnx_scan_of_remat", "maxtext_like")
    tolerance = 1e-6 if is_narrow else 1e-12  # their softmax: float32
    assert relative(result.by_length, sums) < tolerance
    assert_close(result.output, output, atol=2 * tolerance)
    assert_close(result.total, jax.jit(model.fn)(x), atol=1e-12)
    assert result.longer is None


TOLERANCES = {jnp.float64: 1e-13, jnp.float32: 2e-6}


@pytest.mark.full
@pytest.mark.parametrize("name", full_but(NETWORKS, "both norms"))
def test_the_networks_of_the_library_have_the_sums_of_their_own_pass(x64, name):
    fields = {}
    for part in covered_parts(name, ByLength.covers):
        fields |= NETWORKS[name][part]
    config = config_of(depth=2, **fields)
    # Without a skip past the cross-attention every path starts at the memory.
    configs = [config] if config.cross_skip else [config, config.replace(cross_skip=True)]
    for config, dtype in itertools.product(configs, TOLERANCES):
        compare_with_own_pass(config, dtype, TOLERANCES[dtype])


@jax.jit
def sum_paths_both_ways(params, x, memory, extra, config):
    """Sums paths of the network as a function, and in its own pass, in one program.

    Returns {what is summed: (of the function, of the own pass)}, and the sums of the function from
    the memory alone, None without one.
    """
    head_gain = 0.5 + jnp.arange(4, dtype=x.dtype).reshape(2, 2)
    inputs = extra | ({"memory": memory} if config.cross_attention else {})

    def sum_paths(direction=None, count_mlps=False, head_gain=None):
        def fn(rows):
            inputs = extra | ({"memory": rows[: len(memory)]} if config.cross_attention else {})
            edit = name_branches(config, head_gain)
            return rc.apply(params, rows[len(memory) :], config, edit=edit, **inputs).output

        branches = {"attention": "attention", "mlp": "mlp"} if count_mlps else "attention"
        rows = jnp.concatenate([memory, x])
        options = {"branches": branches, "longest": config.depth, "direction": direction}
        return rc.function_contributions(fn, rows, **options)

    def sum_both(**options):
        return sum_paths(**options), rc.path_contributions(params, x, config, **options, **inputs)

    sums = {"all": sum_both(), "gained": sum_both(head_gain=head_gain)}
    if config.mlp != "none":
        sums["MLPs apart"] = sum_both(count_mlps=True)
    from_memory = None
    if config.cross_attention:
        from_memory = sum_paths(jnp.concatenate([memory, jnp.zeros_like(x)])).by_length
    return sums, from_memory


def compare_with_own_pass(config, dtype, tolerance):
    """Compares all that both give: lengths, MLPs, heads, paths from the memory, the offset."""
    params, x, extra = jax.tree.map(lambda a: as_floats(a, dtype), example(config))
    memory = extra.pop("memory", np.zeros((0, config.d_model), dtype))
    sums, from_memory = jax.device_get(sum_paths_both_ways(params, x, memory, extra, config))
    result, want = sums["all"]
    assert result.by_length.dtype == result.offset.dtype == dtype
    assert result.longer is None
    for name in ("by_length", "offset", "output"):
        assert relative(getattr(result, name), getattr(want, name)) < tolerance, name
    if config.cross_attention:
        assert relative(from_memory, want.from_memory) < tolerance
        assert np.abs(from_memory).max() > 0.1
    if config.mlp != "none":
        apart, want_apart = sums["MLPs apart"]
        assert apart.count_mlps
        assert relative(apart.by_length, want_apart.by_length) < tolerance
    gained, want_gained = (sums.by_length for sums in sums["gained"])
    assert relative(gained, want_gained) < tolerance
    assert not config.cross_skip or relative(gained, result.by_length) > 0.05


def name_branches(config, head_gain=None):
    """Makes edits that name each branch, and multiply what each head passes on, not its output."""
    edit = {
        f"{kind}_branch": functools.partial(named, "mlp" if kind == "mlp" else "attention")
        for kind in config.kinds
    }
    if head_gain is not None:

        def scale_paths(heads, layer):
            scaled = head_gain[layer][:, None, None] * heads
            return scaled + jax.lax.stop_gradient(heads - scaled)

        edit["head_output"] = scale_paths
    return edit


def as_floats(a, dtype):
    a = np.asarray(a)
    return a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a


def named(name, branch, layer):
    return checkpoint_name(branch, name)
