"""Moving layers between devices while training runs.

A micro-batch runs whole under one plan: its forwards, its backwards, in a stream its updates. From
a given micro-batch on that is the new plan. So residuals never move, and no micro-batch computes
anything else than without the move.

    layer 3 goes from device 0 to device 1 at micro-batch 2:
    device 0   F0 F1 B0    B1 SUM                   its tasks of the old plan, then what it has summed leaves
    link             WEIGHTS      SUM               weights and optimizer state go ahead, beside the work
    device 1                          F2 B2 ...     its tasks of the new plan

What was left behind is freed once all copies have come. If anything fails before, the old state is
whole. If a move between two steps fails later, when some values are only on the host, it brings
them back. Inside a step what comes later is the update, which consumes the state as it does in
every step.

Over several processes nothing is freed between two steps before every process says that all copies
have come: what fails in one of them leaves all with the old state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax

from jvpipe.ir.buffers import Lowered, Peak
from jvpipe.ir.kinds import Kind
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import TaskLists
from jvpipe.lowering.splice import spliced
from jvpipe.lowering.step import divided_move, lower_move, lower_step
from jvpipe.runtime.engine.binding import Bound
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.controller import Controller, Moment
from jvpipe.runtime.engine.disagreement import Disagreement
from jvpipe.runtime.engine.failures import StageError
from jvpipe.runtime.engine.hosts import Hosts, together
from jvpipe.runtime.engine.placing import name_of
from jvpipe.runtime.engine.tensors import Limits, MemoryLimitExceeded
from jvpipe.runtime.engine.training_state import Name, State
from jvpipe.runtime.engine.transport import to_host
from jvpipe.schedules.one_f_one_b import one_f_one_b

UNFORESEEN = -1
"""Stands for a stream's steps where a migration is prepared again once it is due."""


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A plan that took another one's place.

    Attributes:
        step: at which it did.
        microbatch: of that step, from which on it holds.
        why: for the records.
        old: the plan before.
        new: the plan since.
        layers: that moved: (layer, device before, device after).
        moved_bytes: carried by the copies.
        how: "inside" a step, "between" two steps, or "by host": between two steps, through the
            host's memory, since a device cannot hold what leaves and what arrives at once.
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
            f"{list(self.new.cuts)}, {self.moved_bytes:,} bytes moved {self.how}; "
            f"{f'layers {moved}' if moved else 'only fates changed'}"
        )


@dataclass(frozen=True)
class Migration:
    """A change of plan, ready to run.

    Attributes:
        change: the entry of the history.
        old: the plan in use.
        new: the plan to come.
        bound: a whole step if the change is made inside one, else only the moves.
        stream_steps: in a stream, how far the old plan's has come, or a number of steps after which
            it is the same.
        steps: where that is in the stream of the new plan.
        leaving: over several processes, the rows that end what the moves have left behind.
    """

    change: PlanChange
    old: CompiledPlan
    new: CompiledPlan
    bound: Bound
    stream_steps: int = 0
    steps: int = 0
    leaving: Bound | None = None


class _Way(NamedTuple):
    """A way to make a change of plan.

    `after` runs what follows; `lowered` is what all processes run together, and `bound` what this
    one does; `peaks` are the most bytes meanwhile. The other fields are those of `PlanChange` and
    `Migration`.
    """

    after: CompiledPlan
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
    """Lowers and compiles a change of plan at a step and a micro-batch, the first way for which there is room.

    Inside a step nothing stops, but both plans are in memory; between two steps the pipeline is
    drained first; by host a device never holds what leaves and what arrives at once.

    Args:
        old: the plan in use.
        new: the plan to come.
        at: (step, micro-batch) from which it holds.
        why: for the records.
        limits: kept while layers move.
        stream_steps: those of the stream of `old` then; 0 if nothing is in flight.
        hosts: the processes that all take the same way, if they are to agree on it here.

    Raises:
        MemoryLimitExceeded: the new plan does not keep the limit, or nothing can be moved within
            it.
    """
    together(hosts, "limits", lambda: limits.check(new.peaks, new.devices))
    step, microbatch = at
    stream_steps = old.representative(stream_steps)
    ways = _ways(old, new, starts_inside=bool(microbatch or stream_steps))
    for how in ways:
        lower = partial(_way, how, old, new, microbatch, stream_steps)
        way = together(hosts, "moves", lower)
        check = partial(limits.check, way.peaks, new.devices, "while layers move")
        try:
            together(hosts, "limits", check)
        except MemoryLimitExceeded:
            if how == ways[-1]:
                raise
            continue
        moved_bytes = copied_bytes(way.lowered, Kind.OUT if how == "by host" else Kind.MOVE)
        layers = moved_layers(old.plan, new.plan)
        change = PlanChange(step, way.microbatch, why, old.plan, new.plan, layers, moved_bytes, how)
        return Migration(change, old, way.after, way.bound, stream_steps, way.steps, way.leaving)
    raise AssertionError("the last way raises")


def _ways(old: CompiledPlan, new: CompiledPlan, *, starts_inside: bool) -> list[str]:
    """Returns the ways in which a change of plan may be made, the one that was asked for first."""
    ways = ["between"]
    # Whole micro-batches and slices of them cannot be mixed in one step.
    if starts_inside and not (old.plan.replicated or new.plan.replicated):
        ways.insert(0, "inside")
    # By host, arrays are freed before all has come: what failed in one process could not be undone
    # in the others.
    if not new.hosts:
        ways.append("by host")
    return ways


def _way(
    how: str, old: CompiledPlan, new: CompiledPlan, microbatch: int, stream_steps: int
) -> _Way:
    """Lowers and compiles one of the ways."""
    if how != "inside":
        return _between_steps(old, new, by_host=how == "by host")
    if old.schedule.synchronous:
        lowered, bound = _step(old, new, microbatch)
        return _Way(new, lowered, bound, new.peaks_of(bound), microbatch)
    # The new plan's stream goes on from the old one's, which forgets where it came from if it can.
    alone, steps = old.without_previous(stream_steps)
    after = replace(new, previous=(alone, steps * new.microbatches + microbatch))
    step, bound = after.stream_step(steps)
    return _Way(after, step.lowered, bound, after.peaks, microbatch, steps)


def _between_steps(old: CompiledPlan, new: CompiledPlan, *, by_host: bool) -> _Way:
    move = lower_move(new.traced.graph, old.plan, new.plan, new.optimizer, by_host=by_host)
    if new.hosts is None:
        bound = new.bound(move)
        return _Way(new, move, bound, new.peaks_of(bound))
    # All processes copy first, and free what was left behind only when all have copied.
    copies, leaving = divided_move(move)
    bound = new.bound(copies)
    return _Way(new, move, bound, new.peaks_of(bound), leaving=new.bound(leaving))


def moved_between_steps(
    migration: Migration, state: State, controller: Controller
) -> tuple[jax.Array, ...]:
    """Runs a migration that is made between two steps; returns the arrays under the new plan.

    Args:
        migration: the one.
        state: consumed.
        controller: runs it.

    Raises:
        StageError: a copy failed; its `state` is whole under the old plan, unless it is a
            `HostLost`.
    """
    at, hosts = Moment(state.step), migration.new.hosts
    if hosts is None or migration.leaving is None:
        arrays, _ = controller.run(migration.bound, state.arrays, {}, at)
        return arrays

    def copy() -> tuple[jax.Array, ...]:
        arrays, _ = controller.run(migration.bound, state.arrays, {}, at)
        try:
            return jax.block_until_ready(arrays)
        except Exception as error:
            raise controller.failure(error) from error

    live = controller.ledger.live
    before = list(live)
    # If a copy fails anywhere, every process keeps its old arrays: nothing has been freed yet.
    try:
        arrays = hosts.together("copies of layers that move", copy)
    except Exception as error:
        live[:] = before
        if isinstance(error, Disagreement):
            raise StageError(str(error)) from error
        raise
    arrays, _ = controller.run(migration.leaving, arrays, {}, at)
    return arrays


def state_after_failed_move(migration: Migration, state: State, table: Sequence[Any]) -> State:
    """Returns the state that a failed move has left, whole under the old plan: lost arrays are brought back.

    Args:
        migration: the move.
        state: what it consumed.
        table: the arrays that there were, by their numbers in the buffer table.
    """
    if not any(x is not None and x.is_deleted() for x in state.arrays):
        return state
    buffers, placing = migration.bound.lowered.buffers, migration.old.placing
    # Some copy of each array is alive, at the old place or at the new one, on a device or on the
    # host.
    alive: dict[Name, Any] = {}
    for buffer, x in zip(buffers, table, strict=True):
        if x is not None and not x.is_deleted():
            alive.setdefault(name_of(buffer), x)
    values = {name: to_host(x) for name, x in alive.items()}
    # The table begins with the state; what follows was made by the move, and takes the room of what
    # comes back.
    for x in table[len(state.arrays) :]:
        if x is not None:
            x.delete()
    arrays = [
        placing.put(values[name_of(buffer)], buffer, may_alias=False) if x.is_deleted() else x
        for buffer, x in zip(migration.old.persistent, state.arrays, strict=True)
    ]
    return replace(state, arrays=tuple(arrays))


def moved_layers(old: Plan, new: Plan) -> tuple[tuple[int, int, int], ...]:
    """Returns the layers that change devices: (layer, before, after).

    For replicas, the event names the first device that a layer leaves and the first to which it
    comes.

    >>> moved_layers(Plan.from_cuts([2, 1]), Plan.from_cuts([1, 2]))
    ((1, 0, 1),)
    """
    before, after = _devices_of(old), _devices_of(new)
    moved = []
    for layer, places in before.items():
        left = [d for d in places if d not in after[layer]]
        entered = [d for d in after[layer] if d not in places]
        if left or entered:
            moved.append((layer, (left or places)[0], (entered or after[layer])[0]))
    return tuple(moved)


def _devices_of(plan: Plan) -> dict[int, tuple[int, ...]]:
    return {layer: stage.devices for stage in plan.stages for layer in stage.layers}


def _step(old: CompiledPlan, new: CompiledPlan, microbatch: int) -> tuple[Lowered, Bound]:
    """Returns a step whose micro-batches run under the old plan up to one, and under the new plan from it on."""
    layouts = [*old.layouts()[:microbatch], *new.layouts(len(old.programs))[microbatch:]]
    lists = spliced(_plain(old), _plain(new), microbatch)
    lowered = lower_step(new.graph, layouts, lists, new.optimizer)
    return lowered, new.bound(lowered, [*old.programs, *new.programs])


def _plain(compiled: CompiledPlan) -> TaskLists:
    """Returns the tasks of each stage in a step inside which layers move, with whole backwards.

    Lists of several stages per device, or of halves, give way to 1F1B's for this step: the order
    changes no value.
    """
    stages = len(compiled.plan.stages)
    are_whole = all(task.kind in (Kind.F, Kind.B) for tasks in compiled.lists for task in tasks)
    of_lists = [{task.stage for task in tasks} for tasks in compiled.lists]
    if are_whole and of_lists == [{s} for s in range(stages)]:
        return compiled.lists
    return one_f_one_b(stages, compiled.microbatches)


def copied_bytes(lowered: Lowered, kind: Kind = Kind.MOVE) -> int:
    """Returns the bytes that the copies of a kind carry."""
    copies = (row for row in lowered.rows if row.kind == kind)
    return sum(lowered.buffers[b].bytes for row in copies for b in row.writes)
