"""`python -m jvpipe.train`: trains a model of `jvpipe.models` as a pipeline, in a run directory."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jvpipe
from jvpipe.cli import export
from jvpipe.cli.interrupt import StopRequest
from jvpipe.cli.job import Job, prepare, resume_command
from jvpipe.cli.train_options import Options, parse
from jvpipe.cli.training import train


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit code is 2 for a user's mistake, 128 + the signal if one stopped it."""
    try:
        with ExitStack() as held:
            return run(parse(arguments), held)
    except (ValueError, OSError, jvpipe.MemoryLimitExceeded, jvpipe.StageError) as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2


def run(options: Options, held: ExitStack) -> int:
    """Prepares, trains and evaluates; returns the exit code. The folder of the run is kept until `held` is closed."""
    try:
        job, state = prepare(options, held)
    except KeyboardInterrupt:
        print("stopped before the first step: there is nothing to save", file=sys.stderr)
        return 130
    with StopRequest() as stop:
        state = train(job, state, stop)
    if stop.signum is not None:
        told = f"the last architecture is in {job.run.checkpoints()[-1]}" if job.search else resume_command(job)
        print(f"stopped; {'' if job.search else 'to go on: '}{told}", file=sys.stderr)
        return 128 + stop.signum
    try:
        finish(job, state)
    except KeyboardInterrupt:
        print(f"stopped; to evaluate: {resume_command(job)}", file=sys.stderr)
        return 130
    return 0


def finish(job: Job, state: Any) -> None:
    """Evaluates on held-out text, and exports if asked to; of a search also says what it found."""
    if job.search:
        best, loss = job.search.evolution.best
        print(f"best architecture, mean training loss {loss:.4f}: {' '.join(best.names())}; now the last one")
    for change in job.pipe.session.history:
        print(replace(change, step=change.step + 1))
    losses = [float(job.pipe.evaluate(state, batch)["loss"]) for batch in job.data.held_out]
    print(f"held-out loss {sum(losses) / len(losses):.4f}", end=", ")
    print(f"predicting by token frequency {job.data.baseline_loss:.4f}")
    if job.options.export:
        try:
            export.write_safetensors(Path(job.options.export), job.pipe.params(state))
        except OSError as problem:
            saved = job.run.checkpoints()[-1]
            raise OSError(f"{problem}; the state is in {saved}, to export it: {resume_command(job)}") from problem
        print(f"parameters in {job.options.export}")
