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
from jvpipe.planners.model.stage_cost import StageCost, evaluate
from jvpipe.schedules.schedule import Schedule, with_updates
from jvpipe.simulate.rows import simulate_lists
from jvpipe.simulate.stages import PARTS, Features, StageLoad, StageWork, stage_work
from jvpipe.simulate.timeline import Timeline


def simulated_step_s(problem: Problem, stages: Sequence[StageCost]) -> float:
    """Seconds per step: of one step, if the schedule is synchronous; of M micro-batches of a stream, if not.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.planners.model.stage_cost import evaluate
    >>> from jvpipe.planners.model.problem import Decision
    >>> from jvpipe.schedules import find_schedule
    >>> costs = Costs((LayerCost("a", 1.0, 2.0, (Option(0),)),) * 4)
    >>> problem = Problem(costs, stages=4, schedule=find_schedule("1f1b"), microbatches=8)
    >>> stages = evaluate(problem, Decision.keeping_all([0, 1, 2, 3, 4])).stages
    >>> simulated_step_s(problem, stages)  # (8 + 4 - 1) (1 + 2)
    33.0
    """
    parts_s = [load.parts_s for load in _loads(stages)]
    stream = _work_of(problem, len(stages), parts_s)
    seconds = stream.seconds(parts_s)
    starts = stream.work.starts_s(seconds)
    return float(_steps_s(problem, stream, np.add(starts, seconds)[:, None])[0])


def least_steps_s(
    problem: Problem, stages_s: Float[np.ndarray, "stages 8 runs"]
) -> Float[np.ndarray, " runs"]:
    """Counts for many plans at once what `simulated_step_s` is not below: transfers wait for no others.

    Args:
        problem: whose schedule and micro-batches count.
        stages_s: of each plan's stages the seconds of a forward, of what is computed again before a backward, of that
            with what else it computes again, of the halves of one, of an update, of the link before it, and of its
            own link; infinite where a stage cannot be.
    """
    stages, _, runs = stages_s.shape
    every = stages_s.transpose(1, 0, 2)
    forward_s, early_s, backward_s, input_s, weight_s, update_s, comm_s, link_s = every
    loads_s = np.zeros((stages, len(PARTS), runs))
    loads_s[:, PARTS.index(Kind.F)] = forward_s
    loads_s[:, PARTS.index(Kind.R)] = early_s
    loads_s[:, PARTS.index(Kind.B)] = backward_s
    loads_s[:, PARTS.index(Kind.I)] = input_s
    loads_s[:, PARTS.index(Kind.W)] = weight_s
    loads_s[:, PARTS.index(Kind.U)] = update_s
    loads_s[:, PARTS.index(Kind.RETURN)] = comm_s / 2
    loads_s[:-1, PARTS.index(Kind.SEND)] = comm_s[1:] / 2
    impossible = np.isinf(loads_s).any(axis=(0, 1))
    possible_s = np.where(impossible, 0.0, loads_s).reshape(-1, runs)
    no_more = Features(recompute=bool(early_s.any()), swaps=False, updates=bool(update_s.any()))
    stream = _stream(problem.schedule, stages, problem.microbatches, no_more)
    by_task_s = possible_s[stream.slots]
    least_s = _steps_s(problem, stream, stream.work.many_starts_s(by_task_s) + by_task_s)
    busy_s = problem.microbatches * link_s.max(axis=0)
    return np.where(impossible, np.inf, np.maximum(least_s, busy_s))


def bubble_fraction(
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
        problem.group(task.stage).replicas * _busy_s(stages[task.stage], task.kind)
        for tasks in lists
        for task in tasks
    )
    busy_s += sum(problem.updates * stage.replicas * stage.update_s for stage in stages)
    there = devices or sum(len(devices) for devices in set(problem.where))
    return 1.0 - busy_s / (there * step_s) if step_s else 0.0


def _busy_s(stage: StageCost, kind: Kind) -> float:
    match kind:
        case Kind.F:
            return stage.forward_s
        case Kind.B:
            return stage.recompute_s + stage.backward_s
        case Kind.I:
            return stage.recompute_s + stage.halves_s[0]
        case Kind.W:
            return stage.halves_s[1]
        case _:
            raise AssertionError(f"{kind} is in no list at the level of stages")


def forecast(problem: Problem, decision: Decision) -> Timeline:
    """The decision's timeline, with bytes: one step, if the schedule is synchronous; a stream of two, if not.

    Beside what micro-batches in flight hold, a stage's bytes (parameters, what layers need while they run, what is
    in transit) are counted all the time.
    """
    loads = _loads(evaluate(problem, decision).stages)
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
    before, timed = stream_window(stream.stages, problem.microbatches)
    first, last = (
        [stream.ids[Task(s, Kind.B, m)] for s in range(stream.stages)]
        for m in (before, before + timed)
    )
    return (ends_s[last] - ends_s[first]).max(axis=0) * (problem.microbatches / timed)


def _loads(stages: Sequence[StageCost]) -> list[StageLoad]:
    """The stages' seconds and bytes; of what a stage receives and sends back, its neighbour sends one half."""
    send_s = [*(c.comm_s / 2 for c in stages[1:]), 0.0]
    return [
        StageLoad(
            forward_s=c.forward_s,
            backward_s=c.waiting_s + c.backward_s,
            recompute_s=c.early_s,
            out_s=c.swap_s / 2,
            in_s=c.swap_s / 2,
            send_s=sent_s,
            return_s=c.comm_s / 2,
            input_s=c.waiting_s + c.halves_s[0],
            weight_s=c.halves_s[1],
            reduce_s=c.reduce_s,
            update_s=c.update_s,
            static_bytes=c.held.static + c.held.beyond,
            kept_bytes=c.held.kept,
            swapped_bytes=c.held.swapped,
            handed_bytes=c.held.handed,
        )
        for c, sent_s in zip(stages, send_s, strict=True)
    ]
