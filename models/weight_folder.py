"""Folders of weights as transformers of Hugging Face writes them: `config.json`, `model.safetensors` or its shards."""

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
"""Endings of names that have changed."""
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of numbers that are read."""


@dataclass(frozen=True)
class Folder:
    """A folder of weights; `told` is what its config.json tells, `files` where each tensor is, by its usual name."""

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
            ValueError: they are of a type that stands for others, as those of quantized models.
        """
        file, stored = self.files[name]
        with safe_open(file, "numpy") as tensors:
            dtype = tensors.get_slice(stored).get_dtype()
        if dtype not in DTYPES:
            raise ValueError(
                f"{file}: {stored} is of {dtype}: save the model in one of {', '.join(DTYPES)}"
            )
        return dtype_of(DTYPES[dtype])

    def array(self, name: str) -> np.ndarray:
        """A tensor as the file has it."""
        file, stored = self.files[name]
        with safe_open(file, "numpy") as tensors:
            return tensors.get_tensor(stored)

    def repeats(self, name: str, other: str) -> bool:
        """Whether a tensor has the numbers of another."""
        if other not in self.files:
            return False
        return np.array_equal(self.array(name), self.array(other))


def open_folder(path: Path) -> Folder:
    """Looks into a folder of weights.

    Raises:
        ValueError: there is none, a part of it is missing, or a file of it cannot be read.
    """
    try:
        settings = _table(path / CONFIG)
        parts = {"model.safetensors"}
        if (path / INDEX).exists():
            parts = set(map(str, _table(path / INDEX, "weight_map").values()))
            if missing := sorted(part for part in parts if not (path / part).exists()):
                raise ValueError(f"{INDEX} names {', '.join(missing)}, which is not there")
        files: dict[str, tuple[Path, str]] = {}
        for part in sorted(parts):
            with safe_open(path / part, "numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no dict
                    # Where names differ in what `usual` takes off alone, one would hide the other.
                    _, twin = files.setdefault(usual(name), (path / part, name))
                    if twin != name:
                        raise ValueError(f"{twin} and {name} are two tensors for one parameter")
    except (OSError, ValueError, RecursionError, SafetensorError) as problem:
        reason = str(problem)
        if isinstance(problem, OSError) and problem.filename:
            reason = f"{problem.filename}: {problem.strerror}"
        raise ValueError(
            f"{path} holds no weights: it should have a config.json and a model.safetensors, as save_pretrained of "
            f"transformers writes them ({reason})"
        ) from problem
    return Folder(path, settings, files)


def _table(path: Path, key: str | None = None) -> dict[str, Any]:
    """What a file of JSON maps names to, or what it has under a key."""
    data = json.loads(path.read_text())
    table = data.get(key) if key is not None and isinstance(data, dict) else data
    if not isinstance(table, dict):
        problem = "maps no names" if key is None else f"has no {key}"
        raise ValueError(f"{path.name} {problem}")
    return table


def usual(name: str) -> str:
    """The name of a tensor without what differs from folder to folder.

    >>> usual("bert.embeddings.LayerNorm.gamma")
    'embeddings.LayerNorm.weight'
    """
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for old, new in _ALSO.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name
