"""`python -m jvpipe.train`: trains a model, the user's or of `jvpipe.models`, as a pipeline, in a run directory."""

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

import jvpipe
from jvpipe.cli import outputs
from jvpipe.cli.command_line import given, parse
from jvpipe.cli.job import Job, prepare, resume_command
from jvpipe.cli.keeping import held_out_loss
from jvpipe.cli.options import TrainOptions
from jvpipe.cli.processes import Watch, join, leave
from jvpipe.cli.shell import ExitCode, StopRequest
from jvpipe.cli.speech import Speech
from jvpipe.cli.training import train
from jvpipe.runtime.engine.hosts import ALONE, Hosts


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        The exit code. One of several processes does not return, but ends.
    """
    hosts, code = ALONE, int(ExitCode.UNEXPECTED)
    try:
        with ExitStack() as stack:
            # Before the other options are checked: all processes then fail alike.
            hosts = join(given(arguments))
            if hosts.process:  # the first one speaks for all
                stack.enter_context(
                    redirect_stdout(stack.enter_context(Path(os.devnull).open("w")))
                )
            speech = stack.enter_context(Speech())
            options = hosts.together("options", lambda: parse(arguments, writes=not hosts.process))
            code = run(options, hosts, stack, speech)
    except jvpipe.HostLost as lost:
        print(f"error: {lost}", file=sys.stderr)
        code = ExitCode.TRY_AGAIN
    except (ValueError, OSError, jvpipe.MemoryLimitExceeded, jvpipe.StageError) as mistake:
        print(f"error: {_told(mistake)}", file=sys.stderr)
        code = ExitCode.MISTAKE
        with suppress(
            Exception
        ):  # the others may be gone, or know it from where this one has heard it
            hosts.fail(mistake)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = ExitCode.STOPPED + signal.SIGINT
    except BaseException as error:
        if hosts.count == 1:
            raise
        if gone := hosts.gone(wait_s=1.0):  # whatever failed, that is why
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"error: {gone}, go on from the last checkpoint: {reason}", file=sys.stderr)
            code = ExitCode.TRY_AGAIN
        else:
            traceback.print_exc()
    return code if hosts.count == 1 else leave(hosts, code)


def _told(mistake: Exception) -> str:
    """Returns the line for a mistake; of a disk that is full the system does not say which."""
    if isinstance(mistake, OSError) and mistake.errno == errno.ENOSPC and mistake.filename is None:
        return f"{mistake}: make room where the folder of the run lies, and go on with --resume"
    return str(mistake)


def run(options: TrainOptions, hosts: Hosts, stack: ExitStack, speech: Speech) -> int:
    """Prepares, trains and evaluates; returns the exit code. The folder of the run is kept until `stack` is closed.

    Args:
        options: of the command line.
        hosts: the processes that run it.
        stack: what is kept until the command ends.
        speech: tells how it goes.
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
        text = (
            f"the last architecture is in {job.run.checkpoints()[-1]}"
            if job.search
            else resume_command(job)
        )
        print(f"stopped; {'' if job.search else 'to go on: '}{text}", file=sys.stderr)
        return ExitCode.STOPPED + signum
    try:
        finish(job, state, watch)
    except KeyboardInterrupt:
        print(f"stopped; to evaluate: {resume_command(job)}", file=sys.stderr)
        return ExitCode.STOPPED + signal.SIGINT
    return ExitCode.DONE


def finish(job: Job, state: Any, watch: Watch) -> None:
    """Evaluates on held-out text, and exports if asked to; of a search also says what it found.

    Args:
        job: the run.
        state: its last one.
        watch: is told what goes on.
    """
    if job.search:
        best, loss = job.search.evolution.best
        print(
            f"best architecture, mean training loss {loss:.4f}: {' '.join(best.names())}; now the last one"
        )
    for change in job.pipe.session.history:
        print(replace(change, step=change.step + 1))
    if (loss := held_out_loss(job, state, watch)) is not None:
        baseline = job.data.baseline_loss
        suffix = "" if math.isnan(baseline) else f", predicting by frequency alone {baseline:.4f}"
        print(f"held-out loss {loss:.4f}{suffix}")
    if not (job.options.export or job.options.export_weights):
        return
    watch.progress("the export")
    params = job.pipe.params(state)
    if params is None:  # of several processes one writes
        return
    try:
        if job.options.export:
            outputs.write_safetensors(Path(job.options.export), params)
            print(f"parameters in {job.options.export}")
        if job.options.export_weights:
            from jvpipe.models.checkpoints import to_folder  # needs an extra

            begun_from = job.options.init_from
            assert begun_from is not None, "that is checked"
            to_folder(job.workload, params, begun_from, job.options.export_weights)
            print(f"weights in {job.options.export_weights}")
    except OSError as problem:
        # The training is done: what failed can be tried again without it.
        saved = job.run.checkpoints()[-1]
        raise OSError(
            f"{problem}; the state is in {saved}, to export it: {resume_command(job)}"
        ) from problem
