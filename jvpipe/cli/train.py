"""`python -m jvpipe.train`: trains a model of `jvpipe.models` as a pipeline, in a run directory."""

import dataclasses
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args, get_type_hints

import jax
import numpy as np
import tyro

import jvpipe
from jvpipe import models
from jvpipe.cli import export
from jvpipe.cli.architecture_search import ArchitectureSearch
from jvpipe.cli.interrupt import StopRequest
from jvpipe.cli.rundir import RunDir, hold_new
from jvpipe.cli.runplan import devices_of, given_plan, kept_plan
from jvpipe.report import timeline
from jvpipe.report.console import TrainingDisplay
from jvpipe.report.metrics import MetricsLog, StepMetrics
from jvpipe.runtime.checkpoints.saving import checkpoint_plan
from jvpipe.runtime.losses import nan_leaves
from jvpipe.runtime.monitor import Measured
from jvpipe.schedules import find_schedule

FIXED = ("model", "size", "dtype", "batch_size", "seed")
"""What a resumed run cannot change; all else is placement, or how long to go on."""
NOT_KEPT = ("resume", "remeasure", "export")
"""Options that hold for one process alone."""


@dataclass(frozen=True)
class Options:
    """Trains a model as a pipeline over the devices of this machine."""

    model: str = "bert"
    """Which model."""
    size: str | None = None
    """Which of its sizes; the smallest one if left out."""
    dtype: str = "float32"
    """The type to compute in (float32 or bfloat16); parameters are float32."""
    stages: int = 2
    """Over how many devices."""
    microbatches: int = 4
    """Into how many parts a batch is split."""
    schedule: str = "1f1b"
    """In which order the micro-batches run: gpipe, 1f1b; asynchronously: pipedream, 2bw, pipemare, xpipe."""
    planner: str = "jvpipe"
    """How layers are spread over stages: jvpipe, even, torchgpipe, vpipe, dawnpiper, ..."""
    plan: str | None = None
    """A plan to follow, such as the plan.json of a run: nothing is planned then."""
    memory_limit: str | None = None
    """What each device may hold, such as 2GiB."""
    host_memory_limit: str | None = None
    """What values swapped to the host may take there, of all devices together."""
    checkpoint: str | None = None
    """Which micro-batches are computed again from their stage's input: always, except_last, never."""
    batch_size: int | None = None
    """Examples per step; the model's own if left out."""
    steps: int | None = None
    """The total number of steps, those before a resume included; the model's own if left out."""
    data: str | None = None
    """A text file or a folder of them; by default the English prose that comes with Python."""
    seed: int = 0
    """Of parameters, dropout and the order of the data."""
    remeasure: tyro.conf.FlagCreatePairsOff[bool] = False
    """Measures layers anew; else what an earlier run of the same model has measured on this machine is used."""
    run_dir: str | None = None
    """Where the run is kept; by default a new folder in runs/."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Continues the run in --run-dir, under its plan. Options that are not given are as they were in it; with other
    stages, another planner, schedule or limit it is planned anew."""
    checkpoint_every: int = 100
    """Steps between checkpoints; there is always one of the last step."""
    adapt: tyro.conf.FlagCreatePairsOff[bool] = False
    """Lets layers leave a device that has become slow, and come back."""
    nas: tyro.conf.FlagCreatePairsOff[bool] = False
    """Searches architectures by regularised evolution: one after another is trained, blocks keep their parameters."""
    nas_steps: int = 5
    """Steps that each architecture is trained for at a time."""
    export: str | None = None
    """Writes the trained parameters to this .safetensors file."""


@dataclass(frozen=True)
class Job:
    """A run that is ready to train."""

    options: Options
    steps: int
    batch_size: int
    run: RunDir
    workload: models.Workload
    data: models.Data
    pipe: jvpipe.Pipeline
    learning_rates: np.ndarray
    search: ArchitectureSearch | None = None

    def stream(self, state: Any, steps: int) -> Iterator[tuple[Any, dict[str, jax.Array], Sequence[str]]]:
        """The steps of the run: states, metrics, and the names of the blocks of the architecture if it is searched."""
        if self.search is None:
            return ((*found, ()) for found in self.pipe.run(state, self.data.train, steps))
        found = self.search.run(self.pipe, state, self.data.train, steps)
        return ((state, metrics, architecture.names()) for state, metrics, architecture in found)

    def ends_architecture(self, step: int) -> bool:
        """Whether another architecture follows after a step."""
        return self.search is not None and step % self.search.steps == 0


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
        told = f"the last architecture is in {job.run.checkpoints()[-1]}" if job.search else _resume_command(job)
        print(f"stopped; {'' if job.search else 'to go on: '}{told}", file=sys.stderr)
        return 128 + stop.signum
    try:
        finish(job, state)
    except KeyboardInterrupt:
        print(f"stopped; to evaluate: {_resume_command(job)}", file=sys.stderr)
        return 130
    return 0


def parse(arguments: Sequence[str] | None) -> Options:
    """The options: given ones, else with --resume those of the run but --export, else the defaults."""
    options = tyro.cli(Options, args=arguments, prog="python -m jvpipe.train")
    if options.resume:
        if options.run_dir is None:
            raise ValueError("--resume needs --run-dir, the folder of the run to continue")
        before = RunDir(Path(options.run_dir))
        config = before.read_config()
        if options.nas or config.get("nas"):
            raise ValueError("--nas cannot be resumed: a search saves its last architecture alone. Begin a new run")
        saved = _options_in(config, before.config)
        if saved.get("data") and not options.data:
            print(f"data: {saved['data']}, as the run in {options.run_dir} had it; --data says where it is now")
        options = tyro.cli(Options, args=arguments, default=Options(**saved), prog="python -m jvpipe.train")
    for name in ("stages", "microbatches", "batch_size", "steps", "checkpoint_every", "nas_steps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if options.export:
        export.check_writable(Path(options.export))
    return options


def _options_in(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The options of a run, but for what it was to write elsewhere.

    Raises:
        ValueError: one is of another type than the command line's.
    """
    types = get_type_hints(Options)
    saved = {name: config[name] for name in types if name in config and name not in NOT_KEPT}
    for name, value in saved.items():
        if type(value) not in (get_args(types[name]) or (types[name],)):
            raise ValueError(f"{path} is not what a run wrote: {name} is {value!r}")
    return saved


def prepare(options: Options, held: ExitStack) -> tuple[Job, Any]:
    """Opens the data, builds the pipeline and makes or restores the state; nothing is written before it is checked.

    Args:
        options: those of the run.
        held: what keeps its folder from others, while it is open.
    """
    resumed = RunDir(Path(options.run_dir)) if options.resume and options.run_dir else None
    before = resumed.read_config() if resumed else dataclasses.asdict(Options())
    plan = given = given_plan(dataclasses.asdict(options), before)
    if resumed and not given:
        plan = kept_plan(resumed.plan, dataclasses.asdict(options), before)
    if plan is not None:
        options = replace(options, stages=len(plan.stages), schedule=plan.schedule or options.schedule)
    jax.config.update("jax_num_cpu_devices", devices_of(plan) if plan else options.stages)
    _keep_compiled()
    workload = models.load(options.model, options.size, dtype=options.dtype)
    steps, batch_size = options.steps or workload.steps, options.batch_size or workload.batch_size
    options = replace(options, size=workload.size, steps=steps, batch_size=batch_size)
    run = RunDir(Path(options.run_dir)) if options.run_dir else hold_new(held, _new_folder(workload))
    if options.run_dir:
        held.enter_context(run.held())
    config = _config(options, workload)
    if options.resume:
        run.check(config)
        if plan and not given and run.checkpoints():  # layers may have moved since it was made
            with run.advising():
                plan = checkpoint_plan(run.checkpoints()[-1]) or plan
    else:
        run.refuse_if_used()
    search = _search(options, workload)
    order = find_schedule(options.schedule)
    updates = 1 if order.synchronous else options.microbatches // order.period(options.microbatches)
    pipe = jvpipe.Pipeline(
        search.first.loss_fn if search else workload.loss_fn,
        workload.optimizer(steps * updates, local=not order.synchronous),
        stages=plan or options.stages,
        microbatches=options.microbatches,
        schedule=options.schedule,
        planner=options.planner,
        memory_limit=options.memory_limit,
        host_memory_limit=options.host_memory_limit,
        checkpoint=options.checkpoint,
        has_state=workload.has_state,
        grad_norm=order.synchronous,
        remeasure=options.remeasure,
    )
    files = before.get("files", {})
    run.check_files(files)
    data_path = None if options.data is None else Path(options.data)
    with TemporaryDirectory() as scratch:
        kept = run.path if options.resume else Path(scratch)
        data = workload.open_data(data_path, kept, options.seed, batch_size)
        made = {file.name: file.read_bytes() for file in Path(scratch).iterdir()}
    if options.resume:
        run.check({"data_digest": data.digest})
        run.check_files(files)
    key = jax.random.key(options.seed)
    state = pipe.init(search.first.params if search else workload.init, data.held_out[0], key, workload.initial_state())
    if options.resume and run.checkpoints():
        last = run.checkpoints()[-1]
        with run.advising():
            state = pipe.restore(last)
        data.train.set_state(jvpipe.checkpoint_extra(last)["data"])
    if not options.resume:
        files = run.adopt(made)
    run.write_plan(pipe.plan)  # before the options that it was made for: they say whether it may be used again
    run.write_config(config | dataclasses.asdict(options) | {"data_digest": data.digest, "files": files})
    run.explanation.write_text(pipe.explain() + "\n")
    rates = workload.learning_rates(steps * updates)
    return Job(options, steps, batch_size, run, workload, data, pipe, rates, search), state


def train(job: Job, state: Any, stop: StopRequest) -> Any:
    """Runs the steps that are left, logging each, and saves: now and then, and the last one whatever ends the run."""
    first = state.step
    told = f"steps {first + 1} to {job.steps}" if first < job.steps else f"all {first} steps are done"
    print(f"{job.workload.name} {job.workload.size}: {told}, run in {job.run.path}")
    if first >= job.steps:
        return state
    job.pipe.monitor()
    job.pipe.adapt(job.options.adapt)
    done: tuple[int, dict[str, jax.Array], Sequence[str]] | None = None  # a step that is not yet logged
    with MetricsLog(job.run.metrics, first) as log, TrainingDisplay(job.steps, first) as display:
        clock = Clock()

        def tell(*, before: bool) -> None:
            if done is not None:
                line = _measured(job, *done, job.pipe.measured(before=before), clock.lap_s())
                log.append(line)
                display.update(line)

        try:
            for step, found in enumerate(job.stream(state, job.steps - first), first + 1):
                tell(before=True)  # one step later, so that the pipeline never waits for a log
                state, done = found[0], (step, *found[1:])
                last = step == job.steps or stop.signum is not None
                saves = last or step % job.options.checkpoint_every == 0
                if saves or job.ends_architecture(step):
                    job.pipe.wait(state)
                    tell(before=False)
                    done = None
                if saves:
                    save(job, state, step, found[2])
                if last:
                    break
        except ValueError:  # the loss is no number: its step belongs into the log
            tell(before=False)
            raise
    timeline.write(job.run.timeline, job.pipe.measured().spans)
    return state


def save(job: Job, state: Any, step: int, architecture: Sequence[str]) -> None:
    """Saves the state and the place in the data, together and whole; older checkpoints go.

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


def finish(job: Job, state: Any) -> None:
    """Evaluates on held-out text, and exports if asked to; of a search also says what it found."""
    if job.search:
        best, loss = job.search.evolution.best
        print(f"best architecture, mean training loss {loss:.4f}: {' '.join(best.names())}; now the last one")
    for change in job.pipe.history:
        print(change)
    losses = [float(job.pipe.evaluate(state, batch)["loss"]) for batch in job.data.held_out]
    print(f"held-out loss {sum(losses) / len(losses):.4f}", end=", ")
    print(f"predicting by token frequency {job.data.baseline_loss:.4f}")
    if job.options.export:
        try:
            export.write_safetensors(Path(job.options.export), job.pipe.params(state))
        except OSError as problem:
            saved = job.run.checkpoints()[-1]
            raise OSError(f"{problem}; the state is in {saved}, to export it: {_resume_command(job)}") from problem
        print(f"parameters in {job.options.export}")


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
        recomputed_s=measured.rerun_s + (job.pipe.planned.recompute_s if job.pipe.planned else 0.0),
        architecture=tuple(architecture),
    )


def _keep_compiled() -> None:
    """Keeps compiled programs in the user's cache, so that the next start finds them."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "jvpipe" / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _new_folder(workload: models.Workload) -> str:
    return f"runs/{workload.name}-{workload.size}-{datetime.now():%Y%m%d-%H%M%S}"


def _search(options: Options, workload: models.Workload) -> ArchitectureSearch | None:
    """The search of architectures that --nas asks for."""
    if not options.nas:
        return None
    if workload.supernet is None:
        raise ValueError(
            f"--nas needs a model whose architecture can be searched: evolved-transformer or evolved-amoebanet, not "
            f"{workload.name}"
        )
    return ArchitectureSearch(workload.supernet, options.seed, options.nas_steps)


def _config(options: Options, workload: models.Workload) -> dict[str, Any]:
    """What a resumed run must agree with: fixed options, the model's settings, every parameter's shape."""
    shapes = export.parameter_names(jax.eval_shape(workload.init, jax.random.key(0)))
    return {
        **{name: getattr(options, name) for name in FIXED},
        "model_config": dataclasses.asdict(workload.config),
        "parameters": {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in shapes.items()},
    }


def _resume_command(job: Job) -> str:
    export_to = ["--export", job.options.export] if job.options.export else []
    return shlex.join(["python", "-m", "jvpipe.train", "--run-dir", str(job.run.path), "--resume", *export_to])
