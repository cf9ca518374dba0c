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


def simulated_s(
    problem: ReplicaProblem,
    plan: ReplicaPlan,
    stages: Sequence[ReplicaStage],
    *,
    closely: bool = False,
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
    backwards_s = starts_s[
        step.slots == WHATS.index(What.BACKWARD) * plan.stages
    ]  # of the first stage
    begin = (few - more) // 2
    apart_s = (backwards_s[begin + more] - backwards_s[begin]) / more if count > few else 0.0
    return float((starts_s + seconds).max() + max(0, count - few) * apart_s)


def simulation(
    problem: ReplicaProblem, plan: ReplicaPlan, stages: Sequence[ReplicaStage]
) -> Timeline:
    """The step as a timeline of all its micro-batches; the replicas of a stage are in step, so each stage has one line.

    Args:
        problem: whose cluster and batch count.
        plan: the places of the stages.
        stages: what they take.
    """
    step = _step(problem, plan, stages, problem.batch // plan.size)
    starts_s, seconds = step.timed(stages)
    whats, where = np.divmod(step.slots, plan.stages)
    rows = zip(whats.tolist(), where.tolist(), step.microbatches.tolist(), strict=True)
    tasks = [Task(s, KIND_OF[WHATS[what]], m) for what, s, m in rows]
    return Timeline(
        tasks, starts_s, starts_s + seconds, step.work.occupies, step.names, plan.stages
    )


class _Step(NamedTuple):
    """The rows of a step as work; the slot of each in what is listed by kind and stage; the names of resources."""

    work: Work
    slots: Int[np.ndarray, " rows"]
    microbatches: Int[np.ndarray, " rows"]
    names: tuple[str, ...] = ()

    def timed(
        self, stages: Sequence[ReplicaStage]
    ) -> tuple[Float[np.ndarray, " rows"], Float[np.ndarray, " rows"]]:
        """When each row starts, and the seconds that it takes."""
        each_s = np.array([_seconds(kind, s, stages) for kind in WHATS for s in range(len(stages))])
        seconds = each_s[self.slots]
        return np.array(self.work.starts_s(seconds.tolist())), seconds


def _step(
    problem: ReplicaProblem, plan: ReplicaPlan, stages: Sequence[ReplicaStage], count: int
) -> _Step:
    return _linked(
        len(stages),
        count,
        tuple(_links(problem, plan, kind, s) for kind in WHATS for s in range(plan.stages)),
    )


@lru_cache(maxsize=256)
def _linked(stages: int, count: int, links: tuple[tuple[Hashable, ...], ...]) -> _Step:
    alone = _alone(stages, count)
    names: dict[Hashable, int] = {s: s for s in range(stages)}
    occupied = [tuple(names.setdefault(x, len(names)) for x in held) for held in links]
    work = alone.work.queueing([occupied[slot] for slot in alone.slots.tolist()])
    return alone._replace(work=work, names=tuple(map(_name, names)))


@lru_cache(maxsize=64)
def _alone(stages: int, count: int) -> _Step:
    """The step if transfers disturb nobody; a row waits for rows of its own micro-batch."""
    forward, backward, send, back, reduce = (
        range(at * stages, (at + 1) * stages) for at in range(len(WHATS))
    )
    needs: dict[int, tuple[int, ...]] = {}
    rows: list[tuple[int, int]] = []
    for s, tasks in enumerate(one_f_one_b(stages, count)):
        last = s + 1 == stages
        needs[forward[s]] = (send[s - 1],) if s else ()
        needs[backward[s]] = (forward[s],) if last else (forward[s], back[s + 1])
        needs[send[s]], needs[back[s]], needs[reduce[s]] = (
            (forward[s],),
            (backward[s],),
            (backward[s],),
        )
        runs = {
            Kind.F: (forward[s],) if last else (forward[s], send[s]),
            Kind.B: (backward[s], back[s]) if s else (backward[s],),
        }
        rows += [(slot, m) for _, kind, m in tasks for slot in runs[kind]]
        rows.append((reduce[s], count - 1))
    slots, microbatches = np.array(rows).T
    ids = np.zeros((len(WHATS) * stages, count), dtype=np.int64)
    ids[slots, microbatches] = np.arange(len(rows))
    numbered = ids.tolist()
    waits = [tuple([numbered[need][m] for need in needs[slot]]) for slot, m in rows]
    occupies = [(slot % stages,) if slot < 2 * stages else () for slot, _ in rows]
    work = Work(waits, occupies, range(stages))
    return _Step(work, slots, np.where(slots < reduce[0], microbatches, 0))


def _name(resource: Hashable) -> str:
    """What a resource is called: a stage, the network of a machine one way, or a stage's link to the next or before."""
    match resource:
        case (What() as what, s):
            return f"link of stage {s}, {'on' if what is What.SEND else 'back'}"
        case (way, machine):
            return f"network of machine {machine}, {way}"
        case _:
            return f"stage {resource}"


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
        return (
            tuple((way, machine) for machine in every for way in ("out", "in"))
            if len(every) > 1
            else ()
        )
    if not 0 <= (s + 1 if kind is What.SEND else s - 1) < plan.stages:
        return ()
    there = machines_of(plan.places[s + 1 if kind is What.SEND else s - 1])
    if here == there or len({*here, *there}) == 1:
        return ((kind, s),)
    return (*(("out", m) for m in sorted(set(here))), *(("in", m) for m in sorted(set(there))))
