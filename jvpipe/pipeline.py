"""The class `Pipeline`: its options, its plan, and changes of the plan or the model.

The methods that take or return states, such as steps and checkpoints, are in trainer.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from jvpipe.ir.optimizer import Optimizer
from jvpipe.ir.outline import outline_of
from jvpipe.ir.plan import Plan
from jvpipe.papers.registry import reason_of
from jvpipe.planners.replanning import Rule
from jvpipe.report.explain import explain, stage_lines
from jvpipe.runtime.engine.beside_training import beside_training
from jvpipe.runtime.engine.hosts import telling
from jvpipe.runtime.engine.tensors import Ledger
from jvpipe.runtime.engine.training_state import State
from jvpipe.schedules import Schedule
from jvpipe.session.arguments import check_loss, checked_moment, checked_plan
from jvpipe.session.checked_settings import settings_of
from jvpipe.session.options import checked
from jvpipe.session.session import Session, switch_model
from jvpipe.session.trigger import checked_rule
from jvpipe.trainer import Trainer
from jvpipe.util.devices import Device
from jvpipe.util.given import checked_flag
from jvpipe.util.option import PIPELINE

Tree = Any


class Pipeline(Trainer):
    """A pipeline of devices that trains a plain JAX loss.

    The loss is traced and cut into layers. A stage is consecutive layers on one device. A
    batch is split into micro-batches, which pass the stages one after another. A fate says
    what happens to a tensor between forward and backward.

    Args:
        loss_fn: a function `(params, batch, rng) -> loss`, whose result is a scalar or a
            `jvpipe.Weighted`. With `has_aux`, the result is `(loss, aux)`. With
            `has_state`, the function is `(params, model_state, batch, rng) -> (loss,
            new_model_state[, aux])`.
        optimizer: an optax transformation. Its update is cut into parts, which run on the
            devices of their layers; an error names what cannot be cut.
        stages: the number of stages, or a `Plan`. By default 2 or, with `replicas="auto"`,
            a number that the planner chooses.
        microbatches: how many micro-batches a batch is split into, by default 4. The number
            must divide the leading axis of every batch leaf. A loss that couples examples,
            such as a contrastive loss, sees only the examples of one micro-batch; unless
            `microbatches` is given, a warning says so.
        schedule: the order in which micro-batches run. Synchronous schedules end each step
            with a flush, after which no micro-batch is in flight: "gpipe", "1f1b",
            "interleaved", "zb-h1", "zb-v", "v-half" or "auto". Asynchronous schedules have
            no flush: "pipedream", "pipedream-vertical-sync", "2bw", "pipemare" or "xpipe".
            A schedule with options may also be given, such as
            `jvpipe.schedules.PipeMare(decay=0.5, warmup_updates=100)`.
        planner: "jvpipe", which chooses cuts and fates together for the fastest step under
            the memory limit; or the name of another planner, such as "even" or "pipedream".
            `python -m jvpipe` lists all planners.
        memory_limit: bytes, or a text such as "16GiB", for each device; or a sequence with
            one limit per device. By default, the memory that each device reports, if it
            reports any.
        host_memory_limit: how much host memory all devices together may use for swapped
            values, and for arrays that `update_model` parks there.
        fates: the fates of tensors: "keep", "swap" (to host memory) or "recompute", by
            patterns of tensor names, as in `{"*/attention/*": "swap"}`.
        checkpoint: for which micro-batches a stage recomputes everything from its input:
            "always", "except_last" or "never", as in torchgpipe.
        devices: one per stage, by default the first ones of `jax.devices()`. Stages share a
            device that is listed more than once. If the schedule runs several stages per
            device, `stages` is the number of devices, and `devices` lists them. If devices
            differ in speed or memory, planner "jvpipe" chooses the stage of each device.
        speeds: the relative speed of each device, such as `[2.0, 1.0]`; by default, layers
            are measured on one device of each kind.
        replicas: how many devices each stage has, such as (2, 1); by default one each, so
            that results do not depend on how many devices a machine has. With "auto", the
            planner chooses the replicas and the number of stages for all devices; it
            chooses one device per stage if the schedule or the loss does not allow more.
            Stages take `devices` in order: first stage 0 takes as many as it has, then
            stage 1, and so on. The devices of a stage share the examples of each
            micro-batch. A loss that is a mean or a `jvpipe.Weighted` keeps its value, and
            dropout keeps its masks. But each replica's batch norms normalize by the
            statistics of its own examples, and the means of these statistics are kept.
            Gradients are added up once per update. In a schedule without a flush, the
            devices of a stage take turns with whole micro-batches instead.
        sharding: if `devices` are meshes, how parameters are sharded over the axes of the
            meshes: a `PartitionSpec` for each regular expression of whole paths, as in
            `{".*/kernel": PartitionSpec(None, "model")}`. A parameter that no expression
            matches is replicated on all devices of its mesh. Gradients and optimizer state
            are sharded like their parameter. The compiler chooses the sharding of layers'
            outputs. All meshes must have the same axes. Memory limits, and bytes in the
            ledger, are those of one device of each mesh.
        batch_axis: the axis of the meshes over which the examples of each micro-batch are
            sharded. Operations that couple examples, such as batch norm, see the whole
            micro-batch.
        stacked: how the optimizer sees parameters of layers over which the loss scans. By
            default it sees the stacked arrays, as in plain optax; an optimizer that cannot
            be cut between such layers is refused. With "per_layer", it sees a separate
            parameter for each layer.
        frozen: patterns of the paths of parameters that are not trained, such as
            `["base/*"]`. They have no gradient and no optimizer state, and may be of any
            type, such as int8 or int4. The optimizer gets `optax.MaskedNode()` in their
            place. Parameters that the optimizer never changes (`optax.set_to_zero`), and
            whose gradients it does not read, cost as little as frozen parameters.
        state_fates: the fates of the optimizer's state, by patterns of the paths of
            parameters, as in `{"*": "swap"}`: "keep", or "swap", which leaves the state on
            the host between updates. By default, the planner decides under a memory limit,
            and without a limit all state is kept.
        whole_layers: recompute whole layers, each by the program that ran its forward before.
            Results then do not depend on fates on any platform, because each layer has the same
            programs under all fates. (On CPUs, results never depend on fates.) A layer is
            recomputed as a whole if any of its values has the fate "recompute".
        has_aux: the loss also returns auxiliary values.
        has_state: the loss takes and returns a model state, such as statistics of batch
            norms.
        deferred_batch_norm: running statistics of batch norms change once per batch, by the
            statistics of all its examples, as in torchgpipe. jvpipe finds the running
            statistics in the model state by tracing the loss. Each micro-batch is still
            normalized by its own statistics. Stages cannot have replicas with this option.
        aux_reduce: how leaves of aux, by path, are reduced over micro-batches: "mean",
            "sum", "max" or "last", as in `{"largest": "max"}`. Over replicas, a leaf is
            reduced this way only if the trace of the loss does not show how to reduce it.
            By default, floating-point scalars are averaged over micro-batches, and other
            leaves are stacked.
        model_state_reduce: how leaves of the model state, by path, are reduced over
            replicas if the trace of the loss does not show how: "mean" over examples;
            "sum", which adds up the changes of all replicas; or "same", if all replicas
            have equal values. If several patterns match, the last one counts.
        grad_norm: also report the global norm of the gradient.
        group: run consecutive layers of a stage as one program in each direction, with
            results bitwise identical to those of separate layers. Groups take longer to
            compile, but need fewer dispatches, which are the bottleneck of small layers and
            fast devices. True compiles groups before the first step; False never groups
            layers. By default, layers run separately. On CPUs, another thread compiles groups
            once the steps have taken as long as compiling the layers took, and later steps
            use them. A layer that calls code on the host always runs as its own program.
            After a move, layers run separately until their groups are compiled. Layers are
            never grouped if groups would exceed the memory limit, or under `sharding`.
        remeasure: measure layers again, although an earlier process has measured them.
            Measurements are stored beside JAX's compilation cache, if that is on disk
            (`jax_compilation_cache_dir`).

    Raises:
        ValueError: an argument cannot be used; the message has its value and the cure.

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
        whole_layers: bool = False,
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
        """The ledger: which versions of weights tasks read (`versions`), and bytes on devices."""
        return self.session.ledger

    @property
    def plan(self) -> Plan:
        """The plan in use: each stage's layers and devices, and what happens to its values
        between forward and backward.
        """
        session = self.session
        outline = outline_of(session.graph, session.settings.microbatches)
        return replace(session.compiled.plan, outline=outline)

    def explain(self) -> str:
        """Returns a text that says which layers run where and why, and what they cost."""
        session = self.session
        plan, devices = session.compiled.plan, session.settings.devices
        layer_s, reasons = session.compiled_plans.reasons()
        why = reason_of(plan.planner)
        return explain(session.graph, plan, session.peaks, layer_s, devices, why, reasons)

    # Changes

    def migrate(
        self, state: State, plan: Plan, at: tuple[int, int] | None = None, why: str = "as asked"
    ) -> State:
        """Moves layers to the devices of another plan during training.

        Under a schedule with a flush, results do not change, unless the number of replicas does.
        If there are several processes, all must make the same call.

        Args:
            state: the newest state, which is consumed if the move is made at once.
            plan: the new plan, with other cuts, fates or another number of stages.
            at: (step, micro-batch) of the first micro-batch under the new plan; by default,
                the first one of the next step. A move at a later step is made when training
                reaches that step. During a move inside a step, devices wait only for the
                summed gradients of the moving layers. If either plan has replicas, the move
                must be between two steps.
            why: the reason, which `session.history` records.

        Raises:
            ValueError: the plan does not fit the model or the devices, or the step is in
                the past.
            MemoryLimitExceeded: the new plan, or the move to it, exceeds the limit.
            StageError: a copy failed. If it failed between two steps, nothing is lost: the
                error's `state` is complete under the old plan.
        """
        self.session.check_state(state)
        self.session.migrations.request(state, checked_plan(plan), checked_moment(at), why)
        return self.session.migrations.run_due(state, self.drain)

    def adapt(self, on: bool = True, rule: Rule | None = None) -> None:
        """Switches adapting on or off: moving layers away from devices that have become slow.

        Layers move back when the device recovers. If jvpipe's own planner made the plan, it
        also makes the new plans, under the same limits. `session.history` has the moves and
        their reasons. If there are several processes, all must call this before the same
        step.

        Args:
            on: whether layers move from now on.
            rule: how much a move must gain; None for the default rule.
        """
        checked_flag("on", on)
        self.session.adapter.switch(on, checked_rule(rule))
        if on and self.session.controller.monitor is None:
            self.session.monitor()

    def update_model(
        self, state: State, loss_fn: Callable[..., Any], params: Tree, model_state: Tree = None
    ) -> State:
        """Switches to another model, under a new plan, from the next step on.

        Micro-batches in flight are finished first. A parameter keeps its value and its
        optimizer state if the present model has a parameter with the same path, shape and
        type. In the same way, a leaf of the model state keeps its value. Arrays that the new
        model lacks are parked on the host until a later model has them again. New parameters
        and leaves begin with the given values and fresh optimizer state. A layer that an
        earlier model had is not compiled again. A loss object that was used before is
        neither traced nor planned again.

        Args:
            state: the newest state, which is consumed.
            loss_fn: the new loss, with the same arguments and kinds of results as the
                present one.
            params: the new model's parameters; shapes suffice for those that keep their
                value or return from the host.
            model_state: the new model's state; by default that of the present model.

        Raises:
            ValueError: the loss reads a parameter that `params` lack, or an array of both
                models has another shape or type in the new one; nothing has changed.
            MemoryLimitExceeded: the new model exceeds the limit; nothing has changed.
            StageError: a copy failed; the error's `state` is the present model's, drained
                and complete.
        """
        check_loss(loss_fn, has_state=self.session.settings.has_state)
        return switch_model(self.session, state, loss_fn, params, model_state)

    def precompile(
        self, loss_fn: Callable[..., Any], params: Tree, model_state: Tree = None
    ) -> None:
        """Traces, plans and compiles a model for all devices, ahead of `update_model`.

        It may be called in another thread during training; new layers are then timed while
        training continues. If there are several processes, all must call it in the thread
        that trains.

        Args:
            loss_fn: the loss of the next model.
            params: its parameters, as arrays or shapes.
            model_state: its state, as arrays or shapes; by default that of the present model.
        """
        check_loss(loss_fn, has_state=self.session.settings.has_state)
        with beside_training():
            models, present = self.session.known_models, self.session.compiled_plans
            models.compiled_for(present, loss_fn, params, model_state).compile_everywhere()
