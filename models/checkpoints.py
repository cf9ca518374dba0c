"""Loads a model from a folder of weights, and writes it back once it is trained.

The package transformers saves the folders that we load, and loads the folders that we
write.
"""

from pathlib import Path
from typing import Any

import jax

from jvpipe.models import lora
from jvpipe.models.hub import model_folder
from jvpipe.models.weight_folder import Folder, open_folder
from jvpipe.models.weights import read_fields, read_params, write_params
from jvpipe.models.workload import OF_FOLDERS, Workload, format_of, load, sizes

Tree = Any


def model_of(folder: Folder) -> str:
    """Returns the name of our model that reads a folder.

    Raises:
        ValueError: no model reads it; the message names the kinds of folders that are read.
    """
    kind = folder.told.get("model_type")
    if kind not in OF_FOLDERS:
        raise ValueError(
            f"{folder.path} is a folder of {kind}: read are those of {', '.join(OF_FOLDERS)}"
        )
    return OF_FOLDERS[kind]


def published_size(model: str) -> str:
    """Returns a size with the recipe of published models; a folder replaces the size's fields."""
    return next(size for size in sizes(model) if size not in ("tiny", "mini"))


def from_folder(path: str | Path, key: jax.Array, **fields: Any) -> tuple[Workload, Tree]:
    """Opens a model in a folder that `save_pretrained` of transformers wrote, with its parameters.

    No weights are read yet. Parameters are `jvpipe.LazyArray`, and `Pipeline.init` reads each of
    them on the device that will hold it.

    Args:
        path: the folder. If it does not exist, a model's name on a hub, `owner/name[@REVISION]`.
        key: draws the adapters, if there are any.
        fields: replace fields that config.json gives the model's configuration. `lora=8` adds
            adapters of rank 8 to the linear maps that `lora_on` matches.

    Raises:
        ValueError: the folder does not exist or lacks a part, no model reads it, or the fields do
            not fit the model.
    """
    folder = open_folder(model_folder(path))
    name = model_of(folder)
    settings = read_fields(folder, format_of(name))
    workload = load(name, published_size(name), **{**settings, **fields})
    return workload, first_params(folder, workload, key)


def first_params(folder: Folder, workload: Workload, key: jax.Array) -> Tree:
    """Joins the parameters in a model's folder with freshly drawn adapters.

    Raises:
        ValueError: the folder has another architecture; the message names the first tensor that
            differs.
    """
    shapes = lora.without_adapters(jax.eval_shape(workload.init, key))
    base = read_params(folder, format_of(workload.name), workload.config, shapes)
    adapters = jax.jit(lambda key: lora.adapters_alone(workload.init(key)))(key)
    return lora.joined_params(base, adapters)


def to_folder(workload: Workload, params: Tree, like: str | Path, into: str | Path) -> None:
    """Writes a trained model like the folder that it began with, for transformers to load.

    Adapters are added to the kernels that they adapt. The settings and the tokenizer's files are
    copied.

    Args:
        workload: the model.
        params: what `Pipeline.params` returns.
        like: the folder, or the hub's name, that the model began with.
        into: a new folder, or an empty one.

    Raises:
        ValueError: the folder that the model began with no longer exists.
        OSError: the new folder cannot be written.
    """
    folder, form = open_folder(model_folder(like)), format_of(workload.name)
    write_params(folder, form, workload.config, lora.merged_params(params), Path(into))
