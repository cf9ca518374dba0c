"""What `--model` names, a model of jvpipe or a user's own: it is found, checked, completed, and given its data."""

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import optax

from jvpipe import models
from jvpipe.models.fields import with_fields
from jvpipe.models.recipe import Recipe
from jvpipe.session.arguments import check_loss, whole_number
from jvpipe.session.trees import shapes_of
from jvpipe.trace.leaves import abstract
from jvpipe.util.names import did_you_mean

Tree = Any


def own_data(
    where: str, model: Any, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> models.Data:
    """What a user's model is trained on.

    Args:
        where: the value of `--model`, for messages.
        model: whose `batches` and `held_out` are read.
        data_path: of `--data`, which such a model does not read.
        run_dir: the folder of the run.
        seed: of the batches.
        batch_size: examples in each.

    Raises:
        ValueError: the batches are none.
    """
    if data_path is not None:
        raise ValueError(
            f"--data {data_path} is for jvpipe's own models; {where} gives its batches itself"
        )
    told = f"--model {where}: batches(seed={seed}, batch_size={batch_size})"
    iterator = _iterator(told, model.batches(seed, batch_size))
    train: Placed | Counted
    if hasattr(iterator, "get_state") and hasattr(iterator, "set_state"):
        train = Placed(told, iterator)
        begin = train.get_state()
        first = next(train)
        train.set_state(begin)
    else:
        train = Counted(told, iterator)
        first = train.peek()
    _check_size(told, first, batch_size)
    held_out = tuple(model.held_out()) if hasattr(model, "held_out") else ()
    return models.Data(train, first, held_out, digest_of(first))


def shapes(where: str, model: Any, batch_size: int) -> Tree:
    """The shapes of a batch of so many examples.

    Args:
        where: how the model was named, for messages.
        model: whose batches they are.
        batch_size: examples per batch.
    """
    told = f"--model {where}: batches(seed=0, batch_size={batch_size})"
    first = Counted(told, _iterator(told, model.batches(0, batch_size))).peek()
    _check_size(told, first, batch_size)
    return abstract(first, "batch leaf")


class Counted:
    """A stream of batches whose place is how many were taken: to go on, the same stream is begun and advanced.

    >>> batches = Counted("batches", iter("abc"))
    >>> batches.set_state({"batches": 1})
    >>> next(batches), batches.get_state()
    ('b', {'batches': 2})
    """

    def __init__(self, told: str, iterator: Iterator[Tree]) -> None:
        self._told, self._iterator, self._taken = told, iterator, 0

    def peek(self) -> Tree:
        """The next batch, which stays the next."""
        batch = next(self)
        self._iterator, self._taken = chain([batch], self._iterator), self._taken - 1
        return batch

    def __iter__(self) -> "Counted":
        return self

    def __next__(self) -> Tree:
        batch = _next(self._told, self._iterator)
        self._taken += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """How many batches were taken."""
        return {"batches": self._taken}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Passes over the batches that were taken before."""
        if set(state) != {"batches"}:
            raise ValueError(
                f"{self._told} keeps no place of its own, and the run was saved with one: {dict(state)}"
            )
        while self._taken < state["batches"]:
            next(self)


class Placed:
    """A stream that keeps its place itself, such as Grain's; where it tells that in bytes, they are text here."""

    def __init__(self, told: str, iterator: Any) -> None:
        self._told, self._iterator = told, iterator

    def __iter__(self) -> "Placed":
        return self

    def __next__(self) -> Tree:
        return _next(self._told, self._iterator)

    def get_state(self) -> dict[str, Any]:
        """What the iterator tells."""
        place = self._iterator.get_state()
        return (
            {"place": place.decode("latin-1"), "bytes": True}
            if isinstance(place, bytes)
            else {"place": place}
        )

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues there."""
        if "place" not in state:
            raise ValueError(
                f"{self._told} keeps a place of its own, and the run was saved without: {dict(state)}"
            )
        place = state["place"]
        self._iterator.set_state(place.encode("latin-1") if state.get("bytes") else place)


def digest_of(batch: Tree) -> str:
    """The SHA-256 of a batch: its containers, and the bytes of its leaves.

    >>> digest_of({"x": np.zeros(2)}) == digest_of({"x": np.zeros(2)}) != digest_of({"x": np.ones(2)})
    True
    """
    digest = hashlib.sha256(str(shapes_of(batch)).encode())
    for leaf in jax.tree.leaves(batch):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def _iterator(told: str, batches: Any) -> Iterator[Tree]:
    try:
        return iter(batches)
    except TypeError as problem:
        raise ValueError(
            f"{told} should give an iterator of batches, not {type(batches).__name__}"
        ) from problem


def _next(told: str, iterator: Iterator[Tree]) -> Tree:
    try:
        return next(iterator)
    except StopIteration:
        cure = "let it go on without end (while True: ...), or train for fewer --steps"
        raise ValueError(f"{told} has come to its end: {cure}") from None


def _check_size(told: str, batch: Tree, batch_size: int) -> None:
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if sizes != {(batch_size,)}:
        counts = sorted(size[0] if size else 0 for size in sizes)
        raise ValueError(
            f"{told} gives arrays whose first axis is {counts}: it counts the examples, {batch_size}"
        )


# A user's own model, checked and completed: the message names what it lacks.

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
        ValueError: it is not a model: what is missing, and what it should be.
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
    """Raises ValueError if a model lacks something, or has something of the wrong kind."""
    kind = type(model).__name__
    for name, wanted in _MUST.items():
        if not callable(getattr(model, name, None)):
            there = (
                f"its {name} is {getattr(model, name)!r}"
                if hasattr(model, name)
                else f"it has no {name}"
            )
            raise ValueError(
                f"--model {where} is not a model ({kind}): {there}, which should be {wanted}"
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


# What `--model` names: a model of jvpipe, of an installed package, or an object in a user's own file or module.

ENTRY_POINTS = "jvpipe.models"
"""The group in which packages announce their models."""


def find_model(
    name: str, size: str | None = None, fields: Mapping[str, Any] | None = None
) -> models.Workload:
    """The model that a command line names.

    Args:
        name: `bert`, or what an installed package announces in the group `jvpipe.models`, or `file.py:name`, or
            `package.module:name`.
        size: one of its sizes.
        fields: what replaces those of its configuration, such as the `dtype` that it computes in; texts are read.

    Raises:
        ValueError: there is no such model, or it lacks something; the message says what.

    >>> find_model("bert", "base").title
    'bert base'
    >>> find_model("bert.py")
    Traceback (most recent call last):
    ...
    ValueError: --model bert.py: say which object of the file it is, bert.py:NAME
    """
    options = {name: value for name, value in (fields or {}).items() if value is not None}
    if name in models.NAMES:
        return models.load(name, size, **options)
    announced = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in announced:
        return completed(name, name, _loaded(name, announced[name].load), size, options)
    where, colon, attribute = name.rpartition(":")
    if not colon and (name.endswith(".py") or "/" in name):
        raise ValueError(f"--model {name}: say which object of the file it is, {name}:NAME")
    if not colon:
        known = [*models.NAMES, *announced]
        raise ValueError(
            did_you_mean("model", name, known)
            + "; one of your own is file.py:NAME or package.module:NAME"
        )
    module = _loaded(
        name,
        lambda: _of_file(Path(where)) if where.endswith(".py") else importlib.import_module(where),
    )
    return completed(name, attribute, _member(name, module, attribute), size, options)


def is_installed(name: str) -> bool:
    """Whether a model is one of jvpipe's or announced by an installed package, and not code of whoever names it."""
    return name in models.NAMES or name in entry_points(group=ENTRY_POINTS).names


def _of_file(path: Path) -> ModuleType:
    """The module of a file, imported once; what lies beside it can be imported too."""
    file = path.resolve()
    if not file.is_file():
        raise ValueError("there is no such file")
    name = f"{file.stem}_of_{file.parent.name}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(file):
        return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _loaded(name: str, load: Any) -> Any:
    """What a user's code gives; whatever it raises is a mistake that names `--model`."""
    try:
        return load()
    except Exception as problem:
        kind = "" if isinstance(problem, ValueError) else f"{type(problem).__name__}: "
        told = (str(problem).splitlines() or [""])[0]
        raise ValueError(
            f"--model {name} cannot be imported: {kind}{told}{_line_of(name, problem)}"
        ) from problem


def _line_of(name: str, problem: Exception) -> str:
    """Where in the user's file it went wrong, if it did there."""
    at, trace = None, problem.__traceback__
    file = Path(name.rpartition(":")[0]).name
    while trace is not None:
        code = trace.tb_frame.f_code
        at = trace.tb_lineno if Path(code.co_filename).name == file else at
        trace = trace.tb_next
    return "" if at is None else f" (line {at} of {file})"


def _member(name: str, module: ModuleType, attribute: str) -> Any:
    if hasattr(module, attribute):
        return getattr(module, attribute)
    own = [
        each for each, value in vars(module).items() if not each.startswith("_") and is_model(value)
    ]
    there = (
        did_you_mean("name", attribute, own)
        if own
        else f"there is no {attribute}, nor any other model"
    )
    raise ValueError(f"--model {name}: {there} in {name.removesuffix(f':{attribute}')}")
