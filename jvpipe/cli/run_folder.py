"""Manages the folder of a run: files, checkpoints, a lock, and checks before a run is resumed.

A file is sealed if it holds a digest of its content, so that a change by hand is noticed. A
checkpoint is whole if all of it was written and nothing has changed since.
"""

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from socket import gethostname
from tempfile import NamedTemporaryFile
from typing import Any

from jvpipe.cli.options import DECIDES
from jvpipe.cli.own_model import is_installed
from jvpipe.ir.plan import Plan
from jvpipe.report.metrics import replace_bytes, replace_text
from jvpipe.runtime.state.checkpoints.checkpoint import (
    check_checkpoint,
    delete_checkpoint,
    is_checkpoint,
    open_checkpoint,
)
from jvpipe.runtime.state.checkpoints.generations import DamageError, adding_path, file_digest
from jvpipe.schedules import find_schedule
from jvpipe.schedules.planned import pipeline_length
from jvpipe.util.brief import brief
from jvpipe.util.pattern import anything, compare


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Writes entries and their digest as JSON; a crash leaves the whole old file or the new one."""
    replace_text(path, json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n")


def read_sealed(path: Path) -> dict[str, Any]:
    """Returns the entries of a file that `write_sealed` wrote.

    Raises:
        OSError: the file cannot be read.
        DamageError: the file has changed since it was written, or is not such a file.
    """
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        # The digest was computed without its own entry.
        digest, expected = content.pop("digest", None), _digest(content)
    except (ValueError, RecursionError) as problem:
        raise DamageError(f"{path} is damaged: {problem}") from problem
    if digest != expected:
        damage = "has lost its digest" if digest is None else "is not what the run wrote"
        raise DamageError(
            f"{path} {damage}: put it back (options are changed on the command line, not in the file)"
        )
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


# The folder of a run.

RECORDED = {
    "model_config": {str: anything},
    "parameters": {str: str},
    "data_digest": str,
    "files": {str: str},
}
"""The entries of config.json that are not options, with their patterns (see util/pattern.py)."""


class HeldError(ValueError):
    """The error for a folder that another process has locked."""


@dataclass(frozen=True)
class RunDir:
    """The folder of a run, with the paths of its files.

    A checkpoint is a folder inside, named by its step.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The file with the options of the run and the digest of its data."""
        return self.path / "config.json"

    @property
    def plan(self) -> Path:
        """The file with the plan, which `jvpipe.Plan.load` reads."""
        return self.path / "plan.json"

    @property
    def explanation(self) -> Path:
        """The file with the reasons for the plan, in words."""
        return self.path / "plan.txt"

    @property
    def metrics(self) -> Path:
        """The file with the metrics, one line of JSON per step."""
        return self.path / "metrics.jsonl"

    @property
    def best(self) -> Path:
        """The file that names the checkpoint with the lowest held-out loss."""
        return self.path / "best.json"

    @property
    def timeline(self) -> Path:
        """The file with a Chrome trace of the last measured steps."""
        return self.path / "timeline.json"

    @property
    def profile(self) -> Path:
        """The folder of the profile that jax.profiler writes."""
        return self.path / "profile"

    @property
    def holder(self) -> Path:
        """The file that names the process that has locked the folder; it exists inside `held`."""
        return self.path / ".held-by"

    def checkpoint(self, step: int) -> Path:
        """Returns the folder for the checkpoint of a step."""
        return self.path / "checkpoints" / f"{step:08d}"

    def checkpoints(self) -> list[Path]:
        """Returns the folders of all complete checkpoints, oldest first."""
        return [path for path in self._folders(r"\d{8,}") if is_checkpoint(path)]

    def prune(self, keep: int, best_step: int = 0) -> None:
        """Deletes all checkpoints except the last ones and the best one.

        Checkpoints that a killed process left incomplete or half deleted are deleted, too. Nothing
        else in the folder is touched.

        Args:
            keep: the number of last checkpoints to keep.
            best_step: the step of the best checkpoint; 0 if there is none.
        """
        # `checkpoints()` leaves out incomplete ones, so they are not kept here.
        kept = [*self.checkpoints()[-keep:], self.checkpoint(best_step)]
        for path in self._folders(r"\d{8,}"):
            if path not in kept:
                delete_checkpoint(path)
        for path in self._folders(r"\d{8,}\.deleted"):
            with adding_path(path):
                shutil.rmtree(path)

    def _folders(self, pattern: str) -> list[Path]:
        """Returns the folders of checkpoints whose names match a regular expression, sorted."""
        folder = self.path / "checkpoints"
        names = folder.iterdir() if folder.is_dir() else ()
        return sorted(p for p in names if re.fullmatch(pattern, p.name) and p.is_dir())

    def read_config(self) -> dict[str, Any]:
        """Returns the entries of config.json.

        Raises:
            ValueError: there is no run here, or an entry is of another type.
            DamageError: the file has changed since it was written.
        """
        try:
            config = read_sealed(self.config)
            for name in RECORDED.keys() & config.keys():
                compare(f"{self.config}: {name}", config[name], RECORDED[name])
            return config
        except OSError as problem:
            raise ValueError(
                f"{self.path} holds no run to resume: {self.config.name}: {problem}"
            ) from problem

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes config.json; a crash leaves the old file or the whole new one."""
        write_sealed(self.config, config)

    def write_plan(self, plan: Plan) -> None:
        """Writes plan.json; a crash leaves the old file or the whole new one."""
        write_sealed(self.plan, plan.to_json())

    def adopt(self, files: Mapping[str, bytes]) -> dict[str, str]:
        """Writes further files of the run, such as its tokenizer; returns their digests by name."""
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
                    f"{path} is not what the run began with: put it back, or delete it, and it is remade from the data"
                )

    def identity(self) -> str:
        """Returns a text by which processes on several hosts check that they see the same folder.

        The text is the same on all hosts, and differs from that of any other folder.

        Raises:
            ValueError: there is no such folder.
        """
        try:
            seen = self.path.stat()
        except OSError as problem:
            raise ValueError(
                f"{self.path.absolute()} is not there: the folder of a run must lie on a file system that all "
                f"processes see ({problem.strerror})"
            ) from problem
        return f"file {seen.st_ino}, changed at {seen.st_mtime_ns} ns"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Makes the folder if there is none, and locks it while the context is open.

        The system frees the lock however the process ends. At the end of the context, the folder is
        removed if it was made here and is still empty.

        Raises:
            HeldError: another process holds the lock.
        """
        # The innermost folder comes first, because folders must be removed in this order.
        new_folders = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HeldError(
                    f"another run is at work in {self.path}{self._holder()}: stop it, or name another --run-dir"
                ) from None
            holder, seen = f"process {os.getpid()}, started by {os.getppid()}", os.fstat(descriptor)
            replace_bytes(self.holder, f"{holder}, on {gethostname()}".encode())
            # Writing this file has changed the folder's time of change, which `identity` contains.
            # Other hosts may still see the old time for a while, and would then refuse the folder
            # as another one. Therefore the old time is set again.
            with suppress(OSError):
                os.utime(self.path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
            place = self.place()
            try:
                yield
            finally:
                with suppress(OSError):  # `descriptor` finds the folder also if it was moved
                    os.unlink(self.holder.name, dir_fd=descriptor)
                with suppress(OSError):  # `rmdir` refuses a folder that is not empty
                    for path in new_folders if self.place() == place else ():
                        path.rmdir()
        finally:
            os.close(descriptor)

    def _holder(self) -> str:
        """Describes the process that has locked the folder, in brackets; empty if not known."""
        with suppress(OSError):
            text = self.holder.read_bytes()[:200].decode(errors="replace")
            return f" ({text})" if text.isprintable() else ""
        return ""

    def place(self) -> tuple[int, int] | None:
        """Returns the device and inode numbers of this path's folder; None if there is no folder.

        The numbers change if the folder is moved away and another one takes its path.
        """
        try:
            seen = self.path.stat()
        except OSError:
            return None
        return seen.st_dev, seen.st_ino

    @contextmanager
    def advising(self) -> Iterator[None]:
        """Adds advice to a DamageError about the last checkpoint that is raised in the context.

        The message then names the newest whole checkpoint before it, or says that there is none.
        """
        try:
            yield
        except DamageError as damage:
            *older, newest = self.checkpoints()
            advice = "no older checkpoint is whole"
            if whole := [path for path in older if _is_whole(path)]:
                advice = f"{whole[-1]} is whole: move {newest} out of the way, and --resume goes on from that one"
            raise DamageError(f"{damage}; {advice}") from damage

    def check_last(self) -> None:
        """Raises DamageError if the last checkpoint has a step that differs from its name."""
        for path in self.checkpoints()[-1:]:
            _check_step(path)

    def refuse_if_used(self) -> None:
        """Raises ValueError if the folder has a checkpoint, which a new run would overwrite."""
        if self.checkpoints():
            raise ValueError(
                f"{self.path} holds a run already: continue it with --resume, or name another --run-dir"
            )

    def check(
        self, expected: Mapping[str, Any], usual: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Checks that entries of this folder's config.json are as expected.

        Args:
            expected: the expected entries by name.
            usual: defaults for the fields of entries that are mappings. If config.json lacks a
                field, because an older jvpipe has written it, the field has its default.

        Raises:
            ValueError: entries differ. The message names each of them; if an entry is a mapping, it
                also names the first field that differs.
        """
        # JSON turns tuples into lists, so the expected values are passed through JSON as well.
        there, here = dict(self.read_config()), json.loads(json.dumps(expected))
        for key, fields in json.loads(json.dumps(usual or {})).items():
            there[key] = fields | there.get(key, {})
        if differing := list(_differences({key: there.get(key) for key in here}, here)):
            differences = "; ".join(
                f"{key} is {_short(old)} there, {_short(new)} here" for key, old, new in differing
            )
            raise ValueError(f"{self.path} holds another run: {differences}")


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
        check_checkpoint(checkpoint)
        _check_step(checkpoint)
    except DamageError:
        return False
    return True


def _check_step(checkpoint: Path) -> None:
    step, named = open_checkpoint(checkpoint).meta.get("step"), int(checkpoint.name)
    if step != named:
        raise DamageError(
            f"{checkpoint} holds the state of step {brief(step)}, not of step {named} as its name says"
        )


def _short(value: Any) -> str:
    return value if isinstance(value, str) else brief(value)


def _differences(
    there: Mapping[str, Any], here: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yields (name, value there, value here) for each entry that differs.

    For an entry that is a mapping, only its first field that differs is yielded.
    """
    for key in dict.fromkeys([*here, *there]):
        old, new = there.get(key, "missing"), here.get(key, "missing")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from (
                (f"{key}: {name}", a, b) for name, a, b in islice(_differences(old, new), 1)
            )
        elif old != new:
            yield key, old, new


# The plan of a run comes from the file of --plan, from the folder of a resumed run, or a planner.


def given_plan(options: Mapping[str, Any], before: Mapping[str, Any]) -> Plan | None:
    """Returns the plan that --plan names, or None.

    The result is None without --plan. It is also None if the resumed run was started with the same
    --plan, because the folder of the run has that plan.

    Args:
        options: the options of this run.
        before: the options of the run that is resumed; the defaults for a new run.

    Raises:
        ValueError: the file holds no plan, or --stages, --replicas or --schedule contradict it.
    """
    path = options["plan"]
    if path is None or path == before.get("plan"):
        return None
    plan = Plan.load(path)
    schedule = find_schedule(plan.schedule or options["schedule"])
    # Users may write the replicas of stages as 2,1 or as 2:1.
    counts = [between.join(map(str, plan.replicas)) for between in ",:"]
    chosen = {
        "stages": [pipeline_length(plan, schedule)],
        "replicas": counts,
        "schedule": [plan.schedule],
    }
    for name, chosen_value in chosen.items():
        if options[name] not in (*chosen_value, before.get(name)):
            raise ValueError(
                f"--{name} {options[name]} contradicts --plan {path}: there it is {chosen_value[0]}"
            )
    return plan


def kept_plan(path: Path, options: Mapping[str, Any], before: Mapping[str, Any]) -> Plan | None:
    """Returns the plan in the folder of a resumed run; None if a new plan must be made.

    A new plan must be made if the folder has none, if its schedule or stages differ from those of
    the options, if an option in `DECIDES` has changed, or if --remeasure is given.

    Args:
        path: the plan.json of the run.
        options: the options of this run.
        before: the options with which the run was started.

    Raises:
        DamageError: the file has changed since the run wrote it.
    """
    if (
        options["remeasure"]
        or not path.exists()
        or any(options[name] != before.get(name) for name in DECIDES)
    ):
        return None
    # This only checks the digest: a plan that was changed by hand is refused.
    read_sealed(path)
    plan = Plan.load(path)
    schedule = find_schedule(options["schedule"])
    same = plan.schedule == schedule.name and options["stages"] in (
        None,
        pipeline_length(plan, schedule),
    )
    return plan if same else None


# The config.json of a folder may name code, which --resume would run. In a folder from
# somewhere else, the code may be malicious. So a run writes a mark into config.json. Only this
# user can make the mark, and it fits only this folder. If it is right, the code may run.

MARK = "made_here"
"""The name of the entry of config.json that holds the mark."""
_KEY_BYTES = 32
"""The size of the key, which is that of a SHA-256 digest. A key of another size is not used."""


def mark(folder: Path, model: str) -> str:
    """Computes the mark of this user's run of a model in a folder; empty if there is no key.

    The mark is an HMAC of user, folder and model. Its key is a secret in the user's home. So a
    folder that was moved, or that comes from somewhere else, does not have the right mark.

    Args:
        folder: the folder of the run.
        model: the model as `--model` names it.
    """
    key = _key()
    if key is None:
        return ""
    file, colon, name = model.rpartition(":")
    code = f"{Path(file).resolve()}:{name}" if colon and file.endswith(".py") else model
    content = json.dumps([os.getuid(), str(folder.resolve()), code])
    return hmac.new(key, content.encode(), hashlib.sha256).hexdigest()


def check_made_here(folder: Path, config: Mapping[str, Any], model: str) -> None:
    """Refuses to run code that is named by a folder from somewhere else.

    Args:
        folder: the folder of the run.
        config: the entries of the folder's config.json.
        model: the model that config.json names.

    Raises:
        ValueError: the model is code that is not installed, and the mark in `config` is not right.
    """
    found, ours = config.get(MARK), mark(folder, model)
    if is_installed(model) or (ours and isinstance(found, str) and found == ours):
        return
    raise ValueError(
        f"{folder} was not made here by this user, and names code to be run, {model}: look at it, and give --model "
        f"{model} again, or --trust"
    )


def _key() -> bytes | None:
    """Returns the user's secret key, which the first call makes.

    Returns None if the key cannot be made, or if others may read or change it.
    """
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        path = state / "jvpipe" / "key"
        if not path.exists():
            # The file gets its name only when it is complete. If two processes make a key at the
            # same time, the second link fails, and both use the first key.
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=path.parent) as file:  # only its owner can read it
                file.write(secrets.token_bytes(_KEY_BYTES))
                file.flush()
                with suppress(FileExistsError):  # another process was faster
                    os.link(file.name, path)
        seen, key = path.stat(), path.read_bytes()
    except (OSError, RuntimeError):  # no home, or nothing can be written there
        return None
    mine = seen.st_uid == os.getuid() and not seen.st_mode & 0o077
    return key if mine and len(key) == _KEY_BYTES else None
