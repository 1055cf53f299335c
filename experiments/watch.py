"""Watching a training run: draws its metrics.jsonl while it grows, and says when it collapses.

    python -m experiments.run_sort --monitor --run_name=a &
    python -m experiments.watch results/sort/a

A line of the file is a JSON object: "step", perhaps "seed", and numbers, or lists of them with one
for each layer, such as those of `rc.monitor`; any program can write it (rank_collapse.runs.metrics
does). The picture is figures/metrics.png in the run's folder. When a threshold is passed, one line
says so. Ends with the run, or after --patience minutes without a new line.

Exit code: 0 no threshold was passed, 3 one was, 2 a mistake in the command.
"""

import time
from pathlib import Path

from absl import flags

from experiments.shell import cli, signals
from rank_collapse.report.alarms import COLLAPSE, Threshold, alarms
from rank_collapse.report.metrics import metrics_figure
from rank_collapse.runs import metrics
from rank_collapse.runs.drawn import drawn
from rank_collapse.runs.files import RunError, make_folder, write_atomically

PASSED = 3

FLAGS = cli.bare_flags()
define = cli.definer(FLAGS)
define("string", "run", None, "Folder of the run, or the file itself; also without --run=.")
define("boolean", "once", False, "Read what is there, draw it and end.")
define("boolean", "stop", False, "End as soon as a threshold is passed.")
define("float", "every", 5.0, "Seconds between two looks.", lower_bound=0.1)
define("float", "patience", 0.0, "Minutes without a new line after which to end (0: never).",
       lower_bound=0.0)  # fmt: skip
define("multi_string", "below", [], "name=value: passed when the metric is below it, at any layer.")
define("multi_string", "above", [], "name=value: passed when the metric is above it.")


def main(options: flags.FlagValues) -> int:
    if not options.run:
        raise ValueError("which run? python -m experiments.watch FOLDER")
    path = Path(options.run)
    folder, path = (path, path / metrics.NAME) if path.is_dir() else (path.parent, path)
    thresholds = thresholds_of(options)
    said, size, grown = [], -1, time.monotonic()
    while True:
        complete = (folder / "summary.json").exists()  # before the file, which has all lines then
        now = path.stat().st_size if path.exists() else -1
        if now != size:
            size, grown = now, time.monotonic()
            rows = metrics.read(path)
            draw(rows, thresholds, folder)
            for alarm in alarms(rows, thresholds):
                if alarm not in said:
                    said.append(alarm)
                    print(alarm, flush=True)
        waited = (time.monotonic() - grown) / 60
        if complete or options.once or (options.stop and said):
            break
        if options.patience and waited > options.patience:
            print(f"nothing new for {waited:.3g} minutes")
            break
        pause(options.every)
    if size < 0:
        raise RunError(f"{path} is not there; --monitor makes a trained experiment write it")
    print(f"{len(said)} thresholds passed; drawn in {folder / 'figures' / 'metrics.png'}")
    return PASSED if said else 0


def thresholds_of(options: flags.FlagValues) -> list[Threshold]:
    """Those of the flags, and the usual ones of the metrics that the flags do not name.

    Raises:
        ValueError: A flag that is not name=value.
    """
    own = []
    for flag in ("below", "above"):
        for text in options[flag].value:
            name, _, value = text.rpartition("=")
            try:
                own.append(Threshold(name, float(value), flag == "above"))
            except ValueError:
                name = ""
            if not name:
                raise ValueError(f"--{flag}={text} is not name=value")
    named = {threshold.name for threshold in own}
    return own + [threshold for threshold in COLLAPSE if threshold.name not in named]


def draw(rows, thresholds, folder: Path) -> None:
    """Writes figures/metrics.png; nothing where there is nothing yet."""
    if not rows:
        return
    make_folder(folder / "figures")
    png = drawn(metrics_figure(rows, thresholds))[".png"]
    write_atomically(folder / "figures" / "metrics.png", png)


def pause(seconds: float) -> None:
    """Waits, and ends where the user asks for it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        signals.check()
        time.sleep(min(0.2, max(0.0, end - time.monotonic())))


if __name__ == "__main__":
    cli.run(main, FLAGS, positional="run")
