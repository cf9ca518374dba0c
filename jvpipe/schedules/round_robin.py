"""The lists of asynchronous schedules whose stages have several devices, on which micro-batches take turns (PipeDream).

Micro-batch m runs whole on device m mod r of a stage of r devices. Replicas 2:1, an update every 2
micro-batches:

    stage 0   even   F0 F2     B0 F4   ...
              odd    F1 F3          B1 U1 F5 ...
    stage 1             F0 B0 F1 B1 U1     ...

A stage has as many micro-batches in flight as the next one, and one more for each of its devices,
rounded up to the same number for each: with fewer (PipeDream counts the devices from the stage on)
those of a stage that is wider than its neighbours wait for one another.
"""

import math
from dataclasses import dataclass

from jvpipe.ir.plan import Plan
from jvpipe.ir.task import TaskLists
from jvpipe.schedules.one_f_one_b import EagerLists
from jvpipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class RoundRobin:
    """The lists for stages of several devices each.

    >>> from jvpipe.ir.task import text
    >>> RoundRobin((2, 1)).in_flight, text(RoundRobin((2, 1))(2, 6)[0])
    ((4, 1), '0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5')
    """

    replicas: tuple[int, ...]

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches in flight on each stage."""
        counts: list[int] = []  # from the last stage on
        for devices in reversed(self.replicas):
            following = counts[-1] if counts else 0
            rounds = -(-(following + devices) // devices)
            counts.append(rounds * devices)
        return tuple(reversed(counts))

    def __call__(self, stages: int, microbatches: int) -> TaskLists:
        """Makes a list per stage."""
        return EagerLists(self.in_flight)(stages, microbatches)


def taking_turns(schedule: Schedule, plan: Plan) -> Schedule:
    """Returns an asynchronous schedule as the stages of a plan run it."""
    return schedule.with_lists(RoundRobin(plan.replicas)) if plan.replicated else schedule


def check_turns(schedule: Schedule, plan: Plan, microbatches: int) -> None:
    """Raises ValueError if micro-batches cannot take turns.

    Args:
        schedule: an asynchronous one.
        plan: whose stages have several devices.
        microbatches: of a step.
    """
    if schedule.predicts or schedule.decay is not None:
        raise ValueError(
            f"replicated stages cannot run under {schedule.name}, which remembers what its updates did: use "
            "'pipedream' or '2bw', or one device for each stage"
        )
    every = schedule.period(microbatches)
    if odd := [count for count in plan.replicas if every % count]:
        raise ValueError(
            f"an update every {every} micro-batches needs one of each replica, and a stage has {odd[0]}: use a "
            f"multiple of {list(plan.replicas)}, such as jvpipe.schedules.PipeDream(update_every="
            f"{math.lcm(*plan.replicas)}), and micro-batches that it divides"
        )
    in_flight = max(RoundRobin(plan.replicas).in_flight)
    if schedule.rule == "one behind" and microbatches < in_flight:
        raise ValueError(
            f"{schedule.name} on stages of {list(plan.replicas)} devices needs at least {in_flight} micro-batches, "
            f"{microbatches} are given: with fewer, a micro-batch would still be in flight two updates later"
        )
