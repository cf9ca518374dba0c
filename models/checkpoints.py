"""Loads a model from a folder of weights, and writes a trained model as such a folder.

These are the folders that the package transformers saves and loads.
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
    """Returns the name of jvpipe's model for a folder.

    Raises:
        ValueError: no model can read the folder; the message lists the supported types.
    """
    kind = str(folder.told.get("model_type"))
    if kind not in OF_FOLDERS:
        raise ValueError(
            f"{folder.path} has a model of type {kind}: supported are {', '.join(OF_FOLDERS)}"
        )
    return OF_FOLDERS[kind]


def published_size(model: str) -> str:
    """Returns a size with the recipe for published models. A folder replaces the size's shape."""
    return next(size for size in sizes(model) if size not in ("tiny", "mini"))


def from_folder(path: str | Path, key: jax.Array, **fields: Any) -> tuple[Workload, Tree]:
    """Opens the model and the parameters in a folder that transformers' `save_pretrained` wrote.

    No weights are read yet. Parameters are `jvpipe.LazyArray`. `Pipeline.init` reads each of them
    when it places it on a device.

    Args:
        path: the folder, or else the name of a model on the Hugging Face hub,
            `owner/name[@REVISION]`.
        key: the random key for the adapters, if there are any.
        fields: fields of the model's configuration; they replace the values from config.json.
            `lora=8` adds adapters of rank 8 to the linear maps that `lora_on` matches.

    Raises:
        ValueError: the folder does not exist or is incomplete, no model can read it, or the fields
            do not fit the model.
    """
    folder = open_folder(model_folder(path))
    name = model_of(folder)
    settings = read_fields(folder, format_of(name))
    workload = load(name, published_size(name), **{**settings, **fields})
    return workload, first_params(folder, workload, key)


def first_params(folder: Folder, workload: Workload, key: jax.Array) -> Tree:
    """Joins the parameters in a model's folder with freshly drawn adapters.

    Raises:
        ValueError: the folder's architecture differs from the model's; the message names the first
            tensor that differs.
    """
    shapes = lora.without_adapters(jax.eval_shape(workload.init, key))
    base = read_params(folder, format_of(workload.name), workload.config, shapes)
    adapters = jax.jit(lambda key: lora.adapters_alone(workload.init(key)))(key)
    return lora.joined_params(base, adapters)


def to_folder(workload: Workload, params: Tree, like: str | Path, into: str | Path) -> None:
    """Writes a trained model as a folder for transformers, like the folder that it was loaded from.

    Adapters are merged into the kernels that they adapt. The settings and the tokenizer's files are
    copied.

    Args:
        workload: the model.
        params: what `Pipeline.params` returns.
        like: the folder, or the name on the hub, that the model was loaded from.
        into: a new folder, or an empty one.

    Raises:
        ValueError: the folder that the model was loaded from no longer exists, or `into` is not
            empty.
        OSError: the new folder cannot be written.
    """
    folder, form = open_folder(model_folder(like)), format_of(workload.name)
    write_params(folder, form, workload.config, lora.merged_params(params), Path(into))
