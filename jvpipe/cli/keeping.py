"""The checkpoints of a run, the evaluations that decide which is the best, and early stopping."""

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jvpipe
from jvpipe.cli.job import Job
from jvpipe.cli.options import MOST
from jvpipe.cli.processes import Watch
from jvpipe.report.metrics import replace_text
from jvpipe.runtime.engine.losses import nan_leaves
from jvpipe.runtime.state.checkpoints.background import Writer
from jvpipe.runtime.state.checkpoints.generations import damage_of
from jvpipe.session.checkpoints import Snapshot, snapshot
from jvpipe.util.pattern import compare, maybe, number, whole_in

_KEPT = {
    "best_loss": maybe(number),
    "best_step": whole_in(0, MOST),
    "since": whole_in(0, MOST),
}


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of a run so far.

    They are the least loss, the step after which it was measured, and the number of evaluations
    since then.

    >>> seen = Evaluations().after(10, 2.0).after(20, 1.5).after(30, 1.75)
    >>> seen.best_step, seen.since, seen.over(2), seen.after(40, math.nan).over(2)
    (20, 1, False, True)
    """

    best_loss: float | None = None
    best_step: int = 0
    since: int = 0

    def after(self, step: int, loss: float) -> "Evaluations":
        """Adds an evaluation; a loss that is not a number does not count as better."""
        if loss < (math.inf if self.best_loss is None else self.best_loss):
            return Evaluations(loss, step)
        return replace(self, since=self.since + 1)

    def over(self, patience: int | None) -> bool:
        """Tells whether `patience` evaluations or more have followed the best one."""
        return patience is not None and self.since >= patience

    def told(self, patience: int | None) -> str:
        """Returns a run's last line, about the best evaluation; empty if there was none."""
        if self.best_loss is None:
            return ""
        stopped = (
            f"; stopped early, as {self.since} evaluations since were no better"
            if self.over(patience)
            else ""
        )
        return f"best held-out loss {self.best_loss:.4f} after step {self.best_step}, which best.json names{stopped}\n"

    def to_json(self) -> dict[str, Any]:
        """Returns the values that checkpoints keep; empty if there was no evaluation."""
        return {} if self == Evaluations() else asdict(self)


def evaluations_before(job: Job) -> Evaluations:
    """Reads the evaluations that the last checkpoint of a resumed run holds."""
    kept = job.run.checkpoints() if job.options.resume else []
    saved = jvpipe.checkpoint_extra(kept[-1]).get("evaluations", {}) if kept else {}
    if not saved and isinstance(saved, dict):
        return Evaluations()
    with damage_of(kept[-1]):
        compare("evaluations", saved, _KEPT)
    return Evaluations(**saved)


def held_out_loss(job: Job, state: Any, watch: Watch) -> float | None:
    """Returns the mean loss of the held-out batches, without changing the run; None if none exist.

    Args:
        job: the run.
        state: the newest state.
        watch: is told that the run goes on.
    """
    losses = []
    for batch in job.data.held_out:
        watch.progress("the evaluation")
        losses.append(float(job.pipe.evaluate(state, batch)["loss"]))
    return sum(losses) / len(losses) if losses else None


# Checkpoints are written by a thread beside the training, and best.json names the best of them.


class Keeper:
    """A writer of a run's states; all processes of the run save together.

    A step waits only until its state has been copied to the host; a thread writes the copy. If the
    write fails, its error is raised at the next step. If there are several processes, it is raised
    at the next save or at the end, because only there do all processes meet.
    """

    def __init__(self, job: Job, opened: ExitStack) -> None:
        self._job, self._writer = job, opened.enter_context(Writer())
        self._place = job.run.place()

    def check(self) -> None:
        """Raises the error of the last write, if it has failed by now."""
        if self._job.hosts.count == 1:
            self._writer.check()

    def finish(self) -> None:
        """Waits until the last checkpoint is written."""
        self._job.hosts.together("the checkpoint", self._writer.wait)

    def save(self, state: Any, step: int, architecture: Sequence[str], seen: Evaluations) -> None:
        """Saves the state and the place in the data in one checkpoint.

        Older checkpoints are deleted once it is whole.

        Args:
            state: the state after the step.
            step: the number of the step, from 1.
            architecture: the names of the architecture's blocks, in a search.
            seen: the evaluations so far.

        Raises:
            ValueError: a parameter is NaN, or the folder of the run is gone; no checkpoint is
                written or deleted.
        """
        self.finish()  # so that the host never holds two copies of the state
        job = self._job
        # The place in the data is part of the checkpoint, so that it always fits the state.
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
    """Writes best.json, and deletes older checkpoints, with those that a killed run has left.

    Args:
        job: the run.
        seen: the evaluations so far.
    """
    # best.json is replaced before checkpoints are deleted, so it never names a deleted one.
    if seen.best_step:
        checkpoint = job.run.checkpoint(seen.best_step).relative_to(job.run.path)
        saved = {
            "step": seen.best_step,
            "held_out_loss": seen.best_loss,
            "checkpoint": checkpoint.as_posix(),
        }
        replace_text(job.run.best, json.dumps(saved, indent=1) + "\n")
    else:
        job.run.best.unlink(missing_ok=True)  # it may name a checkpoint that was moved away
    job.run.prune(job.options.keep, seen.best_step)
