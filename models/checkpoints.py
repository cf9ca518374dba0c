"""Models out of folders of weights and back: what transformers saved is trained, and transformers loads what was."""

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
    """Says which of our models is in a folder.

    Raises:
        ValueError: none; the message names those that are known.
    """
    kind = folder.told.get("model_type")
    if kind not in OF_FOLDERS:
        raise ValueError(
            f"{folder.path} is a folder of {kind}: read are those of {', '.join(OF_FOLDERS)}"
        )
    return OF_FOLDERS[kind]


def published_size(model: str) -> str:
    """A size that is trained by the recipe of published ones; all of its fields are a folder's."""
    return next(size for size in sizes(model) if size not in ("tiny", "mini"))


def from_folder(path: str | Path, key: jax.Array, **fields: Any) -> tuple[Workload, Tree]:
    """Takes the model and its parameters from a folder as `save_pretrained` of transformers writes it.

    Nothing is read of the weights yet: parameters are `jvpipe.LazyArray`, and `Pipeline.init` reads each where it is to
    lie.

    Args:
        path: the folder, or where there is none, a model's name on a hub, `owner/name[@REVISION]`.
        key: draws the adapters, if there are any.
        fields: of the model's configuration, in place of what the folder tells; `lora=8` gives adapters of that rank
            to the linear maps that `lora_on` matches.

    Raises:
        ValueError: there is no such folder, a part of it is missing, it is of a model that is not known, or the fields
            do not fit it.
    """
    folder = open_folder(model_folder(path))
    name = model_of(folder)
    settings = read_fields(folder, format_of(name))
    workload = load(name, published_size(name), **{**settings, **fields})
    return workload, first_params(folder, workload, key)


def first_params(folder: Folder, workload: Workload, key: jax.Array) -> Tree:
    """The parameters in a folder of a model, beside adapters as they are drawn.

    Raises:
        ValueError: the folder is of another architecture; the first tensor that differs is named.
    """
    shapes = lora.without_adapters(jax.eval_shape(workload.init, key))
    base = read_params(folder, format_of(workload.name), workload.config, shapes)
    adapters = jax.jit(lambda key: lora.adapters_alone(workload.init(key)))(key)
    return lora.joined_params(base, adapters)


def to_folder(workload: Workload, params: Tree, like: str | Path, into: str | Path) -> None:
    """Writes a trained model as the folder lies that it began with, for transformers to load.

    Adapters are added to what they adapt. Settings and the tokenizer's files are copied.

    Args:
        workload: the model.
        params: what `Pipeline.params` gives.
        like: the folder or the name that it began with.
        into: a new folder, or an empty one.

    Raises:
        ValueError: the one that it began with is not there any more.
        OSError: nothing can be written.
    """
    folder, form = open_folder(model_folder(like)), format_of(workload.name)
    write_params(folder, form, workload.config, lora.merged_params(params), Path(into))
