"""Checkpoints of several processes: each writes a part, and the first makes the generation.

A generation is the folder with the whole content of a checkpoint, and a draft is a generation that
is still being written (`generations.py`). Each line shows what a process writes; time runs to the
right. At each bar, the processes wait for each other:

    process 0   draft  |  part-0000.safetensors  |  meta.json, digests.json, the generation's name  |
    process 1          |  part-0001.safetensors  |                                                  |

If one process fails, all processes raise an error. The older generation then stays, because the
draft gets its final name only at the end.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.runtime.state.checkpoints import array_file, generations
from jvpipe.runtime.state.checkpoints.array_file import Arrays
from jvpipe.runtime.state.checkpoints.checkpoint import (
    META,
    Saved,
    checkpoint_folder,
    open_checkpoint,
)
from jvpipe.runtime.state.checkpoints.generations import DamageError

T = TypeVar("T")


@dataclass(frozen=True)
class _Part:
    """The description of a part, which the process that wrote the part sends to the others.

    `bytes` is the size of its file. `keys` and `raw` are those of `array_file.Packed`.
    """

    file: str
    bytes: int
    digest: str
    keys: list[list[Any]]
    raw: list[list[Any]]


def save_parts(
    hosts: Hosts,
    path: str | Path,
    arrays: Arrays,
    meta: Mapping[str, Any],
) -> None:
    """Writes a checkpoint together with all other processes; if one fails, nothing changes.

    Args:
        hosts: the processes, all of which must call this.
        path: a folder that all processes see.
        arrays: the arrays on the host that this process saves, by kind and path.
        meta: further entries of `meta.json`; those of the first process are written.

    Raises:
        ValueError: the path is that of a file, or some process sees another folder there.
        OSError: this process cannot write there.
        Disagreement: another process has failed.
    """
    folder = Path(path).absolute()
    draft = folder / hosts.decided("draft", partial(_begin, folder))
    try:
        part = hosts.together("part", partial(_write, draft, hosts.process, arrays))
        parts = [_Part(**fields) for fields in hosts.exchange_json("parts", asdict(part))]
        of_all = {**meta, "kinds": list(arrays)}
        hosts.first("checkpoint", partial(_finish, draft, parts, of_all))
    except Exception:
        if not hosts.process:
            generations.drop_draft(draft)
        raise


def _begin(folder: Path) -> str:
    draft = generations.begin_draft(checkpoint_folder(folder))
    draft.mkdir()
    return draft.name


def _write(draft: Path, process: int, arrays: Arrays) -> _Part:
    """Writes this process's part, and forces it to the disk.

    Args:
        draft: the folder of the draft.
        process: the number of this process.
        arrays: its arrays.

    Raises:
        ValueError: the draft is not in the folder that this process sees.
    """
    if not draft.is_dir():
        raise ValueError(_elsewhere(draft.parent, process))
    file = draft / f"part-{process:04d}.safetensors"
    packed = array_file.pack(arrays)
    array_file.write(file, packed, draft.parent)
    generations.sync(file)
    size = file.stat().st_size
    digest = generations.file_digest(file)
    return _Part(file.name, size, digest, packed.keys, packed.raw)


def _finish(draft: Path, parts: Sequence[_Part], meta: Mapping[str, Any]) -> None:
    """Makes the draft with the parts of all processes the newest generation.

    Args:
        draft: the folder of the draft.
        parts: the part of each process.
        meta: further entries of `meta.json`.

    Raises:
        ValueError: a part is not in the folder that the first process sees.
    """
    # A part is missing here if its process sees another folder under this path.
    for process, part in enumerate(parts):
        file = draft / part.file
        if not file.is_file() or file.stat().st_size != part.bytes:
            raise ValueError(_elsewhere(draft.parent, process))
    content = {
        **meta,
        "keys": [key for part in parts for key in part.keys],
        "raw": [raw for part in parts for raw in part.raw],
        "parts": {part.file: array_file.names_in(draft / part.file) for part in parts},
    }
    (draft / META).write_text(json.dumps(content))
    # Each process has computed the digest of its own part right after writing it, when the system
    # still had the file in memory. So the first process need not read the parts.
    generations.finish_draft(draft, {part.file: part.digest for part in parts})


def _elsewhere(folder: Path, process: int) -> str:
    """Writes the message for a process that sees another folder under the same path."""
    return (
        f"{folder} is another folder in process {process} than in the first one: "
        "a checkpoint of several processes needs a folder that all see"
    )


def open_together(hosts: Hosts | None, path: str | Path) -> Saved:
    """Opens a checkpoint in all processes, and checks its files, each file in one process.

    Args:
        hosts: the processes, if there are several.
        path: a folder that all processes see.

    Raises:
        ValueError: there is no checkpoint, or some processes find different ones.
        DamageError: the checkpoint has changed since it was saved.
    """
    saved = read_together(hosts, partial(open_checkpoint, path))
    if hosts is not None:
        content = [("generation", saved.generation.name), ("meta.json", json.dumps(saved.meta))]
        hosts.agree("the checkpoints", content)
    share = (hosts.process, hosts.count) if hosts is not None else (0, 1)
    read_together(hosts, partial(saved.check, *share))
    return saved


def read_together(hosts: Hosts | None, act: Callable[[], T]) -> T:
    """Calls a function that reads a checkpoint; if one process finds damage, all raise an error.

    Args:
        hosts: the processes, if there are several.
        act: reads the checkpoint.

    Raises:
        DamageError: some process has found damage.
        Disagreement: another process has failed with some other error.
    """
    if hosts is None:
        return act()

    # Damage is returned as a value. If it were raised, `together` would raise a Disagreement in the
    # other processes instead of a DamageError.
    def read() -> T | DamageError:
        try:
            return act()
        except DamageError as damage:
            return damage

    value = hosts.together("checkpoint", read)
    damage = str(value) if isinstance(value, DamageError) else ""
    for word in hosts.exchange("damage", damage.encode()):
        if word:
            raise DamageError(word.decode())
    assert not isinstance(value, DamageError)
    return value
