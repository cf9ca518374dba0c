"""What the simulator says of a problem's stages: seconds per step, as often as a planner likes to ask.

The order of tasks depends on the schedule, the stages and the micro-batches alone: it is made once, then only run.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Float

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import StageCost, evaluate_decision
from jvpipe.schedules.schedule import Schedule, with_updates
from jvpipe.simulate.rows import simulate_lists
from jvpipe.simulate.stages import PARTS, Features, StageLoad, StageWork, stage_work
from jvpipe.simulate.timeline import Timeline


def simulated_step_s(problem: Problem, stages: Sequence[StageCost]) -> float:
    """Seconds per step: of one step, if the schedule is synchronous; of M micro-batches of a stream, if not.

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
    stream = _work_of(problem, len(stages), parts_s)
    seconds = stream.seconds(parts_s)
    starts = stream.work.starts_s(seconds)
    return float(_steps_s(problem, stream, np.add(starts, seconds)[:, None])[0])


def least_steps_s(
    problem: Problem,
    parts_s: Float[np.ndarray, "stages parts runs"],
    link_s: Float[np.ndarray, "stages runs"],
) -> Float[np.ndarray, " runs"]:
    """Counts for many plans at once what `simulated_step_s` is not below: transfers wait for no others.

    Args:
        problem: whose schedule and micro-batches count.
        parts_s: of each plan's stages the seconds of `StageCost.load`; infinite where a stage cannot be.
        link_s: how long the stages' own links are busy per micro-batch.
    """
    stages, _, runs = parts_s.shape
    loads_s = parts_s.copy()
    # A stage sends in as many seconds as the one after it returns in.
    loads_s[:-1, PARTS.index(Kind.SEND)] = parts_s[1:, PARTS.index(Kind.RETURN)]
    impossible = np.isinf(loads_s).any(axis=(0, 1))
    possible_s = np.where(impossible, 0.0, loads_s).reshape(-1, runs)
    recompute, updates = (bool(parts_s[:, PARTS.index(part)].any()) for part in (Kind.R, Kind.U))
    # Copies to the host and reductions have no tasks here, so that their seconds are not read.
    features = Features(recompute=recompute, swaps=False, updates=updates)
    stream = _stream(problem.schedule, stages, problem.microbatches, features)
    by_task_s = possible_s[stream.slots]
    least_s = _steps_s(problem, stream, stream.work.many_starts_s(by_task_s) + by_task_s)
    busy_s = problem.microbatches * link_s.max(axis=0)
    return np.where(impossible, np.inf, np.maximum(least_s, busy_s))


def simulated_bubble_fraction(
    problem: Problem, stages: Sequence[StageCost], devices: int | None = None
) -> float:
    """The idle share of the devices in a simulated step.

    Args:
        problem: whose schedule and micro-batches count.
        stages: what they take.
        devices: that there are, those that have no stage among them; those that have one unless given.
    """
    step_s = simulated_step_s(problem, stages)
    lists = problem.schedule.tasks(problem.devices, problem.microbatches)
    busy_s = sum(
        problem.group(task.stage).replicas * stages[task.stage].task_s(task.kind)
        for tasks in lists
        for task in tasks
    )
    busy_s += sum(problem.updates * stage.replicas * stage.update_s for stage in stages)
    there = devices or sum(len(devices) for devices in set(problem.where))
    return 1.0 - busy_s / (there * step_s) if step_s else 0.0


def forecast(problem: Problem, decision: Decision) -> Timeline:
    """The decision's timeline, with bytes: one step, if the schedule is synchronous; a stream of two, if not.

    Beside what micro-batches in flight hold, a stage's bytes (parameters, what layers need while they run, what is
    in transit) are counted all the time.
    """
    loads = _loads(evaluate_decision(problem, decision).stages)
    count = problem.microbatches * (1 if problem.schedule.synchronous else 2)
    lists = _lists(problem.schedule, problem.devices, problem.microbatches, count)
    return simulate_lists(
        lists, loads, shared_link=problem.peer_uses_host, machines=_machines(problem)
    )


def _machines(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The machines of the devices at each place, if they are known."""
    machines = tuple(group.machines for group in problem.groups)
    return machines if all(machines) else ()


def _work_of(problem: Problem, stages: int, parts_s: Sequence[Sequence[float]]) -> StageWork:
    features = Features.of(parts_s, shared=problem.peer_uses_host, machines=_machines(problem))
    return _stream(problem.schedule, stages, problem.microbatches, features)


@lru_cache(maxsize=32)
def _stream(schedule: Schedule, stages: int, microbatches: int, features: Features) -> StageWork:
    """The work of a step; of an asynchronous schedule, as much of its stream as `_steps_s` looks at."""
    count = (
        microbatches
        if schedule.synchronous
        else sum(stream_window(stages, microbatches)) + stages + 1
    )
    lists = _lists(schedule, stages // schedule.chunks, microbatches, count)
    return stage_work(lists, features)


def _lists(schedule: Schedule, devices: int, microbatches: int, count: int) -> TaskLists:
    """The lists of so many micro-batches with their updates: of a step, each device's after all else that it does.

    Args:
        schedule: whose tasks they are.
        devices: that the pipeline passes.
        microbatches: of a step.
        count: micro-batches of the lists.
    """
    lists = schedule.tasks(devices, count)
    if not schedule.synchronous:
        return tuple(tuple(with_updates(tasks, schedule.period(microbatches))) for tasks in lists)
    stages = (sorted({task.stage for task in tasks}) for tasks in lists)
    updates = ([Task(s, Kind.U, count - 1) for s in of_device] for of_device in stages)
    return tuple((*tasks, *more) for tasks, more in zip(lists, updates, strict=True))


def trips_counted(stages: int, microbatches: int) -> float:
    """The least share of the round trips, of any number of stages, that ends while a stream is timed."""
    _, timed = stream_window(stages, microbatches)
    return min(timed // length * length for length in range(1, stages + 1)) / timed


def stream_window(stages: int, microbatches: int) -> tuple[int, int]:
    """How many micro-batches of a stream pass before its steady state is timed, and how many then.

    Stages take turns in waiting for each other, over as many micro-batches as there are stages or a part of them.
    """
    return 2 * stages, stages * math.ceil(max(2 * stages, microbatches) / stages)


def _steps_s(
    problem: Problem, stream: StageWork, ends_s: Float[np.ndarray, "tasks runs"]
) -> Float[np.ndarray, " runs"]:
    """Seconds per step from when tasks end: in a stream, how far apart the slowest stage's backwards end."""
    if problem.schedule.synchronous:
        return ends_s.max(axis=0)
    # Stages take turns in being late; over a multiple of their number that evens out.
    before, timed = stream_window(stream.stages, problem.microbatches)
    # The slowest stage's backwards tell how far apart steps are, once the stream is steady.
    first, last = (
        [stream.ids[Task(s, Kind.B, m)] for s in range(stream.stages)]
        for m in (before, before + timed)
    )
    return (ends_s[last] - ends_s[first]).max(axis=0) * (problem.microbatches / timed)


def _loads(stages: Sequence[StageCost]) -> list[StageLoad]:
    """Returns the stages' seconds and bytes; a stage sends as long as the one after it returns."""
    send_s = [*(after.comm_s / 2 for after in stages[1:]), 0.0]
    return [stage.load(sent_s) for stage, sent_s in zip(stages, send_s, strict=True)]
