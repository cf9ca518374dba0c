"""The simulated step of a plan with replicated stages: rows on devices and on named links.

The replicas of a stage are in step, so a stage is one row of its devices. Beside F and B there are SEND and RETURN of
the slices, on the networks of the machines between which they pass, and a REDUCE per stage after its last B, on those
of all machines that its replicas are on: stages that share a machine's network wait for each other there. Of many
micro-batches the last ones are not simulated: they are as far apart as those in the middle of those that are.
"""

from collections.abc import Hashable, Sequence
from enum import IntEnum, auto
from functools import lru_cache
from typing import NamedTuple, assert_never

import numpy as np
from jaxtyping import Float, Int

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task
from jvpipe.planners.model.replicas_plan import ReplicaPlan
from jvpipe.planners.model.replicas_problem import ReplicaProblem
from jvpipe.planners.model.replicas_stage import ReplicaStage
from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.simulate.engine import Work
from jvpipe.simulate.timeline import Timeline

LEAST_SIMULATED = 8
"""So many micro-batches are simulated at least, and as many as four per stage."""
CLOSELY = 8
"""So many times as many are simulated of plans that are looked at closely: where stages wait for networks, the first
ones are not as far apart as all.
"""


class What(IntEnum):
    """What a row of a stage does; RETURN sends cotangents."""

    FORWARD = auto()
    BACKWARD = auto()
    SEND = auto()
    RETURN = auto()
    REDUCE = auto()


WHATS = tuple(What)
KIND_OF = dict(zip(WHATS, (Kind.F, Kind.B, Kind.SEND, Kind.RETURN, Kind.REDUCE), strict=True))
Row = tuple[What, int, int]


def simulated_s(
    problem: ReplicaProblem, plan: ReplicaPlan, stages: Sequence[ReplicaStage], *, closely: bool = False
) -> float:
    """The seconds of a step under 1F1B.

    Args:
        problem: whose cluster and batch count.
        plan: the places of the stages.
        stages: what they take.
        closely: looks at more micro-batches.
    """
    count, more = problem.batch // plan.size, 2 * plan.stages * (CLOSELY if closely else 1)
    few = max(LEAST_SIMULATED, more) + more
    step = _step(problem, plan, stages, min(count, few))
    starts_s, seconds = step.timed(stages)
    backwards_s = starts_s[step.slots == WHATS.index(What.BACKWARD) * plan.stages]  # of the first stage
    begin = (few - more) // 2
    apart_s = (backwards_s[begin + more] - backwards_s[begin]) / more if count > few else 0.0
    return float((starts_s + seconds).max() + max(0, count - few) * apart_s)


def simulation(problem: ReplicaProblem, plan: ReplicaPlan, stages: Sequence[ReplicaStage]) -> Timeline:
    """The step as a timeline of all its micro-batches; the replicas of a stage are in step, so each stage has one line.

    Args:
        problem: whose cluster and batch count.
        plan: the places of the stages.
        stages: what they take.
    """
    step = _step(problem, plan, stages, problem.batch // plan.size)
    starts_s, seconds = step.timed(stages)
    tasks = [Task(s, KIND_OF[what], m) for what, s, m in step.rows]
    return Timeline(tasks, starts_s, starts_s + seconds, step.work.occupies, step.names, plan.stages)


class _Step(NamedTuple):
    """The rows of a step as work; the slot of each in what is listed by kind and stage; the names of resources."""

    rows: tuple[Row, ...]
    work: Work
    slots: Int[np.ndarray, " rows"]
    names: tuple[str, ...]

    def timed(self, stages: Sequence[ReplicaStage]) -> tuple[Float[np.ndarray, " rows"], Float[np.ndarray, " rows"]]:
        """When each row starts, and the seconds that it takes."""
        each_s = np.array([_seconds(kind, s, stages) for kind in WHATS for s in range(len(stages))])
        seconds = each_s[self.slots]
        return np.array(self.work.starts_s(seconds.tolist())), seconds


def _step(problem: ReplicaProblem, plan: ReplicaPlan, stages: Sequence[ReplicaStage], count: int) -> _Step:
    sends = tuple(stage.comm_s > 0 for stage in stages)
    links = tuple(_links(problem, plan, kind, s) for kind in WHATS for s in range(plan.stages))
    return _work(plan.stages, count, sends, links)


@lru_cache(maxsize=256)
def _work(stages: int, count: int, sends: tuple[bool, ...], links: tuple[tuple[Hashable, ...], ...]) -> _Step:
    rows, slots, waits = _numbered(stages, count, sends)
    names: dict[Hashable, int] = {s: s for s in range(stages)}
    occupied = [tuple(names.setdefault(x, len(names)) for x in held) for held in links]
    work = Work(waits, [occupied[slot] for slot in slots], range(stages))
    return _Step(rows, work, np.array(slots), tuple(map(_name, names)))


@lru_cache(maxsize=64)
def _numbered(
    stages: int, count: int, sends: tuple[bool, ...]
) -> tuple[tuple[Row, ...], list[int], list[tuple[int, ...]]]:
    """The rows, the slot of each, and the numbers of those that each waits for."""
    rows = _rows(stages, count, sends)
    ids = {row: i for i, row in enumerate(rows)}
    slots = [WHATS.index(kind) * stages + s for kind, s, _ in rows]
    return tuple(rows), slots, [tuple(ids[need] for need in needs) for needs in rows.values()]


def _name(resource: Hashable) -> str:
    """What a resource is called: a stage, the network of a machine one way, or a stage's link to the next or before."""
    match resource:
        case (What() as what, s):
            return f"link of stage {s}, {'on' if what is What.SEND else 'back'}"
        case (way, machine):
            return f"network of machine {machine}, {way}"
        case _:
            return f"stage {resource}"


def _rows(stages: int, count: int, sends: Sequence[bool]) -> dict[Row, list[Row]]:
    """The rows, and what each waits for; `sends` says whether a transfer before each stage takes time."""
    rows: dict[Row, list[Row]] = {}
    for s, tasks in enumerate(one_f_one_b(stages, count)):
        for _, kind, m in tasks:
            if kind == Kind.F:
                rows[What.FORWARD, s, m] = [(What.SEND if sends[s] else What.FORWARD, s - 1, m)] if s else []
                if s + 1 < stages and sends[s + 1]:
                    rows[What.SEND, s, m] = [(What.FORWARD, s, m)]
            elif kind == Kind.B:
                back = (What.RETURN if s + 1 < stages and sends[s + 1] else What.BACKWARD, s + 1, m)
                rows[What.BACKWARD, s, m] = [(What.FORWARD, s, m), *([back] if s + 1 < stages else [])]
                if s and sends[s]:
                    rows[What.RETURN, s, m] = [(What.BACKWARD, s, m)]
        rows[What.REDUCE, s, 0] = [(What.BACKWARD, s, count - 1)]
    return rows


def _seconds(kind: What, s: int, stages: Sequence[ReplicaStage]) -> float:
    match kind:
        case What.FORWARD:
            return stages[s].forward_s
        case What.BACKWARD:
            return stages[s].backward_s
        case What.SEND:
            return stages[s + 1].comm_s / 2 if s + 1 < len(stages) else 0.0
        case What.RETURN:
            return stages[s].comm_s / 2
        case What.REDUCE:
            return stages[s].reduce_s
        case _:
            assert_never(kind)


def _links(problem: ReplicaProblem, plan: ReplicaPlan, kind: What, s: int) -> tuple[Hashable, ...]:
    """What a row occupies: its stage's devices, or the networks of machines, one for each direction."""
    machines_of = problem.cluster.machines_of
    if kind is What.FORWARD or kind is What.BACKWARD:
        return (s,)
    here = machines_of(plan.places[s])
    if kind is What.REDUCE:
        every = sorted(set(here))
        return tuple((way, machine) for machine in every for way in ("out", "in")) if len(every) > 1 else ()
    if not 0 <= (s + 1 if kind is What.SEND else s - 1) < plan.stages:
        return ()
    there = machines_of(plan.places[s + 1 if kind is What.SEND else s - 1])
    if here == there or len({*here, *there}) == 1:
        return ((kind, s),)
    return (*(("out", m) for m in sorted(set(here))), *(("in", m) for m in sorted(set(there))))
