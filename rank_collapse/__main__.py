"""`python -m rank_collapse` is the command `rank-collapse`."""

from rank_collapse.command import run

if __name__ == "__main__":
    run()
