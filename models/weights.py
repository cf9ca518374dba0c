"""Folders of weights as Hugging Face's transformers writes them: `config.json` and `model.safetensors`."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from jvpipe.models.folder_settings import Settings

_PREFIXES = ("bert.", "transformer.")
_ALSO = {".gamma": ".weight", ".beta": ".bias"}
"""Endings of names that have changed."""
_DTYPES = ("F64", "F32", "F16", "BF16")
"""Types of numbers that are read."""


class Source(NamedTuple):
    """The tensors of a folder that are a parameter, side by side along its last axis; `turned`: each transposed."""

    names: tuple[str, ...]
    turned: bool = False


@dataclass(frozen=True)
class Folder:
    """A folder of weights; `told` is what its config.json tells, `files` where each tensor is, by its usual name."""

    path: Path
    told: Mapping[str, Any]
    files: Mapping[str, tuple[Path, str]] = field(repr=False)

    def shape(self, name: str) -> tuple[int, ...]:
        """That of a tensor."""
        file, own = self.files[name]
        with safe_open(file, "numpy") as tensors:
            return tuple(tensors.get_slice(own).get_shape())

    def array(self, name: str) -> np.ndarray:
        """A tensor in float32.

        Raises:
            ValueError: its numbers are of a type that stands for others, as those of quantized models.
        """
        file, own = self.files[name]
        with safe_open(file, "numpy") as tensors:
            dtype = tensors.get_slice(own).get_dtype()
            if dtype not in _DTYPES:
                raise ValueError(
                    f"{file}: {own} is of {dtype}: save the model in one of {', '.join(_DTYPES)}"
                )
            return tensors.get_tensor(own).astype(np.float32)

    def repeats(self, name: str, other: str) -> bool:
        """Whether a tensor has the numbers of another."""
        return other in self.files and np.array_equal(self.array(name), self.array(other))


@dataclass(frozen=True)
class Format:
    """How a kind of model lies in folders.

    `fields` maps the settings of a folder to fields of our configuration; settings that it does not ask for and that
    are not `harmless` are refused. `sources` maps a configuration to the source of each parameter, by its path joined
    by dots. Of other tensors, `copies` maps those that repeat a source to it, and patterns of `ignored` tell those
    that our model has no use for.
    """

    fields: Callable[[Settings, Folder], dict[str, Any]]
    sources: Callable[[Any], dict[str, Source]]
    harmless: tuple[str, ...]
    copies: Mapping[str, str]
    ignored: tuple[str, ...]


def open_folder(path: Path) -> Folder:
    """Looks into a folder of weights.

    Raises:
        ValueError: there is none, or a file of it cannot be read.
    """
    try:
        told = _table(path / "config.json")
        index = path / "model.safetensors.index.json"
        parts = (
            set(map(str, _table(index, "weight_map").values()))
            if index.exists()
            else {"model.safetensors"}
        )
        files: dict[str, tuple[Path, str]] = {}
        for part in sorted(parts):
            with safe_open(path / part, "numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no dict
                    twin = files.setdefault(usual(name), (path / part, name))[1]
                    if twin != name:
                        raise ValueError(f"{twin} and {name} are two tensors for one parameter")
    except (OSError, ValueError, RecursionError, SafetensorError) as problem:
        told = (
            f"{problem.filename}: {problem.strerror}"
            if isinstance(problem, OSError) and problem.filename
            else problem
        )
        raise ValueError(
            f"{path} holds no weights: it should have a config.json and a model.safetensors, as save_pretrained of "
            f"transformers writes them ({told})"
        ) from problem
    return Folder(path, told, files)


def _table(path: Path, key: str | None = None) -> dict[str, Any]:
    """What a file of JSON maps names to, or what it has under a key."""
    told = json.loads(path.read_text())
    table = told.get(key) if key is not None and isinstance(told, dict) else told
    if not isinstance(table, dict):
        raise ValueError(f"{path.name} {'maps no names' if key is None else f'has no {key}'}")
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


def read_fields(folder: Folder, form: Format) -> dict[str, Any]:
    """The fields of a model's configuration, read from a folder of its kind.

    Raises:
        ValueError: a setting has a value that our model lacks, or is not known, or a needed one is missing.
    """
    settings = Settings(folder.told)
    try:
        fields = form.fields(settings, folder)
    except KeyError as missing:
        raise ValueError(f"config.json does not tell {missing}") from missing
    settings.all_understood(form.harmless)
    return fields


def read_params(
    folder: Folder, form: Format, config: Any, shapes: Mapping[str, Any]
) -> dict[str, Any]:
    """The parameters of a model, read from a folder.

    Args:
        folder: of its kind.
        form: how that kind lies in folders.
        config: the model's.
        shapes: nested dicts of what has the shape of each parameter.

    Raises:
        ValueError: the folder is of another architecture; the message names the first tensor that differs.
    """
    sources = form.sources(config)
    leaves = dict(_leaves(shapes))
    assert sorted(sources) == sorted(leaves), sorted(set(sources) ^ set(leaves))
    wanted = {
        name: shape
        for path, source in sources.items()
        for name, shape in _pieces(source, leaves[path].shape)
    }
    for name, shape in wanted.items():
        there = folder.shape(name) if name in folder.files else None
        if there != shape:
            told = "is missing" if there is None else f"is {list(there)}"
            raise ValueError(
                f"{folder.path} is of another architecture: {name} {told} there, {list(shape)} here"
            )
    for name in sorted(folder.files.keys() - wanted):
        _check_unread(folder, form, name)
    return _read(folder, sources, shapes)


def _check_unread(folder: Folder, form: Format, name: str) -> None:
    """Checks that nothing is lost with a tensor that no parameter is read from."""
    if name in form.copies:
        if not folder.repeats(name, form.copies[name]):
            raise ValueError(
                f"{folder.path} is of another architecture: {name} differs there from {form.copies[name]}, "
                "here both are one parameter"
            )
    elif not any(fnmatchcase(name, pattern) for pattern in form.ignored):
        there = list(folder.shape(name))
        raise ValueError(
            f"{folder.path} is of another architecture: {name} is {there} there, missing here"
        )


def _leaves(shapes: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in shapes.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _pieces(source: Source, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a source with their shapes."""
    piece = (*shape[:-1], shape[-1] // len(source.names))
    return ((name, piece[::-1] if source.turned else piece) for name in source.names)


def _read(
    folder: Folder, sources: Mapping[str, Source], shapes: Mapping[str, Any], before: str = ""
) -> dict[str, Any]:
    def leaf(path: str) -> np.ndarray:
        names, turned = sources[path]
        pieces = [folder.array(name).T if turned else folder.array(name) for name in names]
        return np.ascontiguousarray(np.concatenate(pieces, axis=-1))

    return {
        name: _read(folder, sources, value, f"{before}{name}.")
        if isinstance(value, Mapping)
        else leaf(f"{before}{name}")
        for name, value in shapes.items()
    }


def linear(path: str, *names: str, turned: bool = True, bias: bool = True) -> dict[str, Source]:
    """The sources of a linear map, or of several side by side.

    >>> linear("head", "lm_head", bias=False)
    {'head.kernel': Source(names=('lm_head.weight',), turned=True)}
    """
    kernel = {f"{path}.kernel": Source(tuple(f"{name}.weight" for name in names), turned)}
    return kernel | (
        {f"{path}.bias": Source(tuple(f"{name}.bias" for name in names))} if bias else {}
    )


def norm(path: str, name: str, bias: bool = True) -> dict[str, Source]:
    """The sources of a layer norm."""
    return {f"{path}.scale": Source((f"{name}.weight",))} | (
        {f"{path}.bias": Source((f"{name}.bias",))} if bias else {}
    )


def table(path: str, name: str) -> dict[str, Source]:
    """The source of a table of vectors."""
    return {f"{path}.embedding": Source((f"{name}.weight",))}
