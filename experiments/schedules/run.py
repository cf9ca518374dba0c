"""Every family of schedules, simulated.

    python -m experiments.schedules.run [--every N] [--quick] [--rows] [--jobs N]

Each family's cuts and fates are the planner's for it, under the same limit. `auto` must be no
slower than any of them, in every row, and under 0.6 of what 1F1B takes 10% faster than 1F1B with
recomputation in most: otherwise the exit code is 1. Seconds of planning are those of a core.
`--every N` takes each N-th of the drawn models, under all limits; `--quick` few of them, and
nothing else; `--groups` those of some kinds, such as `profiles` and `models`; `--limits` those
under some limits, of which 1 is none.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import tyro

from experiments.schedules.cases import SHARES, Case, bytes_of_1f1b, drawn_cases, real_cases
from jvpipe.papers.registry import find_planner
from jvpipe.planners.joint.device_fates import DeviceFates
from jvpipe.planners.joint.lower_bound import lower_bound
from jvpipe.planners.joint.order_search import find_order
from jvpipe.planners.model.even import balanced
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules.gpipe import GPIPE
from jvpipe.schedules.interleaved import ZBH1, Interleaved
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B, OneFOneB
from jvpipe.schedules.schedule import Schedule
from jvpipe.schedules.vee import VSchedule

FAMILIES: tuple[Schedule, ...] = (
    *(ONE_F_ONE_B, GPIPE, OneFOneB(eager=True), Interleaved(), Interleaved(chunks=4)),
    *(ZBH1(), Interleaved(split=True), VSchedule(), VSchedule(memory="half")),
)
AUTO = "auto"
QUICK = 35
"""Of so many drawn models one is planned by `--quick`."""
TIGHT, GAIN = 0.6, 0.9
SAME = 1 + 1e-9
"""Sums in another order."""


@dataclass(frozen=True)
class Arguments:
    """What is run."""

    every: int = 1
    quick: bool = False
    groups: tuple[str, ...] = ("uniform", "uneven", "profiles", "models")
    limits: tuple[float, ...] = (1.0, 0.8, 0.6)
    rows: bool = False
    jobs: int = os.cpu_count() or 1


@dataclass(frozen=True)
class Planned:
    """Seconds of a step and of planning, the bytes of the fullest device, and what no order of the
    plan is below.
    """

    step_s: float
    peak_bytes: int
    planning_s: float
    bound_s: float = 0.0


@dataclass(frozen=True)
class Row:
    """What came of a case: of each family that has a plan; what 1F1B takes without a limit, and no
    plan is below.
    """

    case_group: str
    name: str
    share: float | None
    full_bytes: int
    bound_s: float
    planned: dict[str, Planned]

    def over_1f1b(self, family: str) -> float:
        """The family's step over that of 1F1B, which recomputes what it must; zero where 1F1B has
        no plan.
        """
        usual = self.planned.get(ONE_F_ONE_B.name)
        return self.planned[family].step_s / usual.step_s if usual else 0.0

    def over_best(self) -> float:
        """The step of `auto` over the fastest family's."""
        return self.planned[AUTO].step_s / min(
            x.step_s for name, x in self.planned.items() if name != AUTO
        )


def row_of(case: Case) -> Row:
    """Plans and simulates a case."""
    free = case.make()
    full_bytes = bytes_of_1f1b(free)
    problem = replace(free, memory_limit_bytes=case.share and int(case.share * full_bytes))
    planned = {schedule.name: one for schedule in FAMILIES if (one := by_rule(problem, schedule))}
    if (one := by_search(problem)) or planned:
        planned[AUTO] = one or Planned(float("inf"), 0, 0.0)
    bound_s = lower_bound(replace(free, schedule=ZBH1()))
    return Row(case.group, case.name, case.share, full_bytes, bound_s, planned)


def by_rule(problem: Problem, schedule: Schedule) -> Planned | None:
    """A family's plan; None if there are too few layers for its chunks, or no fates of balanced
    cuts fit.

    The planner would look further then, for ten seconds or more: it found a plan in few rows, and
    no fast one.
    """
    start_s = time.process_time()
    try:
        asked = replace(problem, stages=schedule.stages_on(problem.devices), schedule=schedule)
        plain = schedule.chunks == 1 and not asked.splits
        cuts = balanced(asked)
        if not plain and DeviceFates.of(asked).fastest(asked, cuts) is None:
            return None
        decision = find_planner("jvpipe").decide(asked)
    except (Infeasible, ValueError):
        return None
    return _simulated(asked, decision, time.process_time() - start_s)


def by_search(problem: Problem) -> Planned | None:
    """The plan of `auto`, or None."""
    start_s = time.process_time()
    try:
        found = find_order(problem)
    except Infeasible:
        return None
    taken_s = time.process_time() - start_s
    layers = tuple(
        replace(layer, split=None) if at in found.whole else layer
        for at, layer in enumerate(problem.costs.layers)
    )
    schedule = found.schedule
    asked = replace(
        problem,
        costs=replace(problem.costs, layers=layers),
        schedule=schedule,
        stages=schedule.stages_on(problem.devices),
    )
    planned = _simulated(asked, found.decision, taken_s)
    return planned and replace(planned, bound_s=found.bound_s)


def _simulated(problem: Problem, decision: Decision, planning_s: float) -> Planned | None:
    found, limit = evaluate_decision(problem, decision), problem.memory_limit_bytes
    if limit is not None and found.peak_bytes > limit:
        return None
    return Planned(simulated_step_s(problem, found.stages), found.peak_bytes, planning_s)


def families_table(rows: Sequence[Row]) -> Iterable[str]:
    """Lists, for each limit, what families take over 1F1B with recomputation under it."""
    yield (
        "| limit | schedule | plans | step over 1f1b: least | median | most | peak: median | most "
        + ("| planning s: median | most |")
    )
    yield f"|{10 * '---|'}"
    for share in sorted({row.share for row in rows}, key=lambda share: -(share or 1)):
        for name in [*(schedule.name for schedule in FAMILIES), AUTO]:
            some = [row for row in rows if row.share == share and name in row.planned]
            usual = [row for row in some if ONE_F_ONE_B.name in row.planned]
            if not usual:
                continue
            steps = _spread([row.over_1f1b(name) for row in usual], 3)
            peaks = _spread([row.planned[name].peak_bytes / row.full_bytes for row in some], 2)[1:]
            taken = _spread([row.planned[name].planning_s for row in some], 2)[1:]
            cells = [share or "none", name, len(some), *steps, *peaks, *taken]
            yield f"| {' | '.join(map(str, cells))} |"


def auto_table(rows: Sequence[Row], label: Callable[[Row], str]) -> Iterable[str]:
    """Lists, for rows of the same label and limit, how `auto` does beside 1F1B and beside the best
    of all families.
    """
    yield "| rows | limit | how many | over 1f1b: least | median | most | 10% faster " + (
        "| over the best family: median | most | faster by 1% | over 1f1b, median: bound of the "
        "plan | of all plans |"
    )
    yield f"|{12 * '---|'}"
    for name, share in dict.fromkeys((label(row), row.share) for row in rows):
        some = [row for row in rows if (label(row), row.share) == (name, share)]
        some = [row for row in some if AUTO in row.planned and ONE_F_ONE_B.name in row.planned]
        usual = [row.over_1f1b(AUTO) for row in some]
        best = [row.over_best() for row in some if len(row.planned) > 1]
        if not best:
            continue
        cells = [
            name,
            share or "none",
            len(some),
            *_spread(usual, 3),
            sum(x <= GAIN for x in usual),
        ]
        cells += [*_spread(best, 4)[1:], sum(x <= 0.99 for x in best)]
        least = [
            (row.planned[AUTO].bound_s, row.bound_s, row.planned[ONE_F_ONE_B.name].step_s)
            for row in some
        ]
        cells += [f"{statistics.median(x[at] / x[2] for x in least):.3f}" for at in (0, 1)]
        yield f"| {' | '.join(map(str, cells))} |"


def _spread(values: Sequence[float], digits: int) -> list[str]:
    return [f"{x:.{digits}f}" for x in (min(values), statistics.median(values), max(values))]


def mistakes(rows: Sequence[Row]) -> list[str]:
    """Lists the rows in which `auto` is slower than a family, and says if under the least limit it
    gains too little.
    """
    some = [row for row in rows if len(row.planned) > 1]
    found = [
        f"auto takes {row.over_best():.4f} of the best: {row}"
        for row in some
        if row.over_best() > SAME
    ]
    tight = [row for row in some if row.share == TIGHT and row.case_group in ("uniform", "uneven")]
    gains = sum(row.over_1f1b(AUTO) <= GAIN for row in tight)
    if tight and 2 * gains <= len(tight):
        found.append(
            f"auto is 10% faster than 1f1b under {TIGHT} of its bytes in {gains} of {len(tight)} "
            "rows only"
        )
    return found


def main() -> int:
    """Prints the tables."""
    arguments = tyro.cli(Arguments)
    every = QUICK if arguments.quick else arguments.every
    cases = [case for at, case in enumerate(drawn_cases()) if at // len(SHARES) % every == 0]
    cases += [] if arguments.quick else real_cases()
    cases = [
        case
        for case in cases
        if case.group in arguments.groups and (case.share or 1.0) in arguments.limits
    ]
    start_s = time.perf_counter()
    rows = []
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        for row in pool.map(row_of, cases):
            rows.append(row)
            if arguments.rows:
                steps = ", ".join(f"{name} {row.over_1f1b(name):.4f}" for name in row.planned)
                print(
                    f"{row.case_group}, {row.name}, limit {row.share or 'none'}: {steps}",
                    flush=True,
                )
    drawn = [row for row in rows if row.case_group in ("uniform", "uneven")]
    print("\n## Families\n", *families_table(drawn), sep="\n")
    print("\n## auto\n", *auto_table(drawn, lambda row: row.case_group), sep="\n")
    print(
        "\n## auto, by devices and micro-batches\n",
        *auto_table(drawn, lambda row: row.name.split(", I")[0]),
        sep="\n",
    )
    real = [row for row in rows if row not in drawn]
    print(
        "\n## auto, profiles and models\n",
        *auto_table(real, lambda row: row.name.split(", S")[0]),
        sep="\n",
    )
    wrong = mistakes(rows)
    print(
        f"\n{len(rows)} rows in {time.perf_counter() - start_s:.0f} s; {len(wrong)} mistakes",
        *wrong,
        sep="\n",
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
