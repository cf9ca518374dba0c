"""The checkpoints of a run, and the evaluations that decide which one is best and when to stop."""

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jvpipe
from jvpipe.cli.command_options import MOST
from jvpipe.cli.job import Job
from jvpipe.cli.processes import Watch
from jvpipe.runtime.engine.losses import nan_leaves
from jvpipe.runtime.state.checkpoints.background import Writer
from jvpipe.runtime.state.checkpoints.generations import damage_of
from jvpipe.runtime.state.checkpoints.held_folder import place_of
from jvpipe.session.checkpoints import Snapshot, snapshot
from jvpipe.session.evaluation import weighed
from jvpipe.util.pattern import compare, maybe, number, whole_in
from jvpipe.util.replaced_file import replace_text

_KEPT = {
    "best_loss": maybe(number),
    "best_step": whole_in(0, MOST),
    "since": whole_in(0, MOST),
}


@dataclass(frozen=True)
class Evaluations:
    """A summary of a run's evaluations so far.

    Attributes:
        best_loss: the lowest loss; None if no loss was finite yet.
        best_step: the step after which this loss was measured.
        since: the number of evaluations since then.

    >>> seen = Evaluations().after(10, 2.0).after(20, 1.5).after(30, 1.75)
    >>> seen.best_step, seen.since, seen.over(2), seen.after(40, math.nan).over(2)
    (20, 1, False, True)
    """

    best_loss: float | None = None
    best_step: int = 0
    since: int = 0

    def after(self, step: int, loss: float) -> "Evaluations":
        """Returns the summary after one more evaluation; NaN is never the lowest loss."""
        if loss < (math.inf if self.best_loss is None else self.best_loss):
            return Evaluations(loss, step)
        return replace(self, since=self.since + 1)

    def over(self, patience: int | None) -> bool:
        """Tells whether a run stops early, `patience` evaluations after the best one."""
        return patience is not None and self.since >= patience

    def told(self, patience: int | None) -> str:
        """Returns a run's last line of output, about its best evaluation; empty without one."""
        if self.best_loss is None:
            return ""
        stopped = ""
        if self.over(patience):
            stopped = f"; stopped early, as {self.since} evaluations since were no better"
        return (
            f"best held-out loss {self.best_loss:.4f} after step {self.best_step} (see best.json)"
            f"{stopped}\n"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the evaluations as JSON for a checkpoint; empty if there was none."""
        return {} if self == Evaluations() else asdict(self)


def evaluations_before(job: Job) -> Evaluations:
    """Returns the evaluations in the last checkpoint of a resumed run; none for a new run.

    Raises:
        DamageError: the checkpoint's entry about evaluations is damaged.
    """
    kept = job.run.checkpoints() if job.options.resume else []
    saved = jvpipe.checkpoint_extra(kept[-1]).get("evaluations", {}) if kept else {}
    if saved == {}:
        return Evaluations()
    with damage_of(kept[-1]):
        compare("evaluations", saved, _KEPT)
    return Evaluations(**saved)


def held_out_loss(job: Job, state: Any, watch: Watch) -> float | None:
    """Returns the loss of all held-out batches together; None if the data has no such batches.

    Args:
        job: the run.
        state: the state to evaluate.
        watch: is notified before each batch, so that a long evaluation does not look like a hang.
    """
    total = weights = 0.0
    for batch in job.data.held_out:
        watch.progress("the evaluation")
        metrics, counted = weighed(job.pipe.session, state, batch)
        if weight := float(counted):  # a batch without weight has no loss: its quotient is NaN
            total += float(metrics["loss"]) * weight
            weights += weight
    if not job.data.held_out:
        return None
    return total / weights if weights else math.nan


# A thread writes checkpoints while training continues. best.json names the best checkpoint.


class Keeper:
    """A writer of a run's checkpoints; all processes of the run save together.

    Training waits only until a state has been copied to the host. A thread then writes the copy. If
    the write fails, a run of one process raises the error after the next step. The processes of a
    larger run must all fail together, so they raise it at the next save or at the end, where each
    process learns whether another one has failed.
    """

    def __init__(self, job: Job, opened: ExitStack) -> None:
        self._job, self._writer = job, opened.enter_context(Writer())
        self._place = place_of(job.run.path)

    def check(self) -> None:
        """Raises the error of the last write if that failed and the run has one process."""
        if self._job.hosts.count == 1:
            self._writer.check()

    def finish(self) -> None:
        """Waits until the last checkpoint is written; raises the error if the write failed."""
        self._job.hosts.together("the checkpoint", self._writer.wait)

    def save(self, state: Any, step: int, architecture: Sequence[str], seen: Evaluations) -> None:
        """Begins a checkpoint of the state and of the position in the data.

        When the checkpoint is complete, older checkpoints that the run need not keep are deleted.

        Args:
            state: the state after the step.
            step: the number of the step, from 1.
            architecture: the names of the architecture's blocks; used only in a search.
            seen: the evaluations so far.

        Raises:
            ValueError: a parameter is NaN, or the folder of the run is gone. Then no checkpoint is
                written or deleted.
        """
        self.finish()  # so that the host never holds two copies of a state
        job = self._job
        # The checkpoint includes the position in the data, so that both always match.
        extra: dict[str, Any] = {
            "step": step,
            "data": job.data.train.get_state(),
            "digest": job.data.digest,
        }
        if job.search:
            extra["architecture"] = list(architecture)
        if evaluations := seen.to_json():
            extra["evaluations"] = evaluations
        copied = snapshot(job.pipe.session, state, extra)
        job.hosts.together("parameters", partial(self._check, copied, step))
        self._writer.begin(partial(self._write, copied, step, seen))

    def _check(self, copied: Snapshot, step: int) -> None:
        """Raises ValueError if a parameter is NaN, or if the folder of the run is gone."""
        run = self._job.run
        if place_of(run.path) != self._place:
            raise ValueError(
                f"{run.path.absolute()} was moved or deleted during the run, so the state after "
                f"step {step} is not saved. To continue from its last checkpoint, move the folder "
                "back or give its new path by --run-dir, and use --resume"
            )
        if lost := next(nan_leaves(copied.arrays["parameter"]), None):
            raise ValueError(
                f"after step {step} parameter '{lost}' is NaN: the state is not saved. Earlier "
                "checkpoints are intact; a lower learning rate may help"
            )

    def _write(self, copied: Snapshot, step: int, seen: Evaluations) -> None:
        copied.write(self._job.run.checkpoint(step))
        tidy(self._job, seen)


def tidy(job: Job, seen: Evaluations) -> None:
    """Writes best.json, and deletes the checkpoints that the run need not keep.

    The run keeps its last `--keep` checkpoints and the best one. Incomplete checkpoints of a killed
    run are also deleted. Only the first process does this.

    Args:
        job: the run.
        seen: the evaluations so far.
    """
    if job.hosts.process:
        return
    run, best_step = job.run, seen.best_step
    # best.json is replaced before checkpoints are deleted, so it never names a deleted one.
    if best_step:
        saved = {
            "step": best_step,
            "held_out_loss": seen.best_loss,
            "checkpoint": run.checkpoint(best_step).relative_to(run.path).as_posix(),
        }
        replace_text(run.best, json.dumps(saved, indent=1) + "\n")
    else:
        # best.json of an earlier start may name a checkpoint that has been moved away since.
        run.best.unlink(missing_ok=True)
    run.prune(job.options.keep, best_step)
