"""Runs `rank-collapse` in tests."""

from rank_collapse.command import main


def run_command(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out
