"""A binary that runs the Python code of its flag, for workers in tests."""

from experiments.lab import cli

FLAGS = cli.bare_flags()
cli.definer(FLAGS)("string", "code", "", "Python.")


def main(options):
    found = {}
    exec(options.code, found)
    return found.get("code", 0)
