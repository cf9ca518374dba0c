"""The lookup of the model that `--model` names: jvpipe's, an installed package's or the user's.

A user's model is any object with the members in `_MUST`. `completed` checks the model and adds
defaults for other members that it lacks. Its batches become the data of a run (`own_data`).
"""

import dataclasses
import hashlib
import importlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jvpipe import models
from jvpipe.models.fields import with_fields
from jvpipe.models.recipe import Recipe
from jvpipe.models.user_batches import UserBatches
from jvpipe.session.arguments import check_loss, misfit_of, whole_number
from jvpipe.trace.batches import shapes_of
from jvpipe.trace.leaves import abstract
from jvpipe.util.brief import brief, first_line
from jvpipe.util.given import checked_flag, several
from jvpipe.util.names import did_you_mean

Tree = Any


def own_data(
    where: str, model: Any, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> models.Data:
    """Opens the data of a user's model: the results of its functions `batches` and `held_out`.

    Args:
        where: the value of `--model`, for messages.
        model: the user's model.
        data_path: the path of `--data`; must be None, because a user's model does not read it.
        run_dir: the folder of the run; not used, because a user's model keeps no files there.
        seed: the seed of the batches.
        batch_size: the number of examples in a batch.

    Raises:
        ValueError: a path is given, or the model does not return batches of this size.
    """
    if data_path is not None:
        raise ValueError(
            f"--data {data_path} is for jvpipe's own models; {where} makes its own batches, so "
            "leave --data out"
        )
    train, first = _begun(where, model, seed, batch_size)
    held_out = model.held_out() if hasattr(model, "held_out") else ()
    batches = several(held_out)
    if batches is None:
        raise ValueError(
            f"--model {where}: held_out() must return a list of batches, not {brief(held_out)}"
        )
    return models.Data(train, first, batches, digest_of(first))


def shapes(where: str, model: Any, batch_size: int) -> Tree:
    """Returns the shapes of a batch of a user's model.

    Args:
        where: the value of `--model`, for messages.
        model: the user's model; its first batch is made.
        batch_size: the number of examples in a batch.
    """
    return abstract(_begun(where, model, 0, batch_size)[1], "batch leaf")


def _begun(where: str, model: Any, seed: int, batch_size: int) -> tuple[UserBatches, Tree]:
    """Begins a model's stream of batches; returns the stream and the first batch that it yields.

    Raises:
        ValueError: the first batch does not have `batch_size` examples.
    """
    called = f"--model {where}: batches(seed={seed}, batch_size={batch_size})"
    batches = UserBatches(called, model.batches(seed, batch_size))
    first = batches.peek()
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(first)}
    if sizes != {(batch_size,)}:
        counts = sorted(size[0] if size else 0 for size in sizes)
        raise ValueError(
            f"{called} gives arrays whose first axis is {counts}: it must be the number of "
            f"examples, {batch_size}"
        )
    return batches, first


def digest_of(batch: Tree) -> str:
    """Computes the SHA-256 of a batch: of its containers, its shapes and the bytes of its leaves.

    >>> zeros, ones = {"x": np.zeros(2)}, {"x": np.ones(2)}
    >>> digest_of(zeros) == digest_of({"x": np.zeros(2)}) != digest_of(ones)
    True
    """
    digest = hashlib.sha256(str(shapes_of(batch)).encode())
    for leaf in jax.tree.leaves(batch):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


# The functions below check a user's model, and add defaults for optional members.

_MUST = {
    "loss_fn": "a function of (params, batch, rng) that gives the loss",
    "init": "a function of a key that gives the parameters",
    "batches": "a function of (seed, batch_size) that gives an iterator of batches",
}
"""The members that a model must have, each with a description for messages."""
_MAY = {
    "optimizer": ("steps",),
    "learning_rates": ("steps",),
    "held_out": (),
    "initial_state": (),
}
"""The functions that a model may have, with the names of their arguments."""
_BATCH_SIZE, _STEPS, USUAL_RATE = 32, 1000, 1e-3
"""The defaults of a model: examples in a batch, steps of a run, and the highest learning rate."""


def completed(
    where: str, name: str, value: Any, size: str | None, options: Mapping[str, Any] | None = None
) -> models.Workload:
    """Makes a workload from a user's model, with defaults for members that the model lacks.

    Args:
        where: the value of `--model`, for messages.
        name: the name of the model.
        value: the model, or a class that makes the model when called without arguments.
        size: the name of one of the model's `sizes`; None for the model itself.
        options: values that replace fields of the model, which must then be a dataclass.

    Raises:
        ValueError: the value is not a model; the message says which member is missing or wrong.
    """
    with _naming(where):
        model = _with_options(_sized(name, value, size), options or {})
    if isinstance(model, models.Workload) and not options:
        return model
    _check_members(where, model)
    recipe = None if hasattr(model, "optimizer") else Recipe(USUAL_RATE)
    with _naming(where):
        has_state = checked_flag("has_state", getattr(model, "has_state", False))
        _check(model, has_state=has_state)
        return models.Workload(
            name=name,
            size=size,
            config=model,
            init=model.init,
            loss_fn=model.loss_fn,
            abstract_batch=partial(shapes, where, model),
            open_data=partial(own_data, where, model),
            optimizer=recipe.optimizer if recipe else partial(_optimizer_of, model),
            learning_rates=recipe.learning_rates if recipe else partial(_rates_of, where, model),
            batch_size=whole_number("batch_size", getattr(model, "batch_size", _BATCH_SIZE)),
            steps=whole_number("steps", getattr(model, "steps", _STEPS)),
            model_state=model.initial_state if has_state else None,
            has_aux=checked_flag("has_aux", getattr(model, "has_aux", False)),
            recipe=recipe,
        )


def _optimizer_of(model: Any, updates: int, local: bool = False) -> Any:
    """Returns the optimizer of a user's model.

    `local` requests an optimizer that suits asynchronous schedules. It is ignored here, because the
    pipeline checks whether a user's optimizer suits the schedule.
    """
    return model.optimizer(updates)


def _rates_of(where: str, model: Any, updates: int) -> np.ndarray:
    """Returns the learning rates of a user's model; NaN if the model does not tell them."""
    if not hasattr(model, "learning_rates"):
        return np.full(updates, math.nan)
    found = model.learning_rates(updates)
    try:
        rates = np.asarray(found, float)
    except (TypeError, ValueError):
        rates = np.array(math.nan)
    if rates.shape != (updates,) or not np.isfinite(rates).all():
        raise ValueError(
            f"--model {where}: learning_rates({updates}) must return {updates} finite numbers, the "
            f"rate of each update, not {brief(found)} of shape {rates.shape}"
        )
    return rates


def _check_members(where: str, model: Any) -> None:
    """Raises ValueError if a member of `_MUST` is missing, or is not a function."""
    for member, should_be in _MUST.items():
        if callable(getattr(model, member, None)):
            continue
        present = f"it has no {member}"
        if hasattr(model, member):
            present = f"its {member} is {getattr(model, member)!r}"
        raise ValueError(
            f"--model {where} is not a model ({type(model).__name__}): {present}, which should be "
            f"{should_be}"
        )


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Puts the value of `--model` before the message of a ValueError inside the context."""
    try:
        yield
    except ValueError as problem:
        raise ValueError(f"--model {where}: {problem}") from problem


def _sized(name: str, named: Any, size: str | None) -> Any:
    """Returns a model, or its variant of a given size; a class is called to make the model."""
    model = _made(named)
    if size is None:
        return model
    sizes = getattr(model, "sizes", {})
    if not isinstance(sizes, Mapping):
        raise ValueError(f"sizes must be a dict from names to models, not {brief(sizes)}")
    if size in sizes:
        return _made(sizes[size])
    if not sizes:
        raise ValueError(f"it has no sizes, so leave out --size {size}")
    raise ValueError(did_you_mean(f"size of {name}", size, list(sizes)))


def _made(named: Any) -> Any:
    """Returns an object, or the result of calling a class without arguments."""
    if not isinstance(named, type):
        return named
    try:
        return named()
    except TypeError as problem:
        kind = named.__name__
        raise ValueError(
            f"the class {kind} cannot be called without arguments ({problem}): give its arguments "
            f"defaults, or name an object, such as mine = {kind}(...)"
        ) from problem


def _with_options(model: Any, options: Mapping[str, Any]) -> Any:
    """Returns the model with some of its fields replaced; raises ValueError if it has no fields."""
    if not options:
        return model
    kind = type(model).__name__
    if not dataclasses.is_dataclass(model):
        name = next(iter(options))
        raise ValueError(
            f"{name}={options[name]} needs a model that is a dataclass, but {kind} is not: make it "
            f"a dataclass, or leave {name} out"
        )
    return with_fields(kind, model, options)


def _check(model: Any, *, has_state: bool) -> None:
    """Raises ValueError if a function of a model is missing or takes other arguments."""
    if has_state and not hasattr(model, "initial_state"):
        raise ValueError("has_state needs initial_state(), a function that returns the first state")
    if hasattr(model, "learning_rates") and not hasattr(model, "optimizer"):
        raise ValueError(
            f"{type(model).__name__} has learning_rates, but not the optimizer that has these "
            "rates: add optimizer(steps), or remove learning_rates"
        )
    check_loss(model.loss_fn, has_state=has_state)
    taken = {"init": ("key",), "batches": ("seed", "batch_size")}
    taken |= {name: arguments for name, arguments in _MAY.items() if hasattr(model, name)}
    for name, arguments in taken.items():
        _check_call(name, getattr(model, name), arguments)


def _check_call(name: str, function: Any, arguments: tuple[str, ...]) -> None:
    call = f"{name}({', '.join(arguments)})"
    if not callable(function):
        raise ValueError(f"{call} should be a function, but it is {function!r}")
    if misfit := misfit_of(function, arguments):
        signature, problem = misfit
        raise ValueError(f"{name}{signature} must accept the call {call}: {problem}") from problem


# The value of `--model` is looked up first among jvpipe's models, then among the models of
# installed packages, and then as an object in a file or a module.

ENTRY_POINTS = "jvpipe.models"
"""The group of entry points by which installed packages register their models."""


def find_model(
    name: str, size: str | None = None, fields: Mapping[str, Any] | None = None
) -> models.Workload:
    """Finds the model that a command line names.

    Args:
        name: a model of jvpipe such as `bert`, or a name that an installed package registers in the
            group `jvpipe.models`, or `file.py:name`, or `package.module:name`.
        size: one of the model's sizes; by default the smallest size of jvpipe's model, or the
            user's model itself.
        fields: values that replace fields of the model, such as `dtype`; texts are converted to the
            type of the field.

    Raises:
        ValueError: there is no such model, or a member of it is missing or wrong.

    >>> find_model("bert", "base").title
    'bert base'
    >>> find_model("bert.py")
    Traceback (most recent call last):
    ...
    ValueError: --model bert.py: name an object in the file, as in bert.py:NAME
    """
    options = dict(fields or {})
    if name in models.NAMES:
        return models.load(name, size, **options)
    announced = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in announced:
        return completed(name, name, _loaded(name, announced[name].load), size, options)
    where, colon, attribute = name.rpartition(":")
    if not colon and (name.endswith(".py") or "/" in name):
        raise ValueError(f"--model {name}: name an object in the file, as in {name}:NAME")
    if not colon:
        unknown = did_you_mean("model", name, [*models.NAMES, *announced])
        raise ValueError(f"{unknown}; for your own model, give file.py:NAME or package.module:NAME")
    if not where:
        raise ValueError(f"--model {name}: name the file or the module, as in file.py{name}")
    is_file = where.endswith(".py")
    module = _loaded(name, partial(_of_file if is_file else importlib.import_module, where))
    return completed(name, attribute, _member(name, module, attribute), size, options)


def is_installed(name: str) -> bool:
    """Tells whether a model belongs to jvpipe or an installed package registers it."""
    return name in models.NAMES or name in entry_points(group=ENTRY_POINTS).names


def _of_file(path: str) -> ModuleType:
    """Imports a file as a module, which may import other files of its folder."""
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError("there is no such file")
    name = f"{file.stem}_of_{file.parent.name}"
    # The file is imported only once. A second import would define its classes again, and objects
    # from the first import would not be instances of the new classes.
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(file):
        return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    # The module is added to `sys.modules` before it runs, because dataclasses look it up there.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _loaded(name: str, load: Any) -> Any:
    """Calls `load`, which imports a user's code; turns any error into a ValueError."""
    try:
        return load()
    except Exception as problem:
        kind = "" if isinstance(problem, ValueError) else f"{type(problem).__name__}: "
        reason = f"{kind}{first_line(problem)}{_line_of(name, problem)}"
        raise ValueError(f"--model {name} cannot be imported: {reason}") from problem


def _line_of(name: str, problem: Exception) -> str:
    """Returns a text with the line of the user's file that led to an error; empty if none did."""
    file = Path(name.rpartition(":")[0]).name
    frames = traceback.extract_tb(problem.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == file]
    # The traceback ends at the error, so the last frame in the user's file is nearest to it.
    return f" (line {lines[-1]} of {file})" if lines else ""


def _member(name: str, module: ModuleType, attribute: str) -> Any:
    if hasattr(module, attribute):
        return getattr(module, attribute)
    suggestion = f"there is no {attribute}, and no other model"
    models_there = [
        other
        for other, value in vars(module).items()
        if not other.startswith("_") and all(hasattr(value, must) for must in _MUST)
    ]
    if models_there:
        suggestion = did_you_mean("name", attribute, models_there)
    raise ValueError(f"--model {name}: {suggestion} in {name.removesuffix(f':{attribute}')}")
