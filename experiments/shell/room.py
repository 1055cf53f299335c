"""The names that experiments import `memory_budget` under until they say `MemoryBudget`."""

from experiments.shell.memory_budget import Compiled, define_flag, seeds_done
from experiments.shell.memory_budget import MemoryBudget as Room

__all__ = ["Compiled", "Room", "define_flag", "seeds_done"]
