"""The migrations of a pipeline: those that wait for their moment, and those that have been."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from jvpipe.ir.plan import Plan
from jvpipe.runtime.compiled_plan import Build
from jvpipe.runtime.controller import Controller, Moment, StageError
from jvpipe.runtime.migrate import Change, Migration, prepare, rescued
from jvpipe.runtime.state import State
from jvpipe.runtime.tensors import Limits
from jvpipe.session.compiled_plans import Builds

_log = logging.getLogger("jvpipe")


class Moves:
    """What is to move, in the order of its moments, and the history of what has."""

    def __init__(
        self, builds: Builds, controller: Controller, limits: Limits, microbatches: int, warmup_updates: int
    ) -> None:
        self._builds, self._controller, self._limits = builds, controller, limits
        self._microbatches, self._warmup_updates = microbatches, warmup_updates
        self.queue: deque[Migration] = deque()
        self.history: list[Change] = []

    def ask(self, state: State, plan: Plan, at: tuple[int, int] | None, why: str) -> None:
        """Prepares a migration and lets it wait for its moment; what `Pipeline.migrate` raises, this raises."""
        step, microbatch = at or (state.step, 0)
        if step < state.step or not 0 <= microbatch < self._microbatches:
            raise ValueError(
                f"at={at} is no moment to come: the next step is {state.step}, its micro-batches are 0 to "
                f"{self._microbatches - 1}"
            )
        if self.queue and (earliest := self.queue[-1].change.step + 1) > step:
            _log.warning("a migration is under way: the next one waits for step %d", earliest)
            step, microbatch = earliest, 0
        old = self.queue[-1].new if self.queue else self._builds.first
        flight = state.flight + step - state.step if state.flight else 0
        new = self._builds.under(plan, old)
        self.queue.append(self._prepared(old, new, (step, microbatch), why, flight))

    def between(self, state: State, drain: Callable[[State], State], build: Build | None = None) -> State:
        """Makes the moves that are due between two steps; those inside the next one wait for it, if `build` runs it."""
        while self.queue and (change := self.queue[0].change).step <= state.step:
            migration, old = self.queue[0], self._builds.first
            runs = build in (None, old) and state.updates >= self._warmup_updates
            m = change.microbatch if runs and change.step == state.step else 0
            foreseen = migration.old, migration.flight, change.microbatch
            if foreseen != (old, old.repeating(state.flight), m):
                new = replace(migration.new, origin=None)
                migration = self._prepared(old, new, (state.step, m), change.why, state.flight)
                self.queue[0] = migration
            if migration.change.how == "inside":
                break
            self.queue.popleft()
            state = drain(state)
            state.check(migration.bound.lowered.persistent)
            self._controller.settle()
            try:
                arrays, _ = self._controller.run(migration.bound, state.arrays, {}, Moment(state.step))
            except StageError as error:
                error.state = rescued(migration, state, error.table)
                error.add_note(
                    "Nothing has moved and nothing is lost: go on with the `state` of this error, or save it."
                )
                raise
            state = replace(state, arrays=arrays)
            self.made(migration)
        return state

    def _prepared(self, old: Build, new: Build, at: tuple[int, int], why: str, flight: int) -> Migration:
        found = prepare(old, new, at, why, self._limits, flight)
        if self._controller.monitor:
            found.bound.compile_marks()
        return found

    def follow(self, builds: Builds) -> None:
        """Another model is trained from here on."""
        self.drop("model")
        self._builds = builds

    def drop(self, whose: str) -> None:
        """Forgets what was to come: it was of the model, or the run, before."""
        if self.queue:
            _log.warning("migrations that were to come are dropped: they were of the %s before", whose)
            self.queue.clear()

    def inside(self, step: int) -> Migration | None:
        """The migration that is due inside a step; it waits no longer, whatever comes of it."""
        return self.queue.popleft() if self.queue and self.queue[0].change.step == step else None

    def made(self, migration: Migration) -> None:
        """From here on the new plan holds."""
        self._builds.switch(migration.new)
        self.history.append(migration.change)
        _log.info("%s", migration.change)
