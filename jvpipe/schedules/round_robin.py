"""Task lists of asynchronous schedules for stages whose devices take turns with micro-batches.

As in PipeDream, micro-batch m runs only on device m mod r of a stage with r devices. F<m> and B<m>
are the forward and the backward of micro-batch m. In this example stage 0 has two devices, for even
and for odd micro-batches, and stage 1 has one. An update (U) comes every two micro-batches:

    stage 0   even   F0 F2     B0 F4   ...
              odd    F1 F3          B1 U1 F5 ...
    stage 1             F0 B0 F1 B1 U1     ...

A stage has as many micro-batches in flight as the next stage, plus one for each of its own devices.
This number is rounded up to a multiple of the stage's devices, so that all its devices have equally
many. The PipeDream paper has fewer in flight: as many as there are devices on the stage and on all
later stages together. But then, on a stage with more devices than its neighbors, the devices would
wait for one another.
"""

import math
from dataclasses import dataclass

from jvpipe.ir.plan import Plan
from jvpipe.ir.task import TaskLists
from jvpipe.schedules.one_f_one_b import EagerLists
from jvpipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class RoundRobin:
    """The lists for stages of several devices; `replicas` has the number of devices of each stage.

    >>> from jvpipe.ir.task import text
    >>> RoundRobin((2, 1)).in_flight, text(RoundRobin((2, 1))(2, 6)[0])
    ((4, 1), '0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5')
    """

    replicas: tuple[int, ...]

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches in flight on each stage."""
        counts: list[int] = []  # from the last stage to the first
        following = 0
        for devices in reversed(self.replicas):
            # With replicas (3, 2): 2 on the last stage, and 2 + 3 = 5 on the stage before it, which
            # is rounded up to 6, two for each of its three devices.
            following = devices * math.ceil((following + devices) / devices)
            counts.append(following)
        return tuple(reversed(counts))

    def __call__(self, stages: int, microbatches: int) -> TaskLists:
        """Makes a list per stage."""
        return EagerLists(self.in_flight)(stages, microbatches)


def taking_turns(schedule: Schedule, plan: Plan) -> Schedule:
    """Returns an asynchronous schedule, with `RoundRobin` lists if the plan has replicas."""
    return schedule.with_lists(RoundRobin(plan.replicas)) if plan.replicated else schedule


def check_turns(schedule: Schedule, plan: Plan, microbatches: int) -> None:
    """Raises ValueError if the devices of a stage cannot take turns with the micro-batches.

    Args:
        schedule: an asynchronous schedule.
        plan: a plan in which stages have several devices.
        microbatches: the number of micro-batches of a step.
    """
    if schedule.predicts or schedule.decay is not None:
        raise ValueError(
            f"replicated stages cannot run under {schedule.name}, "
            "which keeps records of its updates: use 'pipedream' or '2bw', "
            "or one device for each stage"
        )
    every = schedule.period(microbatches)
    if odd := [count for count in plan.replicas if every % count]:
        raise ValueError(
            f"an update every {every} micro-batches needs equally many of each replica, "
            f"but a stage has {odd[0]} replicas: use a multiple of each of {list(plan.replicas)}, "
            f"such as jvpipe.schedules.PipeDream(update_every={math.lcm(*plan.replicas)}), "
            "and a number of micro-batches that it divides"
        )
    in_flight = max(RoundRobin(plan.replicas).in_flight)
    if schedule.rule == "one behind" and microbatches < in_flight:
        raise ValueError(
            f"{schedule.name} on stages of {list(plan.replicas)} devices needs at least "
            f"{in_flight} micro-batches, but {microbatches} are given: "
            "with fewer, a micro-batch would still be in flight two updates later"
        )
