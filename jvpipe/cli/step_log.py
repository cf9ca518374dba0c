"""The log of a run's steps: their metrics, in metrics.jsonl, in trackers and on the screen.

A step is dispatched while the previous step still runs, and reading the metrics of a step waits for
its end. So a step is logged only after the next step has been dispatched, unless training must wait
for the step anyway.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jvpipe.cli.command_options import kept_options
from jvpipe.cli.job import Job
from jvpipe.cli.outputs import Speech, rows_by_device
from jvpipe.cli.processes import Own, shared
from jvpipe.cli.shell import StopRequest
from jvpipe.cost.utilization import ideal_s
from jvpipe.report import chrome_trace
from jvpipe.report.metrics import MetricsLog, StepMetrics, scalars_in
from jvpipe.report.trackers import TrackedRun, Tracker, find_tracker
from jvpipe.runtime.engine.hosts import ALONE, Hosts
from jvpipe.runtime.engine.monitor import Measured
from jvpipe.trace.graph import Traced
from jvpipe.util.paths import path_name


class Done(NamedTuple):
    """A dispatched step: its number, its metrics, and the names of its architecture's blocks.

    Without an architecture search (--nas), there are no such names. The examples and the tokens are
    those of the step's batch; the tokens are None if it has none.
    """

    step: int
    metrics: dict[str, Any]
    examples: int
    tokens: int | None
    architecture: Sequence[str]


class StepLog:
    """A log of steps, which only the first process writes.

    All processes must make the same calls, which exchange metrics and signals; only `failed` does
    not.

    Args:
        job: the run.
        stop: stores the signal that this process receives.
        opened: closes the log and its trackers.
        first: the number of finished steps.
        speech: prints each step.
    """

    def __init__(
        self, job: Job, stop: StopRequest, opened: ExitStack, first: int, speech: Speech
    ) -> None:
        self._job, self._stop, self._speech = job, stop, speech
        self.clock = Clock()
        self._dispatched: Done | None = None  # a step that is not yet logged
        # The model for which the ideal seconds were last computed, and those seconds.
        self._ideal: tuple[Traced | None, float | None] = None, None
        writes = job.hosts.process == 0
        self._file = opened.enter_context(MetricsLog(job.run.metrics, first)) if writes else None
        self._trackers: list[Tracker] = []
        if writes:
            opened.enter_context(speech.training(job.steps, first))
            self._trackers += _trackers(job, first, opened)

    def dispatched(self, done: Done) -> int | None:
        """Registers a dispatched step, and logs the previous step while this one runs.

        Returns:
            The number of a signal that some process has received, or None.
        """
        # If logging fails, `failed` must not log the previous step again.
        previous, self._dispatched = self._dispatched, done
        return self._tell(previous, before=True)

    def ended(self, loss: float | None) -> None:
        """Waits for the end of the last dispatched step, and logs the step.

        Args:
            loss: the loss on held-out batches after the step; None if they were not evaluated.
        """
        self._tell(self._dispatched, before=False, loss=loss)
        self._dispatched = None

    def failed(self) -> None:
        """Logs the last step when this process fails, without the metrics of other processes.

        It does not wait for the other processes, which possibly never make this call.
        """
        self._tell(self._dispatched, before=False, hosts=ALONE)

    def signum(self) -> int | None:
        """Returns the number of a signal that some process has received, or None."""
        return self._tell(None, before=False)

    def _tell(
        self,
        done: Done | None,
        *,
        before: bool,
        loss: float | None = None,
        hosts: Hosts | None = None,
    ) -> int | None:
        """Logs a step; returns the number of a signal that some process has received, or None.

        Args:
            done: the step; None if there is no step to log.
            before: whether another step has been dispatched since.
            loss: the loss on held-out batches after the step; None if they were not evaluated.
            hosts: the processes that exchange metrics and signals; None for all processes.
        """
        ours: Own | None = None
        if done is not None:
            measured = self._job.pipe.session.measured(before=before)
            ours = self._own(done, measured, self.clock.lap_s())
        signum, line = shared(hosts or self._job.hosts, self._stop.signum, ours)
        if line is not None and self._file is not None:
            elapsed_s = self._file.elapsed_s + self.clock.elapsed_s()
            line = replace(line, held_out_loss=loss, elapsed_s=elapsed_s)
            self._file.append(line)
            for tracker in self._trackers:
                tracker.log(line.step, line.numbers())
            self._speech.step(line, rows_by_device(self._job.pipe))
        return signum

    def _own(self, done: Done, measured: Measured, seconds: float) -> Own:
        """Returns the measurements of this process, after waiting for the end of a step.

        Args:
            done: the step.
            measured: the spans and seconds of its tasks.
            seconds: the seconds that the step took.
        """
        job, ledger = self._job, self._job.pipe.ledger
        ideal, busy = self._ideal_s(), chrome_trace.busy(measured.spans)
        metrics = StepMetrics(
            step=done.step,
            loss=float(done.metrics["loss"]),
            # An asynchronous step has several updates, of which the last one's rate is logged.
            learning_rate=float(job.learning_rates[job.updates_after(done.step) - 1]),
            grad_norm=float(done.metrics.get("grad_norm", math.nan)),
            seconds=seconds,
            examples_per_s=done.examples / seconds,
            bubble_fraction=busy.bubble_fraction,
            busy_fraction=chrome_trace.busy_fractions(measured.spans),
            peak_bytes={str(device): peak for device, peak in ledger.peak_bytes.items()},
            staleness=ledger.versions.staleness(sum(job.pipe.plan.cuts)),
            swapped_bytes=measured.swapped_bytes,
            copy_hidden_s=measured.hidden_s,
            copy_exposed_s=measured.exposed_s,
            recomputed_s=measured.recomputed_s,
            tokens_per_s=None if done.tokens is None else done.tokens / seconds,
            mfu=None if ideal is None else ideal / seconds,
            aux=scalars_in(done.metrics.get("aux", ())),
            architecture=tuple(done.architecture),
        )
        return metrics, busy

    def _ideal_s(self) -> float | None:
        """Returns the seconds of a step at the devices' peak rates; None if a rate is unknown."""
        session = self._job.pipe.session
        traced, settings = session.compiled.traced, session.settings
        if traced is not self._ideal[0]:
            kinds = [device.device_kind for device in set(settings.devices)]
            # The computation visits every equation, so it runs only when the model has changed.
            self._ideal = traced, ideal_s(traced, settings.microbatches, kinds)
        return self._ideal[1]


def _trackers(job: Job, first: int, opened: ExitStack) -> Iterator[Tracker]:
    """Yields the trackers of --track, such as TensorBoard; they close when `opened` is closed."""
    run = TrackedRun(job.run.path, kept_options(job.options), first)
    for name in dict.fromkeys(job.options.track):
        tracker = find_tracker(name)(run)
        opened.callback(tracker.close)
        yield tracker


_TOKENS = ("tokens", "input_ids", "inputs")
"""The names of the leaves of a batch that contain a model's input tokens."""


def tokens_in(batch: Any) -> int | None:
    """Counts the tokens of a batch: the integers in leaves called tokens, input_ids or inputs.

    The tokens of a leaf are counted along its first two axes: examples times positions, including
    padding. The result is None if there is no such leaf.

    >>> ids, weights = np.zeros((2, 8), int), np.ones((2, 4))
    >>> tokens_in({"inputs": ids, "tokens": ids[:, :4], "weights": weights})
    24
    >>> tokens_in(ids)
    """
    counts = []
    for path, leaf in jax.tree.leaves_with_path(batch):
        if path_name(path[-1:]) not in _TOKENS or len(leaf.shape) < 2:
            continue
        # Floating-point inputs are features, not tokens.
        if np.issubdtype(leaf.dtype, np.integer):
            counts.append(math.prod(leaf.shape[:2]))
    return sum(counts) if counts else None


class Clock:
    """A clock for the seconds of a run and of each step.

    The seconds of a step exclude work inside `standing`, such as an evaluation.
    """

    def __init__(self) -> None:
        self._begin = self._at = time.perf_counter()

    def lap_s(self) -> float:
        """Returns the seconds since the last call, excluding those inside `standing`."""
        before, self._at = self._at, time.perf_counter()
        return self._at - before

    def elapsed_s(self) -> float:
        """Returns all seconds since the clock was made."""
        return time.perf_counter() - self._begin

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Excludes the seconds inside the context from `lap_s`."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._at += time.perf_counter() - before
