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
from jvpipe.arguments import batch_shapes, micro_batch_shapes, place_stages, reported_limit
from jvpipe.ir.buffers import HOST
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.ir.sizes import parse_bytes
from jvpipe.ir.use import Use
from jvpipe.planners import find_planner
from jvpipe.planners.by_hand import checkpointed, with_fates
from jvpipe.planning import Planned, Request, decide, measure
from jvpipe.programs.optimizer import OptimizerCut, cut_optimizer
from jvpipe.programs.store import shared_store
from jvpipe.report.explain import explain
from jvpipe.report.reasons import cut_reasons
from jvpipe.runtime import skeleton
from jvpipe.runtime.build import Build
from jvpipe.runtime.checkpoint import (
    check_paths,
    load_checkpoint,
    load_meta,
    savable,
    savable_dtype,
    save_checkpoint,
    to_host,
)
from jvpipe.runtime.controller import Controller, Feeds
from jvpipe.runtime.flight import names_of, plain_arrays, step_of
from jvpipe.runtime.monitor import Measured, Monitor
from jvpipe.runtime.replay import Replay
from jvpipe.runtime.state import Leaf, Name, Placing, State, given_leaves, made_leaves
from jvpipe.runtime.tensors import Ledger, check_limit
from jvpipe.schedules import Schedule, find_schedule
from jvpipe.trace.graph import Traced
from jvpipe.trace.loss import KeyKind, abstract, key_words
from jvpipe.trace.model import trace_model

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

    def _place(self, build: Build, leaves: dict[Name, Leaf], words: np.ndarray | None, step: int) -> State:
        check_limit(build.peaks, self._devices, self._limit, self._host_limit)
        constants = given_leaves(build.traced.loss.constants)
        leaves = leaves | {("constant", i): leaf for i, leaf in enumerate(constants)}
        placing = self._placing(build)
        check_limit(placing.peaks(leaves), self._devices, self._limit, idle="while its arrays are made")
        arrays = placing.place(self.ledger, leaves, self._store)
        return State(arrays, words, step)

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
        period = self._microbatches if self._order.synchronous else self._order.period(self._microbatches)
        optimizer = first.optimizer if first else self._cut(graph, model.params, period)
        build = self._build(traced, first.plan, optimizer) if first else self._first_build(traced, optimizer)
        if self._order.warmup_updates:
            warm = self._cut(graph, model.params, self._microbatches)
            self._warm[batch_shapes(batch)] = replace(build, schedule=find_schedule("1f1b"), optimizer=warm)
        self._builds[batch_shapes(batch)] = build
        return build

    def _cut(self, graph: LayerGraph, params: Tree, period: int) -> OptimizerCut:
        """The optimizer in pieces, for updates from `period` micro-batches."""
        found = cut_optimizer(
            self._optimizer,
            abstract(params),
            [p.owner for p in graph.parameters],
            [len(p.readers) for p in graph.parameters],
            microbatches=None if graph.weighted else period,
            grad_norm=self._grad_norm,
        )
        if not self._order.synchronous and (found.cross_layer or self._grad_norm):
            name = " and ".join(found.cross_layer) or "grad_norm=True"
            raise ValueError(
                f"{name} needs a value of all layers at once, which {self._schedule} does not have: its layers are "
                "updated at different times. Use a synchronous schedule (1f1b), or what looks at one parameter at a "
                "time, such as optax.adaptive_grad_clip or optax.clip"
            )
        return found

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
        if not self._checked:
            self._check_first_loss(metrics["loss"], state.step - 1)
        return self.drain(state), metrics

    def run(
        self, state: State, batches: Iterable[Tree], num_steps: int | None = None
    ) -> Iterator[tuple[State, Metrics]]:
        """Steps through a stream of batches; a state is valid until the next one is asked for.

        Under an asynchronous schedule the pipeline stays full between the steps: the states are in flight. Such a
        state can be saved, evaluated or drained; its parameters are each layer's newest.
        """
        watched: tuple[State, list[jax.Array]] | None = None
        for batch in islice(batches, num_steps):
            state, metrics, losses = self._advance(state, batch)
            self._check_losses(watched)
            watched = (state, losses)
            yield state, metrics
        self._check_losses(watched)

    def drain(self, state: State) -> State:
        """Finishes what is in flight."""
        if not state.flight:
            return state
        build = self._flying(state)
        step, bound = build.drain(state.flight)
        arrays, _ = self._controller.run(bound, state.arrays, {})
        self._record(step.uses, state, state.step)
        self.ledger.versions.drained()
        return replace(state, arrays=arrays, flight=0)

    def evaluate(self, state: State, batch: Tree) -> Metrics:
        """The metrics of a batch, forward only; nothing changes."""
        build = self._build_for(batch)
        arrays = self._plain(build, state)
        check_limit(build.peaks_of(build.evaluation), self._devices, self._limit, self._host_limit)
        _, values = self._controller.run(build.evaluation, arrays, self._feeds(batch, state))
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
        arrays, values = self._controller.run(bound, state.arrays, self._feeds(batch, state))
        if uses:
            self._record(uses, state, state.step)
        losses = values[-self._microbatches :] if flight else []
        metrics = self._metrics(build, values[: len(values) - len(losses)])
        return State(arrays, state.words, state.step + 1, flight, state.updates + updates), metrics, losses

    def _record(self, uses: Sequence[Use], state: State, step: int) -> None:
        self.ledger.versions.record(uses, step * self._microbatches, state.updates)

    def replay(
        self, params: Tree, batches: Iterable[Tree], rng: jax.Array | None, model_state: Tree = None
    ) -> tuple[Tree, list[float]]:
        """What this pipeline's run computed, computed again on one device by its ledger of versions alone.

        Args:
            params: what the run began with.
            batches: what it saw, from its first asynchronous step on.
            rng: the key of the run.
            model_state: with `has_state`.

        Returns:
            the parameters, as numpy arrays, and the loss of every micro-batch.
        """
        build, ledger = self._first, self.ledger.versions
        split = self._stacks.split(params)
        leaves = self._optimizer.init(split)
        holders = ((j, layer) for j, layer in build.optimizer.holders if layer is not None)
        initial = jax.tree.leaves(leaves)
        run = Replay(
            build,
            jax.tree.leaves(split),
            {(j, layer): initial[j] for j, layer in holders},
            jax.tree.leaves(model_state),
            build.traced.loss.constants,
            min((use.version for use in ledger.uses()), default=0),
        )
        found = ledger.microbatches()
        losses = []
        for batch in batches:
            feeds = None
            for m in range(self._microbatches):
                uses, drained = next(found, (None, False))
                if uses is None:
                    break
                step = uses[0].microbatch // self._microbatches
                state = State((), None if rng is None else key_words(rng), step)
                feeds = feeds or self._feeds(batch, state)
                parts = [feeds["batch", i][m] for i in range(len(jax.tree.leaves(batch)))]
                losses.append(run.microbatch(uses, parts, feeds["seed", 0][m] if rng is not None else None))
                if drained:
                    run.forget()
        joined = self._stacks.join(jax.tree.unflatten(jax.tree.structure(split), run.parameters))
        return jax.tree.map(np.asarray, joined), losses

    def _plain(self, build: Build, state: State) -> tuple[jax.Array, ...]:
        state.check(len(names_of(build, state.flight)) if state.flight else len(build.persistent))
        return plain_arrays(build, state)

    def _flying(self, state: State) -> Build:
        """The build whose stream a state is in."""
        build = self._first
        state.check(len(names_of(build, state.flight)))
        return build

    def _build_for(self, batch: Tree) -> Build:
        if not self._builds:
            raise ValueError("this pipeline has no model yet: call init or restore first")
        key = batch_shapes(batch)
        if key not in self._builds:
            _log.warning("the shapes of the batch changed: tracing and compiling for them")
            params, rng, model_state = self._inputs
            self._trace(params, batch, rng, model_state)
        return self._builds[key]

    def _feeds(self, batch: Tree, state: State) -> Feeds:
        micro = self._microbatches
        feeds: dict[tuple[str, int], Sequence[Any]] = {}
        for i, leaf in enumerate(map(np.asarray, jax.tree.leaves(batch))):
            size = len(leaf) // micro
            feeds["batch", i] = [leaf[m * size : (m + 1) * size] for m in range(micro)]
        if state.words is not None:
            words = state.words.ravel()
            feeds["seed", 0] = [np.array([*words, state.step, m], np.uint32) for m in range(micro)]
        return feeds

    def _metrics(self, build: Build, values: list[jax.Array]) -> Metrics:
        groups = len(build.traced.graph.aux_groups)
        metrics: Metrics = {"loss": values[0]}
        if self._options["has_aux"]:
            metrics["aux"] = jax.tree.unflatten(build.traced.loss.aux_tree, values[1 : 1 + groups])
        if len(values) > 1 + groups:
            metrics["grad_norm"] = values[1 + groups]
        return metrics

    def _check_first_loss(self, loss: jax.Array, step: int) -> None:
        try:
            value = float(loss)
        except Exception as error:
            raise self._controller.failure(error) from error
        if not np.isfinite(value):
            raise ValueError(
                f"the loss of step {step} is {value}: check the batch, the learning rate and the initial parameters"
            )
        self._checked = True

    def _check_losses(self, watched: tuple[State, list[jax.Array]] | None) -> None:
        """Raises if a micro-batch of a step that has passed gave a loss that is no number."""
        for i, loss in enumerate(watched[1] if watched else ()):
            try:
                value = float(loss)
            except Exception as error:
                raise self._controller.failure(error) from error
            if not np.isfinite(value):
                step = watched[0].step - 1 if watched else 0
                raise ValueError(self._astray(value, step, step * self._microbatches + i))

    def _astray(self, value: float, step: int, m: int) -> str:
        layer = self.graph.loss_layer
        stage = next(s for s, found in enumerate(self.plan.stages) if layer in found.layers)
        read = {self.ledger.versions[found.layers[0], m].forward for found in self.plan.stages}
        return (
            f"the loss of micro-batch {m} (step {step}) is {value} at stage {stage}, read with versions {sorted(read)} "
            "of the weights. The states since are not to be saved; the last checkpoint is whole. A lower learning "
            "rate, or a schedule with less staleness, may help"
        )

    # Looking

    @property
    def programs(self) -> dict[Device, int]:
        """The number of compiled programs that steps use, per device."""
        used = set().union(*(build.executables for build in self._builds.values()))
        return {device: sum(d == device for _, d in used) for device in self._devices}

    @property
    def plan(self) -> Plan:
        """Which layers run where."""
        return self._first.plan

    @property
    def graph(self) -> Any:
        """The layer graph of the model."""
        return self._first.traced.graph

    @property
    def _first(self) -> Build:
        if not self._builds:
            raise ValueError("this pipeline has no model yet: call init or restore first")
        return next(iter(self._builds.values()))

    def explain(self) -> str:
        """A text that says what runs where, what it costs and why."""
        build = self._first
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

    def state_step(self, state: State) -> int:
        """The number of steps that a state has seen."""
        return state.step

    def _host_values(self, state: State, kind: str) -> list[Any]:
        found = self._placing(self._first).values(self._plain(self._first, state))
        try:
            return [to_host(found[name]) for name in sorted(n for n in found if n[0] == kind)]
        except Exception as error:
            raise self._controller.failure(error) from error

    def monitor(self, on: bool = True) -> None:
        """Switches on the measuring of every task, or off."""
        self._controller.monitor = Monitor(self._devices) if on else None

    def measured(self) -> Measured:
        """What the last step did that was measured: what ran when, what was swapped; waits for its end."""
        if self._controller.monitor is None:
            raise ValueError("nothing is measured: call pipe.monitor() before the step")
        return self._controller.monitor.measured()

    @property
    def planned(self) -> Planned | None:
        """What the plan was decided on; None if it was given."""
        return self._planned

    # Keeping

    def save(self, path: str | Path, state: State, extra: dict[str, Any] | None = None) -> None:
        """Writes a checkpoint, keyed by parameter path: any cut can restore it. `extra` is kept with it (JSON)."""
        arrays = {
            kind: dict(zip(names, map(savable, self._host_values(state, kind)), strict=True))
            for kind, names in self._names().items()
        }
        words = None if state.words is None else state.words.tolist()
        params, rng, model_state = self._inputs
        shapes = {"params": params, "batch": self._batch, "model_state": model_state}
        meta = {
            "step": state.step,
            "words": words,
            "key": None if rng is None else [list(KeyKind.of(rng).shape), KeyKind.of(rng).impl],
            "schedule": self._schedule,
            "shapes": {name: skeleton.dump(tree) for name, tree in shapes.items()},
            "extra": extra or {},
        }
        save_checkpoint(path, arrays, meta)

    def restore(self, path: str | Path) -> State:
        """The state that `save` wrote, under this pipeline's own plan."""
        arrays, meta = load_checkpoint(path)
        if not self._builds:
            self._trace_saved(path, meta)
        build = self._first
        leaves: dict[Name, Leaf] = {}
        for kind, names in self._names().items():
            shapes = self._shapes_of(kind)
            check_paths(arrays.get(kind, {}), dict(zip(names, shapes, strict=True)), str(path))
            for i, name in enumerate(names):
                leaves |= {(kind, i): given_leaves([arrays[kind][name]])[0]}
        words = None if meta["words"] is None else np.asarray(meta["words"], np.uint32)
        return self._place(build, leaves, words, int(meta["step"]))

    def _trace_saved(self, path: str | Path, meta: dict[str, Any]) -> None:
        """Traces at the shapes that a checkpoint tells of, for a pipeline that was never initialised."""
        shapes = meta["shapes"]
        if unknown := [name for name, found in shapes.items() if found is None]:
            raise ValueError(
                f"{path} does not tell the containers of its {' and '.join(unknown)}: call init before restore"
            )
        trees = {name: skeleton.load(found) for name, found in shapes.items()}
        rng = None
        if meta["key"] is not None:
            (shape, impl), words = meta["key"], np.asarray(meta["words"], np.uint32)
            rng = jax.numpy.asarray(words.reshape(shape))
            rng = rng if impl is None else jax.random.wrap_key_data(rng, impl=impl)
        self._trace(trees["params"], trees["batch"], rng, trees["model_state"])

    def _names(self) -> dict[str, list[str]]:
        """What the arrays of each kind are called in a checkpoint."""
        build = self._first
        graph = build.traced.graph
        return {
            "parameter": [p.array.name for p in graph.parameters],
            "optimizer": [leaf.array.name for leaf in build.optimizer.state],
            "state": [array.name for array in graph.state],
        }

    def _shapes_of(self, kind: str) -> list[tuple[tuple[int, ...], str]]:
        graph, optimizer = self._first.traced.graph, self._first.optimizer
        arrays = {
            "parameter": [p.array for p in graph.parameters],
            "optimizer": [leaf.array for leaf in optimizer.state],
            "state": graph.state,
        }
        return [(tuple(a.shape), savable_dtype(str(a.dtype))) for a in arrays[kind]]


def checkpoint_extra(path: str | Path) -> dict[str, Any]:
    """What `Pipeline.save` was given as `extra`."""
    return load_meta(path)["extra"]
