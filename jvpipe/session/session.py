"""The session of a pipeline: it runs steps, and changes the plan or the model during training.

`Grouping` lets steps run several layers as one program, as soon as such programs are compiled.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax

from jvpipe.ir.buffers import Peak
from jvpipe.ir.use import Use, synchronous_uses
from jvpipe.runtime.engine.beside_training import Thread, beside_training, program_ends
from jvpipe.runtime.engine.binding import Bound
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.controller import Moment
from jvpipe.runtime.engine.failures import HostLost, StageError
from jvpipe.runtime.engine.hosts import together
from jvpipe.runtime.engine.losses import Losses
from jvpipe.runtime.engine.row_agreement import agree_on_rows
from jvpipe.runtime.engine.training_state import State
from jvpipe.runtime.engine.trees import with_sums
from jvpipe.runtime.engine.versions import VersionLedger
from jvpipe.runtime.state.migrate import Migration
from jvpipe.runtime.state.model_change import ModelChange, plan_model_switch
from jvpipe.runtime.state.plan_change import PlanChange
from jvpipe.session.adapt import Adapter, Migrations
from jvpipe.session.compiled_plans import CompiledPlans
from jvpipe.session.engine import Engine, Metrics
from jvpipe.session.settings import Settings
from jvpipe.util.devices import first_of

Tree = Any
_log = logging.getLogger("jvpipe")


# A group is several consecutive layers of a stage that run as one program. At the start of a run
# and after a migration, layers are apart: each layer has its own programs. Groups are compiled in
# the background, and steps use their programs once they are ready. In a short run, groups save less
# time than their compilation takes, and the length of a run is unknown. So, unless the user
# requests groups, they are compiled once the steps under a plan have taken as long as the plan's
# programs took to compile (c seconds). Groups that the user does not request are compiled only on
# CPUs, where measured results with groups were bitwise identical:
#
#     |-- compile layers --|-- steps of layers apart --|-- steps beside compiling --|-- groups --
#     |<------- c -------->|<---------- c ------------>|
#
# A run that ends early thus compiles no groups.


class Grouping:
    """Compiles groups in the background, and lets the training use them afterwards."""

    def __init__(self) -> None:
        self._thread = Thread("jvpipe-groups")
        self._apart: CompiledPlan | None = None
        self._stepping_s = 0.0  # seconds of the steps under `_apart`
        self._grouped: Future[CompiledPlan] | None = None  # None until compilation begins

    def note_step(self, taken_s: float) -> None:
        """Adds the seconds that the training thread spent in a step."""
        self._stepping_s += taken_s

    def pass_step(self, compiled_plans: CompiledPlans) -> None:
        """Begins to compile groups if the plan has none, or adopts a plan with compiled groups.

        This must be called between two steps, with no migration in the queue.

        Args:
            compiled_plans: the compiled plans of the model.
        """
        current, asked = compiled_plans.current, compiled_plans.settings.group
        if current.grouped or asked is False:
            return
        if asked is None and first_of(compiled_plans.settings.devices[0]).platform != "cpu":
            return
        if self._apart is not current:
            self._apart, self._grouped, self._stepping_s = current, None, 0.0
        if self._grouped is None:
            if asked or self._stepping_s > current.compile_s:
                if not self._thread:
                    self._thread.switch(on=True)
                self._grouped = self._thread.ask(in_groups_or_apart, compiled_plans, current)
        elif not self._thread.waiting and (grouped := self._grouped.result()) is not current:
            compiled_plans.adopt(grouped)

    def wait(self) -> None:
        """Waits until the groups are compiled; the next step uses them."""
        self._thread.wait()


def in_groups_or_apart(compiled_plans: CompiledPlans, apart: CompiledPlan) -> CompiledPlan:
    """Returns a plan in groups, or `apart` if groups do not fit or cannot be compiled."""
    with beside_training():
        try:
            grouped = compiled_plans.in_groups(apart)
            if apart.evaluates:  # otherwise the next evaluation would wait for its groups
                grouped.evaluation  # noqa: B018 - reading it compiles them
            return grouped
        except Exception as error:
            if not program_ends():
                _log.warning("layers stay apart, for their groups cannot be compiled: %s", error)
            return apart


class _StepRun(NamedTuple):
    """The rows of a step, and the changes that the step makes to counters.

    Attributes:
        compiled: the compiled plan; the new one, if a migration is inside a step of a stream.
        bound: the rows of the step (programs and copies), ready to run.
        uses: the version of the weights that each task reads; empty if no record is needed.
        updates: how many updates the step makes.
        stream_steps: how many steps the stream (a run without flushes) has had, with this one.
        migration: the migration made inside the step, if there is one.
    """

    compiled: CompiledPlan
    bound: Bound
    uses: Sequence[Use]
    updates: int
    stream_steps: int
    migration: Migration | None


class Session(Engine):
    """The part of a pipeline that runs steps; tools and tests reach it as `pipe.session`.

    Args:
        settings: the pipeline's options, checked.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        plans, controller, limits = self.compiled_plans, self.controller, self.limits
        self.migrations = Migrations(plans, controller, limits)
        self.adapter = Adapter(plans, self.migrations.queue, limits, settings.hosts)
        self.grouping = Grouping()
        self.model_history: list[ModelChange] = []
        self._anneals_again = False  # whether `_warn_of_annealing` has warned

    @property
    def history(self) -> list[PlanChange]:
        """The migrations of this run, with the time, the reason and the moved layers of each."""
        return self.migrations.history

    def reset(self, compiled: CompiledPlan, making: Sequence[Peak]) -> None:
        """Drops the previous run and its queued and past changes of plan; see `Engine.reset`."""
        super().reset(compiled, making)
        self.migrations.begin_run()
        self.model_history = []

    def follow(self, compiled_plans: CompiledPlans) -> None:
        """Runs the model of these compiled plans from now on."""
        if compiled_plans is not self.compiled_plans:
            super().follow(compiled_plans)
            self.migrations.follow(compiled_plans)
            self.adapter.follow(compiled_plans)

    def advance(self, state: State, batch: Tree) -> tuple[State, Metrics]:
        """Runs one step; under an asynchronous schedule, its last micro-batches stay in flight.

        Errors of earlier steps are raised first, before the given state is consumed. Then earlier
        losses are checked to be finite. In a stream (a run without flushes) the step waits for the
        losses of all earlier steps except the last one. Otherwise, the step checks only losses that
        are already computed. A step that calls code on the host, which can fail, waits for the step
        before it.

        Micro-batches can stay in flight only if they have the shapes of the run's first batch. They
        are finished before a batch of other shapes runs, and such a batch is finished within its
        own step.

        Args:
            state: the newest state, which is consumed.
            batch: a whole batch.
        """
        start_s = time.perf_counter()
        self.check_state(state)
        self.controller.check()
        self.check_losses(state, wait=bool(state.stream_steps), last=not state.stream_steps)
        self.adapter.offer(state.step)
        if not self.migrations.queue:
            self.grouping.pass_step(self.compiled_plans)
        fitting = self.compiled_plans.for_batch(batch)
        if fitting is not self.compiled:
            state = self._drain_for(fitting, state)
            # Draining may have adopted a compiled plan without the stream's earlier plans.
            fitting = self.compiled_plans.for_batch(batch)
        state = self.migrations.run_due(state, self.drain, fitting)
        run = self._step_run(state, batch)
        state.check(run.bound.lowered.persistent)
        # Programs that call code on the host leave marks. `settle`, below, waits for the marks of
        # earlier steps, but not for this step's marks.
        earlier_marks = len(self.controller.marks)
        feeds = self.feeds(batch, state.words, state.step, run.bound)
        moment = Moment(state.step, flows=bool(run.stream_steps))
        arrays, values = self.controller.run(run.bound, state.arrays, feeds, moment)
        if run.migration:
            self.migrations.commit(run.migration)
        else:
            monitor = self.controller.monitor
            self.adapter.observe(monitor, run.compiled, state.step, run.stream_steps)
        compiled, stream_steps = run.compiled.without_previous(run.stream_steps)
        if compiled is not run.compiled:
            self.compiled_plans.adopt(compiled)
        if run.uses:
            self._record(run.uses, state)
        metrics = self._metrics(run, state.step, values)
        self.controller.settle(earlier_marks)
        updates = state.updates + run.updates
        after = replace(
            state, arrays=arrays, step=state.step + 1, stream_steps=stream_steps, updates=updates
        )
        if compiled is not self.compiled:
            after = self._finish(after, compiled)
        self.grouping.note_step(time.perf_counter() - start_s)
        return after, metrics

    def _drain_for(self, fitting: CompiledPlan, state: State) -> State:
        """Finishes the micro-batches in flight, before a batch of other shapes runs.

        Args:
            fitting: the compiled plan for the batch of other shapes.
            state: the newest state.

        Raises:
            MemoryLimitExceeded: the next step would exceed the limit; nothing has changed.
        """
        plan = self.migrations.plan_between(state.step)
        if plan != fitting.plan:
            fitting = self.compiled_plans.with_plan(plan, fitting)
        check = partial(self.limits.check, fitting.peaks, self.settings.devices)
        together(self.settings.hosts, "limits", check)
        return self.drain(state)

    def _record(self, uses: Sequence[Use], state: State) -> None:
        """Records which weights the tasks of a step read, so that the run can be replayed."""
        first = state.step * self.settings.microbatches
        self.ledger.versions.record(uses, first, state.updates)

    def _step_run(self, state: State, batch: Tree) -> _StepRun:
        """Returns the rows of a step; removes a migration that is due inside it from the queue."""
        compiled = self.compiled_at(batch, state.updates)
        migration = self.migrations.pop_due_inside(state.step)
        schedule, microbatches = self.settings.schedule, self.settings.microbatches
        if compiled.schedule.synchronous:
            layers = len(compiled.traced.graph.layers)
            # A synchronous run needs no record. An asynchronous run also records the synchronous
            # steps at its start, because a replay covers the whole run.
            uses = () if schedule.synchronous else synchronous_uses(layers, microbatches)
            bound = migration.bound if migration else compiled.step
            return _StepRun(compiled, bound, uses, 1, 0, migration)
        before = migration.steps if migration else state.stream_steps
        if not before and state.updates > schedule.warmup_updates:
            self._warn_of_annealing()
        compiled = migration.new if migration else compiled
        step, bound = compiled.stream_step(before)
        updates = microbatches // schedule.period(microbatches)
        return _StepRun(compiled, bound, step.uses, updates, before + 1, migration)

    def _metrics(self, run: _StepRun, step: int, values: Sequence[jax.Array]) -> Metrics:
        """Returns the metrics of a step by name, and queues its losses for a later check."""
        values = self.readable(values)
        # In a stream, each micro-batch may have read different weights, so the loss of each is
        # checked. The losses of the micro-batches are then the last values.
        apart = run.stream_steps > 0
        losses = values[-self.settings.microbatches :] if apart else []
        others = values[: len(values) - len(losses)]
        metrics = self.metrics_of(run.compiled, others)
        watched = losses or [metrics["loss"]]
        self.loss_watch.add(Losses(step, run.compiled.plan, watched, apart=apart))
        return metrics

    def compiled_in_the_past(self, batch: Tree, microbatch: int, updates: int) -> CompiledPlan:
        """Returns the compiled plan under which an earlier micro-batch of this run ran.

        Args:
            batch: the batch of the micro-batch.
            microbatch: the micro-batch's number, counted from the start of the run.
            updates: the version of the weights that the micro-batch read.
        """
        compiled = self.compiled_at(batch, updates)
        moment = divmod(microbatch, self.settings.microbatches)
        # The first change after `moment` replaced the plan that was in use at `moment`.
        later = [change for change in self.history if (change.step, change.microbatch) > moment]
        return replace(compiled, plan=later[0].old, previous=None) if later else compiled

    def _warn_of_annealing(self) -> None:
        """Warns once if PipeMare slows its first updates again, because another stream begins."""
        schedule = self.settings.schedule
        if schedule.anneal_updates and not self._anneals_again:
            self._anneals_again = True
            _log.warning(
                "%s begins again, because the pipeline was drained: the next %d updates of early "
                "stages are slowed again. Use one pipe.run, with batches of one shape, or "
                "anneal_updates=0",
                schedule.name,
                schedule.anneal_updates,
            )

    def drain(self, state: State) -> State:
        """Finishes the micro-batches in flight, which ends the stream."""
        self.check_state(state)
        state = self._finish(state, self.compiled)
        if self.compiled.previous:
            self.compiled_plans.adopt(self.compiled.after(None))
        return state

    def _finish(self, state: State, compiled: CompiledPlan) -> State:
        """Finishes the micro-batches in flight with the rows of a compiled plan."""
        if not state.stream_steps:
            return state
        step, bound = compiled.drain(state.stream_steps)
        state.check(bound.lowered.persistent)
        moment = Moment(state.step, flows=True)
        arrays, _ = self.controller.run(bound, state.arrays, {}, moment)
        self._record(step.uses, state)
        self.ledger.versions.drained()
        return replace(state, arrays=arrays, stream_steps=0)


def switch_model(
    session: Session, state: State, loss_fn: Callable[..., Any], params: Tree, model_state: Tree
) -> State:
    """Switches the training to another model; micro-batches in flight are finished first.

    Args:
        session: the session that trains the present model.
        state: the newest state, which is consumed.
        loss_fn: the new loss, with the same arguments and kinds of results as the present one.
        params: the new model's parameters. Shapes suffice for parameters of the present model, and
            for parameters of earlier models, which are parked on the host.
        model_state: the new model's state; None stands for the present model's state.

    Raises:
        ValueError: the loss reads a parameter that `params` lack, or a parameter has
            another shape than before; nothing has changed.
        MemoryLimitExceeded: the new model would exceed the limit; nothing has changed.
        StageError: a copy failed; the error's `state` is the present model's, after draining.
    """
    session.check_state(state)
    models, present = session.known_models, session.compiled_plans
    compiled_plans = models.compiled_for(present, loss_fn, params, model_state)
    old, new = present.current, compiled_plans.current
    trees = compiled_plans.trees
    present.trees.stacks.check_next(trees.stacks)
    states = jax.tree.leaves(trees.model_state if model_state is None else model_state)
    values = {
        "parameter": jax.tree.leaves(trees.stacks.split(params)),
        "state": with_sums(states, new.traced.graph.state),
    }
    switch = plan_model_switch(old, new, values, models.parked, session.limits)
    agree_on_rows(new, "the rows of new models")
    # Messages about losses read the ledger of versions, so losses are checked before this
    # ledger is replaced.
    session.check_losses(state, wait=bool(state.stream_steps))
    state = session.drain(state)
    state.check(len(session.compiled.persistent))
    try:
        state = replace(state, arrays=switch.run(state.arrays, session.ledger))
    except HostLost:
        raise
    except StageError as error:
        error.state = replace(state, arrays=tuple(error.table))
        error.add_note(
            "The previous model is whole: go on with the `state` of this error, or save it."
        )
        raise
    session.follow(compiled_plans)
    # The new model continues with the optimizer state of the old model.
    session.ledger.versions = VersionLedger(complete=False)
    session.model_history.append(switch.change(state.step))
    _log.info("%s", session.model_history[-1])
    return replace(state, model=compiled_plans.model_id)
