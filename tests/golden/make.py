"""Writes tests/golden: small random networks, and what `transformers` or torch computes on them.

    python -m tests.golden.make

Run it again when a case of `architectures.GOLDEN` or `torch_transformer` changes, with torch and
transformers installed (the versions used are in tests/golden/versions.json). Every run draws the
same weights.
"""

import json
import shutil

import numpy as np
import torch
import transformers

from tests.oracles import architectures, torch_transformer
from tests.support.folders import GOLDEN


def main() -> None:
    """Makes every golden case anew."""
    for name in architectures.GOLDEN:
        folder = GOLDEN / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        case = architectures.CASES[name]
        model = architectures.build(case)
        architectures.save(model, folder, case.saved)
        arguments = architectures.inputs(model)
        np.savez_compressed(
            folder / "expected.npz",
            **{f"in/{k}": v for k, v in arguments.items()},
            **{f"out/{k}": v for k, v in architectures.run(model, arguments).items()},
        )
        (folder / "generation_config.json").unlink(missing_ok=True)
    for placement in torch_transformer.PLACEMENTS:
        path = GOLDEN / torch_transformer.golden_name(placement)
        np.savez_compressed(path, **torch_transformer.run(placement))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    (GOLDEN / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
