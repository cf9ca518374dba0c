"""Moves layers between devices while training runs, which is called a migration.

A migration replaces the old plan by a new one. Each micro-batch runs entirely under one of them:
its forwards, its backwards and, in a stream (training without a flush between steps), its updates.
A residual is a value that a forward leaves for its backward. Both run under the same plan, so
residuals never move. In a synchronous run, no value depends on the device that computes it, so a
migration changes no result. In a stream, a layer that gets to another stage may read other versions
of its weights from then on, because the schedule gives each stage its versions.

In this picture, time runs to the right, and layer 3 moves from device 0 to device 1 at
micro-batch 2. F1 and B1 are the layer's forward and backward of micro-batch 1:

    device 0   F0 F1 B0 B1                 micro-batches 0 and 1: the old plan
    link          WEIGHTS  SUM             weights and optimizer state; summed gradients
    device 1               F2  B2 ...      from micro-batch 2 on: the new plan

A buffer at an old place is freed only once its copy has arrived. The rest depends on the moment:

    between two steps          Buffers are freed after all copies have begun. If an error comes
                               later, some values may exist only on the host or at the new place.
                               `state_after_failed_move` brings them back.
    inside a synchronous step  Buffers are freed after the last backward. Only the update is left,
                               which overwrites the old state in any step.
    in a stream                Buffers are freed one by one. As in any step of a stream, updates
                               overwrite the old state.

After an error in the last two cases, a run goes on from a checkpoint, as after any failed step. If
there are several processes, a move between two steps frees nothing before every process has all
its copies. So an error in one process leaves all of them with the old state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from jvpipe.ir.buffers import Lowered, Peak
from jvpipe.ir.kinds import Kind
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
from jvpipe.runtime.state.plan_change import PlanChange, moved_layers
from jvpipe.schedules.one_f_one_b import one_f_one_b

UNFORESEEN = -1
"""A value of `Migration.stream_steps` that no stream reaches. With this value,
`Migration.foresaw` is always false, so the migration is prepared again once it is due."""


@dataclass(frozen=True)
class Migration:
    """A change of plan, ready to run.

    Attributes:
        change: the entry of the history.
        old: the plan in use.
        new: the plan to come.
        bound: the rows of the whole step in which layers move. If they move between two steps,
            only the rows of the moves.
        stream_steps: how many steps the stream of the old plan will have had at the migration, or
            a smaller number after which the same arrays are in flight; 0 if nothing is in flight.
        steps: after how many steps the stream of the new plan has the same arrays in flight.
        leaving: if several processes move layers between two steps, the rows that free the memory
            at the old places; else None, because `bound` has these rows.
    """

    change: PlanChange
    old: CompiledPlan
    new: CompiledPlan
    bound: Bound
    stream_steps: int = 0
    steps: int = 0
    leaving: Bound | None = None

    @property
    def rows(self) -> tuple[Bound, ...]:
        """All rows of the change."""
        return (self.bound,) if self.leaving is None else (self.bound, self.leaving)

    def foresaw(self, current: CompiledPlan, stream_steps: int, microbatch: int) -> bool:
        """Tells whether this migration was prepared for the state that the run is now in.

        If it was not, it is prepared again, by all processes together. So all must find the same
        answer. Each process begins at its own time to run groups of layers as one program, so the
        answer must not depend on the groups of `current`. Groups make no difference to a migration,
        because layers move one by one.

        Args:
            current: the compiled plan in use.
            stream_steps: how many steps the stream has had, as `CompiledPlan.representative`
                returns it.
            microbatch: the first micro-batch under the new plan.
        """
        foreseen = (
            self.old.plan,
            self.old.previous,
            self.stream_steps,
            self.change.microbatch,
        )
        return foreseen == (current.plan, current.previous, stream_steps, microbatch)


def prepare_migration(
    old: CompiledPlan,
    new: CompiledPlan,
    at: tuple[int, int],
    why: str,
    limits: Limits,
    stream_steps: int = 0,
    hosts: Hosts | None = None,
) -> Migration:
    """Lowers and compiles a change of plan, in the first way that keeps the memory limits.

    There are three ways, in order of preference:

        inside     The pipeline does not stop, but both plans need memory at once.
        between    The micro-batches in flight are finished first. A device then holds the layers
                   that leave it beside those that arrive.
        by host    As between, but all layers that move go to the host before any arrives.

    Args:
        old: the plan in use.
        new: the plan to come.
        at: (step, micro-batch) from which the new plan holds.
        why: the reason, for the history.
        limits: the memory limits, which also hold while layers move.
        stream_steps: how many steps the stream of `old` will have had at the change; 0 if nothing
            will be in flight.
        hosts: the processes, if they must choose the same way now; None if each process prepares
            the migration without waiting for others.

    Raises:
        MemoryLimitExceeded: the new plan, or every way to it, exceeds a limit.
    """
    together(hosts, "limits", lambda: limits.check(new.peaks, new.devices))
    _, microbatch = at
    stream_steps = old.representative(stream_steps)
    ways = _ways(old, new, starts_inside=bool(microbatch or stream_steps))
    for how in ways:
        lower = partial(
            _migration_in_way,
            how,
            old,
            new,
            at,
            why,
            stream_steps,
        )
        migration, peaks = together(hosts, "moves", lower)
        check = partial(limits.check, peaks, new.devices, "while layers move")
        try:
            together(hosts, "limits", check)
        except MemoryLimitExceeded:
            if how == ways[-1]:
                raise
        else:
            return migration
    raise AssertionError("the last way raises")


def _ways(old: CompiledPlan, new: CompiledPlan, *, starts_inside: bool) -> list[str]:
    """Returns the ways in which a change of plan may be made, in order of preference.

    Args:
        old: the plan in use.
        new: the plan to come.
        starts_inside: whether the change comes within a step, or while micro-batches are in flight.
    """
    ways = ["between"]
    # Replicas work on slices, and a step cannot mix slices with whole micro-batches.
    if starts_inside and not (old.plan.replicated or new.plan.replicated):
        ways.insert(0, "inside")
    # The way by host frees arrays before all others have arrived, so an error in one process could
    # not be undone in the others.
    if not new.hosts:
        ways.append("by host")
    return ways


def _migration_in_way(
    how: str,
    old: CompiledPlan,
    new: CompiledPlan,
    at: tuple[int, int],
    why: str,
    stream_steps: int,
) -> tuple[Migration, Sequence[Peak]]:
    """Lowers and compiles a change of plan in one of the ways.

    Args:
        how: the way: "inside", "between" or "by host".
        old: the plan in use.
        new: the plan to come.
        at: (step, micro-batch) from which the new plan holds.
        why: the reason, for the history.
        stream_steps: as `Migration.stream_steps`.

    Returns:
        The migration, and the most bytes on each device, and last on the host, while it is made.
    """
    step, microbatch = at
    after, steps, leaving = new, 0, None
    if how != "inside":
        microbatch = 0
        lowered, bound, leaving = _between(old, new, by_host=how == "by host")
    elif old.schedule.synchronous:
        lowered, bound = _step(old, new, microbatch)
    else:
        # The stream of the new plan continues the stream of the old plan, which may continue the
        # streams of earlier plans. The earlier plans are dropped if none of their micro-batches is
        # in flight.
        alone, steps = old.without_previous(stream_steps)
        after = replace(new, previous=(alone, steps * new.microbatches + microbatch))
        stream_step, bound = after.stream_step(steps)
        lowered = stream_step.lowered
    peaks = new.peaks_of(bound) if after is new else after.peaks
    moved_bytes = copied_bytes(lowered, Kind.OUT if how == "by host" else Kind.MOVE)
    layers = moved_layers(old.plan, new.plan)
    change = PlanChange(
        step,
        microbatch,
        why,
        old.plan,
        new.plan,
        layers,
        moved_bytes,
        how,
    )
    migration = Migration(
        change,
        old,
        after,
        bound,
        stream_steps,
        steps,
        leaving,
    )
    return migration, peaks


def _between(
    old: CompiledPlan,
    new: CompiledPlan,
    *,
    by_host: bool,
) -> tuple[Lowered, Bound, Bound | None]:
    """Lowers and compiles a move between two steps.

    Args:
        old: the plan in use.
        new: the plan to come.
        by_host: whether everything that moves goes to the host first.

    Returns:
        All rows of the move, the rows for `Migration.bound`, and those for `Migration.leaving`.
    """
    lowered = lower_move(
        new.traced.graph,
        old.plan,
        new.plan,
        new.optimizer,
        by_host=by_host,
    )
    if new.hosts is None:
        return lowered, new.bound(lowered), None
    # The rows that free memory at the old places run once all processes have copied.
    copies, ends = divided_move(lowered)
    leaving = new.bound(ends)
    return lowered, new.bound(copies), leaving


def moved_between_steps(
    migration: Migration,
    state: State,
    controller: Controller,
) -> tuple[jax.Array, ...]:
    """Runs a migration between two steps; returns the arrays under the new plan.

    Args:
        migration: the migration.
        state: the newest state, which is consumed.
        controller: runs the copies.

    Raises:
        StageError: a copy failed. `state_after_failed_move` can then restore the state under the
            old plan, unless the error is a `HostLost`: another process, and its arrays, are gone.
    """
    at, hosts = Moment(state.step), migration.new.hosts
    if hosts is None or migration.leaving is None:
        arrays, _ = controller.run(migration.bound, state.arrays, {}, at)
        return arrays

    def copy() -> tuple[jax.Array, ...]:
        arrays, _ = controller.run(migration.bound, state.arrays, {}, at)
        for array in arrays:
            if array is not None:  # it lies with this process
                controller.arrive(array)
        return arrays

    live = controller.ledger.live
    before = list(live)
    # These rows free nothing, so if a copy fails anywhere, all processes still have their old
    # arrays.
    try:
        arrays = hosts.together("copies of layers that move", copy)
    except Exception as error:
        live[:] = before
        if isinstance(error, Disagreement):
            raise StageError(str(error)) from error
        raise
    arrays, _ = controller.run(migration.leaving, arrays, {}, at)
    return arrays


def state_after_failed_move(
    migration: Migration,
    state: State,
    table: Sequence[Any],
) -> State:
    """Returns the state before a failed migration, with deleted arrays restored from copies.

    Args:
        migration: the migration that failed.
        state: the state that the migration consumed.
        table: the arrays at the failure, by the numbers of their buffers.
    """
    if not any(x is not None and x.is_deleted() for x in state.arrays):
        return state
    buffers, placing = migration.bound.lowered.buffers, migration.old.placing
    # An old array is deleted only after its copy has arrived. So each array exists somewhere: at
    # the old or at the new place, on a device or on the host.
    alive: dict[Name, Any] = {}
    for buffer, x in zip(buffers, table, strict=True):
        if x is not None and not x.is_deleted():
            alive.setdefault(name_of(buffer), x)
    values = {name: to_host(x) for name, x in alive.items()}
    # The table begins with the state's arrays. All others were made by the migration, and `values`
    # now has what is needed of them. They are deleted to make room for the restored arrays.
    for x in table[len(state.arrays) :]:
        if x is not None:
            x.delete()
    arrays = []
    for buffer, x in zip(migration.old.persistent, state.arrays, strict=True):
        if x.is_deleted():
            x = placing.put(values[name_of(buffer)], buffer, may_alias=False)
        arrays.append(x)
    return replace(state, arrays=tuple(arrays))


def _step(old: CompiledPlan, new: CompiledPlan, microbatch: int) -> tuple[Lowered, Bound]:
    """Returns a step whose micro-batches run under the new plan from `microbatch` on.

    Args:
        old: the plan of the first micro-batches.
        new: the plan of the others.
        microbatch: the first micro-batch under the new plan.
    """
    # A layout says which values each layer's programs take and leave. The layouts of the new plan
    # are numbered after those of the old plan, because the two lists of programs are joined in this
    # order below.
    before = old.layouts()[:microbatch]
    after = new.layouts(len(old.programs))[microbatch:]
    layouts = [*before, *after]
    lists = spliced(_plain(old), _plain(new), microbatch)
    lowered = lower_step(new.graph, layouts, lists, new.optimizer)
    return lowered, new.bound(lowered, [*old.programs, *new.programs])


def _plain(compiled: CompiledPlan) -> TaskLists:
    """Returns a list of tasks for each stage, with whole backwards, for a step in which layers move.

    The lists of two plans can be spliced if both have one stage per list and the same kinds of
    tasks. If the schedule has several stages on a device, or splits backwards in two halves, 1F1B
    replaces it in this step. This changes no result, because no value depends on the order of
    tasks.
    """
    stages = len(compiled.plan.stages)
    kinds = {task.kind for tasks in compiled.lists for task in tasks}
    are_whole = kinds <= {Kind.F, Kind.B}
    of_lists = [{task.stage for task in tasks} for tasks in compiled.lists]
    if are_whole and of_lists == [{s} for s in range(stages)]:
        return compiled.lists
    return one_f_one_b(stages, compiled.microbatches)


def copied_bytes(lowered: Lowered, kind: Kind = Kind.MOVE) -> int:
    """Returns the bytes that the copies of a kind carry."""
    copies = (row for row in lowered.rows if row.kind == kind)
    return sum(lowered.buffers[b].bytes for row in copies for b in row.writes)
