"""Runs of the command line in processes of their own, to be disturbed; each has a time limit."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jvpipe.cli.run_folder import RunDir

LIMIT_S = 600
_WORDS = ("quick", "brown", "lazy", "gray", "small", "green", "river", "dog")


def page(path: Path) -> Path:
    """Writes a page of prose to train on."""
    sentences = [
        f"The {a} {b} sees the {c} near the old stone bridge."
        for a in _WORDS
        for b in _WORDS
        for c in _WORDS
    ]
    path.write_text(
        "\n\n".join(" ".join(sentences[i : i + 5]) for i in range(0, len(sentences), 5))
    )
    return path


@dataclass(frozen=True)
class Run:
    """A run with these options, of the smallest BERT on a text unless they name a model.

    `cache` keeps what is compiled and measured.
    """

    path: Path
    text: Path
    cache: Path
    options: Sequence[str] = field(default=())

    def start(self, *more: str) -> subprocess.Popen[str]:
        """Begins the run, or goes on with it if it has begun."""
        base = [sys.executable, "-m", "jvpipe.train", "--run-dir", str(self.path)]
        begun = (self.path / "config.json").exists()
        bert = ["--size", "tiny", "--batch-size", "8", "--data", str(self.text)]
        fresh = [*(() if "--model" in self.options else bert), *self.options]
        command = [*base, *(["--resume"] if begun else fresh), *more]
        return subprocess.Popen(
            command,
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, *more: str) -> str:
        """Lets the run go on to its end; what it says if it fails, else nothing."""
        with self.start(*more) as process:
            try:
                _, told = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                return f"it was not done after {LIMIT_S} s"
        return told if process.returncode else ""

    def losses(self) -> list[float]:
        """The loss of each step that was logged."""
        return [line["loss"] for line in self.lines()]

    def lines(self) -> list[dict[str, Any]]:
        """What was logged of each step."""
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def checkpoints(self) -> list[int]:
        """The steps of its whole checkpoints, the last one last."""
        return [int(path.name) for path in RunDir(self.path).checkpoints()]

    @property
    def _environment(self) -> dict[str, str]:
        """The command makes its devices itself."""
        flags = [
            flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag
        ]
        return os.environ | {
            "XLA_FLAGS": " ".join(flags),
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
        }
