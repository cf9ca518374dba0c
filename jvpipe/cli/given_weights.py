"""`--init-from`, `--export-weights`: a run that begins with weights of transformers, or gives them back to it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jvpipe import models
from jvpipe.cli.train_options import Options
from jvpipe.models.workload import OF_FOLDERS, format_of

Tree = Any
_DIMENSIONS = (
    "blocks",
    "width",
    "heads",
    "groups",
    "vocabulary",
    "feed_forward",
    "hidden",
    "head_width",
    "spans",
    "window",
)
"""What a size decides, if one is given."""


def as_in_folder(options: Options) -> Options:
    """The options with the fields of the model that the folder of `--init-from` tells; others that are given win.

    Raises:
        ValueError: the folder does not fit the model.
    """
    if options.init_from is None or options.resume:
        return options
    told = f"--init-from {options.init_from}"
    known = sorted(set(OF_FOLDERS.values()))
    if options.model not in known:
        raise ValueError(
            f"{told}: weights are read for {', '.join(known)}, not for {options.model}"
        )
    from jvpipe.models import checkpoints  # needs an extra
    from jvpipe.models.weight_folder import open_folder
    from jvpipe.models.weights import read_fields

    folder = open_folder(Path(options.init_from))
    there = checkpoints.model_of(folder)
    if there != options.model:
        raise ValueError(
            f"{told} is a folder of {folder.told['model_type']}, and --model is {options.model}: "
            f"give --model {there}"
        )
    try:
        fields = read_fields(folder, format_of(options.model))
    except ValueError as problem:
        raise ValueError(f"{told}: {problem}") from problem
    if options.size is not None:
        fields = {name: value for name, value in fields.items() if name not in _DIMENSIONS}
    assigned = (f"{name}={value}" for name, value in fields.items())
    beside = folder.path / "tokenizer.json"
    return replace(
        options,
        size=options.size or checkpoints.published_size(options.model),
        set=(*assigned, *options.set),
        tokenizer=options.tokenizer or (str(beside) if beside.exists() else None),
    )


def first_params(options: Options, workload: models.Workload) -> Tree:
    """What a run begins with: the arrays of the folder, or the function that makes them.

    Raises:
        ValueError: the folder is of another architecture; the first tensor that differs is named.
    """
    if options.init_from is None or options.resume:
        return workload.init
    from jvpipe.models.checkpoints import first_params as in_folder
    from jvpipe.models.weight_folder import open_folder

    return in_folder(open_folder(Path(options.init_from)), workload, jax.random.key(options.seed))


def write_weights(options: Options, workload: models.Workload, params: Tree) -> None:
    """Writes a trained model to the folder of `--export-weights`, laid out as the one that it began with.

    Raises:
        ValueError: that one is not there any more.
        OSError: nothing can be written.
    """
    assert options.init_from is not None
    assert options.export_weights is not None
    from jvpipe.models.checkpoints import to_folder

    to_folder(workload, params, options.init_from, options.export_weights)
