"""Watching a training run: draws its metrics.jsonl while it grows, and says when it collapses.

    python -m experiments.run_sort --monitor --run_name=a &
    python -m experiments.watch results/sort/a

A line of the file is a JSON object: "step", perhaps "seed", and numbers, or lists of them with one
for each layer, such as those of `rc.monitor`; any program can write it (rank_collapse.runs.metrics
does). The picture is figures/metrics.png in the run's folder. A run of several networks has a file
for each, metrics/<network>.jsonl, and a picture, figures/metrics-<network>.png. When a threshold is
passed, one line says so; a loss that is no number passes one. Ends with the run, or after
--patience minutes without a new line.

Exit code: 0 no threshold was passed, 3 one was, 2 a mistake in the command.
"""

import time
from pathlib import Path

from absl import flags

from experiments.shell import cli, signals
from rank_collapse.measures import COLLAPSE
from rank_collapse.report.alarms import Threshold, alarms
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
    thresholds = thresholds_of(options)
    said, sizes, pictures, grown = [], {}, [], time.monotonic()
    while True:
        folder = folder_of(path)  # at each look: the run may only be about to make it
        complete = (folder / "summary.json").exists()  # before the files: they have all lines then
        now = {file: file.stat().st_size for file in files_of(path)}
        for file in (file for file, size in now.items() if size != sizes.get(file)):
            grown, network = time.monotonic(), network_of(file)
            rows = metrics.read(file)
            picture = folder / "figures" / f"metrics{network and f'-{network}'}.png"
            if draw(rows, thresholds, picture) and picture not in pictures:
                pictures.append(picture)
            for alarm in alarms(rows, thresholds):
                which = network, alarm.metric, alarm.threshold, alarm.seed
                if which not in said:
                    said.append(which)
                    print(f"{network}: {alarm}" if network else alarm, flush=True)
        sizes = now
        waited = (time.monotonic() - grown) / 60
        if complete or options.once or (options.stop and said):
            break
        if options.patience and waited > options.patience:
            print(f"nothing new for {waited:.3g} minutes")
            break
        pause(options.every)
    if not sizes:
        missing = path / metrics.NAME if path.is_dir() else path
        raise RunError(f"{missing} is not there; --monitor makes a trained experiment write it")
    where = ", ".join(map(str, pictures))
    print(f"{len(said)} thresholds passed; " + (f"drawn in {where}" if where else "no metric yet"))
    return PASSED if said else 0


def folder_of(path: Path) -> Path:
    """The run's folder, of which a file may have been named."""
    if not path.is_file():
        return path
    return path.parent.parent if network_of(path) else path.parent


def files_of(path: Path) -> list[Path]:
    """The files that are there: the one that was named, or those of a folder, see `metrics`."""
    if path.is_file():
        return [path]
    several = sorted((path / metrics.FOLDER).glob("*.jsonl"))
    return [file for file in (path / metrics.NAME, *several) if file.is_file()]


def network_of(file: Path) -> str:
    """Which network of a run of several a file is of; "" where there is one."""
    return file.stem if file.parent.name == metrics.FOLDER else ""


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
    return own + [usual for usual in COLLAPSE if usual.finite or usual.name not in named]


def draw(rows, thresholds, picture: Path) -> bool:
    """Writes the picture; False where there is no metric yet."""
    if not any(row.keys() - {"step", "seed"} for row in rows):
        return False
    make_folder(picture.parent)
    write_atomically(picture, drawn(metrics_figure(rows, thresholds))[".png"])
    return True


def pause(seconds: float) -> None:
    """Waits, and ends where the user asks for it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        signals.check()
        time.sleep(min(0.2, max(0.0, end - time.monotonic())))


if __name__ == "__main__":
    cli.run(main, FLAGS, positional="run")
