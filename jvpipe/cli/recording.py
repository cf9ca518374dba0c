"""What a run keeps of how its steps went: a timeline, and a profile whose tasks have the names of the plan."""

from pathlib import Path
from typing import Any

import jax

from jvpipe.cli.job import Job
from jvpipe.cli.outputs import writing
from jvpipe.cli.sharing import shared_picture
from jvpipe.ir.span import Picture
from jvpipe.report import timeline


class Recording:
    """A context manager around the steps of a run: writes the timeline of the last ones, or of those it profiles.

    With --profile so many steps are profiled, from the second on, for the first has much to do once; where there are
    not as many, from the first on. A profiler sees each task twice by its name, such as `1F2[layer 4]`: its dispatch,
    and until it has run, on a thread per device, from when it was dispatched or the task before it there had ended.

    Args:
        job: the run.
        first: how many steps are done.
    """

    def __init__(self, job: Job, first: int) -> None:
        self._job, wanted = job, job.options.profile
        self._steps = min(wanted or job.options.timeline_steps, job.steps - first)
        self._begin = None if wanted is None else min(first + 1, job.steps - self._steps)
        self._begun: int | None = None
        self._done = False
        job.pipe.session.monitor(kept=self._steps)

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None and not self._done:
            self._write(self._steps)
        if self._begun is not None:
            self._stop_profile()

    def after(self, step: int, state: Any) -> None:
        """Begins or ends the profile, if it is time to.

        Args:
            step: the number of steps that are done.
            state: that after them.
        """
        if step == self._begin:
            self._job.pipe.wait(state)
            self._start_profile(step)
        elif self._begun is not None and step == self._begun + self._steps:
            self._job.pipe.wait(state)
            self._write(
                self._steps
            )  # the profiler sees a task only once the thread that waits for it has
            self._stop_profile()
            self._done = True

    def _start_profile(self, step: int) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # each call of Python is too much
        jax.profiler.start_trace(str(self._folder), profiler_options=options)
        self._begun = step
        self._job.pipe.session.controller.profiled = True

    def _stop_profile(self) -> None:
        self._job.pipe.session.controller.profiled = False
        jax.profiler.stop_trace()
        self._begun = None
        if self._job.hosts.process == 0:
            print(f"profile in {self._folder}: open it in XProf or Perfetto", flush=True)

    @property
    def _folder(self) -> Path:
        """Where this process writes its profile."""
        hosts, folder = self._job.hosts, self._job.run.profile
        return folder if hosts.count == 1 else folder / f"process-{hosts.process}"

    def _write(self, steps: int) -> None:
        """Writes the timeline of the last steps, of all processes."""
        picture = shared_picture(
            self._job.hosts, timeline.joined(self._job.pipe.session.pictures(steps))
        )
        if self._job.hosts.process == 0:
            timeline.write(self._job.run.timeline, picture)
            if self._job.options.figure is not None:
                self._draw(self._job.options.figure, picture)

    def _draw(self, path: str, picture: Picture) -> None:
        """Draws steps to a file, with the limits that the devices have."""
        from jvpipe.report.figures import timeline_figure

        session = self._job.pipe.session
        settings, monitor = session.settings, session.controller.monitor
        assert monitor is not None
        title = f"{self._job.workload.title}, {settings.schedule.name}, measured"
        with writing("--figure", path):
            limits = dict(zip(monitor.memories, settings.limits, strict=False))
            timeline_figure(picture, path, limits, title)
