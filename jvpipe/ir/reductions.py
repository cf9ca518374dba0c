"""Reductions: how leaves of aux and of the model state are combined, as a user chooses by pattern.

Aux is what a loss returns besides its value. It is reduced over replicas and micro-batches. Model
state is reduced only over replicas. Replicas are places that run the same stage, each on a slice of
every micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from jvpipe.util.brief import brief


class AuxReduction(StrEnum):
    """The reductions of a leaf of aux, over a micro-batch's slices and then over micro-batches."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    LAST = "last"


class StateReduction(StrEnum):
    """The reductions of a leaf of the model state, over the replicas that make the leaf."""

    MEAN = "mean"  # the mean over the examples
    SUM = "sum"  # the previous leaf, plus what each replica has added to it
    SAME = "same"  # the leaf of any replica: the user says that all are the same


@dataclass(frozen=True)
class Reductions:
    """The reductions that a user chooses, by patterns of paths; the trace decides all others."""

    aux: Mapping[str, AuxReduction] = field(default_factory=dict)
    state: Mapping[str, StateReduction] = field(default_factory=dict)


R = TypeVar("R", AuxReduction, StateReduction)


def checked_reduction(option: str, reductions: Any, kind: type[R]) -> dict[str, R]:
    """Checks the reductions that a user gave, and returns them as members of the enum.

    Args:
        option: the name of the option, for messages.
        reductions: names of reductions, by pattern.
        kind: the enum.

    Raises:
        ValueError: `reductions` is not a mapping by pattern, or names an unknown reduction.

    >>> checked_reduction("aux_reduce", {"largest": "max"}, AuxReduction)
    {'largest': <AuxReduction.MAX: 'max'>}
    """
    names = [reduction.value for reduction in kind]
    if not isinstance(reductions, Mapping) or not all(
        isinstance(pattern, str) for pattern in reductions
    ):
        raise ValueError(
            f"{option} must map paths to reductions, such as {{'*/name': '{names[0]}'}}, "
            f"not {brief(reductions)}"
        )
    for pattern, name in reductions.items():
        if name not in names:
            raise ValueError(
                f"{option} has {brief(name)} for {pattern!r}: use one of "
                f"{', '.join(map(repr, names))}"
            )
    return {pattern: kind(name) for pattern, name in reductions.items()}


def chosen(option: str, patterns: Mapping[str, R], paths: Sequence[str]) -> tuple[R | None, ...]:
    """Returns the user's choice for each leaf, or None; the last matching pattern counts.

    Args:
        option: the name of the option, for messages.
        patterns: reductions by pattern.
        paths: the paths of the leaves.

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
                f"{option} pattern {pattern!r} matches no leaf: there are {some or 'none'}{more}"
            )
        by_path.update(dict.fromkeys(matched, reduction))
    return tuple(by_path.get(path) for path in paths)
