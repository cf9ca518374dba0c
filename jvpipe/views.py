"""What can be seen of a pipeline: its plan and why, its parameters, what its steps took, what has moved."""

from typing import Any

import jax
import numpy as np
import optax

from jvpipe._jax import Device
from jvpipe.ir.buffers import HOST
from jvpipe.ir.plan import Plan
from jvpipe.ir.values import ValueKind
from jvpipe.report.explain import explain
from jvpipe.report.reasons import cut_reasons
from jvpipe.runtime.checkpoints.checkpoint import to_host
from jvpipe.runtime.checkpoints.flight import names_of, plain_arrays, with_leaves
from jvpipe.runtime.compiled_plan import Build, shape
from jvpipe.runtime.controller import Controller, Feeds, Moment
from jvpipe.runtime.migrate import Change
from jvpipe.runtime.monitor import Measured, Monitor
from jvpipe.runtime.state import Placing, State
from jvpipe.runtime.tensors import Ledger, Limits
from jvpipe.session.arguments import feeds_of, leaves_like
from jvpipe.session.compiled_plans import Builds, Settings
from jvpipe.session.migrations import Moves
from jvpipe.session.planning import Planned
from jvpipe.trace.stacks import Stacks

Tree = Any


class Views:
    """The looking half of `jvpipe.Pipeline`; it changes nothing."""

    _settings: Settings
    _builds: Builds
    _controller: Controller
    _moves: Moves
    _devices: tuple[Device, ...]
    _limits: Limits
    ledger: Ledger

    @property
    def history(self) -> list[Change]:
        """The plans that took another's place: when, why, what moved."""
        return self._moves.history

    @property
    def build(self) -> Build:
        """What this pipeline runs, for whoever follows it."""
        return self._builds.first

    @property
    def stacks(self) -> Stacks:
        """How stacked parameters are split into layers."""
        return self._builds.stacks

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """As it was given."""
        return self._settings.optimizer

    @property
    def programs(self) -> dict[Device, int]:
        """The number of compiled programs that steps use, per device."""
        used = set().union(*(build.executables for build in self._builds))
        return {device: sum(d == device for _, d in used) for device in self._devices}

    @property
    def plan(self) -> Plan:
        """Which layers run where."""
        return self.build.plan

    @property
    def graph(self) -> Any:
        """The layer graph of the model."""
        return self.build.traced.graph

    def explain(self) -> str:
        """A text that says what runs where, what it costs and why."""
        build = self.build
        planned = None if self.history else self._builds.planned
        reasons = cut_reasons(planned.problem, planned.decision) if planned else ()
        return explain(build.traced.graph, build.plan, build.peaks, self._builds.layer_s, self._devices, reasons)

    def params(self, state: State) -> Tree:
        """The parameters as the caller gave them, as numpy arrays."""
        values = self._host_values(state, "parameter")
        return self.stacks.join(jax.tree.unflatten(jax.tree.structure(self._split_shapes), values))

    def model_state(self, state: State) -> Tree:
        """The model state as the caller gave it, as numpy arrays (keys as keys)."""
        return jax.tree.unflatten(jax.tree.structure(self._builds.inputs[2]), self._host_values(state, "state"))

    def optimizer_state(self, state: State) -> Tree:
        """The optimizer's state as `optimizer.init(params)` gives it, as numpy arrays (keys as keys).

        Where layers are stacked, so is what belongs to them. Averaged parameters or counts are read from it;
        `evaluate(state, batch, params=...)` takes parameters that are made of it.
        """
        values = self._host_values(state, "optimizer")
        return self.stacks.join(jax.tree.unflatten(self.build.optimizer.state_tree, values))

    @property
    def _optimizer_shapes(self) -> Tree:
        optimizer = self.build.optimizer
        return jax.tree.unflatten(optimizer.state_tree, [shape(leaf.array) for leaf in optimizer.state])

    @property
    def _split_shapes(self) -> Tree:
        """Of the parameters."""
        return self.stacks.split(self._builds.inputs[0])

    def evaluate(self, state: State, batch: Tree, params: Tree | None = None) -> dict[str, Any]:
        """The metrics of a batch, forward only; nothing changes.

        Args:
            state: its newest parameters are evaluated, with its model state.
            batch: of any size that the micro-batches divide.
            params: others in their place, such as averaged ones that `optimizer_state` holds; they lie beside the
                state's meanwhile.

        Raises:
            ValueError: `params` are not like those of the pipeline.
            MemoryLimitExceeded: an evaluation does not keep the limit.
            StageError: it failed; the state is whole.
        """
        build = self._builds.of(batch)
        arrays, peaks = self._plain(build, state), build.evaluation_peaks
        leaves = [] if params is None else leaves_like(params, self._split_shapes, self.stacks, "params")
        owned = [buffer for buffer in build.persistent if leaves and buffer.owner == "parameter"]
        beside = [sum(buffer.bytes for buffer in owned if buffer.memory == d) for d in range(len(self._devices))]
        peaks = (*(peak.beside("given parameters", n) for peak, n in zip(peaks, beside, strict=False)), peaks[HOST])
        self._limits.check(peaks, self._devices)
        for device, size in enumerate(beside):
            self.ledger.hold(device, size)
        try:
            if leaves:
                arrays = with_leaves(names_of(build, 0), arrays, ValueKind.PARAMETER, leaves, consume=False)
            feeds = self.feeds(batch, state.words, state.step)
            _, values = self._controller.run(build.evaluation, arrays, feeds, Moment(state.step))
            self._controller.settle()
        finally:
            for device, size in enumerate(beside):
                self.ledger.drop(device, size)
        return self._builds.metrics(build, values)

    def feeds(self, batch: Tree, words: np.ndarray | None, step: int) -> Feeds:
        """What the micro-batches of a step read from the host; `words` are those of the run's key."""
        return feeds_of(batch, words, step, self._settings.microbatches)

    def _host_values(self, state: State, kind: str) -> list[Any]:
        found = self._placing(self.build).values(self._plain(self.build, state))
        try:
            return [to_host(found[name]) for name in sorted(n for n in found if n[0] == kind)]
        except Exception as error:
            raise self._controller.failure(error) from error

    def monitor(self, on: bool = True) -> None:
        """Switches on the measuring of every task, or off."""
        self._controller.monitor = Monitor(self._devices) if on else None

    def measured(self, *, before: bool = False) -> Measured:
        """What the last step did, or the one `before`: what ran when, what was swapped; waits for its end."""
        if self._controller.monitor is None:
            raise ValueError("nothing is measured: call pipe.monitor() before the step")
        return self._controller.monitor.measured(before=before)

    @property
    def planned(self) -> Planned | None:
        """What the plan was decided on; None if it was given."""
        return self._builds.planned

    def _placing(self, build: Build) -> Placing:
        return Placing(build.traced.graph, build.optimizer, build.persistent, self._devices)

    def _check_state(self, state: State) -> None:
        """Raises ValueError for what is no state of this pipeline's present model."""
        self._builds.first  # noqa: B018 - there must be one
        if not isinstance(state, State):
            raise ValueError(
                f"the state must be the one that init, step or restore returned, not of type {type(state).__name__}"
            )
        if state.model is not self._builds.token:
            raise ValueError(
                "this state belongs to another pipeline or model: use the one that init or restore of this pipeline "
                "gave; from one pipeline to another it goes by pipe.save and pipe.restore"
            )

    def _plain(self, build: Build, state: State) -> tuple[jax.Array, ...]:
        self._check_state(state)
        state.check(len(names_of(build, state.flight)) if state.flight else len(build.persistent))
        return plain_arrays(build, state)
