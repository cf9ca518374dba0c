"""What an option is: a field of a dataclass with its type, default, unit, check and help."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Flag, auto
from functools import cache
from typing import Any, Literal, get_args, get_origin

Check = Callable[[str, Any], Any]
"""Takes an option's name as the user wrote it, and the given value. Returns the value that the
program uses, or raises ValueError."""


class Taker(Flag):
    """The calls and commands that take options; the commands also read them from files."""

    PIPELINE = auto()
    PLAN_FOR = auto()
    TRAIN = auto()
    PLAN = auto()


PIPELINE, PLAN_FOR, TRAIN, PLAN = Taker
CALLS, COMMANDS = PIPELINE | PLAN_FOR, TRAIN | PLAN
RUNS, PLANS = PIPELINE | TRAIN, PLAN_FOR | PLAN
EVERY = CALLS | COMMANDS
Group = Literal["model", "pipeline", "memory", "data", "run", "processes"]
"""What an option is about, in the order of the help and of the page of options."""
Resumed = Literal["open", "fixed", "plans", "start", "processes", "own"]
"""What a resumed run does with an option's value in the run's folder (the old value), and with a
new value that the user gives now.

    "open"         keeps the old value, unless a new one is given
    "fixed"        keeps the old value, and refuses a new one
    "plans"        keeps the old value; a new one leads to another plan
    "start"        forgets the old value, which was meant for one start of the run
    "processes"    as "start"; all processes of a start have the same value
    "own"          as "start"; each process may have a value of its own
"""


@dataclass(frozen=True)
class PipelineOption:
    """An option and its properties. Name, type and default come from the field that defines it."""

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
        # The name of a field ends with `_` if it would otherwise be a Python keyword: `import_`.
        words = self.name.strip("_").replace("_", "-")
        return f"--{words}"

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that a value in a file may have."""
        # The arguments of `int | None` are the kinds, but those of `tuple[str, ...]` are not.
        is_tuple = get_origin(self.type) is tuple
        parts = () if is_tuple else get_args(self.type)
        return tuple(get_origin(part) or part for part in parts or (self.type,))

    def checked(self, said: str, value: Any) -> Any:
        """Returns the value that the program uses for a given one.

        If the default is None, the value None means that nothing was given, and is not checked.

        Args:
            said: the option's name as the user wrote it, for the message.
            value: as the user gave it.

        Raises:
            ValueError: the value is not allowed; the message has the value and what is allowed.
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
        default: the value if none is given. None: a planner decides it, or there is no value.
        check: checks a given value and returns what the program uses.
        help: one or more sentences for `--help` and the page of options.
        group: what the option is about.
        unit: what a number counts, or what a text is.
        takers: the calls and commands that have the option, among the takers of the dataclass.
        resumed: what a resumed run does with the value.
        was: the names of the option in the last release.
    """
    defined = PipelineOption(check, help, group, unit, takers, resumed, was)
    return field(default=default, metadata={"option": defined})


@cache
def options_of(holder: type[Any]) -> Mapping[str, PipelineOption]:
    """Returns, by name, the options of a dataclass that any call or command in its `taker` has."""
    options: dict[str, PipelineOption] = {}
    for one in fields(holder):
        defined: PipelineOption = one.metadata["option"]
        # The same definition may serve other dataclasses, so the field completes a copy of it.
        if defined.takers & holder.taker:
            options[one.name] = replace(defined, name=one.name, type=one.type, default=one.default)
    return options


def resumed(holder: type[Any], *kinds: Resumed) -> tuple[str, ...]:
    """Returns the names of the options whose `resumed` is one of `kinds`."""
    return tuple(name for name, one in options_of(holder).items() if one.resumed in kinds)
