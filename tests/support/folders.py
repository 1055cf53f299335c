"""The folders that tests read."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = REPOSITORY / "tests" / "golden"  # small checkpoints, and what `transformers` computes
SHARED_DATA = REPOSITORY.parent / "shared" / "data"  # reference data that tests may lack
