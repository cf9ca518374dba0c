"""What can be seen of a pipeline: its plan and why, its parameters, what its steps took, what has moved."""

from typing import Any

import jax
import optax

from jvpipe._jax import Device
from jvpipe.builds import Builds, Settings
from jvpipe.ir.plan import Plan
from jvpipe.moves import Moves
from jvpipe.planning import Planned
from jvpipe.report.explain import explain
from jvpipe.report.reasons import cut_reasons
from jvpipe.runtime.build import Build
from jvpipe.runtime.checkpoint import to_host
from jvpipe.runtime.controller import Controller
from jvpipe.runtime.flight import names_of, plain_arrays
from jvpipe.runtime.migrate import Change
from jvpipe.runtime.monitor import Measured, Monitor
from jvpipe.runtime.state import Placing, State
from jvpipe.trace.stacks import Stacks

Tree = Any


class Views:
    """The looking half of `jvpipe.Pipeline`; it changes nothing."""

    _settings: Settings
    _builds: Builds
    _controller: Controller
    _moves: Moves
    _devices: tuple[Device, ...]

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
        return explain(build.traced.graph, build.plan, build.peaks, build.layer_s, self._devices, reasons)

    def params(self, state: State) -> Tree:
        """The parameters as the caller gave them, as numpy arrays."""
        values = self._host_values(state, "parameter")
        split = jax.tree.structure(self._builds.stacks.split(self._builds.inputs[0]))
        return self._builds.stacks.join(jax.tree.unflatten(split, values))

    def model_state(self, state: State) -> Tree:
        """The model state as the caller gave it, as numpy arrays (keys as keys)."""
        return jax.tree.unflatten(jax.tree.structure(self._builds.inputs[2]), self._host_values(state, "state"))

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

    def _plain(self, build: Build, state: State) -> tuple[jax.Array, ...]:
        state.check(len(names_of(build, state.flight)) if state.flight else len(build.persistent))
        return plain_arrays(build, state)
