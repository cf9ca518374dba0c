"""What `--model` names: a model of jvpipe, of an installed package, or an object in a file or module of one's own."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from jvpipe import models
from jvpipe.cli.own_model import completed, is_model
from jvpipe.ir.names import did_you_mean

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
