"""Simulates a problem's stages to find seconds per step, cheaply enough for a planner's search.

A graph says which tasks wait for which. It depends on the schedule, on the numbers of stages and
micro-batches, and on `Features`, but not on seconds. So the graph is made once and cached
(`_stream`), and then run with the seconds of one plan after another.

A synchronous schedule is simulated for one step. An asynchronous schedule is simulated as a stream,
of which some micro-batches are timed once it is steady (`stream_window`).
"""

import math
from functools import lru_cache
from itertools import chain

import numpy as np
from jaxtyping import Float

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import Stages, evaluate_decision
from jvpipe.schedules.schedule import Schedule
from jvpipe.simulate.simulator import simulate_lists
from jvpipe.simulate.stages import StageLoad, StageWork, stage_work
from jvpipe.simulate.timeline import Timeline
from jvpipe.simulate.work_parts import PARTS, Features


def simulated_step_s(problem: Problem, stages: Stages) -> float:
    """Simulates a synchronous step, or an asynchronous stream, and counts the seconds per step.

    Args:
        problem: gives the schedule, the micro-batches and the machines.
        stages: the costs of all stages.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.planners.model.stage_cost import evaluate_decision
    >>> from jvpipe.planners.model.problem import Decision
    >>> from jvpipe.schedules import find_schedule
    >>> costs = Costs((LayerCost("a", 1.0, 2.0, (Option(0),)),) * 4)
    >>> problem = Problem(costs, stages=4, schedule=find_schedule("1f1b"), microbatches=8)
    >>> stages = evaluate_decision(problem, Decision.keeping_all([0, 1, 2, 3, 4])).stages
    >>> simulated_step_s(problem, stages)  # (8 + 4 - 1) (1 + 2)
    33.0
    """
    parts_s = [load.parts_s for load in _loads(stages)]
    features = Features.of(
        parts_s,
        shared=problem.peer_uses_host,
        machines=_machines(problem),
    )
    stream = _stream(problem.schedule, len(stages), problem.microbatches, features)
    seconds = stream.seconds(parts_s)
    ends = np.add(stream.work.starts_s(seconds), seconds)
    return float(_steps_s(problem, stream, ends[:, None])[0])


def least_steps_s(
    problem: Problem,
    parts_s: Float[np.ndarray, "stages parts runs"],
    link_s: Float[np.ndarray, "stages runs"],
) -> Float[np.ndarray, " runs"]:
    """Returns lower bounds of `simulated_step_s` for many plans (runs) at once.

    They are lower bounds, because no transfer waits here for another one on a shared link, and
    copies to the host and all-reduces keep no task waiting.

    Args:
        problem: gives the schedule and the micro-batches.
        parts_s: the seconds of each plan's stages, in the order of `PARTS`; infinite for a stage
            that is impossible. The seconds of sends are not read: a send takes as long as the
            return of the stage after it.
        link_s: for how long each stage's own link to the host is busy per micro-batch.
    """
    stages, _, runs = parts_s.shape
    loads_s = parts_s.copy()
    # A stage sends values in as many seconds as the next stage returns their cotangents.
    loads_s[:-1, PARTS.index(Kind.SEND)] = parts_s[1:, PARTS.index(Kind.RETURN)]
    impossible = np.isinf(loads_s).any(axis=(0, 1))
    possible_s = np.where(impossible, 0.0, loads_s).reshape(-1, runs)
    # Copies to the host and all-reduces get no tasks here, so their seconds do not count.
    features = Features(
        recompute=bool(parts_s[:, PARTS.index(Kind.R)].any()),
        swaps=False,
        updates=bool(parts_s[:, PARTS.index(Kind.U)].any()),
    )
    stream = _stream(problem.schedule, stages, problem.microbatches, features)
    by_task_s = possible_s[stream.slots]
    ends_s = stream.work.many_starts_s(by_task_s) + by_task_s
    least_s = _steps_s(problem, stream, ends_s)
    busy_s = problem.microbatches * link_s.max(axis=0)
    return np.where(impossible, np.inf, np.maximum(least_s, busy_s))


def simulated_bubble_fraction(
    problem: Problem,
    stages: Stages,
    devices: int | None = None,
    state_s: float = 0.0,
) -> float:
    """Returns the share of the devices' time that is idle in a simulated step.

    Args:
        problem: gives the schedule, the micro-batches and the devices of each place.
        stages: the costs of all stages.
        devices: the number of devices, with or without a stage; None: those with a stage.
        state_s: the seconds of copies of the optimizer's state, in which all devices are idle.
    """
    step_s = simulated_step_s(problem, stages) + state_s
    if not step_s:
        return 0.0
    lists = problem.schedule.tasks(problem.devices, problem.microbatches)
    tasks = ((stages[task.stage], task.kind) for task in chain.from_iterable(lists))
    # All replicas of a stage work at the same time, so each of them counts as busy.
    busy_s = sum(stage.replicas * stage.task_s(kind) for stage, kind in tasks)
    busy_s += sum(problem.updates * stage.replicas * stage.update_s for stage in stages)
    there = devices or sum(map(len, set(problem.where)))
    return max(0.0, 1.0 - busy_s / (there * step_s))  # sums are rounded


def forecast(problem: Problem, decision: Decision) -> Timeline:
    """Simulates a decision's timeline with bytes: one synchronous step, or two steps of a stream.

    The bytes that micro-batches hold count while they are in flight. All other bytes of a stage,
    such as parameters, count all the time (see `stage_bytes.py`).

    Args:
        problem: the problem that the decision answers.
        decision: the cuts and fates.
    """
    loads = _loads(evaluate_decision(problem, decision).stages)
    count = problem.microbatches * (1 if problem.schedule.synchronous else 2)
    return simulate_lists(
        _lists(problem.schedule, problem.devices, problem.microbatches, count),
        loads,
        shared_link=problem.peer_uses_host,
        machines=_machines(problem),
    )


def _machines(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Lists the machines of the devices at each place; empty if any group does not name them."""
    machines = tuple(group.machines for group in problem.groups)
    return machines if all(machines) else ()


@lru_cache(maxsize=32)
def _stream(
    schedule: Schedule,
    stages: int,
    microbatches: int,
    features: Features,
) -> StageWork:
    """Makes the tasks of a step, or of as much of a stream as `_steps_s` looks at."""
    count = microbatches
    if not schedule.synchronous:
        # The micro-batches after the timed ones keep all stages busy until the timing ends.
        count = sum(stream_window(stages, microbatches)) + stages + 1
    return stage_work(_lists(schedule, stages // schedule.chunks, microbatches, count), features)


def _lists(
    schedule: Schedule,
    devices: int,
    microbatches: int,
    count: int,
) -> TaskLists:
    """Lists the tasks of `count` micro-batches, with the updates.

    A synchronous step ends with its updates. In a stream, a stage has one update in each
    `Schedule.period`.

    Args:
        schedule: the schedule that makes the tasks.
        devices: how many places the pipeline has.
        microbatches: how many micro-batches a step has.
        count: how many micro-batches the lists have.
    """
    if not schedule.synchronous:
        return schedule.with_updates(devices, microbatches, count)
    of_step = []
    for tasks in schedule.tasks(devices, count):
        stages = sorted({task.stage for task in tasks})
        updates = (Task(s, Kind.U, count - 1) for s in stages)
        of_step.append((*tasks, *updates))
    return tuple(of_step)


def trips_counted(stages: int, microbatches: int) -> float:
    """Returns the share of timed micro-batches in whole cycles, for the worst length of a cycle.

    Stages wait for each other in cycles (see `stream_window`). A cycle has 1 to `stages`
    micro-batches. If the timing ends within a cycle, the micro-batches of that cycle do not count
    in the share. The result is the smallest share that any length of cycles gives.
    """
    _, timed = stream_window(stages, microbatches)
    in_cycles = min(timed // length * length for length in range(1, stages + 1))
    return in_cycles / timed


def stream_window(stages: int, microbatches: int) -> tuple[int, int]:
    """Returns how many micro-batches of a stream pass before it is timed, and how many are timed.

    In a steady stream, stages wait for each other in repeating cycles. A cycle takes at most as
    many micro-batches as there are stages. The number of timed micro-batches is a multiple of the
    number of stages, so that the longest cycles end in time.

    Args:
        stages: the number of stages.
        microbatches: the number of micro-batches of a step.
    """
    cycles = max(2, math.ceil(microbatches / stages))
    return 2 * stages, stages * cycles


def _steps_s(
    problem: Problem,
    stream: StageWork,
    ends_s: Float[np.ndarray, "tasks runs"],
) -> Float[np.ndarray, " runs"]:
    """Counts the seconds per step from the times at which tasks end.

    A synchronous step ends with its last task. A stream is timed at each stage, from the end of one
    backward to the end of a later one (`stream_window`), and the slowest stage counts.

    Args:
        problem: gives the schedule and the micro-batches.
        stream: the tasks.
        ends_s: for each task, when it ends in each run.
    """
    if problem.schedule.synchronous:
        return ends_s.max(axis=0)
    before, timed = stream_window(stream.stages, problem.microbatches)
    stages = range(stream.stages)
    first = [stream.ids[Task(s, Kind.B, before)] for s in stages]
    last = [stream.ids[Task(s, Kind.B, before + timed)] for s in stages]
    passed_s = (ends_s[last] - ends_s[first]).max(axis=0)
    return passed_s * (problem.microbatches / timed)


def _loads(stages: Stages) -> list[StageLoad]:
    """Returns the loads of stages; a send takes as long as the next stage's return."""
    send_s = [*(after.comm_s / 2 for after in stages[1:]), 0.0]
    return [stage.load(sent_s) for stage, sent_s in zip(stages, send_s, strict=True)]
