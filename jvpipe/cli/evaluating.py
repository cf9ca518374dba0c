"""Evaluations of a run: the loss on batches that training never sees, the best one, and when to stop."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import jvpipe
from jvpipe.cli.job import Job
from jvpipe.cli.processes import Watch
from jvpipe.ir.pattern import compare, maybe, number, whole
from jvpipe.runtime.checkpoints.generations import damage_of

_KEPT = {"best_loss": maybe(number), "best_step": whole(0, 2**31 - 1), "since": whole(0, 2**31 - 1)}


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
        """With one more; a loss that is no number is none that is better."""
        if loss < (math.inf if self.best_loss is None else self.best_loss):
            return Evaluations(loss, step)
        return replace(self, since=self.since + 1)

    def over(self, patience: int | None) -> bool:
        """Whether so many evaluations were no better than the best."""
        return patience is not None and self.since >= patience

    def told(self, patience: int | None) -> str:
        """In words, once the run has ended; nothing where there was none."""
        if self.best_loss is None:
            return ""
        stopped = (
            f"; stopped early, as {self.since} evaluations since were no better"
            if self.over(patience)
            else ""
        )
        return f"best held-out loss {self.best_loss:.4f} after step {self.best_step}, which best.json names{stopped}\n"

    def to_json(self) -> dict[str, Any]:
        """As checkpoints keep it; nothing where there was none."""
        return {} if self == Evaluations() else asdict(self)

    @staticmethod
    def from_json(kept: dict[str, Any]) -> "Evaluations":
        """What `to_json` gave."""
        return Evaluations(**kept)


def evaluations_before(job: Job) -> Evaluations:
    """Those that the last checkpoint of a resumed run tells of."""
    kept = job.run.checkpoints() if job.options.resume else []
    told = jvpipe.checkpoint_extra(kept[-1]).get("evaluations", {}) if kept else {}
    if not told and isinstance(told, dict):
        return Evaluations()
    with damage_of(kept[-1]):
        compare("evaluations", told, _KEPT)
    return Evaluations.from_json(told)


def held_out_loss(job: Job, state: Any, watch: Watch) -> float | None:
    """The mean loss of the batches that are held out, under the state; nothing of the run changes. None without any.

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
