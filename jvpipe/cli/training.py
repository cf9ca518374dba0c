"""The training of a job: its steps, each logged, and its checkpoints."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from jvpipe.cli.interrupt import StopRequest
from jvpipe.cli.job import Job
from jvpipe.cli.processes import Watch
from jvpipe.cli.recording import Recording
from jvpipe.cli.sharing import shared
from jvpipe.cli.speech import Speech, places
from jvpipe.cli.step_metrics import Done, StepNumbers
from jvpipe.report import timeline
from jvpipe.report.metrics import MetricsLog
from jvpipe.runtime.hosts import ALONE, Hosts
from jvpipe.runtime.losses import nan_leaves


def train(job: Job, state: Any, stop: StopRequest, watch: Watch, speech: Speech) -> tuple[Any, int | None]:
    """Runs the steps that are left, logging each, and saves: now and then, and the last one whatever ends the run.

    Args:
        job: the run.
        state: that to go on from.
        stop: heard between two steps, of whichever process.
        watch: told that steps are taken.
        speech: told of each.

    Returns:
        The state, and the signal that stopped the run, if one did.
    """
    first = state.step
    told = f"steps {first + 1} to {job.steps}" if first < job.steps else f"all {first} steps are done"
    print(f"{job.workload.title}: {told}, run in {job.run.path}", flush=True)
    if first >= job.steps:
        return state, None
    done: Done | None = None  # a step that is not yet logged
    signum: int | None = None
    with ExitStack() as opened:
        recording = opened.enter_context(Recording(job, first))
        job.pipe.adapt(job.options.adapt)
        log = _Log(job, stop, opened, first, speech)
        recording.after(first, state)
        try:
            for step, advanced in enumerate(job.stream(state, job.steps - first), first + 1):
                watch.progress(f"step {step}")
                signum = log.tell(done, before=True)  # one step later, so that the pipeline never waits for a log
                state, done = advanced[0], (step, *advanced[1:])
                last = step == job.steps or signum is not None
                saves = last or step % job.options.checkpoint_every == 0
                if saves or job.ends_architecture(step):
                    job.pipe.wait(state)
                    log.tell(done, before=False)
                    done = None
                if saves:
                    watch.progress(f"the checkpoint of step {step}")
                    with log.clock.standing():
                        save(job, state, step, advanced[2])
                recording.after(step, state)
                if last:
                    break
            signum = log.tell(None, before=False)  # it may have come during the last step, or while that was saved
        except ValueError:  # the loss is no number: its step belongs into the log
            log.tell(done, before=False, hosts=ALONE)
            raise
    return state, signum


class _Log:
    """Logs the steps of a run, in the first of its processes, and hears in all of them which of them is to stop."""

    def __init__(self, job: Job, stop: StopRequest, opened: ExitStack, first: int, speech: Speech) -> None:
        self._job, self._stop, self._speech, self._numbers, self.clock = job, stop, speech, StepNumbers(job), Clock()
        writes = job.hosts.process == 0
        self._log = opened.enter_context(MetricsLog(job.run.metrics, first)) if writes else None
        if writes:
            opened.enter_context(speech.training(job.steps, first))

    def tell(self, done: Done | None, *, before: bool, hosts: Hosts | None = None) -> int | None:
        """Logs a step; returns the signal that some process was sent.

        Args:
            done: the step; None if there is none to log.
            before: another one was dispatched since.
            hosts: who is told; all processes unless given.
        """
        own = None
        if done is not None:
            measured = self._job.pipe.session.measured(before=before)
            own = self._numbers.of(done, measured, self.clock.lap_s()), timeline.busy(measured.spans)
        signum, line = shared(hosts or self._job.hosts, self._stop.signum, own)
        if line is not None and self._log is not None:
            line = replace(line, elapsed_s=self._log.elapsed_s + self.clock.elapsed_s())
            self._log.append(line)
            self._speech.step(line, places(self._job.pipe))
        return signum


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

    def check() -> None:
        if lost := next(nan_leaves(job.pipe.session.own_params(state)), None):
            raise ValueError(
                f"after step {step} parameter '{lost}' is NaN: the state is not saved. The checkpoints before it are "
                "whole; a lower learning rate may help"
            )

    job.hosts.together("parameters", check)
    extra = {"step": step, "data": job.data.train.get_state(), "digest": job.data.digest}
    extra |= {"architecture": list(architecture)} if job.search else {}
    job.pipe.save(job.run.checkpoint(step), state, extra)
    if job.hosts.process == 0:
        job.run.prune()


class Clock:
    """Seconds since it was made, and of steps: since it was last asked, but for what is no part of a step."""

    def __init__(self) -> None:
        self._begin = self._at = time.perf_counter()

    def lap_s(self) -> float:
        """Seconds since the last lap, without those that it stood."""
        before, self._at = self._at, time.perf_counter()
        return self._at - before

    def elapsed_s(self) -> float:
        """Seconds since it was made, all of them."""
        return time.perf_counter() - self._begin

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Does not count the seconds of the block for a step."""
        before = time.perf_counter()
        yield
        self._at += time.perf_counter() - before
