"""Writes arrays to a safetensors file and reads them, under names such as `optimizer/count`.

safetensors is a file format for named arrays of numbers. In a checkpoint, a name is KIND/PATH. The
kind is parameter, optimizer, state (of the model) or flight. The path leads to the array in the
tree of its kind. A micro-batch is in flight if its forward has run and its backward has not. If
some are in flight, all arrays of the run are also saved under the kind flight, each with the name
of its buffer as the path.

The format has no random keys and lacks some types of numbers. Keys are written as their integers,
and arrays of the missing types as bytes. The types of both are kept in the checkpoint's
`meta.json`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jvpipe.trace.keys import is_key
from jvpipe.util.brief import brief

Arrays = dict[str, dict[str, Any]]
"""Arrays of numbers or of random keys, by kind and path; None for one that was not read."""


@dataclass(frozen=True)
class Packed:
    """Arrays in types that the format has.

    Attributes:
        arrays: the arrays by KIND/PATH.
        keys: (kind, path, implementation) of each array of random keys.
        raw: (kind, path, type, shape) of each array that is written as bytes.
    """

    arrays: dict[str, np.ndarray]
    keys: list[list[Any]]
    raw: list[list[Any]]


def pack(arrays: Arrays) -> Packed:
    """Returns arrays in types that the format has."""
    packed = Packed({}, [], [])
    for kind, named in arrays.items():
        for name, array in named.items():
            if is_key(array):
                implementation = str(jax.random.key_impl(array))
                packed.keys.append([kind, name, implementation])
                array = jax.random.key_data(array)
            words = np.asarray(array, order="C")
            # Arrays of types that the format lacks become bytes. `raw` keeps their type and shape.
            if not _is_native(words):
                packed.raw.append([kind, name, str(words.dtype), words.shape])
                words = words.reshape(-1).view(np.uint8)
            packed.arrays[f"{kind}/{name}"] = words
    return packed


def unpack(
    arrays: Arrays,
    keys: Sequence[Sequence[Any]],
    raw: Sequence[Sequence[Any]],
) -> None:
    """Gives arrays that were read the types and shapes that they had before `pack`.

    Args:
        arrays: the arrays as they were read; this mapping is changed.
        keys: the entries of `Packed.keys`.
        raw: the entries of `Packed.raw`.

    Raises:
        ValueError: an entry names an array that does not exist, or that cannot be converted to the
            type and shape of the entry.
    """
    for kind, name, *_ in (*raw, *keys):
        if name not in arrays.get(kind, {}):
            raise ValueError(f"there is no {kind} {brief(name)}, but it is given a type")
    # Bytes come before keys, because the integers of a key may have been written as bytes.
    for kind, name, dtype, shape in raw:
        array = arrays[kind][name]
        if array is not None:
            with _converting(kind, name, array, f"{dtype}{shape}"):
                arrays[kind][name] = array.view(jax.numpy.dtype(dtype)).reshape(shape)
    for kind, name, impl in keys:
        words = arrays[kind][name]
        if words is not None:
            with _converting(kind, name, words, f"key<{impl}>"):
                typed = jax.random.wrap_key_data(jax.numpy.asarray(words), impl=impl)
                arrays[kind][name] = typed


@contextmanager
def _converting(kind: str, name: str, array: np.ndarray, goal: str) -> Iterator[None]:
    """Turns an error in converting an array into a ValueError that names the array.

    Args:
        kind: the kind of the array.
        name: its path.
        array: the array as it was read.
        goal: the type that it is converted to, for the message.
    """
    try:
        yield
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{kind} {brief(name)} is {brief(array)}, and no {goal}") from problem


def write(file: Path, packed: Packed, checkpoint: Path) -> None:
    """Writes the arrays of a checkpoint.

    Args:
        file: the path of a new file.
        packed: the arrays.
        checkpoint: the folder of the checkpoint, for the message.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        save(file, packed.arrays)
    except SafetensorError as problem:
        raise OSError(f"cannot write the checkpoint {checkpoint}: {problem}") from problem


def save(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name, with the permissions of any other file that this process writes.

    Args:
        file: the path of a new file.
        arrays: arrays in types that the format has.

    Raises:
        SafetensorError: an array cannot be written.
        OSError: the file cannot be written.
    """
    # safetensors itself makes files that only their owner may read. So an empty file is made first,
    # and the new file gets its permissions.
    file.touch()
    mode = file.stat().st_mode
    save_file(dict(arrays), file)
    file.chmod(mode)


def names_in(file: Path) -> list[str]:
    """Returns the names of the arrays in a file; ValueError if it is not a safetensors file."""
    with _opened(file) as opened:
        return list(opened.keys())


def read(file: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Reads only the arrays with these names; ValueError if one is not in the file."""
    with _opened(file) as opened:
        return {name: opened.get_tensor(name) for name in names}


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Opens a file of arrays; turns the errors of reading it into ValueError."""
    try:
        with safe_open(file, framework="numpy") as opened:
            yield opened
    # A damaged file, or a name that is not in it, raises SafetensorError. If numpy lacks the type
    # of an array, reading the array raises one of the other errors.
    except (SafetensorError, AttributeError, KeyError, TypeError) as problem:
        raise ValueError(f"{file.name}: {problem}") from problem


def _is_native(array: np.ndarray) -> bool:
    """Tells whether the format has the type of an array."""
    dtype = array.dtype
    is_plain = dtype.isbuiltin == 1 and dtype.itemsize <= 8
    return is_plain or str(dtype) == "bfloat16"
