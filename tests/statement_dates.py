"""When each statement's statistic and range last changed, kept in golden/statements.json.

`PYTHONPATH=. python tests/statement_dates.py` writes it, and refuses a statistic or a range that
changed under the date it had. A statistic in other words is the same one: golden/rewordings.json
has both texts, for a reader to compare, and the first of them is what is kept.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from experiments.lab.statements import STATEMENTS
from experiments.verdicts.claims import Statement
from experiments.verdicts.wording import holds_text

GOLDEN = Path(__file__).parent / "golden"
KEPT = GOLDEN / "statements.json"
REWORDINGS = json.loads((GOLDEN / "rewordings.json").read_text("utf-8"))


def dates_of(statements: Mapping[str, Statement]) -> dict[str, list[str]]:
    """{key: [digest of what decides it, date of its last change]}, of those with a range."""
    return {
        key: [_digest(f"{first_wording(key, own)}\n{holds_text(own)}"), own.changed]
        for key, own in statements.items()
        if own.claimed is not None
    }


def first_wording(key: str, own: Statement) -> str:
    """The text that a statistic had before it was put in other words."""
    texts = REWORDINGS.get(key, {})
    return texts["was"] if own.statistic == texts.get("is") else own.statistic


def under_old_dates(kept: Mapping[str, list[str]], now: Mapping[str, list[str]]) -> list[str]:
    """Statements whose statistic or range is another than that kept, under no later date."""
    return [
        key
        for key, (digest, changed) in now.items()
        if key in kept and digest != kept[key][0] and changed <= kept[key][1]
    ]


def _digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:12]


if __name__ == "__main__":
    now = dates_of(STATEMENTS)
    if KEPT.exists() and (wrong := under_old_dates(json.loads(KEPT.read_text()), now)):
        raise SystemExit(f"changed, with the date of an earlier change: {', '.join(wrong)}")
    KEPT.write_text(json.dumps(now, indent=1) + "\n")
