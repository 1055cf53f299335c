"""The callback of the Trainer of transformers."""

from typing import Any

from rank_collapse.watch.recorder import flatten_row


def make_transformers_callback(watched: Any) -> Any:
    """Makes the callback of `Watch.hf`.

    Args:
        watched: The `Watch`.
    """
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            watched.step = state.global_step + 1

        def on_log(self, args, state, control, logs=None, **kwargs):
            """Adds the last row to the Trainer's history, and its means to what its loggers get."""
            row = (watched.rows or [{}])[-1]
            by_layer = {name: values for name, values in row.items() if isinstance(values, list)}
            state.log_history[-1].update(flatten_row(by_layer))
            for name, values in by_layer.items():
                numbers = [value for value in values if value == value]
                logs |= {name: sum(numbers) / len(numbers)} if numbers else {}

        def on_train_end(self, args, state, control, **kwargs):
            watched.close()

    return Callback()
