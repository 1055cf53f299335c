"""Error rates of `rank-collapse agree` in rounded random networks, as docs/agree.md has them.

    python -m tests_docs.agree_rates 100 20
    python -m tests_docs.agree_rates 100 20 2000000        (other networks: their first seed)

Of so many clean pairs it prints how many are called different, and the same of half as many pairs
of one and of two tokens; of each kind of mistake, planted in one layer of so many networks, how
many are found in that layer and part, and of these how many are named. It does so three times: from
branches, from states alone, and where one run's sublayers take in the other run's stream (a replay
with two probes).
"""

import re
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from rank_collapse.agree.comparison import compare_recordings
from rank_collapse.agree.recording import open_recording, write_recording
from rank_collapse.agree.replay import Replay
from tests.oracles.rounded_transformer import FAULTS, Fault, draw_model, run

NOISE = 2.0**-10
FIRST, FAULTY = 1_000_000, 100_000  # the first seed, from which no threshold was chosen
COLUMNS = ("branches", "states", "replay")
# {kind: (sizes, what the answer must say)}; those of None are not planted by `run`.
KINDS = {
    "attention scaled": ((0.02, 0.05, 0.2, 0.5), "multiplied by"),
    "MLP scaled": ((0.02, 0.05, 0.2, 0.5), "multiplied by"),
    "skip scaled": ((0.02, 0.05, 0.2, 0.5), "multiplied by"),
    "noise": ((0.02, 0.05, 0.1, 0.3, 0.5), None),
    "bias": ((0.02, 0.05, 0.2, 0.5), "a bias"),
    "head scaled": ((0.02, 0.05, 0.2, 0.5), None),
    "temperature": ((0.02, 0.05, 0.2, 0.5), "queries and keys|positions differ"),
    "dropout": ((0.02, 0.1, 0.5), "dropout"),
    "MLP absent": ((1.0,), "absent"),
    "window": ((4,), "window"),
    "theta": ((0.1,), "queries and keys|positions differ"),
    "rotary pairs": ((0,), "queries and keys|positions differ"),
    "heads repeated in another order": ((0,), "order of the key-value heads"),
    "output transposed": ((0,), "a transposed"),
    "norm with 1 + weight": ((0,), None),
    "no causal mask": ((0,), "a causal mask in one run alone"),
    "embedding": ((0,), "root of the width"),
    "off by one layer": ((None,), "off by one layer"),
    "tokens in another order": ((None,), "tokens stand in another order"),
    "state after a norm": ((None,), "after a norm"),
}
# Where tokens attend to all, the states do not show which part of the attention differs.
CAUSAL = ("temperature", "window", "theta", "rotary pairs", "no causal mask")
PRE_NORM = ("skip scaled", "norm with 1 + weight", "state after a norm")


def compare(folder, model, dtype, stream, fault=None, change=None):
    """Return the answers from branches, from states alone, and of a replay.

    Args:
        folder: For the recordings.
        model: The network.
        dtype, stream, fault: Of the second run.
        change: From its arrays to those that are recorded.
    """
    first, second = run(model), run(model, dtype, stream, fault)
    second = change(second) if change else second
    runs = {"a": (first, {}), "b": (second, {})}
    runs["replay"] = (run(model, inputs=second), {"inputs": "b"})
    for seed in range(2):
        noisy = run(model, inputs=second, noise=NOISE, seed=seed)
        runs[f"noisy {seed}"] = (noisy, {"noise": str(NOISE)})
    opened = {name: _write(folder / f"{name}.safetensors", *r) for name, r in runs.items()}
    a, b, still, *noisy = opened.values()
    states = [_write(folder / f"{k}.npz", {"residual": runs[k][0]["residual"]}) for k in "ab"]
    return (
        compare_recordings(a, b),
        compare_recordings(*states),
        compare_recordings(a, b, Replay(0, still, (still, *noisy))),
    )


def _write(path, arrays, metadata=None):
    """Write a recording; returns it opened."""
    write_recording(path, arrays, metadata)
    return open_recording(path)


def count_alarms(folder, count, tokens, first):
    """Count clean pairs that are called different, and those of which nothing can be said.

    Args:
        folder: For the recordings.
        count: Pairs.
        tokens: Tokens of each; None for those that were drawn.
        first: The first seed.
    """
    alarms, silent = np.zeros(3, int), np.zeros(3, int)
    for seed in range(first, first + count):
        model, rng = draw_model(seed)
        if tokens:
            model = replace(model, tokens=model.tokens[:tokens], spike=False)
        dtype = str(rng.choice(["bfloat16", "bfloat16", "float16"]))
        answers = compare(folder, model, dtype, rng.choice([None, "float32"]))
        alarms += [answer.agree is False for answer in answers]
        silent += [answer.agree is None for answer in answers]
    return alarms, silent


def plant(kind, size, seed):
    """Return a network, its mistake, a change of its arrays, and the place of the mistake."""
    model, rng = draw_model(seed, **_choose_form(kind))
    layer = int(rng.integers(model.depth))
    if kind in FAULTS:
        return model, Fault(kind, layer, size), None, (layer, FAULTS[kind][1])
    if kind == "embedding":
        return model, Fault(kind, None), None, None
    order = rng.permutation(model.tokens.shape[0])

    def change(arrays):
        states = arrays["residual"]
        if kind == "off by one layer":
            states = np.concatenate([states[1:], states[-1:]])
        elif kind == "tokens in another order":
            return {name: array[:, order] for name, array in arrays.items()}
        else:
            last = states[-1] / np.sqrt((states[-1] ** 2).mean(axis=-1, keepdims=True))
            states = np.concatenate([states[:-1], last[None].astype(states.dtype)])
        return arrays | {"residual": states}

    has_place = kind == "state after a norm"
    return model, None, change, (model.depth - 1, "layer") if has_place else None


def _choose_form(kind):
    """Return the form of network that a mistake needs."""
    form = {"causal": True} if kind in CAUSAL else {}
    return form | ({"post_norm": False} if kind in PRE_NORM else {})


def _is_found(answer, place, column):
    """Whether a mistake is found where it is."""
    if place is None:
        return answer.agree is False and answer.first is None
    layer, part = place
    return answer.first == {"layer": layer, "part": "layer" if column == "states" else part}


def main(num_clean, num_faulty, first=FIRST):
    """Prints the rates."""
    start = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        print(f"clean pairs, by {', '.join(COLUMNS)}:")
        for tokens, count in ((None, num_clean), (1, num_clean // 2), (2, num_clean // 2)):
            alarms, silent = count_alarms(folder, count, tokens, first)
            text = f"{tokens} tokens" if tokens else "8 to 48 tokens"
            print(f"{text}: of {count}, {alarms} are called different, {silent} are not judged")
        print("| mistake | size | branches | states alone | replay | named |")
        print("|---|---|---|---|---|---|")
        others = np.zeros(3, int)
        for kind, (sizes, words) in KINDS.items():
            for size in sizes:
                counts, named = np.zeros(3, int), np.zeros(3, int)
                for seed in range(first + FAULTY, first + FAULTY + num_faulty):
                    model, fault, change, place = plant(kind, size, seed)
                    answers = compare(folder, model, "bfloat16", None, fault, change)
                    hits = [_is_found(a, place, c) for a, c in zip(answers, COLUMNS, strict=True)]
                    counts += hits
                    others += [
                        answer.first is not None and not hit
                        for answer, hit in zip(answers, hits, strict=True)
                    ]
                    if words:
                        says = [bool(re.search(words, a.kind or "")) for a in answers]
                        named += np.logical_and(hits, says)
                shares = " | ".join(f"{count / num_faulty:.0%}" for count in counts)
                names = f"{named[-1]} of {counts[-1]}" if words else ""
                print(f"| {kind} | {size or ''} | {shares} | {names} |", flush=True)
    print(f"in another place: {others}; {time.process_time() - start:.0f} s of CPU")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
