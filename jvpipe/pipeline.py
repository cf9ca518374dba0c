"""The facade: checks what the user gives and wires the parts. Pytrees end here; below are flat arrays per layer."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jvpipe._jax import Device
from jvpipe.ir.buffers import Peak
from jvpipe.ir.plan import Plan
from jvpipe.ir.sizes import parse_bytes
from jvpipe.ir.use import synchronous_uses
from jvpipe.ir.values import ValueKind
from jvpipe.planners import find_planner
from jvpipe.programs.store import shared_store
from jvpipe.runtime.checkpoints.checkpoint import load_checkpoint
from jvpipe.runtime.checkpoints.flight import names_of, restore_in_flight, with_leaves
from jvpipe.runtime.checkpoints.saving import Saving, saved_inputs, saved_words
from jvpipe.runtime.compiled_plan import Build
from jvpipe.runtime.controller import Controller, Moment, StageError
from jvpipe.runtime.losses import Losses, LossWatch
from jvpipe.runtime.model_change import ModelChange
from jvpipe.runtime.state import Leaf, Name, State, given_leaves, made_leaves
from jvpipe.runtime.tensors import Ledger, Limits
from jvpipe.runtime.versions import VersionLedger
from jvpipe.schedules import Schedule, find_schedule
from jvpipe.session.adapt import Adapter
from jvpipe.session.arguments import (
    check_arrays,
    check_key,
    check_loss,
    check_optimizer,
    checked_fates,
    checked_flags,
    checked_name,
    leaves_like,
    place_stages,
    reported_limit,
    whole_number,
)
from jvpipe.session.background import beside_training
from jvpipe.session.compiled_plans import Builds, Settings
from jvpipe.session.known_models import KnownModels
from jvpipe.session.migrations import Moves
from jvpipe.session.trigger import Rule
from jvpipe.trace.leaves import is_initialiser, made_shapes
from jvpipe.trace.loss import key_words
from jvpipe.views import Views

Tree = Any
Metrics = dict[str, Any]
_log = logging.getLogger("jvpipe")


class Pipeline(Views):
    """Trains a plain JAX loss over a pipeline of devices.

    Args:
        loss_fn: `(params, batch, rng) -> loss`, a scalar or `jvpipe.Weighted`; `(loss, aux)` with `has_aux`;
            `(params, model_state, batch, rng) -> (loss, new_model_state[, aux])` with `has_state`.
        optimizer: any optax transformation that its jaxpr lets cut.
        stages: their number, or a `Plan`.
        microbatches: how many a batch is split into; it must divide the leading axis of every batch leaf.
        schedule: "gpipe", "1f1b"; asynchronous "pipedream", "2bw", "pipemare", "xpipe"; or one with options, such as
            `jvpipe.schedules.PipeMare(decay=0.5, warmup_updates=100)`.
        planner: "jvpipe" (cuts and fates chosen jointly, for the step's seconds under the memory limit), "even",
            "torchgpipe" (balances measured seconds), "torchgpipe-size" (bytes of parameters), or one of "gpipe",
            "pipedream", "dapple", "vpipe", "dawnpiper", "adapipe", after the papers.
        memory_limit: per device, bytes or a text such as "16GiB"; by default what the devices report, if they do.
        host_memory_limit: for swapped values of all devices together, and what `update_model` parks.
        fates: of tensors by name, such as `{"*/attention/*": "swap"}`: "keep", "swap" or "recompute".
        checkpoint: torchgpipe's modes, which micro-batches are computed again from their stage's input: "always",
            "except_last" or "never".
        devices: one per stage, by default the first of `jax.devices()`; name one twice to share it.
        has_aux: the loss returns something beside.
        has_state: the loss carries a model state (batch norm).
        grad_norm: also report the global norm of the gradient.
        remeasure: measure anew what an earlier process has measured. Seconds are kept, and found again, where JAX has a
            compilation cache on disk (`jax_compilation_cache_dir`), and nowhere else.

    Raises:
        ValueError: for anything that cannot be used, with the values and the cure.

    >>> import jax, jax.numpy as jnp, optax
    >>> def loss_fn(params, batch, rng):
    ...     x = batch["x"]
    ...     for w in params:
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.mean((x - batch["y"]) ** 2)
    >>> params = [0.5 * jnp.eye(4)] * 3
    >>> batch = {"x": np.ones((8, 4), np.float32), "y": np.zeros((8, 4), np.float32)}
    >>> pipe = Pipeline(loss_fn, optax.sgd(0.1), stages=2, microbatches=4, planner="even")
    >>> state = pipe.init(params, batch, jax.random.key(0))
    >>> state, metrics = pipe.step(state, batch)
    >>> round(float(metrics["loss"]), 4)
    0.0128
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        stages: int | Plan = 2,
        microbatches: int = 4,
        schedule: str | Schedule = "1f1b",
        planner: str = "jvpipe",
        memory_limit: int | str | None = None,
        host_memory_limit: int | str | None = None,
        fates: Mapping[str, str] | None = None,
        checkpoint: str | None = None,
        devices: Sequence[Device] | None = None,
        *,
        has_aux: bool = False,
        has_state: bool = False,
        grad_norm: bool = False,
        remeasure: bool = False,
    ) -> None:
        checked_flags(has_aux=has_aux, has_state=has_state, grad_norm=grad_norm)
        check_loss(loss_fn, has_state=has_state)
        check_optimizer(optimizer)
        if not isinstance(schedule, Schedule):
            checked_name("schedule", schedule, "1f1b")
        self._order = find_schedule(schedule)
        find_planner(checked_name("planner", planner, "jvpipe"))
        microbatches = whole_number("microbatches", microbatches)
        if isinstance(stages, Plan):
            count, stages = len(stages.stages), stages.under(self._order.name)
        else:
            count = stages = whole_number("stages", stages)
        self._order.check(count, microbatches)
        used, places = place_stages(stages, devices)
        self._settings = Settings(
            loss_fn=loss_fn,
            optimizer=optimizer,
            stages=stages,
            microbatches=microbatches,
            schedule=self._order,
            planner=planner,
            memory_limit_bytes=parse_bytes(memory_limit) or reported_limit(used),
            host_limit_bytes=parse_bytes(host_memory_limit),
            fates=checked_fates(fates),
            checkpoint=None if checkpoint is None else checked_name("checkpoint", checkpoint, "always"),
            devices=used,
            places=places,
            has_aux=has_aux,
            has_state=has_state,
            grad_norm=grad_norm,
            remeasure=remeasure,
        )
        self._devices, self._microbatches = used, microbatches
        self._store = shared_store()
        self._builds = Builds(self._settings, self._store)
        self._models = KnownModels(self._store)
        limits = self._settings.memory_limit_bytes, self._settings.host_limit_bytes
        self._limits = Limits(*limits, parked=self._models.parked)
        self.ledger = Ledger(self._devices)
        host_limited = self._settings.host_limit_bytes is not None
        self._controller = Controller(self.ledger, microbatches, host_limited)
        self._losses = LossWatch(self._controller, microbatches)
        self._moves = Moves(self._builds, self._controller, self._limits, microbatches, self._order.warmup_updates)
        self._adapter = Adapter(self._builds, self._moves.queue, self._limits)
        self.model_history: list[ModelChange] = []

    # Setting up

    def init(self, params: Tree, batch: Tree, rng: jax.Array | None, model_state: Tree = None) -> State:
        """Traces, measures, plans, compiles and places; the caller's arrays stay theirs.

        Args:
            params: a pytree of arrays, or a function `key -> params`, which is then evaluated leaf by leaf on the
                devices that own the leaves.
            batch: a batch, or its shapes.
            rng: the key of the run.
            model_state: with `has_state`.
        """
        if rng is not None:
            check_key(rng)
        check_arrays(params, "parameter")
        check_arrays(model_state, "leaf of the model state")
        if model_state is not None and not self._settings.has_state:
            raise ValueError("model_state is given, but the loss carries none: say has_state=True, or leave it out")
        if is_initialiser(params):
            if rng is None:
                raise ValueError("parameters that a function makes need a key: init(function, batch, rng)")
            shapes = made_shapes(params, rng)
            leaves_of = lambda stacks: made_leaves(self._store, lambda key: stacks.split(params(key)), rng)  # noqa: E731
        else:
            shapes = params
            leaves_of = lambda stacks: given_leaves(jax.tree.leaves(stacks.split(params)))  # noqa: E731
        builds = self._builds.begun(shapes, batch, rng, model_state, leaves_of)
        states = given_leaves(jax.tree.leaves(model_state))
        named = builds.taken_leaves() | {("state", i): leaf for i, leaf in enumerate(states)}
        return self._place(builds, builds.first, named, None if rng is None else key_words(rng), 0)

    def _place(
        self,
        builds: Builds,
        build: Build,
        leaves: dict[Name, Leaf],
        words: np.ndarray | None,
        step: int,
        updates: int = 0,
    ) -> State:
        constants = given_leaves(build.traced.loss.constants)
        leaves = leaves | {("constant", i): leaf for i, leaf in enumerate(constants)}
        placing = self._placing(build)
        self._begin(build, placing.peaks(leaves))
        self._follow(builds)
        arrays = placing.place(self.ledger, leaves, self._store)
        return State(arrays, words, step, updates=updates, model=builds.token)

    def _follow(self, builds: Builds) -> None:
        """From here on these run."""
        if builds is not self._builds:
            self._builds = builds
            self._moves.follow(builds)
            self._adapter.follow(builds)

    # Running

    def step(self, state: State, batch: Tree) -> tuple[State, Metrics]:
        """What one batch teaches. Consumes `state`; returns at once, the devices work on.

        Under an asynchronous schedule nothing is in flight afterwards: `run` keeps the pipeline full.

        Raises:
            ValueError: the loss of an earlier step is not finite and a parameter is NaN; `state` is not consumed.
            StageError: this step failed, or the one before it; `restore` makes the pipeline work again.
        """
        state, metrics = self._advance(state, batch)
        return self.drain(state), metrics

    def run(
        self, state: State, batches: Iterable[Tree], num_steps: int | None = None
    ) -> Iterator[tuple[State, Metrics]]:
        """Steps through a stream of batches; a state is valid until the next one is asked for.

        Under an asynchronous schedule the pipeline stays full between the steps: the states are in flight. Such a
        state can be saved, evaluated or drained; its parameters are each layer's newest.
        """
        if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
            raise ValueError(
                f"run takes a stream of batches, such as a list, not one {type(batches).__name__}: use step"
            )
        for batch in islice(batches, num_steps):
            state, metrics = self._advance(state, batch)
            yield state, metrics
        self._check_losses(state, wait=bool(state.flight))

    def _check_losses(self, state: State, *, wait: bool = False, last: bool = True) -> None:
        self._losses.check(lambda: self.params(state), wait=wait, last=last)

    def drain(self, state: State) -> State:
        """Finishes what is in flight."""
        self._check_state(state)
        if not state.flight:
            return state
        step, bound = self.build.drain(state.flight)
        state.check(bound.lowered.persistent)
        arrays, _ = self._controller.run(bound, state.arrays, {}, Moment(state.step, flows=True))
        self.ledger.versions.record(step.uses, state.step * self._microbatches, state.updates)
        self.ledger.versions.drained()
        if self.build.origin:
            self._builds.switch(replace(self.build, origin=None))
        return replace(state, arrays=arrays, flight=0)

    def with_optimizer_state(self, state: State, tree: Tree) -> State:
        """The state with another state of its optimizer, such as an injected learning rate. Consumes `state`.

        Args:
            state: the newest.
            tree: as `optimizer_state` gives it, changed.

        Raises:
            ValueError: it is none of this optimizer.
        """
        leaves = leaves_like(tree, self._optimizer_shapes, self.stacks, "the optimizer's state")
        self._plain(self.build, state)  # which says if it is not whole
        names = names_of(self.build, state.flight)
        return replace(state, arrays=with_leaves(names, state.arrays, ValueKind.OPTIMIZER, leaves, consume=True))

    def migrate(self, state: State, plan: Plan, at: tuple[int, int] | None = None, why: str = "as asked") -> State:
        """Moves layers while training runs: from a micro-batch on, this plan holds. Values do not change.

        Args:
            state: the newest; consumed if the move is made at once.
            plan: the new one: other cuts, other fates, another number of stages.
            at: (step, micro-batch) of its first micro-batch; now unless given. Inside a step devices do not wait for
                more than the layers' sums of gradients. A step that is not there yet is waited for.
            why: kept in `history`.

        Raises:
            ValueError: the plan does not fit the model or the devices, or the moment is over.
            MemoryLimitExceeded: the plan does not keep the limit, or the way to it does not.
            StageError: something failed on the way. If that was between two steps, nothing is lost: the error's `state`
                is whole under the old plan.
        """
        self._check_state(state)
        if not isinstance(plan, Plan):
            raise ValueError(f"migrate needs a jvpipe.Plan, such as Plan.from_cuts([3, 1]), not {plan!r}")
        self._moves.ask(state, plan, at, why)
        return self._moves.between(state, self.drain)

    def adapt(self, on: bool = True, rule: Rule | None = None) -> None:
        """Lets layers move away from what became slow, and back, as `rule` says; `history` tells why. Or no longer."""
        self._adapter.switch(on, rule or Rule())
        if on and self._controller.monitor is None:
            self.monitor()

    def update_model(self, state: State, loss_fn: Callable[..., Any], params: Tree, model_state: Tree = None) -> State:
        """Goes on with another model from the next step on; the plan is made anew. What is in flight is finished first.

        A parameter with the path, shape and type of one of the present model keeps its value and its optimizer state,
        and so does a leaf of the model state. What the new model lacks waits on the host until a later model has it
        again. The rest begins as given, with fresh optimizer state. Layers that some model had are not compiled again;
        a loss that was met before, the very object, is neither traced nor planned again.

        Args:
            state: the newest; consumed.
            loss_fn: of the same kind as the present one.
            params: those of the new model; of what is kept or comes back shapes are enough.
            model_state: that of the new model; by default the present one.

        Raises:
            ValueError: the loss reads a parameter that `params` lack, or one has another shape than before.
            MemoryLimitExceeded: the new model does not keep the limit. In both cases nothing has changed.
            StageError: something failed on the way; its `state` is the present model's, drained and whole.
        """
        self._check_state(state)
        check_loss(loss_fn, has_state=self._settings.has_state)
        builds = self._models.of(self._builds, loss_fn, params, model_state)
        takeover = self._models.takeover(self._builds, builds, params, model_state, self._limits)
        self._check_losses(state, wait=bool(state.flight))  # while their versions are known
        state = self.drain(state)
        state.check(len(self.build.persistent))
        try:
            state = replace(state, arrays=takeover.run(state.arrays, self.ledger))
        except StageError as error:
            error.state = replace(state, arrays=tuple(error.table))
            error.add_note("The model before is whole: go on with the `state` of this error, or save it.")
            raise
        self._follow(builds)
        state = replace(state, model=builds.token)
        self.ledger.versions = VersionLedger()
        self.model_history.append(takeover.change(state.step))
        _log.info("%s", self.model_history[-1])
        return state

    def precompile(self, loss_fn: Callable[..., Any], params: Tree, model_state: Tree = None) -> None:
        """Traces, plans and compiles a model for all devices ahead of `update_model`; nothing changes.

        It may be called in another thread while this one trains; layers that no model had are timed beside that.
        `params` and `model_state` may be shapes.
        """
        with beside_training():
            self._models.of(self._builds, loss_fn, params, model_state).compile_everywhere()

    def wait(self, state: State) -> State:
        """Waits until a state is there; if a stage failed on the way to it, or the loss is NaN, says which."""
        try:
            jax.block_until_ready(state)
        except Exception as error:
            raise self._controller.failure(error) from error
        self._controller.settle()
        self._check_losses(state, wait=True)
        return state

    def _advance(self, state: State, batch: Tree) -> tuple[State, Metrics]:
        """One step of a run.

        What went wrong before is told first; the state is whole then. Of a stream the losses are waited for while
        another step is under way, else they are looked at once they are there. Where code on the host can fail, a step
        is not done before the one before it.
        """
        self._check_state(state)
        self._controller.check()
        self._check_losses(state, wait=bool(state.flight), last=not state.flight)
        self._adapter.offer(state.step)
        state = self._moves.between(state, self.drain, self._builds.of(batch))
        build, inside = self.build_at(batch, state.updates), self._moves.inside(state.step)
        if build.schedule.synchronous:
            bound, uses, updates, flight = inside.bound if inside else build.step, (), 1, 0
            if not self._order.synchronous:
                uses = synchronous_uses(len(build.traced.graph.layers), self._microbatches)
        else:
            flight = inside.steps if inside else state.flight
            build = inside.new if inside else build
            step, bound = build.stream_step(flight)
            uses, flight = step.uses, flight + 1
            updates = self._microbatches // self._order.period(self._microbatches)
        state.check(bound.lowered.persistent)
        earlier, feeds = len(self._controller.marks), self.feeds(batch, state.words, state.step)
        arrays, values = self._controller.run(bound, state.arrays, feeds, Moment(state.step, flows=bool(flight)))
        if inside:
            self._moves.made(inside)
        else:
            self._adapter.saw(self._controller.monitor, build, state.step, flight)
        settled, flight = build.settled(flight)
        if settled is not build:
            self._builds.switch(settled)
        if uses:
            self.ledger.versions.record(uses, state.step * self._microbatches, state.updates)
        losses = values[-self._microbatches :] if flight else []
        metrics = self._builds.metrics(build, values[: len(values) - len(losses)])
        self._losses.add(Losses(state.step, build.plan, losses or [metrics["loss"]], apart=bool(losses)))
        self._controller.settle(earlier)
        updates += state.updates
        return replace(state, arrays=arrays, step=state.step + 1, flight=flight, updates=updates), metrics

    def build_at(self, batch: Tree, updates: int) -> Build:
        """What a batch runs after so many updates: an asynchronous schedule may begin with synchronous steps."""
        build = self._builds.of(batch)
        return self._builds.warm(batch) if updates < self._order.warmup_updates else build

    def build_of(self, batch: Tree, microbatch: int, updates: int) -> Build:
        """What a micro-batch of the past ran, whose weights had so many updates."""
        build = self.build_at(batch, updates)
        moment = divmod(microbatch, self._microbatches)
        later = [change for change in self.history if (change.step, change.microbatch) > moment]
        return replace(build, plan=later[0].old, origin=None) if later else build

    # Keeping

    def save(self, path: str | Path, state: State, extra: dict[str, Any] | None = None) -> None:
        """Writes a checkpoint, keyed by parameter path: any cut can restore it. `extra` is kept with it (JSON).

        Of a state in flight everything is kept that the same schedule, cuts and fates need to go on to the bit.
        """
        saving = self._saving
        arrays = {kind: self._host_values(state, kind) for kind in saving.names}
        params, rng, model_state = self._builds.inputs
        shapes = {"params": params, "batch": self._builds.batch, "model_state": model_state}
        saving.write(path, state, arrays, rng, shapes, self.ledger.versions, extra or {})

    def restore(self, path: str | Path) -> State:
        """The state that `save` wrote, under this pipeline's own plan."""
        arrays, meta = load_checkpoint(path)
        if not self._builds:
            self._builds.trace(*saved_inputs(path, meta))
        saving, words, build = self._saving, saved_words(meta), self.build
        if build.origin:  # it was on its way from another plan
            build = replace(build, origin=None)
        if "flight" not in meta:
            leaves = saving.leaves(path, arrays)
            state = self._place(self._builds, build, leaves, words, int(meta["step"]), int(meta.get("updates", 0)))
        else:
            flight, values = meta["flight"], arrays["flight"]
            saving.check_flight(path, flight)
            if len(flight["legs"]) > 1:
                build = self._builds.along(flight["legs"])
            self._begin(build, build.peaks)
            found = restore_in_flight(build, int(flight["steps"]), values, self.ledger)
            self.ledger.versions = VersionLedger.from_json(flight["versions"])
            steps, updates = int(flight["steps"]), int(meta["updates"])
            state = State(found, words, int(meta["step"]), steps, updates, self._builds.token)
        if build is not self.build:
            self._builds.switch(build)
        return state

    @property
    def _saving(self) -> Saving:
        return Saving(self.build, self._order, self._microbatches)

    def _begin(self, build: Build, making: Sequence[Peak]) -> None:
        """A run begins, if it and the making of its arrays keep the limits: nothing is left of another one."""
        limits = replace(self._limits, parked={})
        limits.check(build.peaks, self._devices)
        limits.check(making, self._devices, "while its arrays are made")
        self._models.parked.clear()
        self._moves.drop("run")
        self._losses.begin()
        self._controller.marks.clear()
        self.ledger.begin()
