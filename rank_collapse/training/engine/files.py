"""The folder of a sweep: its description, and its runs at the last snapshot.

sweep.json          fingerprints of the functions, axes
runs/<point>-….npz  states and metrics of runs at one step; a newer file replaces those whose
                    runs it has, so that any grouping of runs resumes from any other
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.runs import files
from rank_collapse.training.engine.functions import Functions
from rank_collapse.training.engine.runs import Runs, join_pieces

NAME = "sweep.json"
# A snapshot is left out while the last one took more than this share of the time since.
MOST_SHARE = 0.1


class SweepFolder:
    """The folder of one sweep, locked for this process.

    Args:
        path: Made if absent.
        config: Description of the sweep as JSON stores it, {part: value}.

    Raises:
        RunError: The folder belongs to another sweep, is in use, or cannot be written.
    """

    def __init__(self, path: Any, config: Mapping[str, Any]):
        self.path, self._runs = Path(path), Path(path) / "runs"
        files.make_folder(self._runs)
        process = jax.process_index()  # each locks a folder of its own
        locked = self.path / f"process-{process}" if process else self.path
        files.make_folder(locked)
        self._lock: TextIO = files.lock_folder(locked)
        if jax.process_count() == 1:  # what a killed process was writing
            files.delete_files(self._runs, [p.name for p in self._runs.glob(".*.tmp")])
        self._saved: dict[Path, tuple[int, set]] = {}
        self._next_save = 0.0
        try:
            self._check(json.loads(json.dumps(config)))
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> "SweepFolder":
        return self

    def __exit__(self, *_: Any) -> None:
        self._lock.close()

    def _check(self, config):
        """Writes the description of the sweep, or compares it with the one in the folder."""
        path = self.path / NAME
        if not path.exists():
            if any(self._runs.glob("*.npz")):
                raise files.RunError(f"{self.path} has runs, but no {NAME}: use another folder")
            files.write_atomically(path, json.dumps(config, indent=1).encode())
            return
        saved = files.read_object(path)
        parts = [k for k in dict.fromkeys([*config, *saved]) if saved.get(k) != config.get(k)]
        # Other axes make other programs; of an older JAX the same program may be another text.
        for cause, effects in (
            ({"hyper", "static"}, {"init", "step", "data", "look", "every"}),
            ({"look"}, {"every"}),
        ):
            parts = [k for k in parts if k not in effects or not cause.intersection(parts)]
        version = f" (made by JAX {saved.get('jax')})" if "jax" in parts else ""
        changes = [_describe_change(k, saved.get(k), config.get(k)) for k in parts if k != "jax"]
        if changes:
            differences = "; ".join(changes)
            raise files.RunError(
                f"{self.path} belongs to another sweep{version}: {differences}; use another folder"
            )

    def load(self, functions: Functions, point: int) -> list[Runs]:
        """Loads the saved runs of one combination of static values, each once, in its furthest
        state.

        Args:
            functions: The traced functions, which give the shapes of the arrays.
            point: Index of the combination.

        Returns:
            Runs, in groups that are at the same step.

        Raises:
            RunError: A file is damaged.
        """
        best: dict[tuple[int, int], tuple[int, Path]] = {}
        loaded = {}
        for path in sorted(self._runs.glob(f"{point}-*.npz")):
            runs = _unpack(path, files.load_arrays(path), functions)
            loaded[path], self._saved[path] = runs, (runs.step, set(runs.names()))
            for name in runs.names():
                if name not in best or best[name][0] < runs.step:
                    best[name] = runs.step, path
        parts = []
        for path, runs in loaded.items():
            chosen = [i for i, name in enumerate(runs.names()) if best[name][1] == path]
            if chosen:
                parts.append(runs.take(np.array(chosen)))
        return parts

    def is_due(self) -> bool:
        """Returns whether writing a snapshot takes little time compared with the computation since
        the last one."""
        return time.monotonic() >= self._next_save

    def save(self, point: int, runs: Runs) -> None:
        """Saves runs, whose state is on the host, and deletes the files that these replace.

        Args:
            point: Index of the combination of static values.
            runs: The runs, all at one step.

        Raises:
            RunError: The runs cannot be written; earlier files stay.
        """
        begun = time.monotonic()
        names = runs.names()
        digest = hashlib.sha256(str(names).encode()).hexdigest()[:8]
        path = self._runs / f"{point}-{names[0][0]}-{names[0][1]}-{digest}.npz"
        files.write_arrays(path, _pack(runs), compressed=False)
        new = set(names)
        self._saved[path] = runs.step, new
        prefix = f"{point}-"
        for other, (step, others) in list(self._saved.items()):
            is_older = other != path and other.name.startswith(prefix) and step <= runs.step
            if is_older and others <= new:
                other.unlink(missing_ok=True)
                del self._saved[other]
        now = time.monotonic()
        self._next_save = now + (now - begun) / MOST_SHARE


def _describe_change(name, old, new):
    """Describes how one part of the sweep differs from the folder's.

    Args:
        name: The part, such as "step" or "hyper".
        old, new: The part in the folder, and in this call.
    """
    if name in ("init", "step", "look"):
        if old and new:
            return f"{name} is another function"
        return f"look= is {'given there, not here' if old else 'given here, not there'}"
    if name == "data":
        return "init or step close over other arrays"
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return f"in {name} {files.describe_difference(old, new)}"
    return files.describe_difference({name: old}, {name: new})


def _pack(runs: Runs) -> dict[str, np.ndarray]:
    """Converts runs to named arrays for a file."""
    arrays = {
        "points": runs.points,
        "seeds": runs.seeds,
        "step": np.int64(runs.step),
        "finite_steps": runs.finite_steps,
        "exempt": runs.exempt,
        "look_steps": np.array(runs.look_steps, np.int64),
    }
    arrays |= {f"state/{i}": leaf for i, leaf in enumerate(runs.state)}
    for name in ("metrics", "looks"):
        arrays |= {f"{name}/{i}": join_pieces(p) for i, p in enumerate(getattr(runs, name))}
    return arrays


def _unpack(path: Path, arrays: dict[str, np.ndarray], functions: Functions) -> Runs:
    """Converts the arrays of a file back to runs."""
    try:
        count, step = len(arrays["seeds"]), int(arrays["step"])
        looks = len(arrays["look_steps"])
        return Runs(
            arrays["points"],
            arrays["seeds"],
            step,
            _read_leaves(arrays, "state", functions.state_shapes, (count,)),
            [[a] for a in _read_leaves(arrays, "metrics", functions.metric_shapes, (count, step))],
            [[a] for a in _read_leaves(arrays, "looks", functions.look_shapes, (count, looks))],
            tuple(arrays["look_steps"].tolist()),
            arrays["finite_steps"],
            arrays["exempt"],
        )
    except (KeyError, ValueError, IndexError) as error:
        raise files.damaged_file_error(path, error) from error


def _read_leaves(arrays: Mapping[str, np.ndarray], name: str, shapes: Sequence[Any], axes: tuple):
    """Reads the saved arrays of one pytree, such as the state of runs, and checks their shapes and
    dtypes.

    Args:
        arrays: {"name/number of the leaf": array}.
        name: Name of the pytree.
        shapes: Shape and dtype of each leaf of one run.
        axes: Sizes of the axes in front, such as that of runs.

    Raises:
        ValueError: A leaf of another shape or dtype.
    """
    leaves = []
    for i, shape in enumerate(shapes):
        array, dtype, expected = arrays[f"{name}/{i}"], shape.dtype, shape.shape
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            data = jax.eval_shape(jax.random.key_data, shape)
            dtype, expected = data.dtype, data.shape
        if array.dtype.kind == "V":  # NumPy has no name for bfloat16 and stores its bytes
            array = array.view(dtype)
        if array.shape != (*axes, *expected) or array.dtype != dtype:
            raise ValueError(f"{name}/{i} has dtype and shape {array.dtype}{list(array.shape)}")
        leaves.append(array)
    return leaves
