"""A model of one's own, looked at and completed: what it lacks of what a model must have is said by name."""

import dataclasses
import inspect
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import optax

from jvpipe import models
from jvpipe.cli.own_data import own_data, shapes
from jvpipe.ir.names import did_you_mean
from jvpipe.models.fields import with_fields
from jvpipe.models.recipe import Recipe
from jvpipe.session.arguments import check_loss, whole_number

Tree = Any

_MUST = {
    "loss_fn": "a function of (params, batch, rng) that gives the loss",
    "init": "a function of a key that gives the parameters",
    "batches": "a function of (seed, batch_size) that gives an iterator of batches",
}
"""What a model must have."""
_MAY = {
    "optimizer": ("steps",),
    "learning_rates": ("steps",),
    "held_out": (),
    "initial_state": (),
}
"""The functions that it may have, and what they take."""
_BATCH_SIZE, _STEPS, _RATE = 32, 1000, 1e-3


def is_model(given: Any) -> bool:
    """Whether something has what a model must have."""
    return all(hasattr(given, name) for name in _MUST)


def completed(
    where: str, name: str, given: Any, size: str | None, options: Mapping[str, Any] | None = None
) -> models.Workload:
    """A user's model with the defaults for what it lacks.

    Args:
        where: the value of `--model`, for messages.
        name: what the model is called.
        given: an object, or a class that is made without arguments.
        size: one of its `sizes`.
        options: fields that replace those of a dataclass.

    Raises:
        ValueError: it is no model: what is missing, and what it should be.
    """
    model = _made(where, given)
    if size is not None:
        sizes = dict(getattr(model, "sizes", {}))
        if size not in sizes:
            told = (
                did_you_mean(f"size of {name}", size, list(sizes))
                if sizes
                else f"it has no sizes, {size} is none"
            )
            raise ValueError(f"--model {where}: {told}")
        model = _made(where, sizes[size])
    if isinstance(model, models.Workload) and not options:
        return model
    model = _with_options(where, model, options or {})
    _check(where, model)
    recipe = Recipe(_RATE)
    own = hasattr(model, "optimizer")
    rates = getattr(model, "learning_rates", _unknown if own else recipe.learning_rates)
    return models.Workload(
        name=name,
        size=size,
        config=model,
        init=model.init,
        loss_fn=model.loss_fn,
        abstract_batch=lambda batch_size: shapes(where, model, batch_size),
        open_data=partial(own_data, where, model),
        optimizer=partial(_own_optimizer, model) if own else recipe.optimizer,
        learning_rates=lambda steps: np.asarray(rates(steps)),
        batch_size=_number(where, model, "batch_size", _BATCH_SIZE),
        steps=_number(where, model, "steps", _STEPS),
        model_state=model.initial_state if _flag(where, model, "has_state") else None,
        has_aux=_flag(where, model, "has_aux"),
        recipe=None if own else recipe,
    )


def _own_optimizer(model: Any, steps: int, *, local: bool = False) -> optax.GradientTransformation:
    """Theirs; whether it may stand under an asynchronous schedule (`local`) the pipeline sees."""
    return model.optimizer(steps)


def _unknown(steps: int) -> np.ndarray:
    return np.full(steps, math.nan)


def _made(where: str, given: Any) -> Any:
    """An object, or that of a class."""
    if not isinstance(given, type):
        return given
    try:
        return given()
    except TypeError as problem:
        raise ValueError(
            f"--model {where}: the class {given.__name__} is not made without arguments ({problem}): give them "
            f"defaults, or name an object, such as mine = {given.__name__}(...)"
        ) from problem


def _with_options(where: str, model: Any, options: Mapping[str, Any]) -> Any:
    """The model with fields replaced."""
    if not options:
        return model
    if not dataclasses.is_dataclass(model):
        name, value = next(iter(options.items()))
        raise ValueError(
            f"--model {where}: {name}={value} replaces the field of a dataclass, and {type(model).__name__} is none: "
            f"make it one, or leave {name} out"
        )
    try:
        return with_fields(type(model).__name__, model, options)
    except ValueError as problem:
        raise ValueError(f"--model {where}: {problem}") from problem


def _check(where: str, model: Any) -> None:
    """Raises ValueError for what a model lacks, or has otherwise than it should."""
    kind = type(model).__name__
    for name, wanted in _MUST.items():
        if not callable(getattr(model, name, None)):
            there = (
                f"its {name} is {getattr(model, name)!r}"
                if hasattr(model, name)
                else f"it has no {name}"
            )
            raise ValueError(
                f"--model {where} is no model ({kind}): {there}, which should be {wanted}"
            )
    if getattr(model, "has_state", False) and not hasattr(model, "initial_state"):
        raise ValueError(
            f"--model {where}: has_state needs initial_state(), a function that gives the first state"
        )
    try:
        check_loss(model.loss_fn, has_state=_flag(where, model, "has_state"))
    except ValueError as problem:
        raise ValueError(f"--model {where}: {problem}") from problem
    taken = {"init": ("key",), "batches": ("seed", "batch_size")} | {
        k: v for k, v in _MAY.items() if hasattr(model, k)
    }
    for name, arguments in taken.items():
        _check_call(where, name, getattr(model, name), arguments)


def _check_call(where: str, name: str, function: Any, arguments: tuple[str, ...]) -> None:
    told = f"{name}({', '.join(arguments)})"
    if not callable(function):
        raise ValueError(f"--model {where}: {told} should be a function, it is {function!r}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one that Python cannot look into
        return
    try:
        signature.bind(*arguments)
    except TypeError as problem:
        raise ValueError(
            f"--model {where}: {name}{signature} is called as {told}: {problem}"
        ) from problem


def _flag(where: str, model: Any, name: str) -> bool:
    value = getattr(model, name, False)
    if not isinstance(value, bool):
        raise ValueError(f"--model {where}: {name} must be True or False, not {value!r}")
    return value


def _number(where: str, model: Any, name: str, usual: int) -> int:
    try:
        return whole_number(name, getattr(model, name, usual))
    except ValueError as problem:
        raise ValueError(f"--model {where}: {problem}") from problem
