"""The folder of a run: what it holds, what is last and whole in it, and whether it fits a request to go on."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from jvpipe.report.metrics import replace_text

KEPT_CHECKPOINTS = 2


@dataclass(frozen=True)
class RunDir:
    """Names the files of a run. Checkpoints are folders named by their step; only a whole one bears such a name."""

    path: Path

    @property
    def config(self) -> Path:
        """What the run was asked to do, and on which data."""
        return self.path / "config.json"

    @property
    def plan(self) -> Path:
        """The plan, as `jvpipe.Plan.load` reads it."""
        return self.path / "plan.json"

    @property
    def explanation(self) -> Path:
        """Why the plan is what it is, in words."""
        return self.path / "plan.txt"

    @property
    def metrics(self) -> Path:
        """One line of JSON per step."""
        return self.path / "metrics.jsonl"

    @property
    def timeline(self) -> Path:
        """A Chrome trace of the last measured step."""
        return self.path / "timeline.json"

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step belongs."""
        return self.path / "checkpoints" / f"{step:08d}"

    def checkpoints(self) -> list[Path]:
        """The whole checkpoints, oldest first."""
        folder = self.path / "checkpoints"
        return sorted(p for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []

    def prune(self) -> None:
        """Deletes all but the last checkpoints, and what a killed process left half-written or half-deleted."""
        for old in self.checkpoints()[:-KEPT_CHECKPOINTS]:
            old.rename(old.with_suffix(".deleted"))
        for path in (self.path / "checkpoints").iterdir():
            if not path.name.isdigit():
                shutil.rmtree(path)

    def read_config(self) -> dict[str, Any]:
        """The configuration of the run in this folder.

        Raises:
            ValueError: there is no run here.
        """
        try:
            return json.loads(self.config.read_text())
        except (OSError, json.JSONDecodeError) as problem:
            raise ValueError(f"{self.path} holds no run to resume: {self.config.name}: {problem}") from problem

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes the configuration, whole or not at all."""
        replace_text(self.config, json.dumps(config, indent=1) + "\n")

    def refuse_if_used(self) -> None:
        """Keeps a new run from overwriting another.

        Raises:
            ValueError: there is a checkpoint in the folder.
        """
        if self.checkpoints():
            raise ValueError(f"{self.path} holds a run already: continue it with --resume, or name another --run-dir")

    def check(self, wanted: Mapping[str, Any]) -> None:
        """Checks that the run in this folder agrees with what is wanted, field by field.

        Raises:
            ValueError: they differ; the message names the fields, and of fields within fields the first.
        """
        there, here = self.read_config(), json.loads(json.dumps(wanted))
        if differing := list(_differences({key: there.get(key) for key in here}, here)):
            told = "; ".join(f"{key} is {old} there, {new} here" for key, old, new in differing)
            raise ValueError(f"{self.path} holds another run: {told}")


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The entries that differ: name, value there, value here; of an entry that is a mapping itself the first."""
    for key in dict.fromkeys([*here, *there]):
        old, new = there.get(key, "missing"), here.get(key, "missing")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from ((f"{key}: {name}", a, b) for name, a, b in islice(_differences(old, new), 1))
        elif old != new:
            yield key, old, new
