"""The flags of networks that learn letters, of run_trainability and of the training of others."""

from collections.abc import Sequence

from experiments.lab import cli, vocabulary
from experiments.lab.flags import Flags
from rank_collapse.training.tasks import sequences


def make_flags(selecting: Sequence[str] = ()) -> Flags:
    """The sizes of `trained.designs`, without what chooses its cells but the plain rate and batch
    size."""
    flags = cli.make_flags(
        "trainability", num_seeds=8, shows="failed", traced=("learning_rate",), selecting=selecting
    )
    vocabulary.define(
        flags,
        least={"num_tokens": 1, "n_eval_data": 8},
        num_heads=4,
        d_model=48,
        d_ff=96,
        num_tokens=16,
        num_labels=10,
        n_eval_data=64,
        batch_size=32,
        learning_rate=1e-3,
        seed_chunk=0,
    )
    define = cli.definer(flags)
    define("enum", "task", "reverse", "Task, learned token by token.", sequences.TASKS)
    define("integer", "n_steps", 300, "Training steps.", lower_bound=1)
    return flags
