"""Flags that experiments share: bounds, lists of numbers, second names and the former one."""

import pytest

from experiments.lab import cli, shared_flags
from tests.support.refusals import is_refused


def make_flags(**defaults):
    flags = cli.make_flags("shared")
    shared_flags.define(flags, **defaults)
    return flags


def test_a_flag_has_the_bounds_of_the_vocabulary_or_its_own():
    flags = make_flags(depth=2, d_model=8, dropout=0.1, least={"d_model": 3})
    assert cli.parse_flags(flags, ["--dropout=0.99"]).dropout == 0.99
    assert cli.parse_flags(flags, ["--depth=1", "--d_model=3"]).d_model == 3
    for argument in ("--depth=0", "--d_model=2", "--dropout=1", "--dropout=-0.1"):
        with pytest.raises(Exception, match=argument.partition("=")[0]):
            cli.parse_flags(flags, [argument])


def test_choices_are_those_of_the_library():
    flags = make_flags(mask="none")
    assert cli.parse_flags(flags, ["--mask=causal"]).mask == "causal"
    with pytest.raises(Exception, match="mask"):
        cli.parse_flags(flags, ["--mask=casual"])


def test_numbers_by_commas_are_one_value():
    flags = make_flags()
    shared_flags.define_numbers(flags, "widths", [8], "Widths.", lower_bound=1)
    shared_flags.define_numbers(flags, "gains", [0.5], "Gains.", kind=float)
    options = cli.parse_flags(flags, ["--widths=4", "--widths=2,16", "--gains=1e-3,2"])
    assert options.widths == [2, 16] and options.gains == [1e-3, 2.0]
    assert flags["widths"].help == "Widths. A list by commas."
    for argument in ("widths=2,0", "widths=2,99999999999", "gains=1,nan"):
        with pytest.raises(Exception, match=argument.partition("=")[0]):
            cli.parse_flags(flags, [f"--{argument}"])


def test_a_second_name_sets_the_flag_and_the_help_says_so():
    flags = make_flags(num_heads=4)
    shared_flags.define_alias(flags, width="num_heads")
    shared_flags.define_text(flags, "A text.")
    options = cli.parse_flags(flags, ["--width=2", "--text_file=a.txt"])
    assert options.num_heads == 2 and options.text == "a.txt"
    assert flags["num_heads"].help.endswith("Also --width.")


def test_a_flag_that_the_vocabulary_lacks_is_an_error():
    is_refused("dpeth", make_flags, error=KeyError, dpeth=3)
