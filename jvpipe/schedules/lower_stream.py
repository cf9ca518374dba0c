"""A stream lowered: the steps of an asynchronous schedule as rows, with every version of the weights a buffer.

The first steps of a stream fill the pipeline; from some step on, each is the one before with all numbers moved on. So
a stream is lowered once, up to there, and cut into its steps. A step begins with what the one before left in flight.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.task import Task, TaskLists
from jvpipe.ir.use import Use
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.schedules.course import Course, Leg
from jvpipe.schedules.emit import Key
from jvpipe.schedules.lower import Form, backward, forward, losses, swapped
from jvpipe.schedules.order import order
from jvpipe.schedules.schedule import Schedule
from jvpipe.schedules.slices import Slices, Step, dropping
from jvpipe.schedules.swaps import Swaps
from jvpipe.schedules.versioned import VersionedEmitter


@dataclass(frozen=True)
class StreamLowering:
    """What a stream is lowered from: what `lower_step` takes."""

    graph: LayerGraph
    legs: Sequence[Leg]
    schedule: Schedule
    microbatches: int
    optimizer: OptimizerCut
    layer_s: Sequence[float] | None = None
    had: Mapping[int, Collection[Key]] = field(default_factory=dict)
    """By the step in which a leg begins, the names of all that the legs before have left in flight."""

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps that differ; all later ones are like the last."""
        S, M = max(len(leg.form.plan.stages) for leg in self.legs), self.microbatches
        begun = self.begun
        fill = begun + 2 + -(-S // M)
        slices = self._lower(fill + 2 + -(-2 * S // M), drained=False)
        found = [slices.step(n) for n in range(begun + 2)]
        for n in range(begun + 2, fill + 3):
            if (following := slices.step(n)) == found[-1]:
                return tuple(found)
            found.append(following)
        raise AssertionError("a stream comes to repeat itself")

    def step(self, steps: int) -> Step:
        """The step after so many."""
        return self.steps[min(steps, len(self.steps) - 1)]

    @property
    def begun(self) -> int:
        """The step in which the last leg begins."""
        return self.legs[-1].start // self.microbatches

    def drain(self, steps: int) -> Step:
        """What is left to do after so many steps; it ends with nothing in flight."""
        n = min(steps, len(self.steps))
        return dropping(self._lower(n, drained=True).step(n), self.steps[n - 1])

    def _lower(self, steps: int, *, drained: bool) -> Slices:
        M = self.microbatches
        course = Course(self.graph, self.legs, self.schedule, M, steps, self.layer_s, drained=drained)
        lists = course.parts if drained else course.parts[:-1]
        pen = VersionedEmitter(course, self.optimizer)
        swaps = Swaps(pen, _without_updates(lists), lambda task: swapped(pen, course.form(task.microbatch), task))
        starts = {leg.start: leg.form.plan for leg in self.legs[1:]}
        done: list[Task] = []
        bounds, names, uses = [0], [pen.names()], []
        ordered = []
        for part in lists:
            ordered.append(order(course.waits, part, done, course.versions))
            done += ordered[-1]
        course.settle(done)
        pen.plan_reads(done)
        at = 0
        for n, tasks in enumerate(ordered):
            if n in self.had:
                pen.keep(self.had[n], n * M, n * M // course.every)
            used: list[Use] = []
            for task in tasks:
                pen.at = at
                pen.depart()
                if task.microbatch in starts:
                    pen.settle(starts.pop(task.microbatch))
                pen.enter(course.plans[task.microbatch])
                used += self._task(pen, course.form(task.microbatch), swaps, task)
                at += 1
            uses.append(used)
            bounds.append(len(pen.rows))
            names.append(pen.names())
        if drained:
            pen.enter(self.legs[-1].form.plan)
            pen.refresh()
            bounds[-1], names[-1] = len(pen.rows), pen.names()
        return Slices(pen, bounds, names, uses, M, self.schedule.period(M), drained)

    def _task(self, pen: VersionedEmitter, form: Form, swaps: Swaps, task: Task) -> list[Use]:
        s, kind, m = task
        M = self.microbatches
        layers = [self.graph.layers[i] for i in form.plan.stages[s].layers]
        if kind == "U":
            return [Use("U", layer, m, v) for layer, v in pen.update(s, m)]
        swaps.before(task)
        for layer in layers if kind == "F" else reversed(layers):
            if kind == "F":
                forward(pen, layer, m, form)
                pen.send_tied(layer, m)
                pen.weigh(layer, m)
                losses(pen, layer, range(m // M * M, (m // M + 1) * M), "step", m // M)
            else:
                backward(pen, layer, m, form)
        swaps.after(task)
        return [pen.use(kind, layer, m) for layer in layers]


def _without_updates(lists: Sequence[TaskLists]) -> TaskLists:
    """Every stage's part of every step as a list of its own: swaps do not look beyond a step."""
    return tuple(tuple(task for task in tasks if task.kind != "U") for part in lists for tasks in part)
