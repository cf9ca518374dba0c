"""The facade: checks what the user gives and wires the parts. Pytrees end here; below are flat arrays per layer."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jvpipe._jax import Device
from jvpipe.arguments import batch_shapes, cut_for, micro_batch_shapes, place_stages, reported_limit
from jvpipe.ir.buffers import HOST
from jvpipe.ir.plan import Plan
from jvpipe.ir.sizes import parse_bytes
from jvpipe.planners import find_planner
from jvpipe.planners.by_hand import checkpointed, with_fates
from jvpipe.planning import Planned, Request, decide, measure
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.store import shared_store
from jvpipe.report.explain import explain
from jvpipe.report.reasons import cut_reasons
from jvpipe.runtime.build import Build
from jvpipe.runtime.checkpoint import load_checkpoint, to_host
from jvpipe.runtime.controller import Controller, Feeds
from jvpipe.runtime.flight import lifted, names_of, plain_arrays, step_of
from jvpipe.runtime.losses import LossWatch
from jvpipe.runtime.monitor import Measured, Monitor
from jvpipe.runtime.saving import Saving, saved_inputs, saved_words
from jvpipe.runtime.state import Leaf, Name, Placing, State, given_leaves, made_leaves
from jvpipe.runtime.tensors import Ledger, check_limit
from jvpipe.runtime.versions import VersionLedger
from jvpipe.schedules import Schedule, find_schedule
from jvpipe.trace.graph import Traced
from jvpipe.trace.loss import abstract, key_words
from jvpipe.trace.model import trace_model
from jvpipe.trace.stacks import Stacks

Tree = Any
Metrics = dict[str, Any]
_log = logging.getLogger("jvpipe")


class Pipeline:
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
        host_memory_limit: for swapped values of all devices together.
        fates: of tensors by name, such as `{"*/attention/*": "swap"}`: "keep", "swap" or "recompute".
        checkpoint: torchgpipe's modes, which micro-batches are computed again from their stage's input: "always",
            "except_last" or "never".
        devices: one per stage, by default the first of `jax.devices()`; name one twice to share it.
        has_aux: the loss returns something beside.
        has_state: the loss carries a model state (batch norm).
        grad_norm: also report the global norm of the gradient.

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
    ) -> None:
        self._order = find_schedule(schedule)
        find_planner(planner)
        count = len(stages.stages) if isinstance(stages, Plan) else stages
        for name, value in (("stages", count), ("microbatches", microbatches)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
        self._order.check(count, microbatches)
        self._loss_fn, self._optimizer = loss_fn, optimizer
        self._wanted, self._microbatches = stages, microbatches
        self._schedule, self._planner = self._order.name, planner
        self._host_limit = parse_bytes(host_memory_limit)
        self._fates, self._checkpoint = dict(fates or {}), checkpoint
        self._options = {"has_aux": has_aux, "has_state": has_state}
        self._grad_norm = grad_norm
        self._devices, self._places = place_stages(stages, devices)
        self._limit = parse_bytes(memory_limit) or reported_limit(self._devices)
        self._store = shared_store()
        self._builds: dict[Any, Build] = {}
        self._warm: dict[Any, Build] = {}  # for the synchronous steps before an asynchronous stream
        self.ledger = Ledger(self._devices)
        if not self._order.synchronous:
            self.ledger.versions.period = self._order.period(microbatches)
        self._controller = Controller(self.ledger)
        self._losses = LossWatch(self._controller, microbatches)
        self._checked = False
        self._planned: Planned | None = None

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
        if callable(params):
            if rng is None:
                raise ValueError("parameters that a function makes need a key: init(function, batch, rng)")
            build = self._trace(jax.eval_shape(params, rng), batch, rng, model_state)
            leaves = made_leaves(self._store, lambda key: self._stacks.split(params(key)), rng)
        else:
            build = self._trace(abstract(params), batch, rng, model_state)
            leaves = given_leaves(jax.tree.leaves(self._stacks.split(params)))
        named = {("parameter", i): leaf for i, leaf in enumerate(leaves)}
        named |= {("state", i): leaf for i, leaf in enumerate(given_leaves(jax.tree.leaves(model_state)))}
        return self._place(build, named, None if rng is None else key_words(rng), 0)

    def _place(
        self, build: Build, leaves: dict[Name, Leaf], words: np.ndarray | None, step: int, updates: int = 0
    ) -> State:
        check_limit(build.peaks, self._devices, self._limit, self._host_limit)
        constants = given_leaves(build.traced.loss.constants)
        leaves = leaves | {("constant", i): leaf for i, leaf in enumerate(constants)}
        placing = self._placing(build)
        check_limit(placing.peaks(leaves), self._devices, self._limit, idle="while its arrays are made")
        arrays = placing.place(self.ledger, leaves, self._store)
        return State(arrays, words, step, updates=updates)

    def _placing(self, build: Build) -> Placing:
        return Placing(build.traced.graph, build.optimizer, build.persistent, self._devices)

    def _trace(self, params: Tree, batch: Tree, rng: jax.Array | None, model_state: Tree) -> Build:
        """Traces at the shapes of a batch; the first time this also plans."""
        micro = micro_batch_shapes(batch, self._microbatches)
        self._inputs = (abstract(params), rng, abstract(model_state))
        self._batch = abstract(batch)
        first = next(iter(self._builds.values()), None)
        cuts = first.traced.cuts if first else None
        model = trace_model(self._loss_fn, params, micro, rng, model_state, cuts, **self._options)
        self._stacks, traced, graph = model.stacks, model.traced, model.traced.graph
        cut = partial(cut_for, self._optimizer, graph, model.params, self._microbatches, grad_norm=self._grad_norm)
        optimizer = first.optimizer if first else cut(self._order)
        build = self._build(traced, first.plan, optimizer) if first else self._first_build(traced, optimizer)
        if self._order.warmup_updates:
            plain = find_schedule("1f1b")
            self._warm[batch_shapes(batch)] = replace(build, schedule=plain, optimizer=cut(plain))
        self._builds[batch_shapes(batch)] = build
        return build

    def _build(self, traced: Traced, plan: Plan, optimizer: OptimizerCut) -> Build:
        plan.check(len(traced.graph.layers), len(self._devices))
        layer_s = self._planned.layer_s if self._planned else None
        return Build(traced, plan, self._order, optimizer, self._microbatches, self._devices, self._store, layer_s)

    def _first_build(self, traced: Traced, optimizer: OptimizerCut) -> Build:
        """Plans, unless the plan is given, and makes the plan ready to run."""
        if isinstance(self._wanted, Plan):
            plan = self._wanted.with_schedule(self._schedule)
            return self._build(traced, self._by_hand(traced, plan), optimizer)
        layers = len(traced.graph.layers)
        if self._wanted > layers:
            raise ValueError(
                f"{self._wanted} stages need as many layers, the model has {layers}: use at most {layers} stages"
            )
        request = Request(
            self._planner,
            self._wanted,
            self._schedule,
            self._microbatches,
            self._places,
            self._limit,
            self._host_limit,
        )
        problem = measure(request, traced, optimizer, self._devices[0], self._store)

        def peak_bytes_of(plan: Plan) -> int:
            build = self._build(traced, self._by_hand(traced, plan), optimizer)
            return max(peak.bytes for peak in build.peaks[:HOST])

        self._planned = decide(request, problem, peak_bytes_of)
        return self._build(traced, self._by_hand(traced, self._planned.plan), optimizer)

    def _by_hand(self, traced: Traced, plan: Plan) -> Plan:
        """A plan with the fates that the user gave."""
        if self._checkpoint is not None:
            plan = checkpointed(traced.graph, plan, self._checkpoint)
        return with_fates(traced.graph, plan, self._fates)

    # Running

    def step(self, state: State, batch: Tree) -> tuple[State, Metrics]:
        """What one batch teaches. Consumes `state`; returns at once, the devices work on.

        Under an asynchronous schedule nothing is in flight afterwards: `run` keeps the pipeline full.
        """
        state, metrics, _ = self._advance(state, batch)
        self._check_first(metrics, state.step - 1)
        return self.drain(state), metrics

    def run(
        self, state: State, batches: Iterable[Tree], num_steps: int | None = None
    ) -> Iterator[tuple[State, Metrics]]:
        """Steps through a stream of batches; a state is valid until the next one is asked for.

        Under an asynchronous schedule the pipeline stays full between the steps: the states are in flight. Such a
        state can be saved, evaluated or drained; its parameters are each layer's newest.
        """
        passed: list[jax.Array] = []  # the losses of the step before
        for batch in islice(batches, num_steps):
            before = state.step
            state, metrics, losses = self._advance(state, batch)
            self._losses.check(passed, before - 1, self.plan)
            passed = losses
            self._check_first(metrics, before)
            yield state, metrics
        self._losses.check(passed, state.step - 1, self.plan)

    def _check_first(self, metrics: Metrics, step: int) -> None:
        if not self._checked:
            self._losses.check_first(metrics["loss"], step)
            self._checked = True

    def drain(self, state: State) -> State:
        """Finishes what is in flight."""
        if not state.flight:
            return state
        step, bound = self.build.drain(state.flight)
        state.check(bound.lowered.persistent)
        arrays, _ = self._controller.run(bound, state.arrays, {})
        self.ledger.versions.record(step.uses, state.step * self._microbatches, state.updates)
        self.ledger.versions.drained()
        return replace(state, arrays=arrays, flight=0)

    def evaluate(self, state: State, batch: Tree) -> Metrics:
        """The metrics of a batch, forward only; nothing changes."""
        build = self._build_for(batch)
        arrays = self._plain(build, state)
        check_limit(build.peaks_of(build.evaluation), self._devices, self._limit, self._host_limit)
        _, values = self._controller.run(build.evaluation, arrays, self.feeds(batch, state.words, state.step))
        return self._metrics(build, values)

    def wait(self, state: State) -> State:
        """Waits until a state is there; if a stage failed on the way to it, says which."""
        try:
            return jax.block_until_ready(state)
        except Exception as error:
            raise self._controller.failure(error) from error

    def _advance(self, state: State, batch: Tree) -> tuple[State, Metrics, list[jax.Array]]:
        """One step of a run; also the losses of its micro-batches, if they are known apart."""
        build = self._build_for(batch)
        self._controller.check(wait=False)
        warm = not self._order.synchronous and state.updates < self._order.warmup_updates
        if warm:
            build = self._warm[batch_shapes(batch)]
        if warm or self._order.synchronous:
            bound, uses, updates, flight = build.step, (), 1, 0
        else:
            n = step_of(build, state.flight)
            bound, uses, flight = build.steps[n], build.stream.steps[n].uses, state.flight + 1
            updates = self._microbatches // self._order.period(self._microbatches)
        state.check(bound.lowered.persistent)
        arrays, values = self._controller.run(bound, state.arrays, self.feeds(batch, state.words, state.step))
        if uses:
            self.ledger.versions.record(uses, state.step * self._microbatches, state.updates)
        losses = values[-self._microbatches :] if flight else []
        metrics = self._metrics(build, values[: len(values) - len(losses)])
        return State(arrays, state.words, state.step + 1, flight, state.updates + updates), metrics, losses

    @property
    def build(self) -> Build:
        """What this pipeline runs, for whoever follows it."""
        if not self._builds:
            raise ValueError("this pipeline has no model yet: call init or restore first")
        return next(iter(self._builds.values()))

    @property
    def stacks(self) -> Stacks:
        """How stacked parameters are split into layers."""
        return self._stacks

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """As it was given."""
        return self._optimizer

    def _plain(self, build: Build, state: State) -> tuple[jax.Array, ...]:
        state.check(len(names_of(build, state.flight)) if state.flight else len(build.persistent))
        return plain_arrays(build, state)

    def _build_for(self, batch: Tree) -> Build:
        if not self._builds:
            raise ValueError("this pipeline has no model yet: call init or restore first")
        key = batch_shapes(batch)
        if key not in self._builds:
            _log.warning("the shapes of the batch changed: tracing and compiling for them")
            params, rng, model_state = self._inputs
            self._trace(params, batch, rng, model_state)
        return self._builds[key]

    def feeds(self, batch: Tree, words: np.ndarray | None, step: int) -> Feeds:
        """What the micro-batches of a step read from the host; `words` are those of the run's key."""
        micro = self._microbatches
        feeds: dict[tuple[str, int], Sequence[Any]] = {}
        for i, leaf in enumerate(map(np.asarray, jax.tree.leaves(batch))):
            size = len(leaf) // micro
            feeds["batch", i] = [leaf[m * size : (m + 1) * size] for m in range(micro)]
        if words is not None:
            feeds["seed", 0] = [np.array([*words.ravel(), step, m], np.uint32) for m in range(micro)]
        return feeds

    def _metrics(self, build: Build, values: list[jax.Array]) -> Metrics:
        groups = len(build.traced.graph.aux_groups)
        metrics: Metrics = {"loss": values[0]}
        if self._options["has_aux"]:
            metrics["aux"] = jax.tree.unflatten(build.traced.loss.aux_tree, values[1 : 1 + groups])
        if len(values) > 1 + groups:
            metrics["grad_norm"] = values[1 + groups]
        return metrics

    # Looking

    @property
    def programs(self) -> dict[Device, int]:
        """The number of compiled programs that steps use, per device."""
        used = set().union(*(build.executables for build in self._builds.values()))
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
        reasons = cut_reasons(self._planned.problem, self._planned.decision) if self._planned else ()
        return explain(build.traced.graph, build.plan, build.peaks, build.layer_s, self._devices, reasons)

    def params(self, state: State) -> Tree:
        """The parameters as the caller gave them, as numpy arrays."""
        values = self._host_values(state, "parameter")
        split = jax.tree.structure(self._stacks.split(self._inputs[0]))
        return self._stacks.join(jax.tree.unflatten(split, values))

    def model_state(self, state: State) -> Tree:
        """The model state as the caller gave it, as numpy arrays (keys as keys)."""
        return jax.tree.unflatten(jax.tree.structure(self._inputs[2]), self._host_values(state, "state"))

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
        return self._planned

    # Keeping

    def save(self, path: str | Path, state: State, extra: dict[str, Any] | None = None) -> None:
        """Writes a checkpoint, keyed by parameter path: any cut can restore it. `extra` is kept with it (JSON).

        Of a state in flight everything is kept that the same schedule, cuts and fates need to go on to the bit.
        """
        saving = self._saving
        arrays = {kind: self._host_values(state, kind) for kind in saving.names}
        params, rng, model_state = self._inputs
        shapes = {"params": params, "batch": self._batch, "model_state": model_state}
        saving.write(path, state, arrays, rng, shapes, self.ledger.versions, extra or {})

    def restore(self, path: str | Path) -> State:
        """The state that `save` wrote, under this pipeline's own plan."""
        arrays, meta = load_checkpoint(path)
        if not self._builds:
            self._trace(*saved_inputs(path, meta))
        saving, words = self._saving, saved_words(meta)
        if "flight" not in meta:
            leaves = saving.leaves(path, arrays)
            return self._place(self.build, leaves, words, int(meta["step"]), int(meta.get("updates", 0)))
        saving.check_flight(path, meta["flight"])
        check_limit(self.build.peaks, self._devices, self._limit, self._host_limit)
        steps, values = int(meta["flight"]["steps"]), arrays["flight"]
        found = lifted(self.build, steps, [values[name] for name in sorted(values)], self.ledger)
        self.ledger.versions = VersionLedger.from_json(meta["flight"]["versions"])
        return State(found, words, int(meta["step"]), steps, int(meta["updates"]))

    @property
    def _saving(self) -> Saving:
        return Saving(self.build, self._order, self._microbatches)
