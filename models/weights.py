"""Reads and writes the weights of a folder, by tables that map parameters to tensors.

A table maps each parameter of a model to the tensors from which it is made (`Source`). `pieces`
inverts a table: it maps each tensor to its place in a parameter (`Piece`). Parameters are read with
the table, and tensors are written with its inverse.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from jvpipe.ir.lazy_array import LazyArray
from jvpipe.models.folder_settings import Settings
from jvpipe.models.weight_folder import Folder
from jvpipe.util.new_folder import check_new_folder

_OTHER_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".gguf",
    ".ot",
)
"""Suffixes of files with weights. They are not copied, because they hold the weights before
training.
"""


class Source(NamedTuple):
    """The tensors that make a parameter; they are concatenated along the parameter's last axis.

    Attributes:
        names: the names of the tensors. If the parameter stacks layers, each name has {} for the
            number of a layer.
        turned: whether each tensor is transposed.
        layers: how many layers the parameter stacks along its first axis; None if it does not stack
            layers.
    """

    names: tuple[str, ...]
    turned: bool = False
    layers: int | None = None

    def of(self, layer: int) -> "Source":
        """Returns the source of one of the stacked layers."""
        return Source(tuple(name.format(layer) for name in self.names), self.turned)


@dataclass(frozen=True)
class Format:
    """How a type of model is stored in folders.

    Attributes:
        fields: maps the settings of a folder to fields of our configuration. A setting that it does
            not read and that is not `harmless` is an error.
        sources: maps a configuration to the source of each parameter. The keys are the paths of
            parameters, joined by dots.
        harmless: settings that change nothing for this type of model.
        copies: for each tensor that may repeat another tensor, the name of that other tensor.
        ignored: patterns of tensors that our model does not use.
    """

    fields: Callable[[Settings, Folder], dict[str, Any]]
    sources: Callable[[Any], dict[str, Source]]
    harmless: tuple[str, ...]
    copies: Mapping[str, str]
    ignored: tuple[str, ...]


class Piece(NamedTuple):
    """The place of a tensor in the parameter at `path`.

    The tensor is part number `part` of `parts` parts along the last axis. If the parameter stacks
    layers, the tensor belongs to layer number `layer`. If `turned`, the tensor is transposed.
    """

    path: str
    layer: int | None
    part: int
    parts: int
    turned: bool

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the tensor, given the shape of the whole parameter."""
        *before, last = whole if self.layer is None else whole[1:]
        piece = (*before, last // self.parts)
        return piece[::-1] if self.turned else piece

    def cut(self, whole: Any) -> np.ndarray:
        """Cuts the tensor out of a parameter. A `LazyArray` reads only the tensor's layer."""
        array = np.asarray(whole if self.layer is None else whole[self.layer])
        width = array.shape[-1] // self.parts
        begin = self.part * width
        piece = array[..., begin : begin + width]
        return piece.T if self.turned else piece


def pieces(sources: Mapping[str, Source]) -> dict[str, Piece]:
    """Maps the name of each tensor to its place in a parameter, for a table of sources.

    >>> pieces({"blocks.kernel": Source(("h.{}.w",), True, 2)})["h.1.w"]
    Piece(path='blocks.kernel', layer=1, part=0, parts=1, turned=True)
    """
    found = {}
    for path, source in sources.items():
        count = len(source.names)
        for layer in [None] if source.layers is None else range(source.layers):
            names = source.names if layer is None else source.of(layer).names
            for part, name in enumerate(names):
                found[name] = Piece(path, layer, part, count, source.turned)
    return found


def read_fields(folder: Folder, form: Format) -> dict[str, Any]:
    """Reads the fields of a model's configuration from a folder.

    Raises:
        ValueError: a setting is missing or unknown, or has an unsupported value.
    """
    settings = Settings(folder.told)
    try:
        fields = form.fields(settings, folder)
    except KeyError as missing:
        raise ValueError(f"config.json has no {missing}") from missing
    settings.all_understood(form.harmless)
    return fields


def read_params(
    folder: Folder,
    form: Format,
    config: Any,
    shapes: Mapping[str, Any],
    dtype: str | None = "float32",
) -> dict[str, Any]:
    """Opens the parameters of a model in a folder, as nested dicts of `LazyArray`.

    This reads only headers, and tensors that should repeat another tensor. Each parameter is read
    when it is needed.

    Args:
        folder: a folder with a model of this type.
        form: how this type of model is stored in folders.
        config: the configuration of the model.
        shapes: nested dicts of objects with the `shape` of each parameter.
        dtype: the type of the parameters; None means the type in the files.

    Raises:
        ValueError: the folder's architecture differs from the model's; the message names the first
            tensor that differs.
    """
    sources, leaves = form.sources(config), dict(flat(shapes))
    assert sources.keys() == leaves.keys(), sorted(sources.keys() ^ leaves.keys())
    # Headers reveal all errors in names, shapes and types before any numbers are read.
    piece_of = pieces(sources)
    for name, piece in piece_of.items():
        shape = piece.shape(leaves[piece.path].shape)
        there = folder.shape(name) if name in folder.files else None
        if there != shape:
            problem = "is missing" if there is None else f"has the shape {list(there)}"
            raise ValueError(
                f"{folder.path} has another architecture: {name} {problem} in the folder, but has "
                f"{list(shape)} in the model"
            )
        folder.dtype(name)
    for name in sorted(folder.files.keys() - piece_of):
        _check_unread(folder, form, name)

    def leaf(path: str, shape: tuple[int, ...]) -> LazyArray:
        source = sources[path]
        first = source if source.layers is None else source.of(0)
        kept = folder.dtype(first.names[0]) if dtype is None else np.dtype(dtype)
        return LazyArray(shape, kept, partial(_read, folder, source, kept))

    return nested({path: leaf(path, shape.shape) for path, shape in leaves.items()})


def _check_unread(folder: Folder, form: Format, name: str) -> None:
    """Checks a tensor that belongs to no parameter: it must repeat another tensor or be ignored."""
    if name in form.copies:
        if not folder.repeats(name, form.copies[name]):
            raise ValueError(
                f"{folder.path} has another architecture: {name} and {form.copies[name]} differ in "
                "the folder, but are one parameter in the model"
            )
        return
    if any(fnmatchcase(name, pattern) for pattern in form.ignored):
        return
    there = list(folder.shape(name))
    raise ValueError(
        f"{folder.path} has another architecture: {name} has the shape {there} in the folder, but "
        "is missing in the model"
    )


def _read(folder: Folder, source: Source, dtype: np.dtype[Any], *at: int) -> np.ndarray:
    """Reads a parameter, or only its part at the indices `at` of the first axes."""
    if source.layers is not None:
        # With an index, only one layer is read. So each stage reads only its own layers.
        if not at:
            return np.stack([_read(folder, source, dtype, i) for i in range(source.layers)])
        source, at = source.of(at[0]), at[1:]
    arrays = [folder.array(name) for name in source.names]
    if source.turned:
        arrays = [array.T for array in arrays]
    whole = np.concatenate(arrays, axis=-1)
    return np.ascontiguousarray(whole[at], dtype)


def write_params(
    folder: Folder, form: Format, config: Any, params: Mapping[str, Any], into: Path
) -> None:
    """Writes parameters into a folder with the files, names and types of the original folder.

    Tensors that belong to no parameter are copied unchanged, unless they repeat a trained tensor.
    Other files are also copied, such as config.json and the tokenizer's files.

    Args:
        folder: the original folder.
        form: how this type of model is stored in folders.
        config: the configuration of the model.
        params: nested dicts of arrays, without adapters.
        into: a new folder, or an empty one.

    Raises:
        ValueError: no folder can be made there, or it is not empty.
        OSError: the folder cannot be written.
    """
    # Old files must not stay, because a reader may prefer an old index to the new weights.
    check_new_folder(into, f"into={into}")
    piece_of, leaves = pieces(form.sources(config)), dict(flat(params))

    def tensor(name: str) -> np.ndarray:
        # A tensor that repeats another tensor gets the trained numbers of that other tensor.
        piece = piece_of.get(name) or piece_of.get(form.copies.get(name, ""))
        if piece is None:
            return folder.array(name)
        return np.ascontiguousarray(piece.cut(leaves[piece.path]), folder.dtype(name))

    into.mkdir(exist_ok=True)
    for file in sorted(folder.path.iterdir()):
        if file.is_file() and file.suffix not in _OTHER_WEIGHTS:
            shutil.copyfile(file, into / file.name)
    for file in sorted({file for file, _ in folder.files.values()}):
        with safe_open(file, "numpy") as opened:
            about = opened.metadata()
        stored_here = {name: stored for name, (at, stored) in folder.files.items() if at == file}
        tensors = {stored: tensor(name) for name, stored in stored_here.items()}
        save_file(tensors, into / file.name, metadata=about)


def flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested dicts with their paths, joined by dots.

    >>> dict(flat({"head": {"kernel": 1}, "scale": 2}))
    {'head.kernel': 1, 'scale': 2}
    """
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Makes nested dicts from leaves with paths; the inverse of `flat`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *above, last = path.split(".")
        at = tree
        for name in above:
            at = at.setdefault(name, {})
        at[last] = leaf
    return tree


def linear(path: str, *names: str, turned: bool = True, bias: bool = True) -> dict[str, Source]:
    """Returns the sources of a linear map. It joins the outputs of one or more maps of the folder.

    >>> linear("head", "lm_head", bias=False)
    {'head.kernel': Source(names=('lm_head.weight',), turned=True, layers=None)}
    """
    # PyTorch stores a kernel as [outputs, inputs], our model as [inputs, outputs].
    weights = tuple(f"{name}.weight" for name in names)
    sources = {f"{path}.kernel": Source(weights, turned)}
    if bias:
        sources[f"{path}.bias"] = Source(tuple(f"{name}.bias" for name in names))
    return sources


def norm(path: str, name: str, bias: bool = True) -> dict[str, Source]:
    """Returns the sources of a norm."""
    sources = {f"{path}.scale": Source((f"{name}.weight",))}
    if bias:
        sources[f"{path}.bias"] = Source((f"{name}.bias",))
    return sources


def table(path: str, name: str) -> dict[str, Source]:
    """Returns the source of a table of vectors."""
    return {f"{path}.embedding": Source((f"{name}.weight",))}
