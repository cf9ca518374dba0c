"""The preparation of a training run: its folder, its data, its pipeline and its state.

Each process of the run prepares the same `Job`. `Hosts.together` and `Hosts.agree` wait for all
processes. If a process fails in `together`, or if its values in `agree` differ from the values of
another process, all processes raise an error.
"""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

import jvpipe
from jvpipe import models
from jvpipe.cli import outputs
from jvpipe.cli.command_options import (
    FIXED,
    TrainOptions,
    agreed_options,
    fields_of,
    kept_options,
)
from jvpipe.cli.own_model import find_model
from jvpipe.cli.run_folder import MARK, RunDir, given_plan, hold_new, kept_plan, mark
from jvpipe.cli.run_model import (
    as_in_folder,
    find_search,
    first_params,
    keep_tokenizer,
    retrained,
)
from jvpipe.models.architecture_search import ArchitectureSearch
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.runtime.engine.phases import phase
from jvpipe.runtime.state.checkpoints.checkpoint import open_checkpoint
from jvpipe.runtime.state.checkpoints.generations import DamageError
from jvpipe.runtime.state.checkpoints.saving import checkpoint_plan
from jvpipe.runtime.state.checkpoints.sealed_file import write_sealed
from jvpipe.schedules import find_schedule
from jvpipe.schedules.planned import pipeline_length
from jvpipe.session.arguments import USUAL_MICROBATCHES
from jvpipe.session.options import passed
from jvpipe.session.settings import library_versions
from jvpipe.trace.batches import micro_batch_shapes
from jvpipe.util.brief import first_line
from jvpipe.util.option import PIPELINE, options_of


@dataclass(frozen=True)
class Job:
    """A run that is ready to train.

    Attributes:
        options: the options of the run, including defaults.
        steps: the number of the last step.
        run: the folder of the run.
        workload: the model, with the optimizer that the options ask for.
        data: the batches, at the position where the run continues.
        pipe: the pipeline, which is planned and compiled.
        updates_after: maps a step to the number of updates up to its end.
        learning_rates: the rate of each update of the whole run.
        hosts: the processes of the run.
        search: the architecture search of `--nas`; None without it.
    """

    options: TrainOptions
    steps: int
    run: RunDir
    workload: models.Workload
    data: models.Data
    pipe: jvpipe.Pipeline
    updates_after: Callable[[int], int]
    learning_rates: np.ndarray
    hosts: Hosts
    search: ArchitectureSearch | None = None

    def stream(
        self, state: Any, steps: int
    ) -> Iterator[tuple[Any, dict[str, jax.Array], Any, Sequence[str]]]:
        """Trains for some steps; yields the state, the metrics, the batch and names of each step.

        The names are those of the blocks of the trained architecture; empty without an architecture
        search.
        """
        batch: Any = None

        def take(taken: Any) -> Any:
            nonlocal batch
            batch = taken
            return batch

        batches = map(take, self.data.train)
        if self.search is None:
            for after, metrics in self.pipe.run(state, batches, steps):
                yield after, metrics, batch, ()
            return
        for after, metrics, drawn in self.search.run(self.pipe, state, batches, steps):
            yield after, metrics, batch, drawn.names()

    def pauses(self, step: int) -> bool:
        """Tells whether the next step must wait for this one.

        The next step must wait if the state of this one is evaluated or saved, or if the search
        changes the architecture.
        """
        if self.search is not None and step % self.search.steps == 0:
            return True
        return self.evaluates(step) or self.saves(step)

    def evaluates(self, step: int) -> bool:
        """Tells whether the state after a step is to be evaluated on the held-out batches."""
        period = self.options.eval_every
        return period is not None and step % period == 0

    def saves(self, step: int) -> bool:
        """Tells whether a regular checkpoint is due after a step."""
        return step % self.options.checkpoint_every == 0


def prepare(options: TrainOptions, hosts: Hosts, stack: ExitStack) -> tuple[Job, Any]:
    """Opens the data, builds the pipeline, and makes or restores the state.

    The files of the run are written last, so a run that cannot begin leaves none.

    Args:
        options: the options of the run.
        hosts: the processes of the run.
        stack: holds the lock on the folder of the run until the stack is closed.

    Returns:
        The run, and the state from which it continues.

    Raises:
        ValueError: the options, the model, the data and the folder do not fit each other.
        DamageError: a file of a resumed run has changed since it was written.
        MemoryLimitExceeded: no plan keeps the memory limit.
    """
    # Options are compared first, because processes with different options could deadlock.
    hosts.agree("the options of the processes", [*library_versions(), *agreed_options(options)])
    options, run, workload, files, plan = _start(options, hosts, stack)
    assert options.steps is not None
    assert options.microbatches is not None
    search = hosts.together("model", lambda: find_search(options, workload, hosts))
    updates_after = hosts.together("run", lambda: _updates_after(options, run))
    workload = hosts.together("optimizer", lambda: retrained(workload, options, updates_after))
    updates = updates_after(options.steps)
    pipe = _pipeline(options, workload, plan, search, updates)
    pipe.session.controller.first_step = 1  # steps in messages count from 1, as in metrics.jsonl
    with phase("opening the data"):
        data, new_files = hosts.together(
            "data", lambda: _open_data(options, workload, run, files, hosts)
        )
    hosts.agree("the data of the processes", [("their digest", data.digest)])
    # If a held-out batch cannot be cut into micro-batches, the run must fail here and not later.
    for batch in data.held_out:
        micro_batch_shapes(batch, options.microbatches)
    job = Job(
        options,
        options.steps,
        run,
        workload,
        data,
        pipe,
        updates_after,
        workload.learning_rates(updates),
        hosts,
        search,
    )
    # Planning and compiling may fail, so they come before the first file is written.
    state = _state(job)
    hosts.first(
        "run's files", lambda: _write(job, files if options.resume else run.adopt(new_files))
    )
    return job, state


def _asked(
    options: TrainOptions,
) -> tuple[TrainOptions, Mapping[str, Any], jvpipe.Plan | None, bool]:
    """Reads the folder of a resumed run and the file of `--plan`; completes the options.

    Returns:
        The options of the run, with its stages, micro-batches and schedule; the entries of
        config.json of a resumed run, or the default options; the plan of `--plan` or of the folder,
        or None if a planner must make one; and whether the plan comes from `--plan`.
    """
    resumed = RunDir(Path(options.run_dir)) if options.resume and options.run_dir else None
    before = resumed.read_config() if resumed else asdict(TrainOptions())
    by_name = asdict(options)
    plan = from_file = given_plan(by_name, before)
    if resumed and not from_file:
        plan = kept_plan(resumed.plan, by_name, before)
    options = replace(options, microbatches=options.microbatches or USUAL_MICROBATCHES)
    if plan is None:
        return replace(options, stages=options.stages_asked), before, None, False
    schedule = find_schedule(plan.schedule or options.schedule)
    stages = options.stages if options.shares else pipeline_length(plan, schedule)
    options = replace(options, stages=stages, schedule=schedule.name)
    return options, before, plan, from_file is not None


def _start(
    options: TrainOptions, hosts: Hosts, stack: ExitStack
) -> tuple[TrainOptions, RunDir, models.Workload, Mapping[str, str], jvpipe.Plan | None]:
    """Finds a run's folder, plan and model; locks the folder and sets the number of CPU devices.

    Returns:
        The options, the folder and the model of the run; the digests, by name, of files such as a
        tokenizer in the folder of a resumed run; and the plan, or None.
    """
    options, before, plan, from_file = hosts.together("run", lambda: _asked(options))
    devices = plan.device_count if plan else options.devices_asked
    with suppress(RuntimeError):  # JAX has already made its devices, which may be enough
        jax.config.update("jax_num_cpu_devices", -(-devices // hosts.count))
    hosts.connect()  # from here on, the processes notice at once if another one is lost
    keep_compiled()
    options = hosts.together("weights", lambda: as_in_folder(options))
    workload = hosts.together(
        "model", lambda: find_model(options.model, options.size, fields_of(options))
    )
    options = replace(
        options,
        size=workload.size,
        steps=options.steps or workload.steps,
        batch_size=options.batch_size or workload.batch_size,
    )
    config = _config(options, workload)
    hosts.agree("the model of the processes", [(name, str(x)) for name, x in config.items()])
    run = _held_folder(options, workload, hosts, stack)

    def last_plan() -> jvpipe.Plan | None:
        if not options.resume:
            run.refuse_if_used()
            return plan
        usual = find_model(options.model, options.size).settings
        run.check(config, {"model_config": usual})
        with run.advising():
            run.check_last()
            # Layers may have moved to other devices during the run. The plan of the last checkpoint
            # is therefore newer than plan.json.
            if plan and not from_file and run.checkpoints():
                return checkpoint_plan(run.checkpoints()[-1]) or plan
        return plan

    return options, run, workload, before.get("files", {}), hosts.together("run", last_plan)


def _updates_after(options: TrainOptions, run: RunDir) -> Callable[[int], int]:
    """Returns a function from a step to the number of updates up to its end.

    A step up to the last checkpoint may have had more or fewer updates than one after it.
    """
    assert options.microbatches is not None
    per_step = int(find_schedule(options.schedule).updates(options.microbatches))
    first = made = 0
    if options.resume and run.checkpoints():
        with run.advising():
            last = open_checkpoint(run.checkpoints()[-1])
            last.check_state()
        first, made = last.meta["step"], last.meta["updates"]

    def updates_after(step: int) -> int:
        return made + (step - first) * per_step if step >= first else made * step // first

    return updates_after


def _held_folder(
    options: TrainOptions, workload: models.Workload, hosts: Hosts, stack: ExitStack
) -> RunDir:
    """Opens the run's folder, which all processes must see; the first process locks it."""

    def hold() -> str:
        if options.run_dir is None:
            title = workload.title.replace(" ", "-")
            return str(hold_new(stack, f"runs/{title}-{datetime.now():%Y%m%d-%H%M%S}").path)
        stack.enter_context(RunDir(Path(options.run_dir)).held())
        return options.run_dir

    run = RunDir(Path(hosts.decided("run's folder", hold)))
    seen = [(str(run.path), hosts.together("folder", run.identity))]
    hosts.agree("the folder of the run as processes see it", seen)
    return run


def _write(job: Job, files: Mapping[str, str]) -> None:
    """Writes the files of the run; `files` has the digests of files such as the tokenizer."""
    options, run = job.options, job.run
    # A resumed run uses plan.json if its options equal those in config.json. So plan.json is
    # written first: if the process dies in between, the plan is not older than the options.
    write_sealed(run.plan, job.pipe.plan.to_json())
    # A resumed run checks that its data, files and mark have not changed.
    about_run = {
        "data_digest": job.data.digest,
        "files": files,
        MARK: mark(run.path, options.model),
    }
    run.write_config(_config(options, job.workload) | kept_options(options) | about_run)
    run.explanation.write_text(job.pipe.explain() + "\n")


def _pipeline(
    options: TrainOptions,
    workload: models.Workload,
    plan: jvpipe.Plan | None,
    search: ArchitectureSearch | None,
    updates: int,
) -> jvpipe.Pipeline:
    synchronous = find_schedule(options.schedule).synchronous
    arguments = passed(options, PIPELINE)
    if plan:
        # The plan has the number of devices of each stage.
        arguments |= {"stages": plan, "replicas": None}
    return jvpipe.Pipeline(
        search.first.loss_fn if search else workload.loss_fn,
        workload.optimizer(updates, local=not synchronous),
        devices=jax.devices()[: options.devices] if options.shares and not plan else None,
        has_aux=workload.has_aux,
        has_state=workload.has_state,
        grad_norm=synchronous,
        **arguments,
    )


def _open_data(
    options: TrainOptions,
    workload: models.Workload,
    run: RunDir,
    files: Mapping[str, str],
    hosts: Hosts,
) -> tuple[models.Data, dict[str, bytes]]:
    """Opens the data; also returns the files that a new run must keep to read the same data again.

    A tokenizer is such a file. For a resumed run, `files` has the digests of these files.
    """
    run.check_files(files)
    assert options.batch_size is not None
    data_path = None if options.data is None else Path(options.data)
    # A new run makes these files in a temporary folder, because the run's folder is written last.
    with TemporaryDirectory() as scratch:
        kept = run.path if options.resume else Path(scratch)
        keep_tokenizer(options, workload, kept)
        data = workload.open_data(data_path, kept, options.seed, options.batch_size)
        new_files = {file.name: file.read_bytes() for file in Path(scratch).iterdir()}
    lazily = getattr(data.train, "lazily", None)
    if hosts.count > 1 and lazily is not None:  # each process reads only what its devices need
        data = replace(data, train=lazily())
    if options.eval_every and not data.held_out:
        raise ValueError(
            f"--eval-every {options.eval_every}: {workload.name} has no held-out batches; give it "
            "a function held_out(), or leave --eval-every out"
        )
    if options.resume:
        run.check({"data_digest": data.digest})
        run.check_files(files)
    return data, new_files


def _state(job: Job) -> jvpipe.State:
    """Makes the first state of the run, or restores the last state and the position in the data."""
    if job.search:
        params = job.search.first.params
    else:
        params = job.hosts.together("weights", lambda: first_params(job.options, job.workload))
    key = jax.random.key(job.options.seed)
    state = job.pipe.init(params, job.data.example, key, job.workload.initial_state())
    if not (job.options.resume and job.run.checkpoints()):
        return state
    del state  # its arrays would lie on the devices beside those of the checkpoint
    last = job.run.checkpoints()[-1]
    with phase("restoring the last checkpoint"), job.run.advising():
        state = job.pipe.restore(last)
        _go_back(job.data, last)
    return state


def _go_back(data: models.Data, last: Path) -> None:
    """Sets the data to the position in a checkpoint; raises DamageError if that is impossible."""
    extra = jvpipe.checkpoint_extra(last)
    if "data" not in extra:
        raise DamageError(f"{last} has no position in the data")
    try:
        data.train.set_state(extra["data"])
    except Exception as problem:  # a user's own class of data may raise any kind of error
        reason = f"{type(problem).__name__}: {first_line(problem)}"
        raise DamageError(f"{last} has no usable position in the data: {reason}") from problem


def keep_compiled() -> None:
    """Makes JAX store compiled programs in the user's cache folder, for the next start."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(caches / "jvpipe" / "compiled"))
    # By default, JAX stores only programs that took long to compile. The program of a layer takes
    # little time, but a model has many of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def stay_on_cpus() -> None:
    """Restricts JAX to CPUs, which suffice for planning, unless the user has set a platform."""
    if not jax.config.values["jax_platforms"]:
        jax.config.update("jax_platforms", "cpu")


def _config(options: TrainOptions, workload: models.Workload) -> dict[str, Any]:
    """Returns the entries that a resumed run must not change, such as the shapes of parameters."""
    shapes = outputs.parameter_names(jax.eval_shape(workload.init, jax.random.key(0)))
    parameters = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in shapes.items()}
    fixed = {name: getattr(options, name) for name in FIXED}
    return {**fixed, "model_config": workload.settings, "parameters": parameters}


def resume_command(job: Job) -> str:
    """Returns the command line that resumes a run, with the run's options for output files."""
    command = ["python", "-m", "jvpipe.train", "--run-dir", str(job.run.path), "--resume"]
    for name in ("figure", "export", "export_weights"):
        if path := getattr(job.options, name):
            command += [options_of(TrainOptions)[name].flag, path]
    return shlex.join(command)
