"""The parts of a run's model that options choose: weights, tokenizer, optimizer and search."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jvpipe import models
from jvpipe.cli.command_options import TrainOptions
from jvpipe.cli.own_model import USUAL_RATE
from jvpipe.models.architecture_search import ArchitectureSearch
from jvpipe.models.recipe import Recipe
from jvpipe.models.workload import OF_FOLDERS, format_of
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.runtime.engine.phases import phase
from jvpipe.util.extras import extra

Tree = Any


def keep_tokenizer(options: TrainOptions, workload: models.Workload, folder: Path) -> None:
    """Copies the tokenizer file of `--tokenizer`, and the files of its chat template, to a folder.

    Args:
        options: the options of the run.
        workload: the model of the run.
        folder: the folder that gets the files.

    Raises:
        ValueError: the file is not a tokenizer, or the run would not use it.
    """
    if options.tokenizer is None:
        return
    flag = f"--tokenizer {options.tokenizer}"
    if options.resume:
        raise ValueError(f"{flag}: a resumed run already has its tokenizer; leave --tokenizer out")
    if workload.name not in models.NAMES or "vocabulary" not in workload.settings:
        raise ValueError(
            f"{flag}: {workload.name} does not use a tokenizer of jvpipe; leave --tokenizer out"
        )
    with extra("models"):
        from jvpipe.models.chats import FILES
        from jvpipe.models.tokens import read_tokenizer
    source = Path(options.tokenizer)
    try:
        read_tokenizer(source)
    except ValueError as problem:
        raise ValueError(
            f"--tokenizer: {problem}: give a tokenizer.json of the tokenizers package"
        ) from problem
    (folder / "tokenizer.json").write_bytes(source.read_bytes())
    for name in FILES:
        beside = source.with_name(name)
        if beside.exists():
            (folder / name).write_bytes(beside.read_bytes())


def retrained(
    workload: models.Workload, options: TrainOptions, updates_after: Callable[[int], int]
) -> models.Workload:
    """Returns the model with the optimizer, learning rate and warm-up that the options ask for.

    Args:
        workload: the model with its own optimizer.
        options: the options of the run; `warmup` is a number of steps.
        updates_after: maps a step to the number of updates up to its end; an asynchronous run has
            several per step.

    Raises:
        ValueError: an option changes the learning rate of an optimizer that the model defines.
    """
    rates = {"--learning-rate": options.learning_rate, "--warmup": options.warmup}
    rates_given = [f"{flag} {value:g}" for flag, value in rates.items() if value is not None]
    if options.optimizer is None and not rates_given:
        return workload
    if workload.recipe is None and options.optimizer is None:
        raise ValueError(
            f"{rates_given[0]}: {workload.name} has an optimizer of its own; change the rate "
            "there, or choose another optimizer by --optimizer"
        )
    recipe = workload.recipe or Recipe(USUAL_RATE)
    recipe = replace(
        recipe,
        optimizer_name=options.optimizer or recipe.optimizer_name,
        learning_rate=options.learning_rate or recipe.learning_rate,
        warmup_steps=None if options.warmup is None else updates_after(options.warmup),
    )
    return replace(
        workload,
        recipe=recipe,
        optimizer=recipe.optimizer,
        learning_rates=recipe.learning_rates,
    )


# `--init-from` begins a run with weights from a folder that transformers wrote.

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
"""The fields of a model that --size sets. Without --size, the folder of --init-from sets them."""


def as_in_folder(options: TrainOptions) -> TrainOptions:
    """Adds the model's fields, size and tokenizer in the folder of `--init-from` to the options.

    Raises:
        ValueError: weights cannot be read for the model, or the folder has another model.
    """
    if options.init_from is None or options.resume:
        return options
    flag = f"--init-from {options.init_from}"
    readable = sorted(set(OF_FOLDERS.values()))
    if options.model not in readable:
        raise ValueError(
            f"{flag}: weights can be read for {', '.join(readable)}, but not for {options.model}"
        )
    from jvpipe.models import checkpoints  # needs an extra
    from jvpipe.models.hub import model_folder, pinned
    from jvpipe.models.weight_folder import open_folder
    from jvpipe.models.weights import read_fields

    folder = open_folder(model_folder(options.init_from))
    model = checkpoints.model_of(folder)
    if model != options.model:
        raise ValueError(
            f"{flag} has the weights of {folder.told['model_type']}, but --model is "
            f"{options.model}: give --model {model}"
        )
    try:
        fields = read_fields(folder, format_of(options.model))
    except ValueError as problem:
        raise ValueError(f"{flag}: {problem}") from problem
    # A given size sets the dimensions. The folder sets all other fields.
    if options.size is not None:
        fields = {name: value for name, value in fields.items() if name not in _DIMENSIONS}
    assigned = (f"{name}={value}" for name, value in fields.items())
    beside = folder.path / "tokenizer.json"
    tokenizer = options.tokenizer or (str(beside) if beside.exists() else None)
    return replace(
        options,
        init_from=pinned(options.init_from, folder.path),
        size=options.size or checkpoints.published_size(options.model),
        set=(*assigned, *options.set),
        tokenizer=tokenizer,
    )


def first_params(options: TrainOptions, workload: models.Workload) -> Tree:
    """Returns the parameters in the folder of `--init-from`; without it, the model's `init`.

    Raises:
        ValueError: the folder has another architecture; the message names a tensor that differs.
    """
    if options.init_from is None or options.resume:
        return workload.init
    from jvpipe.models.checkpoints import first_params as in_folder
    from jvpipe.models.hub import model_folder
    from jvpipe.models.weight_folder import open_folder

    with phase("reading the weights"):
        folder = open_folder(model_folder(options.init_from))
        return in_folder(folder, workload, jax.random.key(options.seed))


def find_search(
    options: TrainOptions, workload: models.Workload, hosts: Hosts
) -> ArchitectureSearch | None:
    """Returns the architecture search of --nas; None if --nas is not given.

    Args:
        options: the options of the command.
        workload: the model and its data; the search runs on the model's supernet.
        hosts: the processes of the run; a search runs in a single process.

    Raises:
        ValueError: there are several processes, or the model's architecture cannot be searched.
    """
    if not options.nas:
        return None
    if hosts.count > 1:
        raise ValueError(f"--nas needs a single process, but there are {hosts.count}")
    if workload.supernet is None:
        raise ValueError(
            "--nas needs a model whose architecture can be searched: evolved-transformer or "
            f"evolved-amoebanet, not {workload.name}"
        )
    return ArchitectureSearch(workload.supernet, options.seed, options.nas_steps)
