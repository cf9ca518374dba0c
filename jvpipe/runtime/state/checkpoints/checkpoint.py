"""Checkpoints: arrays by parameter path, so that a run saved under one cut can be restored under any other.

A checkpoint is a generation of its folder: `meta.json`, and `arrays.safetensors`, whose names are KIND/PATH; of several
processes a part from each instead, and in `meta.json` which part has what. Orbax, which wrote them once, is asked to
read what it wrote.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jvpipe.runtime.state.checkpoints import array_file, generations
from jvpipe.runtime.state.checkpoints.array_file import Arrays
from jvpipe.runtime.state.checkpoints.generations import damage_of, read_json
from jvpipe.runtime.state.checkpoints.meta import check_arrays, check_state
from jvpipe.util.brief import brief
from jvpipe.util.given import checked_path
from jvpipe.util.pattern import anything, compare

ARRAYS, META = "arrays.safetensors", "meta.json"


def save_checkpoint(path: str | Path, arrays: Arrays, meta: Mapping[str, Any]) -> None:
    """Writes a checkpoint; whenever the process dies, the folder holds the one before it or this one, whole.

    Args:
        path: a folder, which may hold an older checkpoint that this one replaces.
        arrays: host arrays by kind (parameters, optimizer, state) and path.
        meta: what JSON can hold.

    Raises:
        ValueError: the path is that of a file.
        OSError: it cannot be written there; the older checkpoint is as it was.
    """
    folder = checkpoint_folder(path)
    packed = array_file.pack(arrays)
    with generations.draft(folder) as draft:
        draft.mkdir()
        told = {**meta, "kinds": list(arrays), "keys": packed.keys, "raw": packed.raw}
        (draft / META).write_text(json.dumps(told))
        array_file.write(draft / ARRAYS, packed, folder)


def checkpoint_folder(path: str | Path) -> Path:
    """The folder for a checkpoint; ValueError if there is a file of that name."""
    folder = Path(path).absolute()
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"{folder} is a file, and a checkpoint is a folder: save under another name"
        )
    return folder


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is there; its arrays are read when they are asked for."""

    folder: Path
    generation: Path
    meta: dict[str, Any]

    def check(self, process: int = 0, count: int = 1) -> None:
        """Compares the files of arrays with their digests; of several processes each looks at some of them.

        Args:
            process: this one.
            count: of processes that share the work.

        Raises:
            DamageError: a file is not what was saved.
        """
        generations.check(self.generation, sorted(self.meta.get("parts", [ARRAYS]))[process::count])

    def read(self, wanted: Collection[tuple[str, str]] | None = None) -> Arrays:
        """Reads arrays, from the files that hold them alone; of the others the names are told, with None.

        Args:
            wanted: kind and path of each; all unless given.
        """
        with damage_of(self.folder):
            arrays = self._read(wanted)
            array_file.unpack(arrays, self.meta.get("keys", ()), self.meta.get("raw", ()))
        return arrays

    def check_state(self) -> None:
        """Raises DamageError unless it is of a state, and tells all that a state is made of."""
        with damage_of(self.folder):
            check_state(self.meta)

    def _read(self, wanted: Collection[tuple[str, str]] | None) -> Arrays:
        arrays: Arrays = {kind: {} for kind in self.meta["kinds"]}
        for file, names in self._contents().items():
            split = {name: (name.partition("/")[0], name.partition("/")[2]) for name in names}
            needed = [name for name, at in split.items() if wanted is None or at in wanted]
            values = array_file.read(self.generation / file, needed) if needed else {}
            for name, (kind, path) in split.items():
                if kind not in arrays or path in arrays[kind]:
                    raise ValueError(f"{file}: {brief(name)} is of no kind of {META}, or twice")
                arrays[kind][path] = values.get(name)
        return arrays

    def _contents(self) -> Mapping[str, Sequence[str]]:
        """The names of the arrays in each file."""
        if "parts" in self.meta:
            return self.meta["parts"]
        return {ARRAYS: array_file.names_in(self.generation / ARRAYS)}


def open_checkpoint(path: str | Path) -> Saved:
    """Finds what was saved, and reads what it tells of itself.

    Raises:
        ValueError: there is no checkpoint.
        DamageError: its JSON part is not as it was saved.
    """
    folder = checked_path(path).absolute()
    generation = generations.newest(folder)
    if generation is None:
        raise ValueError(f"{folder} holds no checkpoint that jvpipe saved")
    generations.check(generation, [META])
    with damage_of(folder):
        meta = read_json(generation, META)
        compare(f"{META}:", meta, {str: anything})
        check_arrays(meta)
    return Saved(folder, generation, meta)


def load_checkpoint(path: str | Path) -> tuple[Arrays, dict[str, Any]]:
    """Reads all that was saved.

    Raises:
        ValueError: there is no checkpoint.
        DamageError: it is not as it was saved.
    """
    saved = open_checkpoint(path)
    saved.check()
    return saved.read(), saved.meta


def checkpoint_extra(path: str | Path) -> dict[str, Any]:
    """Reads what `Pipeline.save` was given as `extra`."""
    saved = open_checkpoint(path)
    with damage_of(saved.folder):
        compare(META, saved.meta.get("extra"), {str: anything})
    return saved.meta["extra"]


def is_checkpoint(path: Path) -> bool:
    """True if a folder holds a checkpoint that was written to its end."""
    return generations.newest(path) is not None


def check_checkpoint(path: Path) -> None:
    """Compares the files of a checkpoint with their digests, if it has some; raises DamageError if they differ."""
    if generation := generations.newest(path):
        generations.check(generation)


def delete_checkpoint(path: Path) -> None:
    """Deletes a checkpoint, whole or not, or warns that it cannot; what else lies in its folder stays."""
    generations.delete(path)


WORDS = {
    "parameter": ("model", "parameter"),
    "optimizer": ("optimizer", "array of the optimizer's state"),
    "state": ("model", "leaf of the model state"),
}
"""For the arrays of each kind: of what another one was saved where they differ, and what they are."""


def check_paths(
    kind: str,
    saved: Mapping[str, Any],
    wanted: Mapping[str, tuple[tuple[int, ...], str]],
    where: str,
) -> None:
    """Checks that saved arrays have the wanted names, and those that were read the wanted shapes and types.

    Args:
        kind: of the arrays, as in `WORDS`.
        saved: arrays by path, None for one that was not read.
        wanted: shapes and types by path.
        where: the checkpoint, for the message.

    Raises:
        ValueError: they differ; the message names the first.
    """
    whole, part = WORDS[kind]
    other = f"{where} is of another {whole}: "
    for path, (shape, dtype) in wanted.items():
        if path not in saved:
            raise ValueError(f"{other}it has no {part} '{path}'")
        array = saved[path]
        if array is not None and (tuple(array.shape), str(array.dtype)) != (tuple(shape), dtype):
            found, own = f"{array.dtype}{list(array.shape)}", f"{dtype}{list(shape)}"
            raise ValueError(f"{other}its {part} '{path}' is {found}, this {whole}'s is {own}")
    if extra := sorted(set(saved) - set(wanted)):
        raise ValueError(f"{other}this one has no {part} '{extra[0]}'")
