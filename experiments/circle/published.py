"""How often the published code itself lets the two walkers fall together.

Its three commands at three widths, with --seed 1 to 8 in each of the nine cells; fallen are those
whose walkers end nearer than `results.TOGETHER`. The published picture is of one run at each of
three widths, and its README's command has --seed 2: of the eight seeds at width 32 the one, without
a flag, that falls.
"""

SEEDS = 8
FELL = {
    ("base", 32): 1, ("base", 64): 3, ("base", 128): 1,
    ("circle_skip", 32): 0, ("circle_skip", 64): 0, ("circle_skip", 128): 0,
    ("mlp", 32): 2, ("mlp", 64): 1, ("mlp", 128): 2,
}  # fmt: skip
