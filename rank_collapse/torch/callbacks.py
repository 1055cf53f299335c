"""Callbacks of the trainers of transformers and of Lightning."""

from typing import Any

from rank_collapse.torch.logs import flat


def of_transformers(watched: Any) -> Any:
    """See `Watch.hf`."""
    from transformers import TrainerCallback

    watched.deferred = []

    def finish(state, args, logged=None):
        """Rows of the step before, with the Trainer's loss where it logged it, into its log."""
        rows, watched.deferred = watched.deferred, []
        for row in rows:
            if logged is not None:
                row["loss"] = float(logged["loss"])
            elif args.gradient_accumulation_steps > 1:  # the model's is that of one part of a step
                row.pop("loss", None)
            watched.report(row)
            by_layer = {name: own for name, own in row.items() if isinstance(own, list)}
            if logged is None:
                state.log_history.append({**dict(flat(by_layer)), "step": row["step"]})
                continue
            state.log_history[-1].update(flat(by_layer))
            for name, own in by_layer.items():
                there = [value for value in own if value == value]
                logged |= {name: sum(there) / len(there)} if there else {}

    class Callback(TrainerCallback):
        def on_step_begin(self, args, state, control, **others):
            watched.notes.attempt(None, "the Trainer's log", finish, state, args)
            watched.follow(state.global_step, 1)

        def on_log(self, args, state, control, logs=None, **others):
            if "loss" in (logs or {}):
                watched.notes.attempt(None, "the Trainer's log", finish, state, args, logs)

        def on_train_end(self, args, state, control, **others):
            watched.notes.attempt(None, "the Trainer's log", finish, state, args)
            watched.close()

    return Callback()


def of_lightning(watched: Any) -> Any:
    """See `Watch.lightning`."""
    from lightning.pytorch import Callback

    class Watching(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            watched.follow(trainer.global_step, 0)

        def on_fit_end(self, trainer, module):
            watched.close()

    return Watching()
