"""The command `python -m jvpipe.train`, which trains a model as a pipeline.

The file has the recording of timelines and profiles, then the training, and then the command.
Training first dispatches a step and then logs the previous step (step_log.py). If a step must be
evaluated or saved, training waits for its end and logs it at once.
"""

import errno
import math
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

import jvpipe
from jvpipe.cli import outputs
from jvpipe.cli.command_line import given, parse
from jvpipe.cli.command_options import TrainOptions
from jvpipe.cli.job import Job, prepare, resume_command
from jvpipe.cli.keeping import Evaluations, Keeper, evaluations_before, held_out_loss, tidy
from jvpipe.cli.outputs import Speech, writing
from jvpipe.cli.processes import Watch, join, leave, shared_picture
from jvpipe.cli.shell import ExitCode, StopRequest
from jvpipe.cli.step_log import Done, StepLog, tokens_in
from jvpipe.ir.span import Picture
from jvpipe.report import chrome_trace
from jvpipe.runtime.engine.hosts import ALONE, Hosts
from jvpipe.util.brief import first_line


class Recording:
    """A context manager around the steps of a run, which writes a timeline and perhaps a profile.

    The timeline has the last steps. With --profile N, N steps are profiled, and the timeline has
    these steps. They begin with the second step of this start, because the first step also
    compiles. If there are too few steps, the first step is profiled as well.

    A profile shows each task, such as `1F2[layer 4]`, on the thread that dispatches it and on a
    thread of its device. On the device, the task begins when it was dispatched, or when the
    previous task on this device ended, whichever is later.

    Args:
        job: the run.
        first: the number of finished steps.
    """

    def __init__(self, job: Job, first: int) -> None:
        self._job, count = job, job.options.profile
        self._steps = min(count or job.options.timeline_steps, job.steps - first)
        # The profile begins with the second step, when everything is compiled, if possible.
        self._begin = None if count is None else min(first + 1, job.steps - self._steps)
        self._done = False
        job.pipe.session.monitor(kept=self._steps)

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None and not self._done:
            self._write()
        if self._job.pipe.session.controller.profiled:
            self._stop_profile()

    def after(self, step: int, state: Any) -> None:
        """Begins or ends the profile if one of the two is due after this step.

        Args:
            step: the number of finished steps.
            state: the state after these steps.
        """
        begin = self._begin
        if begin is None or step not in (begin, begin + self._steps):
            return
        self._job.pipe.wait(state)
        if step == begin:
            self._start_profile()
        else:
            # The profile must continue until all tasks of these steps have ended, and `_write`
            # waits for that.
            self._write()
            self._stop_profile()
            self._done = True

    def _start_profile(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a profile with all Python calls is too large to read
        jax.profiler.start_trace(str(self._folder), profiler_options=options)
        self._job.pipe.session.controller.profiled = True

    def _stop_profile(self) -> None:
        self._job.pipe.session.controller.profiled = False
        jax.profiler.stop_trace()
        if self._job.hosts.process == 0:
            print(f"profile in {self._folder}: open it in XProf or Perfetto", flush=True)

    @property
    def _folder(self) -> Path:
        """The folder to which this process writes its profile."""
        hosts, folder = self._job.hosts, self._job.run.profile
        return folder if hosts.count == 1 else folder / f"process-{hosts.process}"

    def _write(self) -> None:
        """Writes the timeline of the last steps, with the devices of all processes."""
        job = self._job
        pictures = job.pipe.session.pictures(self._steps)
        picture = shared_picture(job.hosts, chrome_trace.joined(pictures))
        if job.hosts.process == 0:
            chrome_trace.write_trace(job.run.timeline, picture)
            if job.options.figure is not None:
                self._draw(job.options.figure, picture)

    def _draw(self, path: str, picture: Picture) -> None:
        """Draws a timeline to a file, with the memory limits of the devices."""
        from jvpipe.report.figures import timeline_figure

        session = self._job.pipe.session
        settings, monitor = session.settings, session.controller.monitor
        assert monitor is not None
        title = f"{_model_name(self._job)}, {settings.schedule.name}, measured"
        with writing("--figure", path):
            limits = dict(zip(monitor.memories, settings.limits, strict=False))
            timeline_figure(picture, path, limits, title)


def _model_name(job: Job) -> str:
    """Names the model, with its size unless the folder of --init-from sets its dimensions."""
    return job.workload.name if job.options.init_from else job.workload.title


def train(
    job: Job, state: Any, stop: StopRequest, watch: Watch, speech: Speech
) -> tuple[Any, int | None]:
    """Runs the remaining steps of a run, if any, and prints how the run ends.

    Args:
        job: the run.
        state: the state from which the run continues.
        stop: stores a signal; a signal to any process stops all processes after a step.
        watch: is notified of each step.
        speech: prints each step.

    Returns:
        The last state, and the number of the signal that stopped the run; None if none did.
    """
    first, patience = state.step, job.options.early_stop
    seen = evaluations_before(job)
    finished, over = first >= job.steps, seen.over(patience)
    text = f"steps {first + 1} to {job.steps}"
    if finished or over:
        text = f"all {first} steps are done" if finished else f"stopped early after step {first}"
    print(f"{_model_name(job)}: {text}, run in {job.run.path}", flush=True)
    tidy(job, seen)
    signum: int | None = None
    # A run that stopped early makes no steps when it is resumed.
    if not finished and not over:
        state, seen, signum = _steps(job, state, seen, stop, watch, speech)
    print(seen.told(patience), end="")
    return state, signum


def _steps(
    job: Job, state: Any, seen: Evaluations, stop: StopRequest, watch: Watch, speech: Speech
) -> tuple[Any, Evaluations, int | None]:
    """Runs the steps of a run; logs each step, evaluates states, and saves checkpoints.

    Checkpoints are saved at regular steps, after each evaluation that is the best so far, and after
    the last step. The last step is the end of the run, an early stop, or the step after which a
    signal was noticed. The arguments are those of `train`, and `seen` has the evaluations so far.

    Returns:
        The last state, all evaluations, and the number of the signal that stopped the run, or None.
    """
    first = state.step
    with ExitStack() as opened:
        recording = opened.enter_context(Recording(job, first))
        job.pipe.adapt(job.options.adapt)
        log = StepLog(job, stop, opened, first, speech)
        keeper = Keeper(job, opened)
        recording.after(first, state)
        steps = job.stream(state, job.steps - first)
        try:
            for step, (advanced, metrics, batch, names) in enumerate(steps, first + 1):
                watch.progress(f"step {step}")
                keeper.check()
                examples = jax.tree.leaves(batch)[0].shape[0]
                signum = log.dispatched(Done(step, metrics, examples, tokens_in(batch), names))
                state = advanced
                last = step == job.steps or signum is not None
                if last or job.pauses(step):
                    job.pipe.wait(state)
                    with log.clock.standing():
                        loss = held_out_loss(job, state, watch) if job.evaluates(step) else None
                    seen = seen if loss is None else seen.after(step, loss)
                    log.ended(loss)
                last = last or seen.over(job.options.early_stop)
                if last or job.saves(step) or step == seen.best_step:
                    watch.progress(f"the checkpoint of step {step}")
                    with log.clock.standing():
                        keeper.save(state, step, names, seen)
                recording.after(step, state)
                if last:
                    break
            keeper.finish()
            # A signal may have arrived during the last step, or while its state was saved.
            return state, seen, log.signum()
        except ValueError:
            # The usual cause is a loss that is not finite. The log still gets the last step.
            with suppress(Exception):  # the error that ended the training is the one to tell
                log.failed()
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit code. In a run of several processes, the function ends this process instead.
    """
    hosts, code = ALONE, int(ExitCode.UNEXPECTED)
    try:
        with ExitStack() as stack:
            # Processes connect before most options are checked, so a mistake in one ends all.
            hosts = join(given(arguments))
            if hosts.process:  # only the first process prints
                nowhere = stack.enter_context(Path(os.devnull).open("w"))
                stack.enter_context(redirect_stdout(nowhere))
            speech = stack.enter_context(Speech())
            options = hosts.together("options", lambda: parse(arguments, writes=not hosts.process))
            code = run(options, hosts, stack, speech)
    except jvpipe.HostLost as lost:
        print(f"error: {lost}", file=sys.stderr)
        code = ExitCode.TRY_AGAIN
    except (ValueError, OSError, jvpipe.MemoryLimitExceeded, jvpipe.StageError) as mistake:
        print(f"error: {_told(mistake)}", file=sys.stderr)
        code = ExitCode.MISTAKE
        # This may fail if the other processes are gone, or if one of them reported the mistake.
        with suppress(Exception):
            hosts.fail(mistake)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = ExitCode.STOPPED + signal.SIGINT
    except BaseException as error:
        if hosts.count == 1:
            raise
        if gone := hosts.gone(wait_s=1.0):  # then the lost process caused the error here
            reason = first_line(error)
            print(f"error: {gone}, go on from the last checkpoint: {reason}", file=sys.stderr)
            code = ExitCode.TRY_AGAIN
        else:
            traceback.print_exc()
    return code if hosts.count == 1 else leave(hosts, code)


def _told(mistake: Exception) -> str:
    """Returns the message of a mistake, with advice if a disk is full and no file is named."""
    if isinstance(mistake, OSError) and mistake.errno == errno.ENOSPC and mistake.filename is None:
        return f"{mistake}: make room on the disk of the run's folder, and continue with --resume"
    return str(mistake)


def run(options: TrainOptions, hosts: Hosts, stack: ExitStack, speech: Speech) -> int:
    """Prepares a run, trains and evaluates; returns the exit code.

    Args:
        options: the options of the run.
        hosts: the processes of the run.
        stack: holds the lock on the folder of the run; is closed when the command ends.
        speech: prints the progress of the run.
    """
    print(f"jvpipe {jvpipe.__version__}: {options.model}", flush=True)
    speech.doing("preparing")
    try:
        job, state = prepare(options, hosts, stack)
    except KeyboardInterrupt:
        print("stopped before the first step: there is nothing to save", file=sys.stderr)
        return ExitCode.STOPPED + signal.SIGINT
    watch = stack.enter_context(Watch(hosts, speech.doing))
    with StopRequest() as stop:
        state, signum = train(job, state, stop, watch, speech)
    if signum is not None:
        # A search cannot be resumed.
        text = f"to go on: {resume_command(job)}"
        if job.search:
            text = f"the last architecture is in {job.run.checkpoints()[-1]}"
        print(f"stopped; {text}", file=sys.stderr)
        return ExitCode.STOPPED + signum
    try:
        finish(job, state, watch)
    except KeyboardInterrupt:
        print(f"stopped; to evaluate: {resume_command(job)}", file=sys.stderr)
        return ExitCode.STOPPED + signal.SIGINT
    return ExitCode.DONE


def finish(job: Job, state: Any, watch: Watch) -> None:
    """Evaluates the last state, exports it if requested, and prints the result of a search.

    Args:
        job: the run.
        state: the last state of the run.
        watch: is notified of progress.
    """
    if job.search:
        best, loss = job.search.evolution.best
        names = " ".join(best.names())
        print(
            f"best architecture, mean training loss {loss:.4f}: {names}; the lines below are about "
            "the last architecture"
        )
    for change in job.pipe.session.history:
        print(replace(change, step=change.step + 1))  # steps in messages count from 1
    if (loss := held_out_loss(job, state, watch)) is not None:
        baseline = job.data.baseline_loss
        suffix = "" if math.isnan(baseline) else f", predicting by frequency alone {baseline:.4f}"
        print(f"held-out loss {loss:.4f}{suffix}")
    if not (job.options.export or job.options.export_weights):
        return
    watch.progress("the export")
    params = job.pipe.params(state)
    if params is not None:  # only the first process gets the parameters and writes them
        _export(job, params)


def _export(job: Job, params: Any) -> None:
    """Writes the parameters to the file of `--export` and the folder of `--export-weights`."""
    options = job.options
    try:
        if options.export:
            outputs.write_safetensors(Path(options.export), params)
            print(f"parameters in {options.export}")
        if options.export_weights:
            from jvpipe.models.checkpoints import to_folder  # needs an extra

            assert options.init_from is not None, "`TrainOptions.check` makes sure of that"
            to_folder(job.workload, params, options.init_from, options.export_weights)
            print(f"weights in {options.export_weights}")
    except OSError as problem:
        # Training need not be repeated, because the same command with --resume only exports.
        raise OSError(
            f"{problem}; the state is in {job.run.checkpoints()[-1]}; to export it, run: "
            f"{resume_command(job)}"
        ) from problem
