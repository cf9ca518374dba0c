"""The training of a job: its steps, each logged, and its checkpoints."""

import math
import time
from collections.abc import Sequence
from typing import Any

import jax

from jvpipe.cli.interrupt import StopRequest
from jvpipe.cli.job import Job
from jvpipe.report import timeline
from jvpipe.report.console import TrainingDisplay
from jvpipe.report.metrics import MetricsLog, StepMetrics
from jvpipe.runtime.losses import nan_leaves
from jvpipe.runtime.monitor import Measured


def train(job: Job, state: Any, stop: StopRequest) -> Any:
    """Runs the steps that are left, logging each, and saves: now and then, and the last one whatever ends the run.

    Args:
        job: the run.
        state: that to go on from.
        stop: heard between two steps.
    """
    first = state.step
    told = f"steps {first + 1} to {job.steps}" if first < job.steps else f"all {first} steps are done"
    print(f"{job.workload.name} {job.workload.size}: {told}, run in {job.run.path}")
    if first >= job.steps:
        return state
    job.pipe.session.monitor()
    job.pipe.adapt(job.options.adapt)
    done: tuple[int, dict[str, jax.Array], Sequence[str]] | None = None  # a step that is not yet logged
    with MetricsLog(job.run.metrics, first) as log, TrainingDisplay(job.steps, first) as display:
        clock = Clock()

        def tell(*, before: bool) -> None:
            if done is not None:
                line = _measured(job, *done, job.pipe.session.measured(before=before), clock.lap_s())
                log.append(line)
                display.update(line)

        try:
            for step, advanced in enumerate(job.stream(state, job.steps - first), first + 1):
                tell(before=True)  # one step later, so that the pipeline never waits for a log
                state, done = advanced[0], (step, *advanced[1:])
                last = step == job.steps or stop.signum is not None
                saves = last or step % job.options.checkpoint_every == 0
                if saves or job.ends_architecture(step):
                    job.pipe.wait(state)
                    tell(before=False)
                    done = None
                if saves:
                    save(job, state, step, advanced[2])
                if last:
                    break
        except ValueError:  # the loss is no number: its step belongs into the log
            tell(before=False)
            raise
    timeline.write(job.run.timeline, job.pipe.session.measured().spans)
    return state


def save(job: Job, state: Any, step: int, architecture: Sequence[str]) -> None:
    """Saves the state and the place in the data, together and whole; older checkpoints go.

    Args:
        job: the run.
        state: that after the step.
        step: its number, from 1.
        architecture: the names of its blocks, if the run searches.

    Raises:
        ValueError: a parameter is NaN; the older checkpoints stay.
    """
    if lost := next(nan_leaves(job.pipe.params(state)), None):
        raise ValueError(
            f"after step {step} parameter '{lost}' is NaN: the state is not saved. The checkpoints before it are "
            "whole; a lower learning rate may help"
        )
    extra = {"step": step, "data": job.data.train.get_state(), "digest": job.data.digest}
    extra |= {"architecture": list(architecture)} if job.search else {}
    job.pipe.save(job.run.checkpoint(step), state, extra)
    job.run.prune()


class Clock:
    """Seconds since it was last asked."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def lap_s(self) -> float:
        """Seconds since the last lap."""
        before, self._at = self._at, time.perf_counter()
        return self._at - before


def _measured(
    job: Job,
    step: int,
    metrics: dict[str, jax.Array],
    architecture: Sequence[str],
    measured: Measured,
    seconds: float,
) -> StepMetrics:
    layers = sum(job.pipe.plan.cuts)
    synchronous = "grad_norm" in metrics
    return StepMetrics(
        step=step,
        loss=float(metrics["loss"]),
        learning_rate=float(job.learning_rates[step * len(job.learning_rates) // job.steps - 1]),
        grad_norm=float(metrics["grad_norm"]) if synchronous else math.nan,
        seconds=seconds,
        examples_per_s=job.batch_size / seconds,
        bubble_fraction=timeline.bubble_fraction(measured.spans),
        peak_bytes={str(device): peak for device, peak in job.pipe.ledger.peak_bytes.items()},
        staleness=job.pipe.ledger.versions.staleness(layers),
        swapped_bytes=measured.swapped_bytes,
        copy_hidden_s=measured.hidden_s,
        copy_exposed_s=measured.exposed_s,
        recomputed_s=measured.rerun_s + (job.pipe.session.planned.recompute_s if job.pipe.session.planned else 0.0),
        architecture=tuple(architecture),
    )
