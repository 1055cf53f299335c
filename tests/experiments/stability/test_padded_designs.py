"""Designs at several depths as networks of one depth, and the programs that they share."""

from functools import partial

import numpy as np
import pytest

import rank_collapse as rc
from experiments import run_stability
from experiments.stability.padded_designs import group_by_program, make_configs
from tests.support.runs import parsed

parse_options = partial(parsed, run_stability, "--d_model=8", "--num_heads=2")


def test_layers_past_a_networks_own_change_nothing():
    """A network of 2 layers is computed inside one of 4, whose last branch gains are 0."""
    configs = make_configs(
        parse_options("--designs=pre,depth_scaled", "--mlp=relu", "--depths=2,4")
    )
    assert [case.branches for case in configs] == 2 * [4, 8]
    for case, config in configs.items():
        np.testing.assert_array_equal(config.skip_gain.mlp, [1, 1, 1, 1])
        branch = config.branch_gain.mlp
        assert np.all(branch[: case.depth] > 0) and not branch[case.depth :].any()


def test_networks_that_differ_in_numbers_share_a_program():
    """Post-LN and Admin have the same norms, and Pre-LN others; the depth is a number too."""
    options = parse_options("--designs=post,pre,admin_const", "--mlp=none", "--depths=1,3")
    groups = group_by_program({case.name: c for case, c in make_configs(options).items()})
    names = [{name.removeprefix("encoder ") for name in group} for group in groups]
    assert names == [
        {"post, L=1", "post, L=3", "admin_const, L=1", "admin_const, L=3"},
        {"pre, L=1", "pre, L=3"},
    ]
    gains = [config.branch_gain.attention for group in groups for config in group.values()]
    assert all(gain.dtype == np.float32 and gain.shape == (3,) for gain in gains)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--depths=4,4"], "--depths=4 has fewer than two depths"),
        (["--update_size=0"], "--update_size=0.0 does not change the weights"),
        (["--designs=post,posts"], "posts"),
    ],
)
def test_a_wrong_choice_of_networks_is_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        make_configs(parse_options(*flags))


def test_gains_of_other_shapes_need_another_program():
    """A number for all layers, and one for each, of two depths' number of layers."""
    gains = {"one": 0.5, "three": np.full(3, 0.5), "two": np.full(2, 0.5), "other": 0.25}
    configs = {name: rc.san(3, 1, 2).replace(branch_gain=gain) for name, gain in gains.items()}
    groups = [{*group} for group in group_by_program(configs)]
    assert groups == [{"one", "other"}, {"three"}, {"two"}]
