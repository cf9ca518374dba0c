"""What is kept of a run while it trains: checkpoints, written beside the steps, and which of them is the best."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from jvpipe.cli.evaluating import Evaluations
from jvpipe.cli.job import Job
from jvpipe.report.metrics import replace_text
from jvpipe.runtime.checkpoints.background import Writer
from jvpipe.runtime.losses import nan_leaves
from jvpipe.session.checkpoints import Snapshot, snapshot


class Keeper:
    """Saves the states of a run. A step waits for the copy to the host alone; of several processes all save together.

    What a write fails with is raised at the next step, of several processes at the next save, or at the end.
    """

    def __init__(self, job: Job, opened: ExitStack) -> None:
        self._job, self._writer = job, opened.enter_context(Writer())
        self._place = job.run.place()

    def check(self) -> None:
        """Raises what the last write failed with, if it is known by now."""
        if self._job.hosts.count == 1:
            self._writer.check()

    def finish(self) -> None:
        """Waits for the last checkpoint."""
        self._job.hosts.together("the checkpoint", self._writer.wait)

    def save(self, state: Any, step: int, architecture: Sequence[str], seen: Evaluations) -> None:
        """Saves the state and the place in the data, together and whole; once they are, older checkpoints go.

        Args:
            state: that after the step.
            step: its number, from 1.
            architecture: the names of its blocks, if the run searches.
            seen: the evaluations so far.

        Raises:
            ValueError: a parameter is NaN, or the folder of the run is gone; the older checkpoints stay.
        """
        self.finish()  # so that two copies of the state are never on the host
        job = self._job
        extra = {"step": step, "data": job.data.train.get_state(), "digest": job.data.digest}
        extra |= {"architecture": list(architecture)} if job.search else {}
        extra |= {"evaluations": kept} if (kept := seen.to_json()) else {}
        copied = snapshot(job.pipe.session, state, extra)

        def check() -> None:
            if job.run.place() != self._place:
                path = job.run.path.absolute()
                raise ValueError(
                    f"{path} was moved away while the run was at work: the state after step {step} is not saved. "
                    "Move it back there, or name where it is now with --run-dir: --resume goes on from its last "
                    "checkpoint"
                )
            if lost := next(nan_leaves(copied.arrays["parameter"]), None):
                raise ValueError(
                    f"after step {step} parameter '{lost}' is NaN: the state is not saved. The checkpoints before it "
                    "are whole; a lower learning rate may help"
                )

        job.hosts.together("parameters", check)
        self._writer.begin(partial(self._write, copied, step, seen))

    def _write(self, copied: Snapshot, step: int, seen: Evaluations) -> None:
        job = self._job
        copied.write(job.run.checkpoint(step))
        if job.hosts.process == 0:
            tidy(job, seen)


def tidy(job: Job, seen: Evaluations) -> None:
    """Says in best.json which checkpoint is the best, and lets older ones go, also those that a killed run had left.

    Args:
        job: the run.
        seen: the evaluations so far.
    """
    if seen.best_step:
        checkpoint = job.run.checkpoint(seen.best_step).relative_to(job.run.path)
        told = {
            "step": seen.best_step,
            "held_out_loss": seen.best_loss,
            "checkpoint": checkpoint.as_posix(),
        }
        replace_text(job.run.best, json.dumps(told, indent=1) + "\n")
    else:
        job.run.best.unlink(missing_ok=True)  # of a checkpoint that was moved away
    job.run.prune(job.options.keep, seen.best_step)
