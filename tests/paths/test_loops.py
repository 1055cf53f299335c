"""Looped networks, loop by loop, against the networks of fewer loops."""

from itertools import pairwise

import jax
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.theory.transverse import transverse_growth
from tests.oracles import draws
from tests.support.closeness import assert_close
from tests.support.marks import full_but
from tests.support.refusals import is_refused, parametrize_refusals

ROWS, LOOPS = 2, 3


def make_config(loops=LOOPS, **fields):
    fields = {"norm_placement": "pre", "mask": "causal", "branch_gain": 0.5} | fields
    return rc.transformer(ROWS * loops, 2, 8, layer_map=(0, 1) * loops, d_ff=7, **fields)


def report_in_one_program(params, x, config, **inputs):
    report = jax.jit(lambda params, x: rc.loop_report(params, x, config, **inputs))
    return jax.device_get(report(params, x))


@pytest.mark.parametrize("placement", full_but(["pre", "post"], "pre"))
def test_every_loop_is_the_network_of_so_many(placement):
    with jax.enable_x64(True):
        config = make_config(norm_placement=placement)
        params, x = draws.parameters(config), draws.tokens(5, 8)
        report = report_in_one_program(params, x, config)
        states = [x]
        for loops in range(1, LOOPS + 1):
            fewer = make_config(loops, norm_placement=placement)
            contributions = jax.device_get(rc.path_contributions(params, x, fewer))
            states.append(contributions.total)
            sizes = np.linalg.norm(contributions.by_length, axis=(1, 2))
            path_sizes = report.path_size[loops]
            assert_close(path_sizes[: len(sizes)], sizes, rtol=1e-10)
            assert np.all(path_sizes[len(sizes) :] == 0)
        assert_close(report.rms, [np.sqrt(np.mean(a**2)) for a in states])
        assert_close(report.token_cosine, [rc.token_cosine(a) for a in states])
        changes = [np.linalg.norm(b - a) / np.linalg.norm(a) for a, b in pairwise(states)]
        assert_close(report.fixed_point, changes)
        growth = np.asarray(transverse_growth(params, x, config))[:, 0]
        assert_close(report.transverse, growth.reshape(LOOPS, ROWS).sum(1))
        # a mask and a bias that leave a causal mask reach all parts of the report
        inputs = {"mask": np.tri(5, k=1, dtype=bool), "bias": np.where(np.tri(5), 0, -1e9)}
        masked_report = report_in_one_program(params, x, config.replace(mask="none"), **inputs)
        for name, value in masked_report._asdict().items():
            assert_close(value, getattr(report, name), rtol=1e-9, err_msg=name)


@pytest.mark.full
def test_padded_tokens_are_left_out():
    """Padded tokens change nothing: the report is that of the tokens that exist."""
    config, mask = make_config(mask="none"), np.arange(7) < 4
    params, x = draws.parameters(config), draws.tokens(7, 8)
    padded = rc.loop_report(params, x, config, mask=mask)
    unpadded = report_in_one_program(params, x[:4], config)
    for name, value in padded._asdict().items():
        expected = getattr(unpadded, name)
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5, err_msg=name)


def test_tied_weights_add_up_where_untied_ones_do_not():
    """16 loops with a gain of 1/√N: tied states grow, untied and those with 1/N stay."""
    n = 16

    def get_rms(gain, layer_map=()):
        config = rc.san_skip(n, 4, 64, norm_placement="pre", branch_gain=gain, layer_map=layer_map)
        params = draws.parameters(config, bias_scale=0.0, gain_scale=0.0)
        output = rc.apply(params, draws.normal(32, 64), config).output
        return np.sqrt(np.mean(np.square(output)))

    tied = (0,) * n
    assert get_rms(n**-0.5, tied) > 1.5 > 1.2 > max(get_rms(n**-0.5), get_rms(1 / n, tied))


NETWORK = make_config().replace(layer_map=(0, 2, 1, 0, 1, 2))


@parametrize_refusals(
    [
        (
            lambda: rc.loop_report(draws.parameters(NETWORK), draws.tokens(5, 8), NETWORK),
            r"layer_map=\(0, 2, 1, 0, 1, 2\) of depth=6 must contain all rows from 0 to 2 in "
            r"order, once for each loop; \(0, 1, 2, 0, 1, 2\) has two loops of depth=6",
        ),
    ]
)
def test_mistakes_are_named(arguments, message):
    is_refused(message, *arguments)
