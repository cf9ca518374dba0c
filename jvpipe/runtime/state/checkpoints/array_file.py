"""Arrays by kind and path as a safetensors file, whose names are KIND/PATH.

What the format cannot hold is told beside: typed keys, which are written as their words, and types that it does not
know, which are written as bytes.
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

Arrays = dict[
    str, dict[str, Any]
]  # kind -> path -> array, of numbers or of typed keys; None for one that is not read


@dataclass(frozen=True)
class Packed:
    """Arrays as the format holds them, by KIND/PATH.

    `keys` were typed keys: (kind, path, implementation). `raw` are bytes: (kind, path, type, shape).
    """

    arrays: dict[str, np.ndarray]
    keys: list[list[Any]]
    raw: list[list[Any]]


def pack(arrays: Arrays) -> Packed:
    """Makes arrays ready to be written."""
    words = {(kind, name): _words(x) for kind, named in arrays.items() for name, x in named.items()}
    return Packed(
        {
            "/".join(at): x if _is_native(x) else x.reshape(-1).view(np.uint8)
            for at, x in words.items()
        },
        [
            [kind, name, str(jax.random.key_impl(arrays[kind][name]))]
            for kind, name in words
            if is_key(arrays[kind][name])
        ],
        [[*at, str(x.dtype), x.shape] for at, x in words.items() if not _is_native(x)],
    )


def unpack(arrays: Arrays, keys: Sequence[Sequence[Any]], raw: Sequence[Sequence[Any]]) -> None:
    """Gives arrays that were read their types and shapes again.

    Args:
        arrays: as they were read; changed.
        keys: as in `Packed`.
        raw: likewise.

    Raises:
        ValueError: there is no such array, or it is none of that type and shape.
    """
    for kind, name, *_ in (*raw, *keys):
        if name not in arrays.get(kind, {}):
            raise ValueError(f"there is no {kind} {brief(name)} to be of another type")
    for kind, name, dtype, shape in raw:
        if (array := arrays[kind][name]) is not None:
            with _made(kind, name, f"{dtype}{shape}", array):
                arrays[kind][name] = array.view(jax.numpy.dtype(dtype)).reshape(shape)
    for kind, name, impl in keys:
        if (words := arrays[kind][name]) is not None:
            with _made(kind, name, f"key<{impl}>", words):
                typed = jax.random.wrap_key_data(jax.numpy.asarray(words), impl=impl)
                arrays[kind][name] = typed


@contextmanager
def _made(kind: str, name: str, wanted: str, array: np.ndarray) -> Iterator[None]:
    """Inside it an array is made of another one; ValueError if it cannot be."""
    try:
        yield
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{kind} {brief(name)} is {brief(array)}, and no {wanted}") from problem


def write(file: Path, packed: Packed, checkpoint: Path) -> None:
    """Writes arrays.

    Args:
        file: a new one.
        packed: the arrays.
        checkpoint: that they belong to, for the message.

    Raises:
        OSError: they cannot be written.
    """
    try:
        save(file, packed.arrays)
    except SafetensorError as problem:
        raise OSError(f"cannot write the checkpoint {checkpoint}: {problem}") from problem


def save(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name; whoever may read what this process writes may read them.

    Args:
        file: a new one.
        arrays: that the format can hold.

    Raises:
        SafetensorError: they cannot be written.
        OSError: likewise.
    """
    file.touch()
    mode = file.stat().st_mode  # safetensors itself writes for the owner alone
    save_file(dict(arrays), file)
    file.chmod(mode)


def names_in(file: Path) -> list[str]:
    """The names of the arrays in a file; raises ValueError if it is none of arrays."""
    with _opened(file) as opened:
        return list(opened.keys())


def read(file: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Reads the arrays of these names, and nothing else; raises ValueError if they are not there."""
    with _opened(file) as opened:
        return {name: opened.get_tensor(name) for name in names}


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="numpy") as opened:
            yield opened
    except (SafetensorError, AttributeError, KeyError, TypeError) as problem:  # numpy lacks a type
        raise ValueError(f"{file.name}: {problem}") from problem


def _words(value: Any) -> np.ndarray:
    """An array as a file can hold it: of keys their words."""
    return np.asarray(jax.random.key_data(value) if is_key(value) else value, order="C")


def _is_native(array: np.ndarray) -> bool:
    """True if the format knows the type of an array."""
    return (array.dtype.isbuiltin == 1 and array.dtype.itemsize <= 8) or str(
        array.dtype
    ) == "bfloat16"
