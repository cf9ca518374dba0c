"""Reductions that a user chooses by pattern: of aux over micro-batches and replicas, of model state over replicas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from jvpipe.util.brief import brief


class AuxReduction(StrEnum):
    """What becomes of a leaf of aux over the slices of a micro-batch, and then over the micro-batches of a step."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    LAST = "last"


class StateReduction(StrEnum):
    """What a leaf of the model state is made of, where replicas have each made it of their slice of a micro-batch."""

    MEAN = "mean"  # over the examples
    SUM = "sum"  # of what each has added
    SAME = "same"  # as that of any of them


@dataclass(frozen=True)
class Reductions:
    """What a user says of leaves, by patterns of their paths; the trace says the rest."""

    aux: Mapping[str, AuxReduction] = field(default_factory=dict)
    state: Mapping[str, StateReduction] = field(default_factory=dict)


R = TypeVar("R", AuxReduction, StateReduction)


def checked_reductions(aux: Any, state: Any, *, has_aux: bool, has_state: bool) -> Reductions:
    """Reductions by pattern, as a user gave them.

    Args:
        aux: None, or names of reductions by pattern.
        state: likewise.
        has_aux: whether there are leaves of aux.
        has_state: whether there are leaves of a model state.

    Raises:
        ValueError: one is no such mapping, names another reduction or speaks of no leaf.

    >>> checked_reductions({"largest": "max"}, None, has_aux=True, has_state=False).aux
    {'largest': <AuxReduction.MAX: 'max'>}
    """
    return Reductions(
        _checked("aux_reduce", aux, AuxReduction, "" if has_aux else "has_aux"),
        _checked("model_state_reduce", state, StateReduction, "" if has_state else "has_state"),
    )


def _checked(option: str, choices: Any, kind: type[R], needed: str) -> dict[str, R]:
    """Checks one of these options, and returns its reductions by pattern.

    Args:
        option: its name.
        choices: as the user gave them.
        kind: of reductions.
        needed: the flag without which the loss returns no such leaves; "" if the user has set it.
    """
    if choices is None:
        return {}
    names = [reduction.value for reduction in kind]
    if not isinstance(choices, Mapping) or not all(isinstance(pattern, str) for pattern in choices):
        raise ValueError(
            f"{option} must map paths to reductions, such as {{'*/name': '{names[0]}'}}, not {brief(choices)}"
        )
    for pattern, name in choices.items():
        if name not in names:
            raise ValueError(
                f"{option} says {brief(name)} of '{pattern}': write one of {', '.join(map(repr, names))}"
            )
    if choices and needed:
        raise ValueError(
            f"{option} is given, but the loss returns nothing of that kind: say {needed}=True"
        )
    return {pattern: kind(name) for pattern, name in choices.items()}


def chosen(option: str, patterns: Mapping[str, R], paths: Sequence[str]) -> tuple[R | None, ...]:
    """Returns the reduction that the user chose for each leaf, if any; later patterns win.

    Args:
        option: its name.
        patterns: reductions by pattern.
        paths: of the leaves.

    Raises:
        ValueError: a pattern matches no leaf.

    >>> chosen("aux_reduce", {"*": AuxReduction.LAST, "a/*": AuxReduction.SUM}, ["a/b", "c"])
    (<AuxReduction.SUM: 'sum'>, <AuxReduction.LAST: 'last'>)
    """
    by_path: dict[str, R] = {}
    for pattern, reduction in patterns.items():
        matched = [path for path in paths if fnmatchcase(path, pattern)]
        if not matched:
            some = ", ".join(f"'{path}'" for path in paths[:6])
            more = f" and {len(paths) - 6} more" if len(paths) > 6 else ""
            raise ValueError(
                f"{option} pattern '{pattern}' matches no leaf: there are {some or 'none'}{more}"
            )
        by_path.update(dict.fromkeys(matched, reduction))
    return tuple(by_path.get(path) for path in paths)
