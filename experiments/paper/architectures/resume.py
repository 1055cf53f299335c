"""A pass over a checkpoint's layers inside a run folder: it resumes after an interruption."""

import contextlib
import time
from typing import Any

from experiments.lab.progress import Progress
from rank_collapse import pretrained
from rank_collapse.pretrained.streaming import State
from rank_collapse.runs.files import RunError
from rank_collapse.runs.folder import RunFolder

EVERY = 60.0  # seconds between states that are saved while all goes well


def resumed(
    run: RunFolder,
    of: str,
    source: pretrained.OpenCheckpoint,
    inputs: dict[str, Any],
    groups: dict[str, pretrained.Group],
    chunk: int,
    progress: Progress,
) -> dict[str, dict[str, Any]]:
    """`pretrained.stream`, from the state that an interrupted run has left.

    A state is saved every minute, after the last layer, and when reading or measuring fails; it is
    the caller's to drop when the results are stored.

    Args:
        run: Where states are kept.
        of: Name of the set of weights.
        source, inputs, groups, chunk: As of `stream`.
        progress: Of the layers.
    """
    newest = None
    if (layers := run.newest_checkpoint(of)) is not None:
        like = pretrained.state_like(source, inputs, groups, layers, chunk=chunk)
        with contextlib.suppress(RunError):  # of another --chunk
            newest = like.with_arrays(run.restore_checkpoint(like.arrays(), of=of)[1])
            progress.skip(layers)
            progress.say(f"resumes after layer {layers}")
    saved = time.monotonic()
    due = saved + EVERY  # of the state after the last layer

    def keep(state: State) -> None:
        if state.whole and run.newest_checkpoint(of) != state.layers:
            run.save_checkpoint(state.layers, state.arrays(), of=of)

    def done(state: State) -> None:
        nonlocal saved, newest
        newest, now = state, time.monotonic()
        if now > (due if state.layers == source.config.depth else saved + EVERY):
            keep(state)
            saved = now
        progress.reach(state.layers)

    try:
        return pretrained.stream(source, inputs, groups, chunk=chunk, state=newest, done=done)
    except BaseException:
        if newest is not None:
            keep(newest)
        raise
