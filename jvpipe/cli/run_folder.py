"""The folder of a run: what it holds, what is last and whole in it, and whether it fits a resumed run."""

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
    """Writes a file, whole or not at all."""
    replace_text(path, json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n")


def read_sealed(path: Path) -> dict[str, Any]:
    """Reads what `write_sealed` was given.

    Raises:
        OSError: there is no file.
        DamageError: it is not what was written.
    """
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        # The digest is of everything else in the file.
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


# The folder of a run: what it holds, what is last and whole in it, and whether it fits a request to
# go on.

RECORDED = {
    "model_config": {str: anything},
    "parameters": {str: str},
    "data_digest": str,
    "files": {str: str},
}
"""What a configuration holds beside options."""


class HeldError(ValueError):
    """Another process is in a folder."""


@dataclass(frozen=True)
class RunDir:
    """Names the files of a run. Checkpoints are folders named by their step.

    Only a whole one bears such a name.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The options of the run, and the digest of its data."""
        return self.path / "config.json"

    @property
    def plan(self) -> Path:
        """The plan, as `jvpipe.Plan.load` reads it."""
        return self.path / "plan.json"

    @property
    def explanation(self) -> Path:
        """The reasons for the plan, in words."""
        return self.path / "plan.txt"

    @property
    def metrics(self) -> Path:
        """One line of JSON per step."""
        return self.path / "metrics.jsonl"

    @property
    def best(self) -> Path:
        """Which checkpoint had the least held-out loss."""
        return self.path / "best.json"

    @property
    def timeline(self) -> Path:
        """A Chrome trace of the last measured steps."""
        return self.path / "timeline.json"

    @property
    def profile(self) -> Path:
        """What jax.profiler has written of some steps."""
        return self.path / "profile"

    @property
    def holder(self) -> Path:
        """Which process is at work in the folder, while one is."""
        return self.path / ".held-by"

    def checkpoint(self, step: int) -> Path:
        """Returns the folder for the checkpoint of a step."""
        return self.path / "checkpoints" / f"{step:08d}"

    def checkpoints(self) -> list[Path]:
        """Returns the whole checkpoints, oldest first."""
        return [path for path in self._folders(r"\d{8,}") if is_checkpoint(path)]

    def prune(self, keep: int, best_step: int = 0) -> None:
        """Deletes all but the last checkpoints and the best, and what a killed process left of others; nothing else.

        Args:
            keep: so many of the last.
            best_step: that of the best; none is 0.
        """
        # Folders that are not whole are not checkpoints, so they go with the old ones.
        kept = [*self.checkpoints()[-keep:], self.checkpoint(best_step)]
        for path in self._folders(r"\d{8,}"):
            if path not in kept:
                delete_checkpoint(path)
        for path in self._folders(r"\d{8,}\.deleted"):
            with adding_path(path):
                shutil.rmtree(path)

    def _folders(self, pattern: str) -> list[Path]:
        """Returns the folders of checkpoints whose name is of a pattern."""
        folder = self.path / "checkpoints"
        names = folder.iterdir() if folder.is_dir() else ()
        return sorted(p for p in names if re.fullmatch(pattern, p.name) and p.is_dir())

    def read_config(self) -> dict[str, Any]:
        """Reads the configuration of the run in this folder.

        Raises:
            ValueError: there is no run here.
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
        """Writes the configuration, whole or not at all."""
        write_sealed(self.config, config)

    def write_plan(self, plan: Plan) -> None:
        """Writes the plan, whole or not at all."""
        write_sealed(self.plan, plan.to_json())

    def adopt(self, files: Mapping[str, bytes]) -> dict[str, str]:
        """Writes files that belong to the run, each whole or not at all; returns their digests."""
        for name, content in files.items():
            replace_bytes(self.path / name, content)
        return {name: file_digest(self.path / name) for name in files}

    def check_files(self, digests: Mapping[str, str]) -> None:
        """Compares what belongs to the run with the digests that `adopt` gave; what is gone is not missed.

        Raises:
            DamageError: a file is another one.
        """
        for name, digest in digests.items():
            path = self.path / name
            if path.exists() and file_digest(path) != digest:
                raise DamageError(
                    f"{path} is not what the run began with: put it back, or delete it and it is made again of the data"
                )

    def identity(self) -> str:
        """Returns what tells this folder from all others, also on other hosts.

        Raises:
            ValueError: there is none.
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
        """Keeps other processes out of the folder, which is made if need be.

        If it stays empty it goes again. The lock goes with the process, however that ends.

        Raises:
            HeldError: another process is in the folder.
        """
        # The inner ones first, as they are removed again.
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
            with suppress(OSError):  # other hosts see for a while when it was changed before
                os.utime(self.path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
            place = self.place()
            try:
                yield
            finally:
                with suppress(OSError):  # it may have moved
                    os.unlink(self.holder.name, dir_fd=descriptor)
                with suppress(OSError):  # where something is in it
                    for path in new_folders if self.place() == place else ():
                        path.rmdir()
        finally:
            os.close(descriptor)

    def _holder(self) -> str:
        """Says who is in the folder, in brackets; nothing if that is not known."""
        with suppress(OSError):
            text = self.holder.read_bytes()[:200].decode(errors="replace")
            return f" ({text})" if text.isprintable() else ""
        return ""

    def place(self) -> tuple[int, int] | None:
        """Returns what tells the folder at this path from another one that takes its place.

        Returns None if there is none.
        """
        try:
            seen = self.path.stat()
        except OSError:
            return None
        return seen.st_dev, seen.st_ino

    @contextmanager
    def advising(self) -> Iterator[None]:
        """To the damage of the newest checkpoint adds what to do: which older one is whole."""
        try:
            yield
        except DamageError as damage:
            *older, newest = self.checkpoints()
            advice = "no older checkpoint is whole"
            if whole := [path for path in older if _is_whole(path)]:
                advice = f"{whole[-1]} is whole: move {newest} out of the way, and --resume goes on from that one"
            raise DamageError(f"{damage}; {advice}") from damage

    def check_last(self) -> None:
        """Raises DamageError if the last checkpoint is of another step than its name says."""
        for path in self.checkpoints()[-1:]:
            _check_step(path)

    def refuse_if_used(self) -> None:
        """Keeps a new run from overwriting another.

        Raises:
            ValueError: there is a checkpoint in the folder.
        """
        if self.checkpoints():
            raise ValueError(
                f"{self.path} holds a run already: continue it with --resume, or name another --run-dir"
            )

    def check(
        self, expected: Mapping[str, Any], usual: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Checks that the run in this folder agrees with what is wanted, field by field.

        Args:
            expected: the fields.
            usual: fields within fields, as they were in a run that began before there were such.

        Raises:
            ValueError: they differ; the message names the fields, and of fields within fields the
                first.
        """
        # Through JSON, as what is there has been: tuples are lists.
        there, here = dict(self.read_config()), json.loads(json.dumps(expected))
        for key, fields in json.loads(json.dumps(usual or {})).items():
            there[key] = fields | there.get(key, {})
        if differing := list(_differences({key: there.get(key) for key in here}, here)):
            differences = "; ".join(
                f"{key} is {_short(old)} there, {_short(new)} here" for key, old, new in differing
            )
            raise ValueError(f"{self.path} holds another run: {differences}")


def hold_new(stack: ExitStack, name: str) -> RunDir:
    """Makes a new folder of that name, or with a number behind it, and keeps other processes out of it."""
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
    """Yields the entries that differ: name, value there, value here; of an inner mapping the first alone."""
    for key in dict.fromkeys([*here, *there]):
        old, new = there.get(key, "missing"), here.get(key, "missing")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from (
                (f"{key}: {name}", a, b) for name, a, b in islice(_differences(old, new), 1)
            )
        elif old != new:
            yield key, old, new


# The plan that a run of the command line follows: from a file, as it had it, or yet to be made.


def given_plan(options: Mapping[str, Any], before: Mapping[str, Any]) -> Plan | None:
    """Reads the plan of --plan.

    Returns None if there is none, or if the run that is resumed had it already.

    Args:
        options: of this run.
        before: those of the run that is resumed, else the defaults.

    Raises:
        ValueError: it is not a plan, or --stages, --replicas or --schedule contradict it.
    """
    path = options["plan"]
    if path is None or path == before.get("plan"):
        return None
    plan = Plan.load(path)
    schedule = find_schedule(plan.schedule or options["schedule"])
    # Users write 2,1 or 2:1.
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
    """Reads the plan that a resumed run left, if it is asked for nothing that the plan does not follow from.

    Args:
        path: of its plan.json.
        options: of this run.
        before: those of the run that is resumed.
    """
    if (
        options["remeasure"]
        or not path.exists()
        or any(options[name] != before.get(name) for name in DECIDES)
    ):
        return None
    # A plan that was changed by hand is refused, not followed.
    read_sealed(path)  # whether it is what the run wrote
    plan = Plan.load(path)
    schedule = find_schedule(options["schedule"])
    same = plan.schedule == schedule.name and options["stages"] in (
        None,
        pipeline_length(plan, schedule),
    )
    return plan if same else None


# Whether the code that the folder of a run names may be run again without being asked for: its user
# made it there.

MARK = "made_here"
"""Its name in config.json."""
_KEY_BYTES = 32
"""The bytes of the secret: as many as the digest that is keyed with it has."""


def mark(folder: Path, model: str) -> str:
    """Computes what marks this user's runs of a model in this folder; empty if no key can be kept.

    Args:
        folder: of the run.
        model: as `--model` names it.
    """
    key = _key()
    if key is None:
        return ""
    file, colon, name = model.rpartition(":")
    code = f"{Path(file).resolve()}:{name}" if colon and file.endswith(".py") else model
    content = json.dumps([os.getuid(), str(folder.resolve()), code])
    return hmac.new(key, content.encode(), hashlib.sha256).hexdigest()


def check_made_here(folder: Path, config: Mapping[str, Any], model: str) -> None:
    """Keeps code from being run that a folder from elsewhere names.

    Args:
        folder: of the run.
        config: what its config.json holds.
        model: that it names.

    Raises:
        ValueError: the model is somebody's code, and the mark is not that of this user and this
            place.
    """
    found, ours = config.get(MARK), mark(folder, model)
    if is_installed(model) or (ours and isinstance(found, str) and found == ours):
        return
    raise ValueError(
        f"{folder} was not made here by this user, and names code to be run, {model}: look at it, and give --model "
        f"{model} again, or --trust"
    )


def _key() -> bytes | None:
    """Returns the user's secret, made when first asked for; None if others could read it."""
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        path = state / "jvpipe" / "key"
        if not path.exists():
            # Linked when it is whole: two processes that begin at once agree on one key.
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=path.parent) as file:  # for its owner alone
                file.write(secrets.token_bytes(_KEY_BYTES))
                file.flush()
                with suppress(FileExistsError):  # another process was faster
                    os.link(file.name, path)
        seen, key = path.stat(), path.read_bytes()
    except (OSError, RuntimeError):  # no home, or nothing can be written there
        return None
    mine = seen.st_uid == os.getuid() and not seen.st_mode & 0o077
    return key if mine and len(key) == _KEY_BYTES else None
