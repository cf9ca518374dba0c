"""A run of the command line, made ready: its folder, its data, its pipeline and its state."""

import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

import jvpipe
from jvpipe import models
from jvpipe.cli import export
from jvpipe.cli.architecture_search import ArchitectureSearch
from jvpipe.cli.rundir import RunDir, hold_new
from jvpipe.cli.runplan import devices_of, given_plan, kept_plan
from jvpipe.cli.train_options import FIXED, Options
from jvpipe.runtime.checkpoints.saving import checkpoint_plan
from jvpipe.schedules import find_schedule


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
            return ((*after, ()) for after in self.pipe.run(state, self.data.train, steps))
        searched = self.search.run(self.pipe, state, self.data.train, steps)
        return ((state, metrics, architecture.names()) for state, metrics, architecture in searched)

    def ends_architecture(self, step: int) -> bool:
        """True if another architecture follows after a step."""
        return self.search is not None and step % self.search.steps == 0


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
    schedule = find_schedule(options.schedule)
    updates = steps * (1 if schedule.synchronous else options.microbatches // schedule.period(options.microbatches))
    pipe = _pipeline(options, workload, plan, search, updates)
    pipe.session.controller.first_step = 1  # as metrics.jsonl counts
    files = before.get("files", {})
    data, made = _open_data(options, workload, run, files)
    job = Job(options, steps, batch_size, run, workload, data, pipe, workload.learning_rates(updates), search)
    state = _state(job)
    if not options.resume:
        files = run.adopt(made)
    run.write_plan(pipe.plan)  # before the options that it was made for: they say whether it may be used again
    run.write_config(config | dataclasses.asdict(options) | {"data_digest": data.digest, "files": files})
    run.explanation.write_text(pipe.explain() + "\n")
    return job, state


def _pipeline(
    options: Options,
    workload: models.Workload,
    plan: jvpipe.Plan | None,
    search: ArchitectureSearch | None,
    updates: int,
) -> jvpipe.Pipeline:
    synchronous = find_schedule(options.schedule).synchronous
    return jvpipe.Pipeline(
        search.first.loss_fn if search else workload.loss_fn,
        workload.optimizer(updates, local=not synchronous),
        stages=plan or options.stages,
        microbatches=options.microbatches,
        schedule=options.schedule,
        planner=options.planner,
        memory_limit=options.memory_limit,
        host_memory_limit=options.host_memory_limit,
        checkpoint=options.checkpoint,
        has_state=workload.has_state,
        grad_norm=synchronous,
        remeasure=options.remeasure,
    )


def _open_data(
    options: Options, workload: models.Workload, run: RunDir, files: Mapping[str, str]
) -> tuple[models.Data, dict[str, bytes]]:
    """The data of the run, and the files that it made, which belong to a new run; `files` are digests of the old."""
    run.check_files(files)
    assert options.batch_size is not None
    data_path = None if options.data is None else Path(options.data)
    with TemporaryDirectory() as scratch:
        kept = run.path if options.resume else Path(scratch)
        data = workload.open_data(data_path, kept, options.seed, options.batch_size)
        made = {file.name: file.read_bytes() for file in Path(scratch).iterdir()}
    if options.resume:
        run.check({"data_digest": data.digest})
        run.check_files(files)
    return data, made


def _state(job: Job) -> jvpipe.State:
    """The state at the start of the run, or that of its last checkpoint; the data go on from there."""
    params = job.search.first.params if job.search else job.workload.init
    key = jax.random.key(job.options.seed)
    state = job.pipe.init(params, job.data.held_out[0], key, job.workload.initial_state())
    if job.options.resume and job.run.checkpoints():
        last = job.run.checkpoints()[-1]
        with job.run.advising():
            state = job.pipe.restore(last)
        job.data.train.set_state(jvpipe.checkpoint_extra(last)["data"])
    return state


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
    """The part of the configuration that a resumed run must share: model, batch, seed, every parameter's shape."""
    shapes = export.parameter_names(jax.eval_shape(workload.init, jax.random.key(0)))
    return {
        **{name: getattr(options, name) for name in FIXED},
        "model_config": dataclasses.asdict(workload.config),
        "parameters": {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in shapes.items()},
    }


def resume_command(job: Job) -> str:
    """The command line that goes on with a run."""
    export_to = ["--export", job.options.export] if job.options.export else []
    return shlex.join(["python", "-m", "jvpipe.train", "--run-dir", str(job.run.path), "--resume", *export_to])
