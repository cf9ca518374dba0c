"""What is kept of a run while it trains: checkpoints beside the steps, by which evaluations, and when it ends early."""

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
    """The evaluations of a run so far: the least loss, the step that it came after, and how many followed it.

    >>> seen = Evaluations().after(10, 2.0).after(20, 1.5).after(30, 1.75)
    >>> seen.best_step, seen.since, seen.over(2), seen.after(40, math.nan).over(2)
    (20, 1, False, True)
    """

    best_loss: float | None = None
    best_step: int = 0
    since: int = 0

    def after(self, step: int, loss: float) -> "Evaluations":
        """Adds an evaluation; a loss that is not a number is no better one."""
        if loss < (math.inf if self.best_loss is None else self.best_loss):
            return Evaluations(loss, step)
        return replace(self, since=self.since + 1)

    def over(self, patience: int | None) -> bool:
        """Tells whether so many evaluations were no better than the best."""
        return patience is not None and self.since >= patience

    def told(self, patience: int | None) -> str:
        """Says at the end of a run which was the best; nothing if there was none."""
        if self.best_loss is None:
            return ""
        stopped = (
            f"; stopped early, as {self.since} evaluations since were no better"
            if self.over(patience)
            else ""
        )
        return f"best held-out loss {self.best_loss:.4f} after step {self.best_step}, which best.json names{stopped}\n"

    def to_json(self) -> dict[str, Any]:
        """Returns what checkpoints keep; nothing if there was none."""
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
    """Computes the mean loss of the batches that are held out; None without any. The run does not change.

    Args:
        job: the run.
        state: the newest.
        watch: is told that it goes on.
    """
    losses = []
    for batch in job.data.held_out:
        watch.progress("the evaluation")
        losses.append(float(job.pipe.evaluate(state, batch)["loss"]))
    return sum(losses) / len(losses) if losses else None


# What is kept of a run while it trains: checkpoints, written beside the steps, and which of them is
# the best.


class Keeper:
    """Saves the states of a run. A step waits for the copy to the host alone; of several processes all save together.

    What a write fails with is raised at the next step, of several processes at the next save, or at
    the end.
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
        """Saves the state and the place in the data, together and whole.

        Once they are, older checkpoints go.

        Args:
            state: that after the step.
            step: its number, from 1.
            architecture: the names of its blocks, if the run searches.
            seen: the evaluations so far.

        Raises:
            ValueError: a parameter is NaN, or the folder of the run is gone; the older checkpoints
                stay.
        """
        self.finish()  # so that two copies of the state are never on the host
        job = self._job
        # With the state in one checkpoint, so that none is newer than the other.
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
    # The file is replaced before older checkpoints go: it never names one that is gone.
    if seen.best_step:
        checkpoint = job.run.checkpoint(seen.best_step).relative_to(job.run.path)
        saved = {
            "step": seen.best_step,
            "held_out_loss": seen.best_loss,
            "checkpoint": checkpoint.as_posix(),
        }
        replace_text(job.run.best, json.dumps(saved, indent=1) + "\n")
    else:
        job.run.best.unlink(missing_ok=True)  # of a checkpoint that was moved away
    job.run.prune(job.options.keep, seen.best_step)
