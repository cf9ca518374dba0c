"""The training of a job: its steps, each logged, and its checkpoints."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from jvpipe.cli.evaluating import evaluations_before, held_out_loss
from jvpipe.cli.interrupt import StopRequest
from jvpipe.cli.job import Job
from jvpipe.cli.keeping import Keeper, tidy
from jvpipe.cli.processes import Watch
from jvpipe.cli.recording import Recording
from jvpipe.cli.sharing import shared
from jvpipe.cli.speech import Speech, places
from jvpipe.cli.step_metrics import Done, StepNumbers
from jvpipe.cli.train_options import kept_options
from jvpipe.report import timeline
from jvpipe.report.metrics import MetricsLog
from jvpipe.report.trackers import TRACKERS, TrackedRun, Tracker
from jvpipe.runtime.hosts import ALONE, Hosts


def train(
    job: Job, state: Any, stop: StopRequest, watch: Watch, speech: Speech
) -> tuple[Any, int | None]:
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
    first, patience = state.step, job.options.early_stop
    seen = evaluations_before(job)
    told = (
        f"steps {first + 1} to {job.steps}" if first < job.steps else f"all {first} steps are done"
    )
    print(f"{job.workload.title}: {told}, run in {job.run.path}", flush=True)
    if job.hosts.process == 0:
        tidy(job, seen)
    if first >= job.steps or seen.over(patience):
        print(seen.told(patience), end="")
        return state, None
    done: Done | None = None  # a step that is not yet logged
    signum: int | None = None
    with ExitStack() as opened:
        recording = opened.enter_context(Recording(job, first))
        job.pipe.adapt(job.options.adapt)
        log, keeper = _Log(job, stop, opened, first, speech), Keeper(job, opened)
        recording.after(first, state)
        try:
            for step, advanced in enumerate(job.stream(state, job.steps - first), first + 1):
                watch.progress(f"step {step}")
                keeper.check()
                signum = log.tell(
                    done, before=True
                )  # one step later, so that the pipeline never waits for a log
                state, done = advanced[0], (step, *advanced[1:])
                last = step == job.steps or signum is not None
                if last or job.pauses(step):
                    job.pipe.wait(state)
                    with log.clock.standing():
                        loss = held_out_loss(job, state, watch) if job.evaluates(step) else None
                    seen = seen if loss is None else seen.after(step, loss)
                    log.tell(done, before=False, loss=loss)
                    done = None
                last = last or seen.over(patience)
                if last or job.saves(step) or step == seen.best_step:
                    watch.progress(f"the checkpoint of step {step}")
                    with log.clock.standing():
                        keeper.save(state, step, advanced[2], seen)
                recording.after(step, state)
                if last:
                    break
            keeper.finish()
            signum = log.tell(
                None, before=False
            )  # it may have come during the last step, or while that was saved
        except ValueError:  # the loss is no number: its step belongs into the log
            log.tell(done, before=False, hosts=ALONE)
            raise
    print(seen.told(patience), end="")
    return state, signum


class _Log:
    """Logs the steps of a run, in the first of its processes, and hears in all of them which of them is to stop."""

    def __init__(
        self, job: Job, stop: StopRequest, opened: ExitStack, first: int, speech: Speech
    ) -> None:
        self._job, self._stop, self._speech, self._numbers, self.clock = (
            job,
            stop,
            speech,
            StepNumbers(job),
            Clock(),
        )
        writes = job.hosts.process == 0
        self._log = opened.enter_context(MetricsLog(job.run.metrics, first)) if writes else None
        self._trackers: list[Tracker] = []
        if writes:
            opened.enter_context(speech.training(job.steps, first))
            self._trackers += _trackers(job, first, opened)

    def tell(
        self,
        done: Done | None,
        *,
        before: bool,
        loss: float | None = None,
        hosts: Hosts | None = None,
    ) -> int | None:
        """Logs a step; returns the signal that some process was sent.

        Args:
            done: the step; None if there is none to log.
            before: another one was dispatched since.
            loss: on held-out batches after it, if they were evaluated.
            hosts: who is told; all processes unless given.
        """
        own = None
        if done is not None:
            measured = self._job.pipe.session.measured(before=before)
            own = (
                self._numbers.of(done, measured, self.clock.lap_s()),
                timeline.busy(measured.spans),
            )
        signum, line = shared(hosts or self._job.hosts, self._stop.signum, own)
        if line is not None and self._log is not None:
            line = replace(
                line, held_out_loss=loss, elapsed_s=self._log.elapsed_s + self.clock.elapsed_s()
            )
            self._log.append(line)
            for tracker in self._trackers:
                tracker.log(line.step, line.numbers())
            self._speech.step(line, places(self._job.pipe))
        return signum


def _trackers(job: Job, first: int, opened: ExitStack) -> Iterator[Tracker]:
    """What else is told of each step, until `opened` is closed."""
    run = TrackedRun(job.run.path, kept_options(job.options), first)
    for name in dict.fromkeys(job.options.track):
        tracker = TRACKERS[name](run)
        opened.callback(tracker.close)
        yield tracker


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
