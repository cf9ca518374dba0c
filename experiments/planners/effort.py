"""What each number of effort buys.

    python -m experiments.planners.effort [--every 7] [--longest 0.4] [--only NAME]

Plans every n-th of the recorded problems (tests/record_plans.py) with ten times as much of each
number of the tables of effort, and with a tenth of it, and tells the simulated step and the
processor seconds of planning beside those of the numbers as they are. A number that changes neither
by ten times more nor less has no place in its table.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

from jvpipe.cost import measuring_effort as cost_effort
from jvpipe.planners import splitting
from jvpipe.planners.joint import effort, order_refine
from jvpipe.session import planning
from tests.record_plans import Record, cases

TABLES = {
    **{name: table for name, table in vars(effort).items() if name.isupper()},
    "REFINE": order_refine.EFFORT,
    "OPTIONS": cost_effort.OPTIONS,
    "SPLITTING": splitting.SPLITTING,
    "ASKING": planning.ASKING,
}


def times(value: Any, factor: float) -> Any:
    """A number of effort times a factor; whole numbers stay whole, and at least 1; of several
    numbers there are more.

    >>> times(3, 0.1), times(0.5, 10), times((1, 2, 4), 0.1)
    (1, 5.0, (1,))
    """
    if isinstance(value, tuple):
        return value[:1] if factor < 1 else value
    return max(1, round(value * factor)) if isinstance(value, int) else value * factor


@contextmanager
def with_effort(table: str, name: str, factor: float) -> Iterator[None]:
    """Meanwhile a number is other than it is, wherever it is read."""
    old = TABLES[table]
    new = replace(old, **{name: times(getattr(old, name), factor)})
    with ExitStack() as meanwhile:
        for module in [m for m in sys.modules.values() if m.__name__.startswith("jvpipe.")]:
            for reader in [key for key, value in vars(module).items() if value is old]:
                meanwhile.enter_context(mock.patch.object(module, reader, new))
        yield


def planned(every: int, longest_s: float) -> dict[str, Record]:
    """Plans every n-th of the problems whose planning took at most some seconds when recorded."""
    recorded = json.loads(Path(__file__).with_name("recorded.json").read_text())
    some = [(name, ask) for name, ask in cases() if recorded[name]["planning_s"] <= longest_s]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: ask() for name, ask in some[::every]}


def row(usual: dict[str, Record], other: dict[str, Record]) -> str:
    """The cells of a line: mean and worst of the steps, and the seconds of planning, over those as
    they are.
    """
    both = [
        (other[name]["step_s"], usual[name]["step_s"])
        for name in usual
        if usual[name].get("step_s") and other[name].get("step_s")
    ]
    ratios = [a / b for a, b in both]
    gone = sum(bool(usual[name].get("step_s")) and not other[name].get("step_s") for name in usual)
    planning = sum(x["planning_s"] for x in other.values()) / sum(
        x["planning_s"] for x in usual.values()
    )
    told = f"{fmean(ratios):.4f} | {min(ratios):.3f} to {max(ratios):.3f} | {planning:.2f}"
    return told + (f", {gone} without a plan" if gone else "")


def main() -> None:
    """Prints a table, a line as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=7)
    parser.add_argument("--longest", type=float, default=float("inf"))
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    planned(given.every, given.longest)  # what is compiled and read once is not counted
    usual = planned(given.every, given.longest)
    print(f"{len(usual)} problems\n")
    print(
        "| number | as it is | times | mean step | from, to | planning |\n|---|---|---|---|---|---|"
    )
    for table, numbers in TABLES.items():
        for field in fields(numbers):
            value, name = getattr(numbers, field.name), f"{table}.{field.name}"
            if given.only not in name:
                continue
            for factor in (10, 0.1):
                with with_effort(table, field.name, factor):
                    told = row(usual, planned(given.every, given.longest))
                print(f"| `{name}` | {value} | {factor} | {told} |", flush=True)


if __name__ == "__main__":
    main()
