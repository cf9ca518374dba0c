"""The folder of a run: its files, its checkpoints, its lock, and the checks before a resume.

A checkpoint is whole if it was written completely and has not changed since.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

from jvpipe.cli.command_options import DECIDES
from jvpipe.cli.own_model import is_installed
from jvpipe.ir.plan import Plan
from jvpipe.runtime.state.checkpoints import generations
from jvpipe.runtime.state.checkpoints.checkpoint import open_checkpoint
from jvpipe.runtime.state.checkpoints.generations import DamageError, adding_path, file_digest
from jvpipe.runtime.state.checkpoints.held_folder import HeldError, held_folder
from jvpipe.runtime.state.checkpoints.sealed_file import read_sealed, write_sealed
from jvpipe.schedules import find_schedule
from jvpipe.schedules.planned import pipeline_length
from jvpipe.util.brief import brief
from jvpipe.util.pattern import anything, compare
from jvpipe.util.replaced_file import replace_bytes
from jvpipe.util.user_key import signature

Entries = Mapping[str, Any]
"""Entries of config.json, such as options, by name."""
RECORDED = {
    "model_config": {str: anything},
    "parameters": {str: str},
    "data_digest": str,
    "files": {str: str},
}
"""The entries of config.json that are not options, with their patterns (see util/pattern.py)."""


class RunDir:
    """The folder of a run, with the paths of its files.

        config.json  plan.json  plan.txt      written when the run begins or is resumed
        metrics.jsonl                         a line for each step
        checkpoints/00000100/  ...            a folder for each checkpoint, named by its step
        best.json                             names the checkpoint of the best evaluation
        timeline.json  profile/               the tasks of the devices in some of the steps
        .held-by                              names the process that has locked the folder

    The files need not exist yet.

    Attributes:
        config: the file with the options of the run and the digest of its data.
        plan: the file with the plan, which `jvpipe.Plan.load` reads.
        explanation: the file with the reasons for the plan, in words.
        metrics: the file with the metrics, one line of JSON per step.
        best: the file that names the checkpoint with the lowest held-out loss.
        timeline: the file with a Chrome trace of the last measured steps.
        profile: the folder of the profile that jax.profiler writes.
        holder: the file that names the process that has locked the folder; it exists inside `held`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.plan = path / "plan.json"
        self.explanation = path / "plan.txt"
        self.metrics = path / "metrics.jsonl"
        self.best = path / "best.json"
        self.timeline = path / "timeline.json"
        self.profile = path / "profile"
        self.holder = path / ".held-by"

    def checkpoint(self, step: int) -> Path:
        """Returns the folder for the checkpoint of a step."""
        return self.path / "checkpoints" / f"{step:08d}"

    def checkpoints(self) -> list[Path]:
        """Returns the folders of all complete checkpoints, oldest first."""
        return [path for path in self._folders(r"\d{8,}") if generations.newest(path)]

    def prune(self, keep: int, best_step: int = 0) -> None:
        """Deletes all checkpoints except the last ones and the best one.

        Checkpoints that a killed process left incomplete or half deleted are also deleted. No other
        file in the folder is touched.

        Args:
            keep: the number of last checkpoints to keep.
            best_step: the step of the best checkpoint; 0 if there is none.
        """
        # `checkpoints()` leaves out incomplete checkpoints, so these are deleted.
        kept = [*self.checkpoints()[-keep:], self.checkpoint(best_step)]
        for path in self._folders(r"\d{8,}"):
            if path not in kept:
                generations.delete(path)
        for path in self._folders(r"\d{8,}\.deleted"):
            with adding_path(path):
                shutil.rmtree(path)

    def _folders(self, pattern: str) -> list[Path]:
        """Returns the folders of checkpoints whose names match a regular expression, sorted."""
        folder = self.path / "checkpoints"
        paths = folder.iterdir() if folder.is_dir() else ()
        matching = (path for path in paths if re.fullmatch(pattern, path.name))
        return sorted(path for path in matching if path.is_dir())

    def read_config(self) -> dict[str, Any]:
        """Returns the entries of config.json.

        Raises:
            ValueError: there is no run here, or an entry has a wrong type.
            DamageError: the file has changed since it was written.
        """
        try:
            config = read_sealed(self.config)
            for name in RECORDED.keys() & config.keys():
                compare(f"{self.config}: {name}", config[name], RECORDED[name])
            return config
        except OSError as problem:
            raise ValueError(
                f"{self.path} has no run to resume: {self.config.name}: {problem}"
            ) from problem

    def write_config(self, config: Entries) -> None:
        """Writes config.json; a crash leaves the old file or the whole new one."""
        write_sealed(self.config, config)

    def adopt(self, files: Mapping[str, bytes]) -> dict[str, str]:
        """Writes further files of the run, such as a tokenizer; returns their digests by name."""
        for name, content in files.items():
            replace_bytes(self.path / name, content)
        return {name: file_digest(self.path / name) for name in files}

    def check_files(self, digests: Mapping[str, str]) -> None:
        """Compares the files of `adopt` with their digests; files may be missing.

        Raises:
            DamageError: the content of a file has changed.
        """
        for name, digest in digests.items():
            path = self.path / name
            if path.exists() and file_digest(path) != digest:
                raise DamageError(
                    f"{path} has changed since the run began: restore it, or delete it to make it "
                    "again from the data"
                )

    def identity(self) -> str:
        """Returns a text by which processes on several hosts check that they see the same folder.

        The text is the same on all hosts, and different for any other folder.

        Raises:
            ValueError: there is no such folder.
        """
        try:
            seen = self.path.stat()
        except OSError as problem:
            raise ValueError(
                f"{self.path.absolute()} does not exist on this host: the folder of a run must be "
                f"on a file system that all processes share ({problem.strerror})"
            ) from problem
        return f"file {seen.st_ino}, changed at {seen.st_mtime_ns} ns"

    def held(self) -> AbstractContextManager[None]:
        """Returns a context manager that makes the folder if needed, and locks it while open.

        The context manager raises HeldError if another process has the lock (see `held_folder`).
        """
        return held_folder(self.path, self.holder)

    @contextmanager
    def advising(self) -> Iterator[None]:
        """Adds advice to a DamageError that the context raises about the last checkpoint.

        The advice names the newest whole checkpoint before the last one, or says that none exists.
        """
        try:
            yield
        except DamageError as damage:
            *older, newest = self.checkpoints()
            advice = "no older checkpoint is whole"
            if whole := list(filter(_is_whole, older)):
                advice = f"{whole[-1]} is whole: to resume from it, move {newest} away"
            raise DamageError(f"{damage}; {advice}") from damage

    def check_last(self) -> None:
        """Raises DamageError if the last checkpoint has another step's state than its name says."""
        for path in self.checkpoints()[-1:]:
            _check_step(path)

    def refuse_if_used(self) -> None:
        """Raises ValueError if a new run would overwrite a checkpoint, or a file of the user.

        A run that failed before its first checkpoint may be begun again.
        """
        if self.checkpoints():
            raise ValueError(
                f"{self.path} already has a run: continue it with --resume, or give another "
                "--run-dir"
            )
        with suppress(OSError, DamageError):
            if "data_digest" in read_sealed(self.config):
                return
        for path in (self.config, self.plan, self.metrics, self.explanation, self.timeline):
            if path.exists():
                raise ValueError(
                    f"the run would overwrite {path}, which is not what a run wrote: move it away, "
                    "or give another --run-dir"
                )

    def check(self, expected: Entries, usual: Mapping[str, Entries] | None = None) -> None:
        """Checks that entries of this folder's config.json are as expected.

        Args:
            expected: the expected entries by name.
            usual: defaults for the fields of entries that are mappings, for a config.json from an
                older jvpipe, which may lack fields.

        Raises:
            ValueError: entries differ. The message names each of them, and for a mapping also the
                first field that differs.
        """
        # JSON turns tuples into lists, so the expected values are passed through JSON as well.
        here, defaults = json.loads(json.dumps([expected, usual or {}]))
        there = self.read_config()
        for key, fields in defaults.items():
            there[key] = fields | there.get(key, {})
        compared = {key: there.get(key) for key in here}
        differences = [
            f"{key} is {_short(old)} there, {_short(new)} here"
            for key, old, new in _differences(compared, here)
        ]
        if differences:
            raise ValueError(
                f"{self.path} has a different run: {'; '.join(differences)}. --resume cannot "
                "change these"
            )


def hold_new(stack: ExitStack, name: str) -> RunDir:
    """Makes a new folder, and locks it until `stack` is closed.

    If the name is taken, a number is added to it.
    """
    for number in count(1):
        run = RunDir(Path(name if number == 1 else f"{name}-{number}"))
        with suppress(HeldError):
            if not run.path.exists():
                stack.enter_context(run.held())
                return run
    raise AssertionError("numbers do not end")


def _is_whole(checkpoint: Path) -> bool:
    try:
        if generation := generations.newest(checkpoint):
            generations.check_generation(generation)
        _check_step(checkpoint)
    except DamageError:
        return False
    return True


def _check_step(checkpoint: Path) -> None:
    step = open_checkpoint(checkpoint).meta.get("step")
    named = int(checkpoint.name)
    if step != named:
        raise DamageError(
            f"{checkpoint} has the state of step {brief(step)}, not of step {named} as its name "
            "says"
        )


def _short(value: Any) -> str:
    return value if isinstance(value, str) else brief(value)


def _differences(there: Entries, here: Entries) -> Iterator[tuple[str, Any, Any]]:
    """Yields (name, value there, value here) for each entry that differs.

    For an entry that is a mapping, only its first field that differs is yielded.
    """
    for key in dict.fromkeys([*here, *there]):
        old, new = there.get(key, "missing"), here.get(key, "missing")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            for name, old_field, new_field in islice(_differences(old, new), 1):
                yield f"{key}: {name}", old_field, new_field
        elif old != new and repr(old) != repr(new):  # NaN is not equal to itself
            yield key, old, new


# The plan of a run comes from the file of --plan, the folder of a resumed run, or a planner.


def given_plan(options: Entries, before: Entries) -> Plan | None:
    """Returns the plan that --plan names, or None.

    The result is None without --plan. It is also None if the resumed run began with the same
    --plan, because the run's folder already has that plan.

    Args:
        options: the options of this run.
        before: the earlier options of a resumed run; the defaults for a new run.

    Raises:
        ValueError: the file has no plan, or --stages, --replicas or --schedule contradict the plan.
    """
    path = options["plan"]
    if path is None or path == before.get("plan"):
        return None
    plan = Plan.load(path)
    schedule = find_schedule(plan.schedule or options["schedule"])
    # For each option, the values that agree with the plan. Replicas can be written as 2,1 or 2:1.
    in_plan = {
        "stages": [pipeline_length(plan, schedule)],
        "replicas": [between.join(map(str, plan.replicas)) for between in ",:"],
        "schedule": [plan.schedule or options["schedule"]],
    }
    for name, texts in in_plan.items():
        value = options[name]
        if value not in (*texts, before.get(name)):
            raise ValueError(
                f"--{name} {value} contradicts --plan {path}, where it is {texts[0]}: leave out "
                "one of the two"
            )
    return plan


def kept_plan(path: Path, options: Entries, before: Entries) -> Plan | None:
    """Returns the plan in the folder of a resumed run; None if a new plan must be made.

    A new plan must be made if the folder has none, if the plan's schedule or stages differ from the
    options, if an option in `DECIDES` has changed, or if --remeasure is given.

    Args:
        path: the plan.json of the run.
        options: the options of this run.
        before: the options with which the run was started.

    Raises:
        DamageError: the file has changed since the run wrote it.
    """
    has_changed = any(options[name] != before.get(name) for name in DECIDES)
    if options["remeasure"] or not path.exists() or has_changed:
        return None
    # Reading the file checks its digest, so a plan that was changed by hand is refused.
    read_sealed(path)
    plan = Plan.load(path)
    schedule = find_schedule(options["schedule"])
    # `pipeline_length` may fail for a plan of another schedule.
    if plan.schedule != schedule.name:
        return None
    stages = pipeline_length(plan, schedule)
    return plan if options["stages"] in (None, stages) else None


# The config.json of a folder may name code, which --resume would run. If the folder comes from
# elsewhere, the code may be malicious. So a run writes a mark into config.json that only this user
# can make, and that is valid only for this folder. If the mark is valid, the code may run.

MARK = "made_here"
"""The name of the mark's entry in config.json."""


def mark(folder: Path, model: str) -> str:
    """Computes the mark of this user's run of a model in a folder; empty if the user has no key.

    The mark is a signature of user, folder and model, with a key in the user's home folder. So a
    folder that was moved, or that comes from elsewhere, does not have a valid mark.

    Args:
        folder: the folder of the run.
        model: the model as `--model` names it.
    """
    file, colon, name = model.rpartition(":")
    is_file = colon and file.endswith(".py")
    code = f"{Path(file).resolve()}:{name}" if is_file else model
    return signature(json.dumps([os.getuid(), str(folder.resolve()), code]))


def check_made_here(folder: Path, config: Entries, model: str) -> None:
    """Refuses to run code that a folder from elsewhere names.

    Args:
        folder: the folder of the run.
        config: the entries of the folder's config.json.
        model: the model that config.json names.

    Raises:
        ValueError: the model is code that is not installed, and the mark in `config` is not valid.
    """
    found, ours = config.get(MARK), mark(folder, model)
    if is_installed(model) or (ours and isinstance(found, str) and found == ours):
        return
    raise ValueError(
        f"{folder} was not made here by this user, and names code to be run, {model}: if you trust "
        f"the code, give --model {model} or --trust"
    )
