"""Error rates of `rank-collapse agree` in rounded random networks, as docs/agree.md has them.

    PYTHONPATH=.:tests python tests/agree_rates.py 500 60

Prints how many of so many clean pairs are called different, and of so many pairs with a planted
mistake in one layer, how many are found in that layer: with branches, and from states alone.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from rounded_transformer import Fault, draw_model, run

from rank_collapse.agree.comparison import compare_files
from rank_collapse.agree.recording import record

SIZES = [
    *[(kind, size) for kind in ("attention scaled", "MLP scaled") for size in (0.02, 0.05, 0.2)],
    *[("noise", size) for size in (0.02, 0.05, 0.1, 0.3)],
    *[("bias", size) for size in (0.02, 0.05, 0.2)],
    *[("head scaled", size) for size in (0.05, 0.2, 0.5)],
    *[("temperature", size) for size in (0.05, 0.2)],
    *[("skip scaled", size) for size in (0.02, 0.05)],
    *[("window", 4), ("theta", 0.1), ("rotary pairs", 0), ("dropout", 0.1)],
    *[("heads repeated in another order", 0), ("output transposed", 0)],
    ("norm with 1 + weight", 0),
]  # fmt: skip
PARTS = {"MLP scaled": "mlp", "skip scaled": "layer"}
PRE_NORM = ("skip scaled", "norm with 1 + weight")


def compare(folder, first, second, names):
    """Compare two recordings with some of their arrays."""
    for name, arrays in (("a", first), ("b", second)):
        record({key: arrays[key] for key in names}, folder / f"{name}.npz")
    return compare_files(folder / "a.npz", folder / "b.npz")


def main(num_clean, num_faulty):
    """Prints the rates."""
    everything = ("residual", "attention_branch", "mlp_branch")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        alarms = np.zeros(2, int)
        for seed in range(100_000, 100_000 + num_clean):
            model, rng = draw_model(seed)
            dtype = str(rng.choice(["bfloat16", "bfloat16", "float16"]))
            pair = run(model), run(model, dtype, rng.choice([None, "float32"]))
            answers = [compare(folder, *pair, names) for names in (everything, ("residual",))]
            alarms += [answer.agree is False for answer in answers]
        print(f"clean: {alarms[0]} and {alarms[1]} of {num_clean} called different", flush=True)
        print(f"{'mistake':32} size  with branches, states alone, in another layer")
        for kind, size in SIZES:
            right, wrong = np.zeros(2, int), 0
            for seed in range(200_000, 200_000 + num_faulty):
                form = {"post_norm": False} if kind in PRE_NORM else {}
                model, rng = draw_model(seed, **form)
                layer = int(rng.integers(model.depth))
                pair = run(model), run(model, "bfloat16", None, Fault(kind, layer, size))
                for index, names in enumerate((everything, ("residual",))):
                    place = compare(folder, *pair, names).first
                    part = PARTS.get(kind, "attention") if index == 0 else "layer"
                    right[index] += place == {"layer": layer, "part": part}
                    wrong += place not in (None, {"layer": layer, "part": part})
            shares = "   ".join(f"{hits / num_faulty:4.0%}" for hits in right)
            print(f"{kind:32} {size:4}  {shares}   {wrong}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
