"""Counts right, refused and wrong residual profiles over random draws, against ball arithmetic.

Draws networks of every kind (heads, skips with gains from 0 and 1e-30 to 1, post- and pre-norm,
MLPs, causal and local masks, rotary positions) with weight scales from 0.3 to 6, computes their
profiles with one scale for all tokens, by pairs in float32 and in float64 and by the choice among
these, and compares each with a proof: the plain forward pass in ball arithmetic, whose digits are
doubled until the balls are narrow (needs `pip install python-flint`). Wrong is a number off by more
than 1e-2 decades and 1e-3 of its logarithm in any layer; the expected number of wrong ones is 0.
There is no such table in the paper. About an hour on 2 cores, nearly all of it proofs:

    python -m experiments.check_profiles --num_draws=2000
"""

import os

import jax
from absl import flags

from experiments.checks import profiles
from experiments.shell import cli
from rank_collapse.runs.seeds import seed_keys

FLAGS = cli.make_flags("check_profiles", sweeps=False)
flags.DEFINE_integer("num_draws", 2000, "Networks drawn.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("seed", 0, "Base seed.", lower_bound=0, flag_values=FLAGS)
flags.DEFINE_integer("max_digits", 4000, "Of a proof.", lower_bound=50, flag_values=FLAGS)
flags.DEFINE_integer("workers", 0, "Processes (0: cores).", lower_bound=0, flag_values=FLAGS)
flags.DEFINE_list("cases", [], "Kinds of networks, by a part of the name.", flag_values=FLAGS)


def main(options: flags.FlagValues) -> None:
    chosen = cases_of(options.cases)
    workers = options.workers or os.cpu_count() or 1
    each = -(-options.num_draws // len(chosen))
    with cli.open_run(options, "check_profiles", execution=("workers",)) as run:
        parts = {}
        for name in chosen:
            case, keys = profiles.CASES[name], case_keys(options.seed, name, each)
            parts[name] = run.cached(
                name,
                lambda case=case, keys=keys: profiles.compare(
                    case, keys, max_digits=options.max_digits, workers=workers
                ),
            )
            for row in profiles.rows_of({name: parts[name]}):
                print("  ".join(str(value) for value in row.values()), flush=True)
        summary = run.publish(
            rows=lambda: profiles.rows_of(parts), summary=lambda: profiles.summary_of(parts)
        )
        for name, value in summary.items():
            print(f"{name:36s} {value:.6g}")


def case_keys(seed: int, name: str, count: int):
    """Keys of a case's draws: more draws, or fewer cases, leave the others as they are."""
    place = list(profiles.CASES).index(name)
    return jax.vmap(lambda key: jax.random.fold_in(key, place))(seed_keys(seed, count))


def cases_of(wanted: list[str]) -> list[str]:
    """The cases whose name contains one of the wanted words; all where none is given.

    Raises:
        ValueError: A word that no case contains.
    """
    for word in wanted:
        if not any(word in name for name in profiles.CASES):
            raise ValueError(f"cases={word!r} is in none of {sorted(profiles.CASES)}")
    return [n for n in profiles.CASES if not wanted or any(word in n for word in wanted)]


if __name__ == "__main__":
    cli.run(main, FLAGS)
