"""What changes while a run goes on: migrations that wait for their moment, and the models that are known."""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from threading import RLock
from typing import Any

import jax

from jvpipe.ir.plan import Plan
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.controller import Controller, HostLost, StageError
from jvpipe.runtime.engine.tensors import Limits
from jvpipe.runtime.engine.training_state import State
from jvpipe.runtime.state.migrate import (
    Migration,
    PlanChange,
    moved_between_steps,
    prepare_migration,
    state_after_failed_move,
)
from jvpipe.runtime.state.model_change import Parked
from jvpipe.schedules.planned import pipeline_length
from jvpipe.session.compiled_plans import CompiledPlans
from jvpipe.session.settings import agree_on_rows
from jvpipe.session.trees import micro_batch_shapes, shapes_of
from jvpipe.trace.leaves import abstract

_log = logging.getLogger("jvpipe")


class Migrations:
    """Queues migrations in the order of their moments, and makes each when it is due.

    Args:
        compiled_plans: those of the model; a migration that is made changes their plan.
        controller: runs what moves.
        limits: kept while layers move.
        warmup_updates: the first updates of an asynchronous run, which are made in synchronous steps.
    """

    def __init__(
        self,
        compiled_plans: CompiledPlans,
        controller: Controller,
        limits: Limits,
        warmup_updates: int,
    ) -> None:
        self._compiled_plans, self._controller, self._limits = compiled_plans, controller, limits
        self._warmup_updates = warmup_updates
        self.queue: deque[Migration] = deque()
        self.history: list[PlanChange] = []

    def request(self, state: State, plan: Plan, at: tuple[int, int] | None, why: str) -> None:
        """Prepares a migration and queues it, of several processes in all; raises what `Pipeline.migrate` raises.

        Args:
            state: the newest.
            plan: the plan to come.
            at: (step, micro-batch) from which it holds; now unless given.
            why: kept in `history`.
        """
        if (hosts := self._compiled_plans.settings.hosts) is not None:
            asked = {"plan": plan.to_json(), "moment": at, "reason": why, "step": state.step}
            hosts.agree("migrations", [(name, str(value)) for name, value in asked.items()])
        microbatches = self._controller.microbatches
        step, microbatch = at or (state.step, 0)
        if step < state.step or not 0 <= microbatch < microbatches:
            raise ValueError(
                f"at={at} is not a moment to come: the next step is {state.step}, its micro-batches are 0 to "
                f"{microbatches - 1}"
            )
        if self.queue and (earliest := self.queue[-1].change.step + 1) > step:
            _log.warning("a migration is under way: the next one waits for step %d", earliest)
            step, microbatch = earliest, 0
        old = self.queue[-1].new if self.queue else self._compiled_plans.current
        stream_steps = state.stream_steps + step - state.step if state.stream_steps else 0
        if old.previous and not stream_steps:  # what is in flight by then is known when it is due
            old = replace(old, previous=None)
        if microbatch and (old.plan.replicated or plan.replicated):
            raise ValueError(
                f"at={at} is inside a step: replicated stages change between two steps alone, write at=({step + 1}, 0)"
            )
        # It follows the last that waits, not the present plan.
        new = self._compiled_plans.with_plan(plan, old)
        self.queue.append(self._prepared(old, new, (step, microbatch), why, stream_steps))

    def plan_between(self, step: int) -> Plan:
        """Returns the plan of a step whose batch has other shapes than init's: all that is due in it comes before."""
        due = [migration.new.plan for migration in self.queue if migration.change.step <= step]
        return due[-1] if due else self._compiled_plans.current.plan

    def run_due(
        self, state: State, drain: Callable[[State], State], compiled: CompiledPlan | None = None
    ) -> State:
        """Makes the migrations that are due between two steps; returns the state after them.

        Args:
            state: the newest.
            drain: finishes what is in flight.
            compiled: runs the next step; a migration due inside that step waits for it if this is its plan.

        Raises:
            StageError: a copy failed; its `state` is whole under the old plan.
        """
        while self.queue and (change := self.queue[0].change).step <= state.step:
            migration, old = self.queue[0], self._compiled_plans.current
            runs = compiled in (None, old) and state.updates >= self._warmup_updates
            m = change.microbatch if runs and change.step == state.step else 0
            # It was prepared for a moment that may have come otherwise: then it is prepared again.
            foreseen = migration.old, migration.stream_steps, change.microbatch
            if foreseen != (old, old.representative(state.stream_steps), m):
                new = replace(migration.new, previous=None)
                migration = self._prepared(
                    old, new, (state.step, m), change.why, state.stream_steps
                )
                self.queue[0] = migration
            if migration.change.how == "inside":
                break
            self.queue.popleft()
            # Between two steps nothing is in flight.
            state = drain(state)
            state.check(migration.bound.lowered.persistent)
            self._controller.settle()
            try:
                arrays = moved_between_steps(migration, state, self._controller)
            except HostLost:
                raise
            except StageError as error:
                error.state = state_after_failed_move(migration, state, error.table)
                error.add_note(
                    "Nothing has moved and nothing is lost: go on with the `state` of this error, or save it."
                )
                raise
            state = replace(state, arrays=arrays)
            self.commit(migration)
        return state

    def _prepared(
        self, old: CompiledPlan, new: CompiledPlan, at: tuple[int, int], why: str, stream_steps: int
    ) -> Migration:
        migration = prepare_migration(old, new, at, why, self._limits, stream_steps, new.hosts)
        agree_on_rows(migration.new, "the rows of a migration")
        if self._controller.monitor:
            migration.bound.compile_marks()
        return migration

    def pop_due_inside(self, step: int) -> Migration | None:
        """Removes and returns the migration that is due inside a step, if there is one."""
        return self.queue.popleft() if self.queue and self.queue[0].change.step == step else None

    def commit(self, migration: Migration) -> None:
        """Notes that a migration was made: the new plan holds from here on."""
        self._compiled_plans.adopt(migration.new)
        self.history.append(migration.change)
        _log.info("%s", migration.change)

    def begin_run(self) -> None:
        """Forgets what was to come and what has been: that was another run's."""
        self._discard("run")
        self.history = []

    def follow(self, compiled_plans: CompiledPlans) -> None:
        """Trains another model from here on; what was to come was of the one before."""
        self._discard("model")
        self._compiled_plans = compiled_plans

    def _discard(self, whose: str) -> None:
        if self.queue:
            _log.warning(
                "migrations that were to come are dropped: they were of the %s before", whose
            )
            self.queue.clear()


# The models that a pipeline has met: each is traced and planned once, so that one that comes back costs nothing.

Tree = Any
Loss = Callable[..., Any]
REMEMBERED = 64
"""How many models are remembered; those that were asked for longest ago are forgotten."""


class KnownModels:
    """Remembers compiled plans by the loss they were traced from (that very object) and the shapes of its parameters.

    `parked` are arrays on the host that the present model lacks.
    """

    def __init__(self, store: ProgramStore) -> None:
        self._store = store
        self._known: OrderedDict[Hashable, CompiledPlans] = OrderedDict()
        self._lock = RLock()  # a model may be prepared in the background
        self.parked: Parked = {}

    def compiled_for(
        self, present: CompiledPlans, loss_fn: Loss, params: Tree, model_state: Tree
    ) -> CompiledPlans:
        """Finds the compiled plans of a loss; one that is new is traced at the present one's batch and planned.

        Args:
            present: those of the model that is trained.
            loss_fn: the very object that is looked for.
            params: arrays or shapes.
            model_state: also arrays or shapes; by default the present one's.

        Raises:
            ValueError: the loss reads a parameter that `params` lack, or what `Pipeline.init` refuses.
        """
        trees = present.trees
        params, model_state = (
            abstract(params),
            trees.model_state if model_state is None else abstract(model_state),
        )
        key = self._key(present, loss_fn, params, model_state)
        with self._lock:
            self._known[
                self._key(present, present.settings.loss_fn, trees.params, trees.model_state)
            ] = present
            if key not in self._known:
                self._known[key] = self._traced(present, loss_fn, params, model_state)
            # The least recently asked for goes first.
            self._known.move_to_end(key)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
            return self._known[key]

    def _traced(
        self, present: CompiledPlans, loss_fn: Loss, params: Tree, model_state: Tree
    ) -> CompiledPlans:
        settings = replace(present.settings, loss_fn=loss_fn)
        if isinstance(settings.stages, Plan) or settings.shares:  # for the layers of another model
            plan = settings.stages if isinstance(settings.stages, Plan) else present.current.plan
            places = tuple(stage.devices[0] for stage in plan.stages)
            length = pipeline_length(plan, settings.schedule)
            replicas = tuple(stage.devices for stage in plan.stages) if plan.replicated else ()
            settings = replace(
                settings, stages=length, places=places, shares=False, replicas=replicas
            )
        compiled_plans, trees = CompiledPlans(settings, self._store, present), present.trees
        try:
            compiled_plans.trace(params, trees.batch, trees.rng, model_state)
        except KeyError as error:
            micro = micro_batch_shapes(trees.batch, settings.microbatches)
            rest = (model_state, micro, trees.rng) if settings.has_state else (micro, trees.rng)
            path = _missing(loss_fn, params, *rest) or error.args[0]
            raise ValueError(
                f"the new loss reads parameter '{path}', which params lack: give a value for every parameter that it "
                "reads (of those that are kept the value does not matter)"
            ) from error
        return compiled_plans

    @staticmethod
    def _key(present: CompiledPlans, loss_fn: Loss, params: Tree, model_state: Tree) -> Hashable:
        return id(loss_fn), *map(shapes_of, (params, present.trees.batch, model_state))


class _MissingError(Exception):
    pass


class _Watched(dict[Any, Any]):
    """A part of the parameters that tells what is looked for and missing."""

    path: tuple[Any, ...] = ()

    def __missing__(self, key: Any) -> Any:
        raise _MissingError("/".join(map(str, (*self.path, key))))


def _missing(loss_fn: Loss, params: Tree, *rest: Any) -> str | None:
    """Returns the path of the first parameter that a loss looks for and does not find; None if that cannot be told."""

    def watched(tree: Tree, path: tuple[Any, ...]) -> Tree:
        if not isinstance(tree, Mapping):
            return tree
        watching = _Watched({key: watched(value, (*path, key)) for key, value in tree.items()})
        watching.path = path
        return watching

    try:
        jax.eval_shape(lambda params, *rest: loss_fn(watched(params, ()), *rest), params, *rest)
    except _MissingError as missing:
        return str(missing)
    except Exception:
        return None
    return None
