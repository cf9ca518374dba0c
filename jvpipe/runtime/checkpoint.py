"""Checkpoints: arrays by parameter path, so that a run saved under one cut can be restored under any other."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

Arrays = dict[str, dict[str, np.ndarray]]  # kind -> path -> array


def save_checkpoint(path: str | Path, arrays: Arrays, meta: Mapping[str, Any]) -> None:
    """Writes a checkpoint; it appears under its name only once it is whole.

    Args:
        path: a folder that does not exist yet, or holds an older checkpoint, which is replaced.
        arrays: host arrays by kind (parameters, optimizer, state) and path.
        meta: what JSON can hold.
    """
    final = Path(path).absolute()
    fresh, old = final.with_name(final.name + ".new"), final.with_name(final.name + ".old")
    items = ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), meta=ocp.args.JsonSave(dict(meta)))
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
    return dict(found.arrays), meta


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


def check_paths(saved: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[tuple[int, ...], str]], where: str) -> None:
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
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        words = jax.numpy.asarray(np.array(jax.random.key_data(array)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(array))
    return np.array(array)


def savable(value: Any) -> np.ndarray:
    """Arrays that a checkpoint can hold: keys as their words."""
    return np.asarray(jax.random.key_data(value)) if savable_dtype(str(value.dtype)) != str(value.dtype) else value


def savable_dtype(dtype: str) -> str:
    """The type under which a checkpoint holds arrays of a type."""
    return "uint32" if dtype.startswith("key<") else dtype
