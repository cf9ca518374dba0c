"""DawnPiper's tables 1 and 2, planned at real size.

    python -m experiments.max_batch.planned [WORD ...]

Words name models, schedules and numbers of stages, to look at these alone.

Legend: a batch is that of a step under gpipe and a micro-batch under pipedream, as in the paper. It
counts if the planner finds a plan for it that `evaluate` sees fit into 40 GiB per device. "Own
rules": the same where the planner is told no more than its paper's memory model (`rules.py`) and
values are kept as PyTorch does; "claimed": what then fits by that model.
"""

import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

from experiments.max_batch.largest import largest
from experiments.max_batch.paper import MODELS, REPORTED, Row, rows
from experiments.max_batch.rules import BELIEVING, claims, fits, fits_as_believed
from experiments.max_batch.subjects import CLUSTER, WORKLOADS, Costing, subject
from jvpipe.planners.model.problem import Problem
from jvpipe.schedules import find_schedule
from jvpipe.session.question import on_cluster


class Found(NamedTuple):
    """Of a row: the largest batches as our trace keeps values and as PyTorch does."""

    traced: int
    saved: int


def problem(row: Row, costing: Costing, size: int) -> Problem:
    """The question of a cell: a model at a micro-batch size on so many A100s of 40 GiB."""
    asked = Problem(
        costing(size),
        row.stages,
        find_schedule(row.schedule),
        row.stages,
        CLUSTER.device.memory_bytes,
    )
    return on_cluster(asked, CLUSTER)


def cell(
    row: Row, costing: Costing, judged: Callable[[Problem, str, bool], bool], near: int
) -> int:
    """The largest micro-batch of a row."""
    return largest(
        lambda size: judged(problem(row, costing, size), row.planner, row.optimized), near
    )


def table(model: str, asked: Iterable[Row]) -> dict[Row, Found]:
    """Prints a model's table, row by row."""
    (as_traced, as_saved), found = subject(model), {}
    print(f"\n## {model}\n")
    print(
        "| schedule | stages | S+R | planner | paper | as traced | as PyTorch | over paper | own "
        "rules | claimed |"
    )
    print("|---" * 10 + "|")
    traced, saved = 1, 1
    for row in asked:
        traced, saved = cell(row, as_traced, fits, traced), cell(row, as_saved, fits, saved)
        own = cell(row, as_saved, fits_as_believed, saved) if row.planner in BELIEVING else 0
        claimed = cell(row, as_saved, claims, saved) if row.planner in BELIEVING[1:] else 0
        batch = row.stages if row.schedule == "gpipe" else 1
        found[row] = Found(batch * traced, batch * saved)
        paper = REPORTED[row][MODELS.index(model)] if row in REPORTED else None
        shown = [
            row.schedule,
            row.stages,
            "yes" if row.optimized else "no",
            row.planner,
            paper or "",
            *found[row],
        ]
        shown += [
            f"{batch * saved / paper:.2f}" if paper else "",
            batch * own or "",
            batch * claimed or "",
        ]
        print(f"| {' | '.join(map(str, shown))} |", flush=True)
    return found


def ratios(model: str, found: dict[Row, Found]) -> None:
    """Prints how much larger batches are than those of other planners; beside it DawnPiper's in the
    paper.
    """
    print(
        "\n| schedule | stages | S+R | over | jvpipe as traced | as PyTorch | dawnpiper in the "
        "paper |\n" + "|---" * 7 + "|"
    )
    for row in (row for row in found if row.planner != "jvpipe"):
        ours, dawnpiper = (
            row._replace(optimized=True, planner=planner) for planner in ("jvpipe", "dawnpiper")
        )
        if not row.optimized and row.planner != "pipedream":
            ours, dawnpiper = (other._replace(optimized=False) for other in (ours, dawnpiper))
        at = MODELS.index(model)
        over = [
            f"{mine / max(1, theirs):.2f}"
            for mine, theirs in zip(found[ours], found[row], strict=True)
        ]
        theirs = f"{REPORTED[dawnpiper][at] / REPORTED[row][at]:.2f}" if row != dawnpiper else ""
        shown = [
            row.schedule,
            row.stages,
            "yes" if row.optimized else "no",
            row.planner,
            *over,
            theirs,
        ]
        print(f"| {' | '.join(map(str, shown))} |")
    above = [
        row
        for row in found
        if any(a > b for a, b in zip(found[row], found[_ours(row)], strict=True))
    ]
    print(f"\njvpipe is below another planner in {len(above)} of {len(found)} rows", *above)


def _ours(row: Row) -> Row:
    return row._replace(planner="jvpipe")


def main() -> None:
    words = set(sys.argv[1:])
    models = [model for model in WORKLOADS if model in words] or WORKLOADS
    schedules = words & {"gpipe", "pipedream"} or {"gpipe", "pipedream"}
    stages = words & {"4", "8"} or {"4", "8"}
    asked = [row for row in rows() if row.schedule in schedules and str(row.stages) in stages]
    for model in models:
        ratios(model, table(model, asked))


if __name__ == "__main__":
    main()
