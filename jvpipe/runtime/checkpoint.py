"""Checkpoints: arrays by parameter path, so that a run saved under one cut can be restored under any other."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jvpipe.trace.keys import is_key

Arrays = dict[str, dict[str, Any]]  # kind -> path -> array, of numbers or of typed keys


def save_checkpoint(path: str | Path, arrays: Arrays, meta: Mapping[str, Any]) -> None:
    """Writes a checkpoint; it appears under its name only once it is whole.

    Args:
        path: a folder that does not exist yet, or holds an older checkpoint, which is replaced.
        arrays: host arrays by kind (parameters, optimizer, state) and path.
        meta: what JSON can hold.
    """
    final = Path(path).absolute()
    fresh, old = final.with_name(final.name + ".new"), final.with_name(final.name + ".old")
    named = [(kind, name, x) for kind, found in arrays.items() for name, x in found.items() if is_key(x)]
    impls = [[kind, name, str(jax.random.key_impl(x))] for kind, name, x in named]
    words = {kind: {name: _words(x) for name, x in found.items()} for kind, found in arrays.items()}
    told = ocp.args.JsonSave({**meta, "keys": impls})
    items = ocp.args.Composite(arrays=ocp.args.StandardSave(words), meta=told)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(fresh if final.exists() else final, items, force=True)
    if fresh.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        fresh.rename(final)
        shutil.rmtree(old)


def load_checkpoint(path: str | Path) -> tuple[Arrays, dict[str, Any]]:
    """Reads what `save_checkpoint` wrote."""
    folder = Path(path).absolute()
    meta = load_meta(folder)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(folder, ocp.args.Composite(arrays=ocp.args.StandardRestore()))
    arrays = dict(found.arrays)
    for kind, name, impl in meta.get("keys", []):
        arrays[kind][name] = jax.random.wrap_key_data(jax.numpy.asarray(arrays[kind][name]), impl=impl)
    return arrays, meta


def load_meta(path: str | Path) -> dict[str, Any]:
    """The JSON part of a checkpoint alone."""
    folder = Path(path).absolute()
    if not (folder / "meta").is_dir():
        raise ValueError(f"{folder} holds no checkpoint that jvpipe saved")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        return dict(checkpointer.restore(folder, ocp.args.Composite(meta=ocp.args.JsonRestore())).meta)


def checkpoint_extra(path: str | Path) -> dict[str, Any]:
    """What `Pipeline.save` was given as `extra`."""
    return load_meta(path)["extra"]


def check_paths(saved: Mapping[str, Any], wanted: Mapping[str, tuple[tuple[int, ...], str]], where: str) -> None:
    """Raises ValueError unless saved arrays have the wanted names, shapes and types; names the first that differs."""
    for path, (shape, dtype) in wanted.items():
        if path not in saved:
            raise ValueError(f"{where} is of another model: it has no parameter '{path}'")
        found = saved[path]
        if (tuple(found.shape), str(found.dtype)) != (tuple(shape), dtype):
            raise ValueError(
                f"{where} is of another model: its parameter '{path}' is {found.dtype}{list(found.shape)}, "
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
    """What a checkpoint can hold: of keys their words."""
    return np.asarray(jax.random.key_data(value)) if is_key(value) else value
