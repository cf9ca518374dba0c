"""Checkpoints: arrays by parameter path, so that any cuts can restore what other cuts have saved.

A checkpoint is a folder. Its content lies in one folder inside it, which is called a generation and
is replaced as a whole (`generations.py`):

    meta.json             the step, the shapes of the model and other entries (`meta.py`)
    arrays.safetensors    the arrays, under names KIND/PATH such as `parameter/dense/kernel`
    digests.json          the digests of the two other files, which reveal damage

If there are several processes, each writes a part in place of `arrays.safetensors`, and `meta.json`
lists the arrays of each part (`process_parts.py`).
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jvpipe.runtime.state.checkpoints import array_file, generations
from jvpipe.runtime.state.checkpoints.array_file import Arrays
from jvpipe.runtime.state.checkpoints.generations import damage_of, read_json
from jvpipe.runtime.state.checkpoints.meta import check_array_table, check_state
from jvpipe.util.brief import brief
from jvpipe.util.given import checked_path, shown_path
from jvpipe.util.pattern import anything, compare

ARRAYS, META = "arrays.safetensors", "meta.json"


def save_checkpoint(path: str | Path, arrays: Arrays, meta: Mapping[str, Any]) -> None:
    """Writes a checkpoint.

    If the process dies at any moment, the folder holds the whole older checkpoint (if there was
    one) or the whole new one.

    Args:
        path: a folder, which may hold an older checkpoint; the new one replaces it.
        arrays: arrays on the host, by kind (parameter, optimizer, state, flight) and path.
        meta: further entries of `meta.json`, which JSON can hold.

    Raises:
        ValueError: the path is that of a file.
        OSError: nothing can be written there; the older checkpoint is as it was.
    """
    folder = checkpoint_folder(path)
    packed = array_file.pack(arrays)
    with generations.draft(folder) as draft:
        draft.mkdir()
        content = {**meta, "kinds": list(arrays), "keys": packed.keys, "raw": packed.raw}
        (draft / META).write_text(json.dumps(content))
        array_file.write(draft / ARRAYS, packed, folder)


def checkpoint_folder(path: str | Path) -> Path:
    """Returns the folder for a checkpoint; raises ValueError if there is a file of that name."""
    folder = Path(path).absolute()
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"{shown_path(folder)} is a file, and a checkpoint is a folder: save under another name"
        )
    return folder


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk, whose arrays are read when they are asked for.

    Attributes:
        folder: the folder of the checkpoint.
        generation: the folder of its newest generation.
        meta: the content of `meta.json`.
    """

    folder: Path
    generation: Path
    meta: dict[str, Any]

    def check(self, process: int = 0, count: int = 1) -> None:
        """Compares files of arrays with their digests.

        Processes divide the files among themselves: this one checks every `count`-th file, from
        file number `process` on.

        Args:
            process: the number of this process.
            count: the number of processes.

        Raises:
            DamageError: a file has changed since it was saved.
        """
        files = sorted(self.meta.get("parts", [ARRAYS]))
        generations.check_generation(self.generation, files[process::count])

    def read(self, names: Collection[tuple[str, str]] | None = None) -> Arrays:
        """Reads some arrays, without reading the rest of their files.

        The result has an entry for each array of the checkpoint, which is None if it was not read.

        Args:
            names: the kind and path of each array to read; None for all arrays.

        Raises:
            DamageError: the files do not agree with `meta.json`.
        """
        with damage_of(self.folder):
            arrays = self._read(names)
            array_file.unpack(arrays, self.meta.get("keys", ()), self.meta.get("raw", ()))
        return arrays

    def check_state(self) -> None:
        """Raises DamageError unless `meta.json` has the entries of a state's checkpoint."""
        with damage_of(self.folder):
            check_state(self.meta)

    def _read(self, names: Collection[tuple[str, str]] | None) -> Arrays:
        """Reads some arrays as they were written: keys as integers, and some types as bytes."""
        arrays: Arrays = {kind: {} for kind in self.meta["kinds"]}
        for file, in_file in self._contents().items():
            keys = {name: _kind_and_path(name) for name in in_file}
            # A file is opened only if it has one of the wanted arrays.
            needed = [name for name, key in keys.items() if names is None or key in names]
            values = array_file.read(self.generation / file, needed) if needed else {}
            for name, (kind, path) in keys.items():
                if kind not in arrays or path in arrays[kind]:
                    raise ValueError(
                        f"{file}: {brief(name)} is of no kind in {META}, or is there twice"
                    )
                arrays[kind][path] = values.get(name)
        return arrays

    def _contents(self) -> Mapping[str, Sequence[str]]:
        """Returns the names of the arrays in each file."""
        if "parts" in self.meta:
            return self.meta["parts"]
        return {ARRAYS: array_file.names_in(self.generation / ARRAYS)}


def _kind_and_path(name: str) -> tuple[str, str]:
    """Splits the name of an array at the first slash; the path may have further slashes."""
    kind, _, path = name.partition("/")
    return kind, path


def open_checkpoint(path: str | Path) -> Saved:
    """Finds a checkpoint, and reads its `meta.json`.

    Raises:
        ValueError: there is no checkpoint.
        DamageError: its `meta.json` has changed since it was saved.
    """
    folder = checked_path("path", path).absolute()
    generation = generations.newest(folder)
    if generation is None:
        raise ValueError(f"{shown_path(folder)} holds no checkpoint that jvpipe saved")
    generations.check_generation(generation, [META])
    # The other files are large. `Saved.check` compares their digests later, so that several
    # processes can divide this work.
    with damage_of(folder):
        meta = read_json(generation, META)
        compare(f"{META}:", meta, {str: anything})
        check_array_table(meta)
    return Saved(folder, generation, meta)


def checkpoint_extra(path: str | Path) -> dict[str, Any]:
    """Returns the `extra` with which `Pipeline.save` was called."""
    saved = open_checkpoint(path)
    with damage_of(saved.folder):
        compare(META, saved.meta.get("extra"), {str: anything})
    return saved.meta["extra"]


WORDS = {
    "parameter": ("model", "parameter"),
    "optimizer": ("optimizer", "array of the optimizer's state"),
    "state": ("model", "leaf of the model state"),
}
"""For each kind, the words of messages for what an array belongs to, and for the array itself."""


def check_paths(
    kind: str,
    saved: Mapping[str, Any],
    expected: Mapping[str, tuple[tuple[int, ...], str]],
    where: str,
) -> None:
    """Checks the names of saved arrays, and the shapes and types of those that were read.

    Args:
        kind: the kind of the arrays, as in `WORDS`.
        saved: arrays by path; None for one that was not read.
        expected: shapes and types by path.
        where: the path of the checkpoint, for the message.

    Raises:
        ValueError: an array differs; the message names the first one.
    """
    whole, part = WORDS[kind]
    other = f"{where} is of another {whole}: "
    # A frozen parameter has no optimizer state.
    likely = "; are other parameters frozen (--frozen, frozen=)?" if kind == "optimizer" else ""
    for path, (shape, dtype) in expected.items():
        if path not in saved:
            raise ValueError(f"{other}it has no {part} '{path}'{likely}")
        array = saved[path]
        if array is None:
            continue
        theirs = f"{array.dtype}{list(array.shape)}"
        ours = f"{dtype}{list(shape)}"
        if theirs != ours:
            raise ValueError(f"{other}its {part} '{path}' is {theirs}, this {whole}'s is {ours}")
    extra = sorted(set(saved) - set(expected))
    if extra:
        raise ValueError(f"{other}this one has no {part} '{extra[0]}'{likely}")
