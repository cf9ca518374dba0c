"""Layers that change places while a stream flows: what follows them at once, and when what they left is freed.

task        ... 7     8      9   10   11  ...
moves           MOVE                            of weights that task 7 reads at the new place
two rounds of all stages later               FREE old   DROP new, should nobody need it any more
"""

from collections import deque
from collections.abc import Sequence

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import Task
from jvpipe.ir.values import NEVER, NONE, ValueKind
from jvpipe.lowering.place import Placer
from jvpipe.lowering.stream.timeline import StreamTimeline
from jvpipe.lowering.stream.weights import StreamWeights

_WINDOW = 2  # a layer's old place is free so many tasks of each stage after it has left


class Departures:
    """The buffers that layers have left behind, by the number of the task that moved them.

    >>> import jax
    >>> from jvpipe.ir.layers import Array, Layer, LayerGraph, Parameter, Ref
    >>> from jvpipe.programs.optimizer import OptimizerCut
    >>> reads, loss = (Ref(ValueKind.PARAMETER, 0),), Ref(ValueKind.LOSS, 0)
    >>> graph = LayerGraph((Layer(0, "a", reads, (loss,)),), (), (Parameter(Array("w", (), "float32", 4), (0,)),))
    >>> here, there = (Plan.from_cuts([1], devices=[place]) for place in (0, 1))
    >>> placer = Placer(graph, here, OptimizerCut((), (), (), jax.tree.structure(None), ()))
    >>> placer.begin()
    >>> placer.enter(there)
    >>> new, departures = placer.bring(graph.parameter(0, version=0), 1, 0), Departures(placer)
    >>> departures.note(task=7)
    >>> for task in (9, 10):
    ...     departures.free(task)
    ...     print([str(row.kind) for row in placer.blocks[0].rows])
    ['MOVE']
    ['MOVE', 'FREE', 'DROP']
    """

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self._waiting: deque[tuple[int, int, int]] = deque()

    def note(self, task: int) -> None:
        """Takes over what a task has moved; what lies on the host is waited for at once, for its names are fleeting."""
        placer = self._placer
        for old, new in placer.moved:
            if any(placer.buffers[b].copy.on_host for b in (old, new)):
                self._free(old, new)
            else:
                self._waiting.append((task, old, new))
        placer.moved = []

    def free(self, task: int) -> None:
        """Frees what was moved a few tasks ago, once it has arrived."""
        stages = len(self._placer.where.plan.stages)
        while self._waiting and self._waiting[0][0] + _WINDOW * stages < task:
            self._free(*self._waiting.popleft()[1:])

    def _free(self, old: int, new: int) -> None:
        placer = self._placer
        placer.row(Kind.FREE, placer.buffers[old].place, NONE, NONE, [old, new], [])
        placer.row(Kind.DROP, placer.buffers[new].place, NONE, NONE, [new], [])


def settle(placer: Placer, plan: Plan) -> None:
    """Moves what no task would: constants, and state that all layers share."""
    placer.enter(plan)
    for value, place in (
        (buffer.value, buffer.place) for buffer in placer.where.lasting(placer.optimizer)
    ):
        match value.kind:
            case ValueKind.OPTIMIZER if value.layer == NONE:
                placer.bring(value, place, NONE)
            case ValueKind.CONSTANT:
                placer.bring(value, place, NONE)
            case ValueKind.STATE if value.microbatch == NEVER:
                placer.bring(value, place, NONE)
            case ValueKind.PARAMETER | ValueKind.OPTIMIZER | ValueKind.STATE:
                pass  # its layer brings it along
            case _:
                raise AssertionError(f"{value} does not lie on the devices between steps")


def refresh(placer: Placer, newest: Sequence[int]) -> None:
    """Every place that reads a parameter gets its newest version."""
    for p, (parameter, version) in enumerate(zip(placer.graph.parameters, newest, strict=True)):
        value = placer.graph.parameter(p, version)
        here = placer.where.of(parameter.owner)
        for there in dict.fromkeys(
            place for layer in parameter.readers for place in placer.where.places[layer]
        ):
            placer.bring(value, here, parameter.owner)
            if there != here:
                placer.send(value, here, there, parameter.owner, NONE)


class LastReads:
    """When each version of a parameter is read for the last time at a place, so that its update may overwrite it."""

    def __init__(
        self, timeline: StreamTimeline, weights: StreamWeights, tasks: Sequence[Task]
    ) -> None:
        self._timeline = timeline
        self._last: dict[
            tuple[int, int, int], int
        ] = {}  # parameter, place, version: number of the task
        for number, (s, kind, m) in enumerate(tasks):
            if (back := KINDS[kind].back) is not None:
                layout = timeline.layout(m)
                for layer in layout.layers(s):
                    for p in layer.reading(ValueKind.PARAMETER):
                        v = weights.version(p, m, back=back)
                        self._last[p, layout.plan.stages[s].devices[0], v] = number
                        for place in self._left(p, v, m):
                            self._last[p, place, v] = number

    def after(self, p: int, place: int, version: int, task: int) -> bool:
        """Tells whether a version is read at a place after a task.

        Args:
            p: the parameter.
            place: where it is read.
            version: of the parameter.
            task: the number of a task.
        """
        return self._last.get((p, place, version), -1) > task

    def _left(self, p: int, v: int, m: int) -> set[int]:
        """The places that a version's owner has been at from when it was made, and has left by a micro-batch."""
        spans = self._timeline.spans
        if len(spans) == 1:
            return set()
        owner = self._timeline.graph.parameters[p].owner

        def place(micro: int) -> int:
            layout = self._timeline.layout(micro)
            return layout.plan.stages[layout.stage[owner]].devices[0]

        made = max(v * self._timeline.every - 1, 0)
        return {
            place(micro)
            for micro in (made, *(span.start for span in spans if made < span.start < m))
        } - {place(m)}
