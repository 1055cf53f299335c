"""What an experiment counts and names while it measures."""

import contextlib


def record_progress(monkeypatch, module):
    """Stands in for the progress of a module; returns its events in their order.

    The first is (number of steps, label, log); then (activity, log) and "step".
    """
    events = []

    class Steps:
        def __init__(self, total, label, *, log):
            events.append((total, label, log))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            events.append("end")

        def advance(self):
            events.append("step")

    @contextlib.contextmanager
    def report_activity(activity, log):
        events.append((activity, log))
        yield

    monkeypatch.setattr(module, "Progress", Steps)
    if hasattr(module, "report_activity"):
        monkeypatch.setattr(module, "report_activity", report_activity)
    return events
