"""Writes docs/statements.md and its table of rows, from the run folders of one run.

    python -m experiments.statements results/a,results/b  (the rows of these runs alone)
    python -m experiments.statements                      (from the committed rows: the same again)

See `experiments.reproducing.statements_page`.
"""

from pathlib import Path

from absl import flags

from experiments.lab import cli
from experiments.reproducing import statements_page

FLAGS = cli.make_flags("statements")
define = cli.definer(FLAGS)
define("list", "runs", [], "Run folders of one run.")
define("string", "docs", "docs", "Folder of the page.")


def main(options: flags.FlagValues) -> None:
    """Writes the page and its table."""
    statements_page.write_page(Path(options.docs), [Path(folder) for folder in options.runs])
    print(f"written: {options.docs}/{statements_page.PAGE.name}")


if __name__ == "__main__":
    cli.run(main, FLAGS, positional="runs")
