"""Models of published weights: from a folder as transformers writes it, and back to one."""

from pathlib import Path
from typing import Any

import jax

from jvpipe.models import lora
from jvpipe.models.weight_folder import Folder, open_folder
from jvpipe.models.weights import read_fields, read_params, write_params
from jvpipe.models.workload import OF_FOLDERS, Workload, format_of, load, sizes

Tree = Any


def load_published(path: str | Path, seed: int = 0, **fields: Any) -> tuple[Workload, Tree]:
    """Loads the model of a folder, and its parameters, each of which is read when a pipeline places it.

    Args:
        path: the folder, with config.json and model.safetensors or its parts.
        seed: of what the folder does not have, such as adapters.
        **fields: of the model's configuration that replace those of the folder, such as `tokens=512` or `lora=8`.

    Raises:
        ValueError: the folder holds no weights, or none that are known; the message says what is the matter.
    """
    folder = open_folder(Path(path))
    name = model_of(folder)
    told = read_fields(folder, format_of(name)) | fields
    workload = load(name, published_size(name), **told)
    return workload, published_params(folder, workload, seed)


def save_published(like: str | Path, into: str | Path, workload: Workload, params: Tree) -> None:
    """Writes trained parameters to a new folder, laid out as another one; adapters are added to what they adapt.

    Args:
        like: the folder that the model was loaded from.
        into: the new one.
        workload: the model.
        params: on the host, as `Pipeline.params` gives them.

    Raises:
        OSError: nothing can be written there.
    """
    form, plain = format_of(workload.name), lora.merged(params)
    write_params(open_folder(Path(like)), form, workload.config, plain, Path(into))


def model_of(folder: Folder) -> str:
    """Names the model of ours that a folder holds.

    Raises:
        ValueError: there is none.
    """
    kind = folder.told.get("model_type")
    if kind not in OF_FOLDERS:
        raise ValueError(
            f"{folder.path} is a folder of {kind}: read are those of {', '.join(OF_FOLDERS)}"
        )
    return OF_FOLDERS[kind]


def published_size(model: str) -> str:
    """Names a size that is trained by the recipe of published ones."""
    return next(size for size in sizes(model) if size not in ("tiny", "mini"))


def published_params(folder: Folder, workload: Workload, seed: int) -> Tree:
    """Gives the parameters in a folder, `LazyArray`s, and beside them fresh adapters if the model has such.

    Raises:
        ValueError: the folder is of another architecture; the first tensor that differs is named.
    """
    key, init = jax.random.key(seed), workload.init
    shapes = lora.without_adapters(jax.eval_shape(init, key))
    base = read_params(folder, format_of(workload.name), workload.config, shapes)
    return lora.joined(base, jax.jit(lambda key: lora.adapters_alone(init(key)))(key))
