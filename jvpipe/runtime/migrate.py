"""Moving layers between devices while training runs.

A micro-batch runs whole under one plan: its forwards, its backwards, in a stream its updates. From a given micro-batch
on that is the new plan. So residuals never move, and what a micro-batch computes does not know of the move. What
belongs to a layer follows it: its weights and optimizer state one micro-batch ahead, beside the devices' work; its
sums of gradients and its model state between the last task at the old place and the first at the new one.

What was left behind is freed once all copies are there. Until then, should anything fail, the old state is whole. A
move between two steps that fails later, with values on the host alone, brings them back. Inside a step what comes later
is the update, which consumes the state as it does in every step.

Over several processes nothing is left behind between two steps before every process says that all copies are there:
what fails in one of them leaves all with the old state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from jvpipe.ir.buffers import Lowered, Peak
from jvpipe.ir.kinds import Kind
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import TaskLists
from jvpipe.lowering.splice import spliced
from jvpipe.lowering.step import divided, lower_move, lower_step
from jvpipe.runtime.binding import Bound
from jvpipe.runtime.checkpoints.checkpoint import to_host
from jvpipe.runtime.compiled_plan import CompiledPlan
from jvpipe.runtime.controller import Controller, Moment
from jvpipe.runtime.disagreement import Disagreement
from jvpipe.runtime.failures import StageError
from jvpipe.runtime.hosts import Hosts, together
from jvpipe.runtime.state import Name, State, name_of
from jvpipe.runtime.tensors import Limits, MemoryLimitExceeded
from jvpipe.schedules.one_f_one_b import one_f_one_b

UNFORESEEN = -1
"""Stands for the steps of a stream where a migration is made ready anew when it is due."""


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A plan that took another one's place: when, why, what moved, and how.

    `layers` are (layer, device before, device after). `how`: "inside" a step, "between" two steps, or "by host":
    between two steps, through the host's memory, since a device cannot hold what leaves and what arrives at once.
    """

    step: int
    microbatch: int
    why: str
    old: Plan
    new: Plan
    layers: tuple[tuple[int, int, int], ...]
    moved_bytes: int
    how: str

    def __str__(self) -> str:
        moved = ", ".join(f"{layer} from {a} to {b}" for layer, a, b in self.layers)
        return (
            f"step {self.step}, micro-batch {self.microbatch}: {self.why}; cuts {list(self.old.cuts)} to "
            f"{list(self.new.cuts)}, {self.moved_bytes:,} bytes moved {self.how}"
            + (f"; layers {moved}" if moved else "; only fates changed")
        )


@dataclass(frozen=True)
class Migration:
    """A change of plan, ready to run: `bound` is a whole step if it is made inside one, else moves alone.

    In a stream it is made for a state that is `stream_steps` steps into the stream of the old plan, or as far as that
    repeats itself since; `steps` is where that is in the stream of the new one. Over several processes `leaving` ends
    what moves alone have left behind.
    """

    change: PlanChange
    old: CompiledPlan
    new: CompiledPlan
    bound: Bound
    stream_steps: int = 0
    steps: int = 0
    leaving: Bound | None = None


class _Way(NamedTuple):
    """A way to make a change of plan: `made` runs what follows, `lowered` is what all processes run of it together."""

    made: CompiledPlan
    lowered: Lowered
    bound: Bound
    peaks: Sequence[Peak]
    microbatch: int = 0
    steps: int = 0
    leaving: Bound | None = None


def prepare_migration(
    old: CompiledPlan,
    new: CompiledPlan,
    at: tuple[int, int],
    why: str,
    limits: Limits,
    stream_steps: int = 0,
    hosts: Hosts | None = None,
) -> Migration:
    """Lowers and compiles a change of plan at (step, micro-batch), as asked for if the memory allows.

    A stream that has no room for it while it flows is drained first.

    Args:
        old: the plan in use.
        new: the plan to come.
        at: (step, micro-batch) from which it holds.
        why: for the records.
        limits: kept while layers move.
        stream_steps: those of the stream of `old` then; 0 if nothing is in flight.
        hosts: the processes that all take the same way, if they are to agree on it here.

    Raises:
        MemoryLimitExceeded: the new plan does not keep the limit, or nothing can be moved within it.
    """
    together(hosts, "limits", lambda: limits.check(new.peaks, new.devices))
    (step, microbatch), stream_steps = at, old.representative(stream_steps)
    changes = old.plan.replicated or new.plan.replicated
    ways = ["inside"] if (microbatch or stream_steps) and not changes else []
    ways += ["between"] if new.hosts else ["between", "by host"]
    for how in ways:
        way = together(
            hosts, "moves", lambda how=how: _way(how, old, new, microbatch, stream_steps)
        )
        try:
            together(
                hosts,
                "limits",
                lambda peaks=way.peaks: limits.check(peaks, new.devices, "while layers move"),
            )
        except MemoryLimitExceeded:
            if how == ways[-1]:
                raise
            continue
        moved_bytes = copied_bytes(way.lowered, Kind.OUT if how == "by host" else Kind.MOVE)
        layers = moved_layers(old.plan, new.plan)
        change = PlanChange(step, way.microbatch, why, old.plan, new.plan, layers, moved_bytes, how)
        return Migration(change, old, way.made, way.bound, stream_steps, way.steps, way.leaving)
    raise AssertionError("the last way raises")


def _way(
    how: str, old: CompiledPlan, new: CompiledPlan, microbatch: int, stream_steps: int
) -> _Way:
    """Lowers and compiles one of the ways."""
    if how != "inside":
        move = lower_move(
            new.traced.graph, old.plan, new.plan, new.optimizer, by_host=how == "by host"
        )
        copies, leaving = (move, None) if new.hosts is None else divided(move)
        bound = new.bound(copies)
        return _Way(
            new,
            move,
            bound,
            new.peaks_of(bound),
            leaving=None if leaving is None else new.bound(leaving),
        )
    if old.schedule.synchronous:
        lowered, bound = _step(old, new, microbatch)
        return _Way(new, lowered, bound, new.peaks_of(bound), microbatch)
    alone, steps = old.without_previous(stream_steps)
    made = replace(new, previous=(alone, steps * new.microbatches + microbatch))
    step, bound = made.stream_step(steps)
    return _Way(made, step.lowered, bound, made.peaks, microbatch, steps)


def moved_between_steps(
    migration: Migration, state: State, controller: Controller
) -> tuple[jax.Array, ...]:
    """Runs a migration that is made between two steps; returns the arrays under the new plan.

    Args:
        migration: the one.
        state: consumed.
        controller: runs it.

    Raises:
        StageError: a copy failed; its `state` is whole under the old plan, but for a `HostLost`.
    """
    at, hosts, live = Moment(state.step), migration.new.hosts, controller.ledger.live
    if hosts is None or migration.leaving is None:
        arrays, _ = controller.run(migration.bound, state.arrays, {}, at)
        return arrays

    def copied() -> tuple[jax.Array, ...]:
        arrays, _ = controller.run(migration.bound, state.arrays, {}, at)
        try:
            return jax.block_until_ready(arrays)
        except Exception as error:
            raise controller.failure(error) from error

    before = list(live)
    try:
        arrays = hosts.together("copies of layers that move", copied)
    except Exception as error:
        live[:] = before
        if isinstance(error, Disagreement):
            raise StageError(str(error)) from error
        raise
    arrays, _ = controller.run(migration.leaving, arrays, {}, at)
    return arrays


def state_after_failed_move(migration: Migration, state: State, table: Sequence[Any]) -> State:
    """Makes the state that a failed move left whole under the old plan: what is gone there is brought back.

    Args:
        migration: the move.
        state: what it consumed.
        table: the arrays that there were, by their numbers in the buffer table.
    """
    if not any(x is not None and x.is_deleted() for x in state.arrays):
        return state
    buffers, old = migration.bound.lowered.buffers, migration.old
    alive: dict[Name, Any] = {}
    for buffer, x in zip(buffers, table, strict=True):
        if x is not None and not x.is_deleted():
            alive.setdefault(name_of(buffer), x)
    values = {name: to_host(x) for name, x in alive.items()}
    for x in table[len(state.arrays) :]:
        if x is not None:
            x.delete()
    placing = old.placing
    arrays = tuple(
        placing.put(values[name_of(buffer)], buffer, may_alias=False) if x.is_deleted() else x
        for buffer, x in zip(old.persistent, state.arrays, strict=True)
    )
    return replace(state, arrays=arrays)


def moved_layers(old: Plan, new: Plan) -> tuple[tuple[int, int, int], ...]:
    """The layers that change devices: (layer, before, after); of replicas the first that goes and the first that comes.

    >>> moved_layers(Plan.from_cuts([2, 1]), Plan.from_cuts([1, 2]))
    ((1, 0, 1),)
    """
    before, after = ({i: s.devices for s in plan.stages for i in s.layers} for plan in (old, new))
    moved = []
    for layer, places in before.items():
        gone = [d for d in places if d not in after[layer]]
        come = [d for d in after[layer] if d not in places]
        if gone or come:
            moved.append((layer, (gone or places)[0], (come or after[layer])[0]))
    return tuple(moved)


def _step(old: CompiledPlan, new: CompiledPlan, microbatch: int) -> tuple[Lowered, Bound]:
    """A step whose micro-batches run under the old plan, then under the new one."""
    layouts = [*old.layouts()[:microbatch], *new.layouts(len(old.programs))[microbatch:]]
    lists = spliced(_plain(old), _plain(new), microbatch)
    lowered = lower_step(new.graph, layouts, lists, new.optimizer)
    return lowered, new.bound(lowered, [*old.programs, *new.programs])


def _plain(compiled: CompiledPlan) -> TaskLists:
    """The tasks of each stage in a step inside which layers move: whole backwards, as the order changes no value."""
    stages = [{task.stage for task in tasks} for tasks in compiled.lists]
    whole = all(task.kind in (Kind.F, Kind.B) for tasks in compiled.lists for task in tasks)
    if whole and stages == [{s} for s in range(len(compiled.plan.stages))]:
        return compiled.lists
    return one_f_one_b(len(compiled.plan.stages), compiled.microbatches)


def copied_bytes(lowered: Lowered, kind: Kind = Kind.MOVE) -> int:
    """Bytes that the copies of a kind carry."""
    return sum(
        lowered.buffers[b].bytes for row in lowered.rows if row.kind == kind for b in row.writes
    )
