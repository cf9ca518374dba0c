"""Reductions that a user chooses by pattern: of aux over micro-batches and replicas, of model state over replicas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from jvpipe.util.brief import brief


class AuxReduction(StrEnum):
    """How a leaf of aux is reduced over the slices of a micro-batch, and then over the micro-batches of a step."""

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


def checked_reduction(option: str, reductions: Any, kind: type[R]) -> dict[str, R]:
    """Reads reductions by pattern, as a user gave them.

    Args:
        option: its name.
        reductions: names of reductions by pattern.
        kind: of reductions.

    Raises:
        ValueError: it is not such a mapping, or names another reduction.

    >>> checked_reduction("aux_reduce", {"largest": "max"}, AuxReduction)
    {'largest': <AuxReduction.MAX: 'max'>}
    """
    names = [reduction.value for reduction in kind]
    if not isinstance(reductions, Mapping) or not all(
        isinstance(pattern, str) for pattern in reductions
    ):
        raise ValueError(
            f"{option} must map paths to reductions, such as {{'*/name': '{names[0]}'}}, not {brief(reductions)}"
        )
    for pattern, name in reductions.items():
        if name not in names:
            raise ValueError(
                f"{option} says {brief(name)} of '{pattern}': write one of {', '.join(map(repr, names))}"
            )
    return {pattern: kind(name) for pattern, name in reductions.items()}


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
