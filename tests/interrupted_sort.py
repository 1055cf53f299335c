"""run_sort as it is when Ctrl-C comes after its second checkpoint: a process that tests start."""

from experiments import run_sort
from experiments.lab import cli
from rank_collapse.runs.folder import RunFolder

SMALL = (
    "--depth=1",
    "--width=2",
    "--hidden_dim=8",
    "--n_epochs=4",
    "--n_repeat=1",
    "--n_paths=2",
    "--n_train_data=9",
    "--n_eval_data=5",
    "--batch_sz=4",
    "--num_seeds=3",
    "--num_labels=4",
    "--seq_len=3",
    "--epochs_per_chunk=1",
    "--checkpoint_seconds=0",
    "--keep_models",
)

if __name__ == "__main__":
    save = RunFolder.save_checkpoint

    def interrupt(run, step, state, **more):
        save(run, step, state, **more)
        if step == 2:
            raise KeyboardInterrupt

    RunFolder.save_checkpoint = interrupt
    cli.run(run_sort.main, run_sort.FLAGS)
