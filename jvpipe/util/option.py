"""Defines options: fields of dataclasses, each with type, default, unit, check and help."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Flag, auto
from functools import cache
from typing import Any, Literal, get_args, get_origin

Check = Callable[[str, Any], Any]
"""A function of an option's name, as the user wrote it, and of the given value. It returns the
value that the program uses, or raises ValueError."""


class Taker(Flag):
    """The calls and commands that take options. Commands also read options from files."""

    PIPELINE = auto()
    PLAN_FOR = auto()
    TRAIN = auto()
    PLAN = auto()


PIPELINE, PLAN_FOR, TRAIN, PLAN = Taker
CALLS, COMMANDS = PIPELINE | PLAN_FOR, TRAIN | PLAN
RUNS, PLANS = PIPELINE | TRAIN, PLAN_FOR | PLAN
EVERY = CALLS | COMMANDS
Group = Literal["model", "pipeline", "memory", "data", "run", "processes"]
"""The topic of an option. The help and the page of options list the topics in this order."""
Resumed = Literal["open", "fixed", "plans", "start", "processes", "own"]
"""What a resumed run does with an option's value in the run's folder (the old value), and with a
new value that the user gives now.

    "open"         keeps the old value, unless a new one is given
    "fixed"        keeps the old value, and refuses a new one
    "plans"        keeps the old value, unless a new one is given, which leads to another plan
    "start"        forgets the old value, which was meant for one start of the run
    "processes"    as "start"; all processes of a start have the same value
    "own"          as "start"; each process may have a value of its own
"""


@dataclass(frozen=True)
class PipelineOption:
    """An option and its properties; name, type and default are those of the dataclass field."""

    check: Check
    help: str
    group: Group
    unit: str
    takers: Taker
    resumed: Resumed
    was: tuple[str, ...]
    name: str = ""
    type: Any = None
    default: Any = None

    @property
    def flag(self) -> str:
        """The option's name on a command line."""
        # The name of a field has a `_` at its end if it would otherwise be a Python keyword, as
        # in `import_`.
        words = self.name.strip("_").replace("_", "-")
        return f"--{words}"

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that a value in a file may have."""
        # The kinds of `int | None` are its arguments; the kind of `tuple[str, ...]` is `tuple`.
        is_tuple = get_origin(self.type) is tuple
        parts = () if is_tuple else get_args(self.type)
        return tuple(get_origin(part) or part for part in parts or (self.type,))

    def checked(self, said: str, value: Any) -> Any:
        """Checks a value that the user gave, and returns the value that the program uses.

        If the default is None, the value None means that nothing was given, and is not checked.

        Args:
            said: the option's name as the user wrote it, for the message.
            value: the value as the user gave it.

        Raises:
            ValueError: the value is not allowed; the message says which values are.
        """
        return value if value is None and self.default is None else self.check(said, value)


def option(
    default: Any,
    check: Check,
    help: str,
    group: Group,
    unit: str = "",
    takers: Taker = COMMANDS,
    resumed: Resumed = "open",
    was: tuple[str, ...] = (),
) -> Any:
    """Defines the field of a dataclass as an option.

    Args:
        default: the value if none is given; None if a planner chooses the value, or if the option
            then has no value.
        check: checks a given value and returns what the program uses.
        help: one or more sentences for `--help` and the page of options.
        group: what the option is about.
        unit: what a number counts, or what a text stands for.
        takers: the calls and commands that have the option; `options_of` uses only those that are
            also takers of the dataclass.
        resumed: what a resumed run does with the value.
        was: the names of the option in the last release.
    """
    defined = PipelineOption(check, help, group, unit, takers, resumed, was)
    return field(default=default, metadata={"option": defined})


@cache
def options_of(holder: type[Any]) -> Mapping[str, PipelineOption]:
    """Returns, by name, the options of a dataclass that have any of the dataclass's takers."""
    options: dict[str, PipelineOption] = {}
    for one in fields(holder):
        defined: PipelineOption = one.metadata["option"]
        # Several dataclasses may share a definition, so each one completes a copy of it.
        if defined.takers & holder.taker:
            options[one.name] = replace(defined, name=one.name, type=one.type, default=one.default)
    return options


def resumed(holder: type[Any], *kinds: Resumed) -> tuple[str, ...]:
    """Returns the names of the options whose `resumed` is one of `kinds`."""
    return tuple(name for name, one in options_of(holder).items() if one.resumed in kinds)
