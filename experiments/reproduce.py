"""Reproduce: runs every experiment and writes one report, measured beside published.

Covers the figures of Dong, Cordonnier and Loukas, "Attention is not all you need: pure attention
loses rank doubly exponentially with depth" (2021), and of the note on attention functions (Vaswani
et al. 2017, section 3.2.1), each by the binary of its own.

    python -m experiments.reproduce                   (quick sizes, minutes on two cores)
    python -m experiments.reproduce --preset=paper    (the paper's sizes)

Writes results/reproduce/report.html, one self-contained page. What is done is not computed again;
the exit code is 1 if an experiment failed. Speed is apart: `python -m experiments.benchmark`.
"""

import importlib
import shlex
import sys
import time
from pathlib import Path

from absl import flags

from experiments.shell import cli
from experiments.shell.entry import Entry
from experiments.shell.process import run_process
from rank_collapse import report, runs
from rank_collapse.runs import provenance

# Modules of experiments/ with an ENTRY, in the order of the report.
EXPERIMENTS = (
    "run_collapse",
    "run_path_counts",
    "run_path_chains",
    "run_architectures",
    "run_sort",
    "run_convex_hull",
    "run_memorization",
    "run_circle",
    "run_width",
    "run_attention_forms",
    "run_stability",
    "check_bounds",
)
PRESETS = ("quick", "paper")

FLAGS = cli.make_flags("reproduce")
define = cli.definer(FLAGS)
define("enum", "preset", "quick", "Sizes of the experiments.", PRESETS)
define("list", "only", [], f"Experiments to run, out of {', '.join(EXPERIMENTS)} (default: all).")


def main(options: flags.FlagValues) -> int:
    unknown = sorted(set(options.only) - set(EXPERIMENTS))
    if unknown:
        raise ValueError(f"--only={unknown[0]} is not one of {', '.join(EXPERIMENTS)}")
    folder = Path(options.output_dir or "results/reproduce")
    if options.run_name:
        folder = folder / options.run_name
    chosen = [name for name in EXPERIMENTS if not options.only or name in options.only]
    started, sections = time.monotonic(), []
    for i, name in enumerate(chosen):
        print(f"[{i + 1}/{len(chosen)}] {name}", file=sys.stderr, flush=True)
        entry = importlib.import_module(f"experiments.{name}").ENTRY
        sections.append(run_entry(name, entry, options, folder / options.preset / name))
    path = folder / "report.html"
    runs.make_folder(folder)
    runs.write_atomically(path, page(sections, options.preset, started).encode())
    failed = [s.name for s in sections if s.status != "done"]
    print(f"{len(sections) - len(failed)} of {len(sections)} experiments done: {path}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run_entry(name: str, entry: Entry, options: flags.FlagValues, folder: Path) -> report.Section:
    """Runs one experiment as a process of its own and reads its folder into a section."""
    arguments = [*entry.presets[options.preset], f"--output_dir={folder}"]
    shown = f"python -m experiments.{name} {shlex.join(arguments)}"
    if options.overwrite:
        arguments.append("--overwrite")
    if options.num_devices:
        arguments.append(f"--num_devices={options.num_devices}")
    start = time.monotonic()
    code, printed = run_process([sys.executable, "-m", f"experiments.{name}", *arguments])
    fields = {
        "name": name,
        "title": entry.title,
        "claim": entry.claim,
        "command": shown,
        "details": f"{time.monotonic() - start:.1f} s this time; all numbers: {folder}/results.csv",
    }
    try:
        if code:
            raise runs.RunError(f"exit code {code}")
        summary = runs.read_summary(folder)
        figures = [
            ((folder / "figures" / f"{figure}.png").read_bytes(), caption)
            for figure, caption in entry.captions.items()
        ]
        comparisons = list(entry.compare(summary))
        reading = entry.reading(summary)
    except Exception as error:  # one broken experiment must not take the others' report with it
        message = f"{type(error).__name__}: {error}\n{printed[-2000:]}"
        print(f"{name} failed: {error}", file=sys.stderr)
        return report.Section(**fields, status="failed", error=message)
    return report.Section(**fields, figures=figures, comparisons=comparisons, reading=reading)


def page(sections: list[report.Section], preset: str, started: float) -> str:
    """The report: all sections under one heading, with what they were made with."""
    made = provenance.environment()
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    return report.render(
        "Rank collapse: measured beside published",
        "Every experiment of this repository on the claims and figures of Dong, Cordonnier and "
        "Loukas, “Attention is not all you need: pure attention loses rank doubly exponentially "
        f"with depth” (2021), at the sizes of the preset “{preset}”.",
        sections,
        f"Made {made['started']} in {time.monotonic() - started:.0f} s on {made['device']} "
        f"({made['num_devices']} devices), Python {made['python']}, {versions}, "
        f"git {made['git'] or 'none'}.",
    )


if __name__ == "__main__":
    cli.run(main, FLAGS)
