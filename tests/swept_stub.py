"""A binary without a network whose cells take some time, for tests of sweeps that are killed.

python tests/swept_stub.py --sweep="rate=0.5,1,2;depth=1,2,3" --workers=2 --output_dir=FOLDER
"""

import os
import signal
import time

import numpy as np

from experiments.shell import cli, signals

FLAGS = cli.make_flags("stub", num_seeds=3, shows="value")
define = cli.definer(FLAGS)
define("float", "rate", 1.0, "A factor; of 13 the process dies as if memory had run out.")
define("integer", "depth", 1, "A number.")

SECONDS = "STUB_SECONDS"  # that each of the steps of a cell takes
STEPS = 4


def main(options):
    """A cell: a state that goes on from its checkpoints, then what is shown."""
    with cli.open_run(options) as run:

        def measure():
            done, state = run.restore_checkpoint({"w": np.zeros(3)}) or (0, {"w": np.ones(3)})
            run.log(f"begins after step {done} with {os.environ.get('CUDA_VISIBLE_DEVICES')}")
            for step in range(done + 1, STEPS + 1):
                time.sleep(float(os.environ.get(SECONDS, "0")))
                if options.rate == 13:
                    os.kill(os.getpid(), signal.SIGKILL)
                state = {"w": np.sin(options.rate * state["w"] + step * options.depth)}
                run.save_checkpoint(step, state)
                signals.check()
            return state

        found = run.cached("results", measure)
        run.publish(
            rows=lambda: [{"seed": s, "value": float(v)} for s, v in enumerate(found["w"])],
            summary=lambda: {"mean": float(found["w"].mean())},
        )


if __name__ == "__main__":
    cli.run(main, FLAGS)
