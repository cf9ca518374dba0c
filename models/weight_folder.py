"""Reads folders of weights that Hugging Face's package transformers has written.

A folder has `config.json`, and either `model.safetensors` or several parts with an index.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jax.numpy import dtype as dtype_of
from safetensors import SafetensorError, safe_open

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
_PREFIXES = ("bert.", "transformer.", "model.")
_ALSO = {".gamma": ".weight", ".beta": ".bias"}
"""Maps endings of names in old folders to the endings in newer folders."""
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The supported types of numbers, by their names in files."""


@dataclass(frozen=True)
class Folder:
    """A folder of weights.

    Attributes:
        path: the folder.
        told: the content of the folder's config.json.
        files: maps the usual name of each tensor (`usual`) to the file that holds the tensor, and
            to the tensor's name in that file.
    """

    path: Path
    told: Mapping[str, Any]
    files: Mapping[str, tuple[Path, str]] = field(repr=False)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        file, stored = self.files[name]
        with safe_open(file, "numpy") as tensors:
            return tuple(tensors.get_slice(stored).get_shape())

    def dtype(self, name: str) -> np.dtype[Any]:
        """Returns the type of a tensor's numbers.

        Raises:
            ValueError: the type is not in `DTYPES`, for example because the model is quantized.
        """
        file, stored = self.files[name]
        with safe_open(file, "numpy") as tensors:
            dtype = tensors.get_slice(stored).get_dtype()
        if dtype not in DTYPES:
            raise ValueError(
                f"{file}: {stored} has the type {dtype}: save the model with one of the types "
                f"{', '.join(DTYPES)}"
            )
        return dtype_of(DTYPES[dtype])

    def array(self, name: str) -> np.ndarray:
        """Reads a tensor, in the type of the file."""
        file, stored = self.files[name]
        with safe_open(file, "numpy") as tensors:
            return tensors.get_tensor(stored)

    def repeats(self, name: str, other: str) -> bool:
        """Tells whether a tensor has the same numbers as another tensor."""
        if other not in self.files:
            return False
        return np.array_equal(self.array(name), self.array(other))


def open_folder(path: Path) -> Folder:
    """Opens a folder of weights. Only the headers of its files are read.

    Raises:
        ValueError: the folder does not exist, a part of it is missing, or a file cannot be read.
    """
    try:
        settings = _table(path / CONFIG)
        parts = {"model.safetensors"}
        if (path / INDEX).exists():
            parts = set(map(str, _table(path / INDEX, "weight_map").values()))
            if missing := sorted(part for part in parts if not (path / part).exists()):
                raise ValueError(f"{INDEX} names {', '.join(missing)}, which does not exist")
        files: dict[str, tuple[Path, str]] = {}
        for part in sorted(parts):
            with safe_open(path / part, "numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is not a dict
                    # Two tensors with the same usual name would overwrite each other.
                    _, twin = files.setdefault(usual(name), (path / part, name))
                    if twin != name:
                        raise ValueError(f"{twin} and {name} are two tensors for one parameter")
    except (OSError, ValueError, RecursionError, SafetensorError) as problem:
        reason = str(problem)
        if isinstance(problem, OSError) and problem.filename:
            reason = f"{problem.filename}: {problem.strerror}"
        raise ValueError(
            f"{path} holds no weights: it should have a config.json and a model.safetensors, as "
            f"save_pretrained of transformers writes them ({reason})"
        ) from problem
    return Folder(path, settings, files)


def _table(path: Path, key: str | None = None) -> dict[str, Any]:
    """Reads a JSON file that holds an object; with a `key`, the object under this key."""
    data = json.loads(path.read_text())
    table = data.get(key) if key is not None and isinstance(data, dict) else data
    if not isinstance(table, dict):
        problem = "is not a JSON object" if key is None else f"has no {key}"
        raise ValueError(f"{path.name} {problem}")
    return table


def usual(name: str) -> str:
    """Returns the usual name of a tensor, without prefixes and old endings.

    >>> usual("bert.embeddings.LayerNorm.gamma")
    'embeddings.LayerNorm.weight'
    """
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for old, new in _ALSO.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name
