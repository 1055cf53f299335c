"""Reproduce: runs every experiment and writes one report, with an answer to each statement.

Covers the figures in Dong, Cordonnier and Loukas, "Attention is not all you need: pure attention
loses rank doubly exponentially with depth" (2021), and statements of later papers. You can also run
each experiment by its own command.

    python -m experiments.reproduce                      (quick sizes, minutes on two cores)
    python -m experiments.reproduce --preset=reported    (the sizes of the pages)

Prints a line for each finished experiment, with one of its numbers and the published value, and
then the results. Whenever an experiment ends, the command updates results/reproduce/report.html,
one self-contained page. The page lists every statement with its source and its answer: holds, in
some settings, not in all settings, does not hold, not rejected, or open after N draws. A setting
is one combination of flags that the statement is about. The answer follows from the rows below
it, one row for each setting, with its interval; --verdicts prints the rows, too. With
--until=decided the command adds seeds until all rows are decided. It does not compute finished
experiments again. At the preset quick it saves figures as PNG alone, which is faster; with --pdf it
saves each figure as PDF, too. The exit code is 1 if an experiment failed. `python -m
experiments.benchmark` measures the speed.
"""

import sys
import time
from pathlib import Path

import jax
from absl import flags

from experiments import verdicts
from experiments.lab import check_names, cli, describe_experiment, list_experiments, progress
from experiments.reproducing.results_page import write_markdown
from experiments.reproducing.running import render_report, run_experiments
from experiments.reproducing.sections import PRESETS, answer_sections
from rank_collapse import runs

EXPERIMENTS = list_experiments()  # in the order of the report

FLAGS = cli.make_flags("reproduce", pdf=None, counts="")
FLAGS.define("enum", "preset", "quick", "Sizes of the experiments.", PRESETS)
FLAGS.define(
    "boolean",
    "markdown",
    False,
    "Also write results.md with its tables and figures, statements.md and "
    "the results on the experiments' pages to --docs, from the complete folders of the preset.",
)
FLAGS.define(
    "integer",
    "jobs",
    0,
    "Experiments that run side by side (0: two on two cores or more without "
    "an accelerator, else one).",
    lower_bound=0,
)
FLAGS.define(
    "enum",
    "until",
    None,
    "decided: add seeds, or texts, until the statements are decided, at most those that "
    "experiments/verdicts/statements.toml has as budgets.",
    ["decided"],
)
FLAGS.define("string", "docs", "docs", "Folder of the pages.")
FLAGS.define(
    "boolean", "verdicts", False, "Also print the answer to each statement, with its rows."
)
FLAGS.define(
    "list", "only", [], f"Experiments to run, out of {', '.join(EXPERIMENTS)} (default: all)."
)


def main(options: flags.FlagValues) -> int:
    """Runs the experiments, and writes the report whenever one ends; returns 1 if one failed."""
    check_names(options, "only", EXPERIMENTS)
    folder = Path(options.output_dir or "results/reproduce")
    if options.run_name:
        folder = folder / options.run_name
    chosen = [name for name in EXPERIMENTS if name in options.only]
    if not options.only:
        for name in EXPERIMENTS:
            needed = describe_experiment(name).needs
            if Path(needed).is_dir():
                chosen.append(name)
            else:
                print(f"skipped: {name} needs the folder {needed}: `--help` says how to get it")
    runs.make_folder(folder)  # refused before anything is computed
    if options.markdown:
        runs.make_folder(options.docs)
    jax.config.update("jax_platforms", "cpu")  # accelerators are the workers'
    started, path = time.monotonic(), folder / "report.html"

    def show(sections: list[verdicts.Section]) -> None:
        parent = folder / options.preset
        text = render_report(sections, len(chosen), options.preset, started, parent)
        runs.write_atomically(path, text.encode())

    print(f"report, written anew whenever an experiment ends: {path}", flush=True)
    sections = run_experiments(chosen, options, folder / options.preset, show)
    answers, failed = (
        answer_sections(sections, options.preset),
        [s.name for s in sections if s.error],
    )
    seconds = progress.Progress.format_interval(time.monotonic() - started)
    print(f"{len(sections) - len(failed)} of {len(sections)} experiments done in {seconds}")
    if findings := [f"  {s.title}: {s.finding}" for s in sections if s.finding]:
        print("\n".join(["", "What came out:", *findings, ""]))
    if options.verdicts:
        for answer in answers:
            print(verdicts.answer_lines(answer))
    if answers:
        print(verdicts.count_line(answers))
    print(f"report: {path}" + " (--verdicts prints the answers)" * (len(answers) > 0))
    if options.markdown:
        path = write_markdown(folder / options.preset, options.preset, Path(options.docs))
        print(f"written to {path}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main, FLAGS)
