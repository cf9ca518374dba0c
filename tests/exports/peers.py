"""What the parsers of the systems themselves say of files of ours, each in an environment of its
own (`make peers`).
"""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.exports.readers import READERS, Action, Said

ROOT = Path(__file__).resolve().parents[2]
FORMATS = {"torch-csv": "torch", "megatron": "megatron", "maxtext": "maxtext", "jaxpp": "jaxpp"}
"""Whose parser reads a format."""


def run(peer: str, script: str, *arguments: str) -> str:
    """What a script prints that the Python of a system's environment runs; the test is skipped
    where there is none.
    """
    python = ROOT / "build" / "peers" / peer / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment with {peer}: make peers")
    call = [str(python), str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(call, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def said_by(name: str, texts: Sequence[str], microbatches: int, folder: Path) -> list[Said]:
    """What a system's own parser says of files, one after another in one process.

    Args:
        name: of the format.
        texts: the files.
        microbatches: of a step, of which not every format speaks.
        folder: where they are written.
    """
    paths = [
        folder / f"{number}.{'yml' if name == 'maxtext' else name}" for number in range(len(texts))
    ]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    peer = FORMATS[name]
    printed = run(peer, f"read_by_{peer}.py", str(microbatches), *map(str, paths))
    told = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(told) == len(texts), f"{peer} says {len(told)} of {len(texts)} files"
    return [
        _said(name, fields, text, microbatches) for fields, text in zip(told, texts, strict=True)
    ]


def _said(name: str, fields: dict, text: str, microbatches: int) -> Said:
    """What a parser says; an order that is a rule of the system's is that of the readers here."""
    again, order = fields.pop("again", None), fields.pop("order", None)
    said = Said(**fields, again=None if again is None else set(again))
    if order is None:
        said.order = READERS[name](text, microbatches).order
        return said
    rows = [[(s, kind, m) for s, kind, m in row] for row in order]
    said.order = [[_whole(x, row) for x in row] for row in rows] if name == "jaxpp" else rows
    return said


def _whole(action: Action, row: Sequence[Action]) -> Action:
    """JaxPP's first half of a backward that has the other one in it, which is then nowhere else."""
    s, kind, m = action
    return (s, "B", m) if kind == "I" and (s, "W", m) not in row else action
