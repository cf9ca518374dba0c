"""Arrays by kind and path as a safetensors file, whose names are KIND/PATH.

The format holds neither typed keys, which are written as their words, nor some types of numbers,
which are written as bytes: what they were is kept beside the arrays.
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
"""Arrays of numbers or of typed keys, by kind and path; None for one that is not read."""


@dataclass(frozen=True)
class Packed:
    """Arrays as the format holds them.

    Attributes:
        arrays: by KIND/PATH.
        keys: those that were typed keys: (kind, path, implementation).
        raw: those that are written as bytes: (kind, path, type, shape).
    """

    arrays: dict[str, np.ndarray]
    keys: list[list[Any]]
    raw: list[list[Any]]


def pack(arrays: Arrays) -> Packed:
    """Returns arrays as the format holds them."""
    packed = Packed({}, [], [])
    for kind, named in arrays.items():
        for name, array in named.items():
            words = np.asarray(jax.random.key_data(array) if is_key(array) else array, order="C")
            if is_key(array):
                packed.keys.append([kind, name, str(jax.random.key_impl(array))])
            # As bytes of one axis: the type and the shape are kept beside.
            if not _is_native(words):
                packed.raw.append([kind, name, str(words.dtype), words.shape])
                words = words.reshape(-1).view(np.uint8)
            packed.arrays[f"{kind}/{name}"] = words
    return packed


def unpack(arrays: Arrays, keys: Sequence[Sequence[Any]], raw: Sequence[Sequence[Any]]) -> None:
    """Gives arrays their types and shapes again, after they were read.

    Args:
        arrays: as they were read; changed.
        keys: as in `Packed`.
        raw: as in `Packed`.

    Raises:
        ValueError: there is no such array, or it is none of that type and shape.
    """
    for kind, name, *_ in (*raw, *keys):
        if name not in arrays.get(kind, {}):
            raise ValueError(f"there is no {kind} {brief(name)} to be of another type")
    # Bytes come first: keys may be made of words that were written as such.
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
    """Wraps what makes another array of one; raises ValueError if that fails."""
    try:
        yield
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{kind} {brief(name)} is {brief(array)}, and no {goal}") from problem


def write(file: Path, packed: Packed, checkpoint: Path) -> None:
    """Writes the arrays of a checkpoint.

    Args:
        file: a new one.
        packed: the arrays.
        checkpoint: the folder, for the message.

    Raises:
        OSError: they cannot be written.
    """
    try:
        save(file, packed.arrays)
    except SafetensorError as problem:
        raise OSError(f"cannot write the checkpoint {checkpoint}: {problem}") from problem


def save(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name, with the permissions of any other file that this process writes.

    Args:
        file: a new one.
        arrays: that the format can hold.

    Raises:
        SafetensorError: they cannot be written.
        OSError: the file cannot be written.
    """
    # safetensors itself writes files that only their owner may read.
    file.touch()
    mode = file.stat().st_mode
    save_file(dict(arrays), file)
    file.chmod(mode)


def names_in(file: Path) -> list[str]:
    """Returns the names of the arrays in a file; raises ValueError if it is not one of arrays."""
    with _opened(file) as opened:
        return list(opened.keys())


def read(file: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Reads the arrays of these names, and nothing else.

    Raises ValueError if they are not there.
    """
    with _opened(file) as opened:
        return {name: opened.get_tensor(name) for name in names}


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="numpy") as opened:
            yield opened
    except (SafetensorError, AttributeError, KeyError, TypeError) as problem:  # numpy lacks a type
        raise ValueError(f"{file.name}: {problem}") from problem


def _is_native(array: np.ndarray) -> bool:
    """Tells whether the format knows the type of an array."""
    dtype = array.dtype
    is_plain = dtype.isbuiltin == 1 and dtype.itemsize <= 8
    return is_plain or str(dtype) == "bfloat16"
