"""The facade: checks what the user gives. Pytrees end here; below are flat arrays per layer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jvpipe._jax import Device
from jvpipe.ir.optimizer import Optimizer
from jvpipe.ir.outline import outline_of
from jvpipe.ir.plan import Plan
from jvpipe.ir.values import ValueKind
from jvpipe.papers.registry import reason_of
from jvpipe.report.explain import explain, stage_lines
from jvpipe.runtime.engine.beside_training import beside_training
from jvpipe.runtime.engine.hosts import telling
from jvpipe.runtime.engine.tensors import Ledger
from jvpipe.runtime.engine.training_state import State, given_leaves, made_leaves
from jvpipe.schedules import Schedule
from jvpipe.session import checkpoints
from jvpipe.session.arguments import (
    check_arrays,
    check_key,
    check_loss,
    check_predicted,
    checked_moment,
    checked_plan,
    checked_stream,
)
from jvpipe.session.devices import settings_of
from jvpipe.session.engine import agree_on_given
from jvpipe.session.evaluation import evaluate, predict
from jvpipe.session.options import PIPELINE, checked
from jvpipe.session.session import Metrics, Session, switch_model
from jvpipe.session.trigger import Rule, checked_rule
from jvpipe.trace.leaves import is_initialiser, made_shapes
from jvpipe.util.given import check_callback, checked_flag, checked_path

Tree = Any


class Pipeline:
    """Trains a plain JAX loss over a pipeline of devices.

    Args:
        loss_fn: `(params, batch, rng) -> loss`, a scalar or `jvpipe.Weighted`; `(loss, aux)` with
            `has_aux`; `(params, model_state, batch, rng) -> (loss, new_model_state[, aux])` with
            `has_state`.
        optimizer: any optax transformation that its jaxpr lets cut.
        stages: their number, 2 unless given, or a `Plan`; with `replicas="auto"` as many as are
            best unless given.
        microbatches: how many a batch is split into, 4 unless given; it must divide the leading
            axis of every batch leaf. A loss in which examples meet, such as a contrastive one, sees
            those of a micro-batch alone, of which a warning tells unless the number is given.
        schedule: by name: "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half" or "auto";
            without a flush "pipedream", "pipedream-vertical-sync", "2bw", "pipemare" or "xpipe"; or
            one with options, such as `jvpipe.schedules.PipeMare(decay=0.5, warmup_updates=100)`.
        planner: "jvpipe" (cuts and fates chosen jointly, for the step's seconds under the memory
            limit), or another by name, such as "even" or one after a paper: `python -m jvpipe`
            lists them all.
        memory_limit: bytes or a text such as "16GiB" for all devices, or a sequence with one for
            each; by default what each reports, if they do.
        host_memory_limit: for swapped values of all devices together, and what `update_model`
            parks.
        fates: of tensors by name, such as `{"*/attention/*": "swap"}`: "keep", "swap" or
            "recompute".
        checkpoint: torchgpipe's modes, which micro-batches are computed again from their stage's
            input: "always", "except_last" or "never".
        devices: one per stage, by default the first of `jax.devices()`; name one twice to share it.
            Where the schedule runs several stages per device, `stages` and `devices` count the
            devices that the pipeline passes. Unlike devices get stages in the order that is best
            for planner "jvpipe".
        speeds: how fast each device is beside the others, such as `[2.0, 1.0]`; layers are measured
            on one device of each kind unless given.
        replicas: devices per stage, such as (2, 1), which share the examples of each micro-batch;
            by default one each, as results must not depend on how many devices a machine has. With
            "auto" they are decided, with the number of stages, for all devices that there are; one
            each where schedule or loss allow no more. Counts take `devices` in their order, those
            of the first stage, of the second, and so on. Every replica computes its examples as one
            device computes all: a loss that is a mean, or `jvpipe.Weighted`, keeps its value, and
            dropout its masks. Each replica normalises its own examples with their own statistics,
            and the means of these are kept. Gradients are added up once per update. Without a
            flush, whole micro-batches take turns on the devices of a stage instead.
        sharding: how parameters lie over the axes of meshes, where `devices` are such: a regular
            expression for whole paths, and what lies so, as in `{".*/kernel": PartitionSpec(None,
            "model")}`. What is not named is whole on each device of its mesh. Gradients and the
            optimizer's state lie as their parameter does, what layers make as the compiler finds
            best. All meshes have the same axes; limits and the ledger are of one device of each.
        batch_axis: the axis of the meshes along which the examples of each micro-batch are cut.
            What couples examples, such as batch norm, sees all of them.
        stacked: what the optimizer sees of parameters that the loss scans over, layer by layer: by
            default the arrays as they are, as in plain optax, and an optimizer that cannot be cut
            between such layers is refused; the slice of each layer, as a parameter of its own, with
            "per_layer".
        frozen: patterns of the paths of parameters that stay as they are, such as `["base/*"]`:
            nothing is computed or held for their training, they may be of any type (int8, int4),
            and the optimizer finds `optax.MaskedNode()` in their place. What the optimizer itself
            leaves alone (`optax.set_to_zero`), and of which it reads no gradient, costs as little.
        state_fates: of the optimizer's state by the paths of parameters, such as `{"*": "swap"}`:
            "keep", or "swap", which leaves it on the host between updates. Unless given, the
            planner decides under a limit.
        has_aux: the loss returns something beside.
        has_state: the loss carries a model state (batch norm).
        deferred_batch_norm: what batch norms remember changes once a batch, by the statistics of
            all its examples, whatever the micro-batches, as torchgpipe's do. The leaves of the
            model state that follow them are found in the loss; each micro-batch is still normalised
            by its own statistics. Not with replicas.
        aux_reduce: over micro-batches, and over replicas where the trace cannot say: "mean", "sum",
            "max" or "last" of leaves of aux by path, as in `{"largest": "max"}`; else
            floating-point scalars are averaged, others stacked.
        model_state_reduce: over replicas, where the trace cannot say: the "mean" over examples,
            "sum" of what each has added or "same" on all, of leaves of the model state by path.
            Later patterns win.
        grad_norm: also report the global norm of the gradient.
        group: consecutive layers of a stage run as one program in each direction, with the same
            results bitwise as layers apart. It takes fewer dispatches, which is what limits small
            layers and fast devices, and longer to compile. True compiles groups before the first
            step, False keeps layers apart. If left out, layers begin apart; on CPUs groups are
            compiled beside the run once its steps have taken as long as its programs took to
            compile. Layers that call the host run by programs of their own, and so do those that have moved,
            until their groups are compiled beside the run. If groups would not keep the limit, and
            under `sharding`, layers stay apart.
        remeasure: measure again what an earlier process has measured. Seconds are kept, and found
            again, if JAX has a compilation cache on disk (`jax_compilation_cache_dir`), and nowhere
            else.

    Raises:
        ValueError: for anything that cannot be used, with the values and the cure.

    >>> import jax, jax.numpy as jnp, numpy as np, optax
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

    @telling()
    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: Optimizer,
        stages: int | Plan | None = None,
        microbatches: int | None = None,
        schedule: str | Schedule = "1f1b",
        planner: str = "jvpipe",
        memory_limit: int | str | Sequence[int | str] | None = None,
        host_memory_limit: int | str | None = None,
        fates: Mapping[str, str] | None = None,
        checkpoint: str | None = None,
        devices: Sequence[Device | Mesh] | None = None,
        speeds: Sequence[float] | None = None,
        replicas: Sequence[int] | str | None = None,
        sharding: Mapping[str, PartitionSpec] | None = None,
        batch_axis: str | None = None,
        *,
        stacked: str | None = None,
        frozen: Sequence[str] | None = None,
        state_fates: Mapping[str, str] | None = None,
        has_aux: bool = False,
        has_state: bool = False,
        deferred_batch_norm: bool = False,
        aux_reduce: Mapping[str, str] | None = None,
        model_state_reduce: Mapping[str, str] | None = None,
        grad_norm: bool = False,
        group: bool | None = None,
        remeasure: bool = False,
    ) -> None:
        options = checked(PIPELINE, locals())
        self.session = Session(settings_of(loss_fn, optimizer, devices, options))

    def __repr__(self) -> str:
        session, plans = self.session, self.session.compiled_plans
        if not plans:
            return f"Pipeline({session.settings}: call init)"
        plan, devices = session.compiled.plan, session.settings.devices
        table = stage_lines(session.graph, plan, session.peaks, devices)
        return f"Pipeline({session.settings})\n{table}"

    @property
    def ledger(self) -> Ledger:
        """The weights that each forward and backward read (`versions`), and the bytes that devices held."""
        return self.session.ledger

    @property
    def plan(self) -> Plan:
        """The plan in use, with the layers and devices of each stage and the fates of its residuals."""
        session = self.session
        outline = outline_of(session.graph, session.settings.microbatches)
        return replace(session.compiled.plan, outline=outline)

    def explain(self) -> str:
        """Says what runs where, what it costs and why."""
        session = self.session
        plan, devices = session.compiled.plan, session.settings.devices
        layer_s, reasons = session.compiled_plans.reasons()
        why = reason_of(plan.planner)
        return explain(session.graph, plan, session.peaks, layer_s, devices, why, reasons)

    # A run

    @telling()
    def init(
        self, params: Tree, batch: Tree, rng: jax.Array | None, model_state: Tree = None
    ) -> State:
        """Traces, measures, plans, compiles and places; the caller's arrays stay theirs.

        Args:
            params: a pytree of arrays, those that are a `jvpipe.LazyArray` read one by one; or a
                function `key -> params`, which is then evaluated leaf by leaf on the devices that
                own the leaves.
            batch: a batch, or its shapes.
            rng: the key of the run.
            model_state: with `has_state`.
        """
        session = self.session
        if rng is not None:
            check_key(rng)
        check_arrays(params, "parameter")
        check_arrays(model_state, "leaf of the model state")
        if model_state is not None and not session.settings.has_state:
            raise ValueError(
                "model_state is given, but the loss carries none: say has_state=True, or leave it out"
            )
        makes = is_initialiser(params)
        if makes and rng is None:
            raise ValueError(
                "parameters that a function makes need a key: init(function, batch, rng)"
            )
        if session.settings.hosts is not None:
            agree_on_given(session.settings.hosts, params, batch, rng, model_state)
        if not makes:
            put = lambda stacks: given_leaves(jax.tree.leaves(stacks.split(params)))  # noqa: E731
            return session.begin(params, batch, rng, model_state, put)
        assert rng is not None
        make = lambda stacks: made_leaves(session.store, lambda key: stacks.split(params(key)), rng)  # noqa: E731
        return session.begin(made_shapes(params, rng), batch, rng, model_state, make)

    def step(self, state: State, batch: Tree) -> tuple[State, Metrics]:
        """Trains on one batch. Consumes `state`; returns at once, the devices work on.

        Under an asynchronous schedule nothing is in flight afterwards: `run` keeps the pipeline
        full.

        Raises:
            ValueError: the loss of an earlier step is not finite and a parameter is NaN; `state` is
                not consumed.
            MemoryLimitExceeded: a batch of other shapes than that of `init` does not keep the
                limit; the same field.
            StageError: this step failed, or the one before it; `restore` makes the pipeline work
                again.
        """
        state, metrics = self.session.advance(state, batch)
        return self.session.drain(state), metrics

    def run(
        self,
        state: State,
        batches: Iterable[Tree],
        num_steps: int | None = None,
        on_step: Callable[[State, Metrics], Any] | None = None,
    ) -> Iterator[tuple[State, Metrics]]:
        """Steps through a stream of batches; a state is valid until the next one is asked for.

        Under an asynchronous schedule the pipeline stays full between the steps: the states are in
        flight. Such a state can be saved, evaluated or drained; its parameters are each layer's
        newest. A batch of other shapes than that of `init` flows alone: what is in flight is
        finished before it, and it is within its step.

        Args:
            state: consumed.
            batches: any iterable of them.
            num_steps: how many to take; all unless given.
            on_step: called with the state and the metrics of each step, as soon as it is under way;
                to read a metric waits for it.
        """
        check_callback(on_step)
        for batch in checked_stream(batches, num_steps):
            state, metrics = self.session.advance(state, batch)
            if on_step is not None:
                on_step(state, metrics)
            yield state, metrics
        self.session.check_losses(state, wait=bool(state.stream_steps))

    def needs(self) -> list[str]:
        """Returns the names of the batch leaves that this process reads.

        A `ShapeDtypeStruct` is enough for the others.
        """
        return self.session.needs()

    def drain(self, state: State) -> State:
        """Finishes what is in flight."""
        return self.session.drain(state)

    def wait(self, state: State) -> State:
        """Waits until a state is there.

        If a stage failed on the way to it, or the loss is NaN, says which.
        """
        return self.session.wait(state)

    def evaluate(self, state: State, batch: Tree, params: Tree | None = None) -> Metrics:
        """Computes the metrics of a batch, forward only; nothing changes.

        Args:
            state: its newest parameters are evaluated, with its model state.
            batch: of any size that the micro-batches divide.
            params: others in their place, such as averaged ones that `optimizer_state` holds; they
                lie beside the state's meanwhile.

        Raises:
            ValueError: `params` are not like those of the pipeline.
            MemoryLimitExceeded: an evaluation does not keep the limit.
            StageError: it failed; the state is whole.
        """
        self.session.check_state(state)
        check_arrays(params, "parameter")
        leaves = () if params is None else self.session.trees.split_params(params)
        return evaluate(self.session, state, batch, leaves)

    def predict(self, state: State, batch: Tree, function: Callable[..., Any]) -> Tree:
        """Computes any function of the parameters and a batch, each part where its parameters lie; nothing changes.

        Args:
            state: its newest parameters are read, with its model state.
            batch: of any size; it need not be like that of `init`.
            function: of `(params, batch)`, or with `has_state` of `(params, model_state, batch)`;
                it gives a pytree of arrays, such as logits. What is compiled is kept while this
                very object is asked for.

        Raises:
            ValueError: the function reads no parameter.
            MemoryLimitExceeded: it does not keep the limit beside what the state holds.
        """
        check_predicted(function, has_state=self.session.settings.has_state)
        return predict(self.session, state, batch, function)

    # What a state holds

    def params(self, state: State) -> Tree:
        """Returns the parameters as the caller gave them, as numpy arrays.

        If there are several processes, the first alone gets them.
        """
        leaves = self.session.host_values(state, ValueKind.PARAMETER)
        return None if leaves is None else self.session.trees.join_params(leaves)

    def model_state(self, state: State) -> Tree:
        """Returns the model state as the caller gave it, as numpy arrays (keys as keys).

        If there are several processes, the first alone gets it.
        """
        leaves = self.session.host_values(state, ValueKind.STATE)
        return None if leaves is None else self.session.trees.join_model_state(leaves)

    def optimizer_state(self, state: State) -> Tree:
        """Returns the optimizer's state as `optimizer.init(params)` gives it, as numpy arrays (keys as keys).

        Where layers are stacked, so is what belongs to them. In place of what only the gradient of
        a frozen parameter would fill there is `optax.MaskedNode()`. Averaged parameters or counts
        are read from it; `evaluate(state, batch, params=...)` takes parameters that are made of it.
        """
        leaves = self.session.host_values(state, ValueKind.OPTIMIZER)
        optimizer = self.session.compiled.optimizer
        return (
            None if leaves is None else self.session.trees.join_optimizer_state(optimizer, leaves)
        )

    def with_optimizer_state(self, state: State, tree: Tree) -> State:
        """Gives the state another state of its optimizer, such as an injected learning rate.

        Consumes `state`.

        Args:
            state: the newest.
            tree: as `optimizer_state` gives it, changed.

        Raises:
            ValueError: it is none of this optimizer.
        """
        check_arrays(tree, "leaf of the optimizer's state")
        leaves = self.session.trees.split_optimizer_state(self.session.compiled.optimizer, tree)
        return self.session.replace_optimizer_state(state, leaves)

    # Changes

    def migrate(
        self, state: State, plan: Plan, at: tuple[int, int] | None = None, why: str = "as asked"
    ) -> State:
        """Moves layers while training runs: from a micro-batch on, this plan holds.

        Values do not change. If there are several processes, all ask for the same.

        Args:
            state: the newest; consumed if the move is made at once.
            plan: the new one: other cuts, other fates, another number of stages.
            at: (step, micro-batch) of its first micro-batch; now unless given. Inside a step
                devices do not wait for more than the layers' sums of gradients. A step that is not
                there yet is waited for. Stages that are replicated, before or after, change between
                two steps alone.
            why: kept in `session.history`.

        Raises:
            ValueError: the plan does not fit the model or the devices, or the moment is over.
            MemoryLimitExceeded: the plan does not keep the limit, or the way to it does not.
            StageError: something failed on the way. If that was between two steps, nothing is lost:
                the error's `state` is whole under the old plan.
        """
        self.session.check_state(state)
        self.session.migrations.request(state, checked_plan(plan), checked_moment(at), why)
        return self.session.migrations.run_due(state, self.drain)

    def adapt(self, on: bool = True, rule: Rule | None = None) -> None:
        """Lets layers move away from what became slow, and back, as `rule` says; or no longer.

        The planner that made the plan is asked again, under the same limits, if it is jvpipe's own.
        `session.history` tells what moved and why. If there are several processes, all call it
        before the same step.
        """
        checked_flag("on", on)
        self.session.adapter.switch(on, checked_rule(rule))
        if on and self.session.controller.monitor is None:
            self.session.monitor()

    def update_model(
        self, state: State, loss_fn: Callable[..., Any], params: Tree, model_state: Tree = None
    ) -> State:
        """Goes on with another model, under a new plan, from the next step on.

        Steps in flight are finished first. A parameter with the path, shape and type of one of the
        present model keeps its value and its optimizer state, and so does a leaf of the model
        state. Leaves that the new model lacks wait on the host until a later model has them again.
        The rest begins as given, with fresh optimizer state. Layers that some model had are not
        compiled again; a loss that was met before, the very object, is neither traced nor planned
        again.

        Args:
            state: the newest; consumed.
            loss_fn: of the same kind as the present one.
            params: those of the new model; of what is kept or comes back shapes are enough.
            model_state: that of the new model; by default the present one.

        Raises:
            ValueError: the loss reads a parameter that `params` lack, or one has another shape than
                before.
            MemoryLimitExceeded: the new model does not keep the limit. In both cases nothing has
                changed.
            StageError: something failed on the way; its `state` is the present model's, drained and
                whole.
        """
        self.session.check_state(state)
        check_loss(loss_fn, has_state=self.session.settings.has_state)
        return switch_model(self.session, state, loss_fn, params, model_state)

    def precompile(
        self, loss_fn: Callable[..., Any], params: Tree, model_state: Tree = None
    ) -> None:
        """Traces, plans and compiles a model for all devices ahead of `update_model`; nothing changes.

        It may be called in another thread while this one trains; layers that no model had are timed
        beside that. If there are several processes, all call it in the thread that trains.

        Args:
            loss_fn: that of the model to come.
            params: arrays or shapes.
            model_state: arrays or shapes too.
        """
        check_loss(loss_fn, has_state=self.session.settings.has_state)
        with beside_training():
            models, present = self.session.known_models, self.session.compiled_plans
            models.compiled_for(present, loss_fn, params, model_state).compile_everywhere()

    # Checkpoints

    def save(self, path: str | Path, state: State, extra: dict[str, Any] | None = None) -> None:
        """Writes a checkpoint, keyed by parameter path: any cut can restore it.

        If there are several processes, each writes a part. A state in flight is saved with all that
        the same schedule, cuts and fates need to go on bitwise identically.

        Args:
            path: a folder.
            state: any valid one.
            extra: kept with it (JSON); `jvpipe.checkpoint_extra` reads it.
        """
        self.session.check_state(state)
        checkpoints.save_state(
            self.session, checked_path(path), state, {} if extra is None else extra
        )

    @telling()
    def restore(self, path: str | Path) -> State:
        """Reads the state that `save` wrote, under this pipeline's own plan."""
        return checkpoints.restore(self.session, checked_path(path))
