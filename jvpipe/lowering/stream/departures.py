"""Departures: the buffers that layers leave at their old places when they move in a stream.

A stream is training without a flush, so tasks go on while layers change places (devices). In the
example there are two stages, and task 7 moves weights to the place where it reads them:

    tasks    ... 7    8    9    10   11                      12 ...
    rows         MOVE                    FREE old, DROP new

The old buffer must not be freed before the copy has arrived. So FREE waits for the copy, and then
frees the old buffer. FREE is written only after `_WINDOW` (two) more tasks per stage, here before
task 12, because the copy has normally arrived by then. A late copy only costs time.

A buffer is freed by the last row that touches it. FREE, a row of the old place, also touches the
new buffer. But FREE must not free the new buffer, because another process may hold it. So a DROP
row of the new place follows, which frees the new buffer if no later row touches it.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import Task
from jvpipe.ir.values import NEVER, NONE, ValueKind
from jvpipe.lowering.place import Placer
from jvpipe.lowering.stream.stream_timeline import StreamTimeline
from jvpipe.lowering.stream.weights import StreamWeights

_WINDOW = 2
"""The number of further tasks per stage after which the buffers at an old place are freed.

With a smaller number, a task might wait for the copy. With a larger number, old buffers are held
longer. Results are the same for every number.
"""


class _Moved(NamedTuple):
    """A task's number, a buffer that the task has moved, and its copy at the new place."""

    task: int
    old: int
    new: int


class Departures:
    """The buffers that layers have left behind and that are not freed yet.

    >>> import jax
    >>> from jvpipe.ir.layers import Array, Layer, LayerGraph, Parameter, Ref
    >>> from jvpipe.programs.optimizer_pieces import OptimizerCut
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
        self._waiting: deque[_Moved] = deque()

    def note(self, task: int) -> None:
        """Notes the buffers that task number `task` has moved, to free the old ones later.

        If a move is from or to the host, its FREE is written at once, because the next update moves
        the same state again. The disadvantage is that FREE may have to wait for the copy.
        """
        placer = self._placer
        for old, new in placer.moved:
            copies = placer.buffers[old].copy, placer.buffers[new].copy
            if any(copy.on_host for copy in copies):
                self._free(old, new)
            else:
                self._waiting.append(_Moved(task, old, new))
        placer.moved = []

    def free(self, task: int) -> None:
        """Frees the old buffers of moves that are old enough at task number `task`.

        With S stages, a move is old enough after more than `_WINDOW` * S tasks of any stages.
        """
        window = _WINDOW * len(self._placer.where.plan.stages)
        while self._waiting and self._waiting[0].task + window < task:
            moved = self._waiting.popleft()
            self._free(moved.old, moved.new)

    def _free(self, old: int, new: int) -> None:
        """Frees an old buffer once its copy has arrived, and the copy too if it is not needed."""
        placer = self._placer
        source = placer.buffers[old].place
        target = placer.buffers[new].place
        placer.row(Kind.FREE, source, NONE, NONE, [old, new], [])
        placer.row(Kind.DROP, target, NONE, NONE, [new], [])


def settle(placer: Placer, plan: Plan) -> None:
    """Moves, at the start of a plan, the values that no task of the plan moves.

    They are constants, model state that no layer writes, and optimizer state that belongs to no
    layer. The tasks of a layer move its parameters, its optimizer state and the model state that
    it writes.

    Args:
        placer: writes the rows.
        plan: the plan that begins.
    """
    placer.enter(plan)
    for buffer in placer.where.lasting:
        value, place = buffer.value, buffer.place
        match value.kind:
            case ValueKind.OPTIMIZER if value.layer == NONE:
                placer.bring(value, place, NONE)
            case ValueKind.CONSTANT:
                placer.bring(value, place, NONE)
            case ValueKind.STATE if value.microbatch == NEVER:
                placer.bring(value, place, NONE)
            case ValueKind.PARAMETER | ValueKind.OPTIMIZER | ValueKind.STATE:
                pass  # the tasks of its layer move it
            case _:
                raise AssertionError(f"{value} is not state between steps")


def refresh(placer: Placer, newest: Sequence[int]) -> None:
    """Brings the newest version of every parameter to every place that reads it.

    Args:
        placer: writes the rows.
        newest: the newest version of each parameter.
    """
    graph, where = placer.graph, placer.where
    pairs = zip(graph.parameters, newest, strict=True)
    for p, (parameter, version) in enumerate(pairs):
        value = graph.parameter(p, version)
        owner = parameter.owner
        here = where.of(owner)
        reading = [place for layer in parameter.readers for place in where.places[layer]]
        for place in dict.fromkeys(reading):
            placer.bring(value, here, owner)
            if place != here:
                placer.send(value, here, place, owner, NONE)


class LastReads:
    """The last task that reads each version of a parameter at each place.

    After that task an update may overwrite the version.
    """

    def __init__(
        self,
        timeline: StreamTimeline,
        weights: StreamWeights,
        tasks: Sequence[Task],
    ) -> None:
        self._timeline = timeline
        self._last: dict[tuple[int, int, int], int] = {}  # by parameter, place and version: a task
        for number, (s, kind, m) in enumerate(tasks):
            back = KINDS[kind].back
            if back is None:
                continue
            layout = timeline.layout(m)
            here = layout.plan.stages[s].devices[0]
            for layer in layout.layers(s):
                for p in layer.reading(ValueKind.PARAMETER):
                    version = weights.version(p, m, back=back)
                    # If the owner has left a place since the version was made, the version may be
                    # copied from that place. So the task also counts as a read there.
                    for place in (here, *self._left(p, version, m)):
                        self._last[p, place, version] = number

    def after(
        self,
        p: int,
        place: int,
        version: int,
        task: int,
    ) -> bool:
        """Tells whether a version of a parameter is read at a place after a task.

        Args:
            p: the parameter.
            place: the place where it is read.
            version: the version.
            task: the number of a task.
        """
        return self._last.get((p, place, version), -1) > task

    def _left(self, p: int, v: int, m: int) -> set[int]:
        """Finds the places that a parameter's owner has left since a version was made.

        Args:
            p: the parameter.
            v: the version.
            m: the micro-batch that reads the version; only moves before this micro-batch count.
        """
        timeline = self._timeline
        if len(timeline.spans) == 1:
            return set()
        owner = timeline.graph.parameters[p].owner

        def place(micro: int) -> int:
            layout = timeline.layout(micro)
            return layout.plan.stages[layout.stage[owner]].devices[0]

        maker = max(v * timeline.every - 1, 0)  # the micro-batch whose update made it
        moves = [span.start for span in timeline.spans if maker < span.start < m]
        places = {place(micro) for micro in (maker, *moves)}
        return places - {place(m)}
