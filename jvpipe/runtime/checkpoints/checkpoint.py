"""Checkpoints: arrays by parameter path, so that a run saved under one cut can be restored under any other.

A checkpoint is a generation of its folder: `arrays.safetensors`, whose names are KIND/PATH, and `meta.json`. Orbax,
which wrote them once, is asked to read what it wrote.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jvpipe.runtime.checkpoints import generations
from jvpipe.runtime.checkpoints.generations import DamageError
from jvpipe.trace.keys import is_key

Arrays = dict[str, dict[str, Any]]  # kind -> path -> array, of numbers or of typed keys
_ARRAYS, _META = "arrays.safetensors", "meta.json"


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
    folder = Path(path).absolute()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, and a checkpoint is a folder: save under another name")
    words = {(kind, name): _words(x) for kind, named in arrays.items() for name, x in named.items()}
    told = {
        **meta,
        "kinds": list(arrays),
        "keys": [
            [kind, name, str(jax.random.key_impl(arrays[kind][name]))]
            for kind, name in words
            if is_key(arrays[kind][name])
        ],
        "raw": [[*at, str(x.dtype), x.shape] for at, x in words.items() if not _is_native(x)],
    }
    flat = {"/".join(at): x if _is_native(x) else x.reshape(-1).view(np.uint8) for at, x in words.items()}
    with generations.draft(folder) as draft:
        draft.mkdir()
        (draft / _META).write_text(json.dumps(told))
        try:
            save_file(flat, draft / _ARRAYS)
        except SafetensorError as problem:
            raise OSError(f"cannot write the checkpoint {folder}: {problem}") from problem
    _remove_orbax(folder)


def load_checkpoint(path: str | Path) -> tuple[Arrays, dict[str, Any]]:
    """Reads what `save_checkpoint` wrote.

    Raises:
        ValueError: there is no checkpoint.
        DamageError: it is not as it was saved.
    """
    meta = load_meta(path)
    generation = generations.newest(Path(path).absolute())
    if generation is None:
        arrays = _read_by_orbax(Path(path).absolute())
    else:
        generations.check(generation)
        arrays = {kind: {} for kind in meta["kinds"]}
        with safe_open(generation / _ARRAYS, framework="numpy") as file:
            for joined in file.keys():  # noqa: SIM118 - it is no mapping
                kind, _, name = joined.partition("/")
                arrays[kind][name] = file.get_tensor(joined)
        for kind, name, dtype, shape in meta["raw"]:
            arrays[kind][name] = arrays[kind][name].view(jax.numpy.dtype(dtype)).reshape(shape)
    for kind, name, impl in meta.get("keys", []):
        arrays[kind][name] = jax.random.wrap_key_data(jax.numpy.asarray(arrays[kind][name]), impl=impl)
    return arrays, meta


def load_meta(path: str | Path) -> dict[str, Any]:
    """The JSON part of a checkpoint alone; raises what `load_checkpoint` does."""
    folder = Path(path).absolute()
    if not is_checkpoint(folder):
        raise ValueError(f"{folder} holds no checkpoint that jvpipe saved")
    generation = generations.newest(folder)
    if generation:
        generations.check(generation, [_META])
    file = generation / _META if generation else folder / "meta" / "metadata"
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as problem:
        raise DamageError(f"{folder} is damaged: {file.relative_to(folder)}: {problem}") from problem


def checkpoint_extra(path: str | Path) -> dict[str, Any]:
    """Reads what `Pipeline.save` was given as `extra`."""
    return load_meta(path)["extra"]


def is_checkpoint(path: Path) -> bool:
    """True if a folder holds a checkpoint that was written to its end."""
    return generations.newest(path) is not None or (path / "meta").is_dir()


def check_checkpoint(path: Path) -> None:
    """Compares the files of a checkpoint with their digests, if it has some; raises DamageError if they differ."""
    if generation := generations.newest(path):
        generations.check(generation)


def delete_checkpoint(path: Path) -> None:
    """Deletes a checkpoint, whole or not; what else lies in its folder stays."""
    _remove_orbax(path)
    generations.delete(path)


def check_paths(saved: Mapping[str, Any], wanted: Mapping[str, tuple[tuple[int, ...], str]], where: str) -> None:
    """Checks that saved arrays have the wanted names, shapes and types.

    Args:
        saved: arrays by path.
        wanted: shapes and types by path.
        where: the checkpoint, for the message.

    Raises:
        ValueError: they differ; the message names the first.
    """
    for path, (shape, dtype) in wanted.items():
        if path not in saved:
            raise ValueError(f"{where} is of another model: it has no parameter '{path}'")
        array = saved[path]
        if (tuple(array.shape), str(array.dtype)) != (tuple(shape), dtype):
            raise ValueError(
                f"{where} is of another model: its parameter '{path}' is {array.dtype}{list(array.shape)}, "
                f"this model's is {dtype}{list(shape)}"
            )
    if extra := sorted(set(saved) - set(wanted)):
        raise ValueError(f"{where} is of another model: this one has no parameter '{extra[0]}'")


def to_host(array: jax.Array) -> Any:
    """A copy on the host that no later step can overwrite."""
    if is_key(array):
        words = jax.numpy.asarray(np.array(jax.random.key_data(array)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(array))
    return np.array(array)


def _words(value: Any) -> np.ndarray:
    """An array as a checkpoint can hold it: of keys their words."""
    return np.asarray(jax.random.key_data(value) if is_key(value) else value, order="C")


def _is_native(array: np.ndarray) -> bool:
    """True if the format knows the type of an array; others are written as bytes."""
    return (array.dtype.isbuiltin == 1 and array.dtype.itemsize <= 8) or str(array.dtype) == "bfloat16"


def _read_by_orbax(folder: Path) -> Arrays:
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            return dict(checkpointer.restore(folder, ocp.args.Composite(arrays=ocp.args.StandardRestore())).arrays)
    except Exception as problem:  # of any kind
        raise DamageError(f"{folder} is damaged: {str(problem).partition(' [')[0]}") from problem


def _remove_orbax(folder: Path) -> None:
    """Deletes what Orbax wrote for us, if that is what is there."""
    if not (folder / "meta" / "metadata").is_file():
        return
    for path in (folder / "arrays", folder / "meta"):
        shutil.rmtree(path, ignore_errors=True)
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        (folder / name).unlink(missing_ok=True)
