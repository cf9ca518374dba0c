"""A stream lowered: the steps of an asynchronous schedule as rows, with every version of the weights a buffer.

The first steps of a stream fill the pipeline; from some step on, each is the one before with all numbers moved on. So
a stream is lowered once, up to there, and cut into its steps. A step begins with what the one before left in flight.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from jvpipe.ir.buffers import Lowered
from jvpipe.ir.fates import Fates
from jvpipe.ir.layers import LayerGraph, Signature
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import Row, Task, TaskLists
from jvpipe.ir.use import Use
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.schedules.emit import Key
from jvpipe.schedules.lower import Form, backward, forward, losses, metric_keys, order, swapped
from jvpipe.schedules.schedule import Schedule
from jvpipe.schedules.stream import parts, versions
from jvpipe.schedules.swaps import Swaps
from jvpipe.schedules.versioned import VersionedEmitter, relative


@dataclass(frozen=True)
class Step:
    """A step of a stream: its rows, the names of what is in flight before and after it, and who read what.

    Its metrics end with the losses of its micro-batches.
    """

    lowered: Lowered
    before: tuple[Key, ...]
    after: tuple[Key, ...]
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class StreamLowering:
    """What a stream is lowered from: what `lower_step` takes."""

    graph: LayerGraph
    signatures: Sequence[Signature]
    plan: Plan
    schedule: Schedule
    microbatches: int
    optimizer: OptimizerCut
    layer_s: Sequence[float] | None = None

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps that differ; all later ones are like the last."""
        S, M = len(self.plan.stages), self.microbatches
        fill = 2 + -(-S // M)
        found = self._lower(fill + 2 + -(-2 * S // M), drained=False)
        first = next(n for n in range(1, fill + 2) if found[n] == found[n + 1])
        return tuple(found[: first + 1])

    def drain(self, steps: int) -> Step:
        """What is left to do after so many steps; it ends with nothing in flight."""
        n = min(steps, len(self.steps))
        return _dropping(self._lower(n, drained=True)[-1], self.steps[n - 1])

    def _lower(self, steps: int, *, drained: bool) -> list[Step]:
        S, M = len(self.plan.stages), self.microbatches
        lists = parts(self.schedule, S, M, steps, drained=drained)
        whole = self.schedule.with_updates(S, M, steps if drained else steps + 1 + -(-S // M))
        table = versions(self.schedule, whole, M)
        pen = VersionedEmitter(self.graph, self.plan, self.optimizer, self.schedule, table, M)
        form = Form(0, Fates.of(self.graph, self.plan), self.signatures)
        swaps = Swaps(pen, _without_updates(lists), lambda task: swapped(pen, form, task))
        done: list[Task] = []
        bounds, names, uses = [0], [pen.names()], []
        ordered = []
        for part in lists:
            ordered.append(order(self.graph, self.plan, part, self.layer_s, done))
            done += ordered[-1]
        pen.plan_reads(done)
        at = 0
        for tasks in ordered:
            used: list[Use] = []
            for task in tasks:
                pen.at = at
                used += self._task(pen, form, swaps, task)
                at += 1
            uses.append(used)
            bounds.append(len(pen.rows))
            names.append(pen.names())
        if drained:
            pen.refresh()
            bounds[-1], names[-1] = len(pen.rows), pen.names()
        return _cut(pen, bounds, names, uses, M, self.schedule.period(M), drained=drained)

    def _task(self, pen: VersionedEmitter, form: Form, swaps: Swaps, task: Task) -> list[Use]:
        s, kind, m = task
        M = self.microbatches
        layers = [self.graph.layers[i] for i in self.plan.stages[s].layers]
        if kind == "U":
            return [Use("U", layer, m, v) for layer, v in pen.update(s, m)]
        swaps.before(task)
        for layer in layers if kind == "F" else reversed(layers):
            if kind == "F":
                forward(pen, layer, m, form)
                pen.send_tied(layer, m)
                pen.weigh(layer, m)
                losses(pen, layer, m, range(m // M * M, (m // M + 1) * M), "step", m // M)
            else:
                backward(pen, layer, m, form)
        swaps.after(task)
        return [pen.use(kind, layer, m) for layer in layers]


def _without_updates(lists: Sequence[TaskLists]) -> TaskLists:
    """Every stage's part of every step as a list of its own: swaps do not look beyond a step."""
    return tuple(tuple(task for task in tasks if task.kind != "U") for part in lists for tasks in part)


def _cut(
    pen: VersionedEmitter,
    bounds: Sequence[int],
    names: Sequence[dict[int, Key]],
    uses: Sequence[Sequence[Use]],
    M: int,
    every: int,
    *,
    drained: bool,
) -> list[Step]:
    """The steps of a lowered stream, each with numbers of its own."""
    last: dict[int, int] = {}
    for i, row in enumerate(pen.rows):
        last |= dict.fromkeys((*row.reads, *row.writes), i)
    lasting = pen.lasting()
    count = len(bounds) - 1 - drained
    written = {k for layer in pen.graph.layers for k in layer.writing("state")}

    def base(n: int) -> tuple[int, int]:
        step = min(n, count)  # the drain counts from its end
        return step * M, step * M // every

    def alive(n: int) -> list[tuple[Key, int]]:
        """What is in flight before step n, in the order of its names."""
        if n == 0:
            return [(pen.buffers[b].key, b) for b in range(pen.persistent)]
        here = [b for b in names[n] if b in lasting or last.get(b, -1) >= bounds[n]]
        if drained and n == len(bounds) - 1:
            return [(key, pen.newest_id(key)) for key in pen.plain]
        return sorted(((relative(names[n][b], *base(n), written), b) for b in here), key=lambda item: str(item[0]))

    found = []
    for n, (a, b) in enumerate(pairwise(bounds)):
        before, after = alive(n), alive(n + 1)
        ends = {buffer for _, buffer in after}
        told = metric_keys(pen.graph, "step", n) + [("loss", 0, m, pen.home) for m in range(n * M, n * M + M)]
        metrics = [pen.ids[key] for key in told if key in pen.ids]
        ids = {buffer: i for i, (_, buffer) in enumerate(before)}
        for row in pen.rows[a:b]:
            for buffer in (*row.reads, *row.writes):
                ids.setdefault(buffer, len(ids))
        rows = []
        m0, v0 = base(n)
        final_use = {x: i for i in range(a, b) for x in (*pen.rows[i].reads, *pen.rows[i].writes)}
        for i in range(a, b):
            row = pen.rows[i]
            touched = dict.fromkeys((*row.reads, *row.writes))
            dead = [x for x in touched if final_use[x] == i and x not in ends and x not in metrics]
            rows.append(_renumbered(row, ids, dead, m0))
        gone = [x for _, x in before if x not in ends and x not in final_use]
        assert not gone, "what nobody touches any more was kept"
        called = {x: names[n].get(x) or names[n + 1].get(x) or pen.buffers[x].key for x in ids}
        buffers = [replace(pen.buffers[x], key=relative(key, m0, v0, written)) for x, key in called.items()]
        lowered = Lowered(
            tuple(rows),
            tuple(buffers),
            len(before),
            tuple(ids[x] for _, x in after),
            tuple(ids[x] for x in metrics),
        )
        moved = tuple(use.moved(-m0, -v0) for use in uses[n])
        found.append(Step(lowered, tuple(k for k, _ in before), tuple(k for k, _ in after), moved))
    return found


def _dropping(drain: Step, last: Step) -> Step:
    """A drain that begins with all that a step leaves: versions that only later steps would have read are dropped."""
    places = {key: i for i, key in enumerate(drain.before)}
    sizes = {key: last.lowered.buffers[b] for key, b in zip(last.after, last.lowered.final, strict=True)}
    assert places.keys() <= sizes.keys()
    extra = [replace(sizes[key], key=key) for key in last.after if key not in places]
    old, count = drain.lowered, len(last.after)
    ids = {places[key]: i for i, key in enumerate(last.after) if key in places}
    ids |= {b: b + len(extra) for b in range(len(drain.before), len(old.buffers))}
    dropped = [i for i, key in enumerate(last.after) if key not in places]
    buffers = [replace(sizes[key], key=key) for key in last.after] + list(old.buffers[len(drain.before) :])
    drops = []
    for d in dict.fromkeys(buffer.device for buffer in extra):
        here = tuple(i for i in dropped if buffers[i].device == d)
        drops.append(Row("DROP", d, -1, -1, -1, here, (), here))
    rows = [_renumbered(row, ids, row.frees, 0) for row in old.rows]
    final, metrics = (tuple(ids[b] for b in found) for found in (old.final, old.metrics))
    return Step(Lowered((*drops, *rows), tuple(buffers), count, final, metrics), last.after, drain.after, drain.uses)


def _renumbered(row: Row, ids: dict[int, int], dead: Sequence[int], m0: int) -> Row:
    return replace(
        row,
        microbatch=row.microbatch - m0 if row.microbatch >= 0 else row.microbatch,  # -1: of none
        reads=tuple(ids[x] for x in row.reads),
        writes=tuple(ids[x] for x in row.writes),
        frees=tuple(ids[x] for x in dead),
    )
