"""The points of a grid: their order, groups and prefixes; options that never change."""

import copy

import pytest

from experiments.lab import cli, list_points

FLAGS = cli.make_flags("grid", num_seeds=2, shows="value", traced=("gain",))
FLAGS.define("integer", "depth", 2, "Layers.")
FLAGS.define("float", "gain", 1.0, "Of the skips.")
FLAGS.define("integer", "heads", 2, "Of a layer.")


def parse_points(*arguments):
    return list_points(cli.parse_flags(FLAGS, list(arguments)))


def test_a_command_without_axes_is_one_point():
    (options,) = parse_points("--depth=3")
    assert options.depth == options["depth"] == 3 and options.gain == 1.0
    assert options.axes == {} and options.prefix == ""
    assert options.group == (options,) and options.number == 0
    assert "depth" in options and "width" not in options and {*options} == {*FLAGS}


def test_points_that_differ_in_traced_flags_alone_are_a_group():
    points = parse_points("--gain=0,1,1.0", "--depth=4,2")
    assert [(p.depth, p.gain, p.number) for p in points] == [
        (4, 0.0, 0),
        (4, 1.0, 0),
        (2, 0.0, 1),
        (2, 1.0, 1),
    ]
    assert points[0].group == points[1].group == tuple(points[:2])
    assert points[3].prefix == "gain=1.0/depth=2/"  # in the order in which they were typed


def test_axes_with_common_values_do_not_share_groups():
    """One depth and one number of heads are one program; (2, 4) is another program than (4, 2)."""
    points = parse_points("--depth=2,4", "--gain=2,4", "--heads=4,2")
    groups = {}
    for point in points:
        groups.setdefault((point.depth, point.heads), []).append(point)
    assert {p.number for p in points} == {0, 1, 2, 3}
    for group in groups.values():
        assert {p.group for p in group} == {tuple(group)} and len({p.number for p in group}) == 1


def test_points_do_not_follow_the_flags_and_cannot_be_changed():
    flags = cli.parse_flags(FLAGS, ["--depth=3"])
    (options,) = list_points(flags)
    flags.depth = 5
    assert options.depth == 3
    with pytest.raises(AttributeError, match="cannot be changed: depth=4"):
        options.depth = 4
    other = options.replace(depth=4)
    assert (other.depth, options.depth, other.gain) == (4, 3, 1.0)


def test_a_flag_that_there_is_not_is_named():
    (options,) = parse_points()
    with pytest.raises(AttributeError, match="there is no flag --width"):
        options.width  # noqa: B018
    assert not hasattr(options, "width")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_has_the_same_values(copied):
    (options,) = parse_points("--depth=3")
    assert dict(copied(options)) == dict(options)
