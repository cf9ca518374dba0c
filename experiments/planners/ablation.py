"""What each part of the order search is worth: python -m experiments.planners.ablation [PART ...]

Plans the same problems with one part of `schedule="auto"` switched off at a time, and prints the
simulated step and the processor seconds of planning over those of the whole search. A part that
changes no step by more than 0.5% does not earn its lines.

The problems are of three kinds: recorded ones (tests/record_plans.py), which the command line
plans; tiny ones under limits, for which the fastest plan is known (tests/planners/joint); and a
published setting of zero bubble under two limits, where the order alone is open.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any
from unittest import mock

import tyro

from experiments.schedules.published import SETTINGS, problem
from jvpipe.planners.joint import order_refine, order_search
from jvpipe.planners.joint.order_search import find_order
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Problem
from tests.planners.joint.test_exact_plans import drawn, limited
from tests.record_plans import cases

RECORDED = (97, 99, 100, 105, 107, 111)
TINY_SEEDS, TINY_LIMITS = range(6), (0.7, 0.5)
ZERO_BUBBLE_LIMITS = (1, 2)
"""Over what 1F1B holds."""
Switch = Callable[[], AbstractContextManager[Any]]


def without(module: Any, name: str, value: Any) -> Switch:
    """Replaces what a module reads under a name."""
    return partial(mock.patch.object, module, name, value)


def nothing(*_: Any, **__: Any) -> tuple[()]:
    """Yields nothing, whatever is asked."""
    return ()


@dataclass
class NoOrder:
    """A scheduler that finds no order."""

    order: None = None

    @classmethod
    def where(cls, refuses: Callable[..., bool]) -> Callable[..., Any]:
        """Gives list scheduling that finds no order for some of its options."""
        whole = order_search.Listing
        return lambda *args, **options: (
            cls() if refuses(*args, **options) else whole(*args, **options)
        )


def without_family(ending: str) -> Switch:
    """Drops the orders of a family."""
    whole = order_search.fitting

    def some(one: Any, order: Any, family: str = "") -> Iterator[Any]:
        return iter(()) if family.endswith(ending) else whole(one, order, family)

    return without(order_search, "fitting", some)


def effort(**changes: Any) -> Switch:
    """Changes numbers of `RefineEffort`."""
    return without(order_refine, "EFFORT", replace(order_refine.EFFORT, **changes))


def order_effort(**changes: Any) -> Switch:
    """Changes numbers of `OrderEffort`, where candidates are made."""

    def switch() -> AbstractContextManager[Any]:
        return mock.patch.object(order_search, "ORDER", replace(order_search.ORDER, **changes))

    return switch


def without_placement(at: int) -> Switch:
    """Leaves out a placement of stages on devices."""
    every = order_search.PLACEMENTS
    return without(order_search, "PLACEMENTS", (*every[:at], *every[at + 1 :]))


def plain_moments(whole: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Makes room for fewer micro-batches in flight as if there were many cuts."""
    return lambda problem, few: whole(problem, few=False)


PARTS: dict[str, Switch] = {
    "tabu climb": without(order_refine, "climbed", lambda loads, order, *_: order),
    "list scheduling": without(order_search, "Listing", lambda *_, **__: NoOrder()),
    "list scheduling, eager forwards": without(
        order_search, "Listing", NoOrder.where(lambda *_, eager, **__: eager)
    ),
    "list scheduling, caps": order_effort(caps=()),
    "orders in rounds": without(order_search, "in_rounds", nothing),
    "late by bytes": without_family("late by bytes"),
    "room for fewer in flight": without(order_search, "_moments", nothing),
    "room in more ways where cuts are few": without(
        order_search, "_moments", plain_moments(order_search._moments)
    ),
    "all cuts where they are few": order_effort(all_cuts=0),
    "bounds moved in orders": without(order_refine, "_moved", lambda _: []),
    "bounds of rules moved": effort(rules_moved=0),
    "plans of 1F1B": without(order_search, "_own_rivals", nothing),
    "eager 1F1B": without(order_search, "_eager_may_win", lambda *_: False),
    "orders for plans of 1F1B": without(order_search, "_from_rival", nothing),
    "swaps": without(order_search, "_swapping", nothing),
    "two chunks in a loop": without_placement(1),
    "four chunks in a loop": without_placement(2),
    "two chunks in a vee": without_placement(3),
}


@dataclass(frozen=True)
class Measured:
    """The step that was found for a problem, None if there is no plan, and the processor seconds of
    planning.
    """

    step_s: float | None
    planning_s: float


def recorded() -> Iterator[tuple[str, Measured]]:
    """Plans the recorded problems."""
    for name, plan in cases():
        if name.startswith("chain ") and int(name.split()[1]) in RECORDED:
            record = plan()
            yield name, Measured(record.get("step_s"), record["planning_s"])


def asked(problem: Problem) -> Measured:
    """Plans a problem."""
    start_s = time.process_time()
    try:
        step_s = find_order(problem).step_s
    except Infeasible:
        step_s = None
    return Measured(step_s, time.process_time() - start_s)


def others() -> Iterator[tuple[str, Measured]]:
    """Plans the tiny problems and those of a published setting."""
    for seed in TINY_SEEDS:
        for share in TINY_LIMITS:
            yield f"tiny {seed} limit {share}", asked(limited(drawn(seed, 9, 5), share))
    for times in ZERO_BUBBLE_LIMITS:
        yield f"zero bubble limit {times}", asked(problem(SETTINGS[0], times, 1))


def measured(part: str | None = None) -> dict[str, Measured]:
    """Plans all problems without a part, or without several with " + " between their names."""
    with ExitStack() as meanwhile:
        meanwhile.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if part is not None:
            for each in part.split(" + "):
                meanwhile.enter_context(PARTS[each]())
        return dict([*recorded(), *others()])


def line(part: str, whole: dict[str, Measured], less: dict[str, Measured]) -> str:
    """Returns the row of a part: steps and seconds of planning without it over those with it."""
    ratios, gone = dict[str, float](), 0
    for name, before in whole.items():
        after = less[name]
        if before.step_s and after.step_s:
            ratios[name] = after.step_s / before.step_s
        gone += bool(before.step_s) and not after.step_s
    worst = max(ratios, key=ratios.__getitem__)
    slower = sum(ratio > 1.005 for ratio in ratios.values())
    planning = sum(x.planning_s for x in less.values()) / sum(x.planning_s for x in whole.values())
    cells = (part, f"{fmean(ratios.values()):.4f}", f"{ratios[worst]:.4f}", worst, str(slower))
    return f"| {' | '.join(cells)} | {gone} | {planning:.2f} |"


def main(parts: tyro.conf.Positional[Sequence[str]] = tuple(PARTS)) -> None:
    """Prints a table, a row as soon as it is known."""
    whole = measured()
    print(f"{len(whole)} problems, {sum(x.planning_s for x in whole.values()):.0f} s of planning\n")
    print("| without | mean step | worst | where | over 0.5% | no plan | planning |")
    print("|---|---|---|---|---|---|---|")
    for part in parts:
        print(line(part, whole, measured(part)), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
