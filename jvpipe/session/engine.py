"""The engine of a pipeline: begins a run, and reads its states.

Session (session.py) extends the engine with training steps. Evaluations and checkpoints need only
the engine.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jvpipe.ir.buffers import Peak
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.ir.span import Picture
from jvpipe.ir.values import Value, ValueKind
from jvpipe.programs.store import shared_store
from jvpipe.runtime.engine.awaited import Awaited
from jvpipe.runtime.engine.binding import Bound
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.controller import Controller, Feeds
from jvpipe.runtime.engine.feeds import feeds_of
from jvpipe.runtime.engine.forks import check_not_forked
from jvpipe.runtime.engine.freed_memory import keep_freed_memory
from jvpipe.runtime.engine.hosts import Hosts, together
from jvpipe.runtime.engine.losses import LossWatch
from jvpipe.runtime.engine.monitor import Measured, Monitor
from jvpipe.runtime.engine.phases import phase
from jvpipe.runtime.engine.picture import picture
from jvpipe.runtime.engine.row_agreement import agree_on_rows
from jvpipe.runtime.engine.tensors import Ledger, Limits
from jvpipe.runtime.engine.training_state import Leaf, Name, State, given_leaves
from jvpipe.runtime.engine.transport import to_host
from jvpipe.runtime.engine.trees import Trees, with_sums
from jvpipe.runtime.state.checkpoints.flight import names_of, newest_of, plain_arrays, with_leaves
from jvpipe.session.compiled_plans import CompiledPlans, KnownModels, LeavesOf
from jvpipe.session.settings import Settings, option_parts
from jvpipe.trace.coupling import warn_of_splitting
from jvpipe.trace.loss import key_words
from jvpipe.trace.structure import comparable
from jvpipe.util.devices import is_own

Tree = Any
Metrics = dict[str, Any]


class Engine:
    """The parts of a pipeline that steps, evaluations and checkpoints share.

    The parts are the compiled plans, the controller (which dispatches rows), the ledger (which
    counts bytes and weight versions) and the limits.

    Args:
        settings: the pipeline's options, checked.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store = shared_store()
        self.compiled_plans = CompiledPlans(settings, self.store)
        self.known_models = KnownModels(self.store)
        hosts, host_limit_bytes = settings.hosts, settings.host_limit_bytes
        # Parked arrays of models that are not in training count toward the host's limit.
        parked = self.known_models.parked
        self.limits = Limits(settings.limits or None, host_limit_bytes, parked=parked)
        if any(device.platform == "cpu" for device in settings.devices):
            keep_freed_memory()
        self.ledger = Ledger(settings.devices)
        self.controller = Controller(
            self.ledger, settings.microbatches, host_limit_bytes is not None
        )
        if hosts is not None:
            hosts.agree("the options of the pipelines", option_parts(settings))
            hosts.connect()
            self.controller.hosts = hosts
        self.loss_watch = LossWatch(self.controller)
        # The compiled function of the last call of `predict`, by its key.
        self.predictions: dict[Hashable, CompiledPlan] = {}
        # The plan with which the run began, and the peaks that all processes reported for it.
        self._begun_with: tuple[Plan, Sequence[Peak]] = Plan(()), ()

    # Looking

    @property
    def compiled(self) -> CompiledPlan:
        """The compiled plan in use, for the batch shape at which the model was first traced."""
        return self.compiled_plans.current

    @property
    def graph(self) -> LayerGraph:
        """The layers of the model."""
        return self.compiled.traced.graph

    @property
    def trees(self) -> Trees:
        """The caller's pytrees, as shapes."""
        return self.compiled_plans.trees

    @property
    def peaks(self) -> list[Peak | None]:
        """Each device's peak in a step of the present plan; None if only another process knows it.

        Processes exchange their peaks once, when a run begins. After a change of the plan,
        a process knows only the peaks of its own devices.
        """
        plan, peaks = self._begun_with
        devices, is_at_begin = self.settings.devices, plan == self.compiled.plan
        at_begin = peaks if is_at_begin else [None] * len(devices)
        each = zip(devices, self.compiled.peaks, at_begin, strict=False)
        return [here if is_own(device) else told for device, here, told in each]

    def monitor(self, on: bool = True, kept: int = 2) -> None:
        """Switches the timing of every task on or off.

        Args:
            on: whether tasks are timed from now on.
            kept: how many of the last steps are remembered.
        """
        layer_s, settings = self.compiled_plans.layer_s or (), self.settings
        self.controller.monitor = (
            Monitor(settings.devices, kept, layer_s, settings.microbatches) if on else None
        )

    def pictures(self, steps: int = 1) -> list[Picture]:
        """Waits for the end of the last steps, and returns a picture of the tasks in each."""
        monitor = self._watching()
        labels = [self.graph.label(layer) for layer in self.graph.layers]
        return [picture(monitor, record, labels) for record in monitor.last(steps)]

    def measured(self, *, before: bool = False) -> Measured:
        """Waits for the end of the last step, and returns its spans, seconds and swapped bytes.

        If `before` is true, the function measures the step before the last one.
        """
        measured, compiled = self._watching().measured(before=before), self.compiled
        kept = compiled.microbatches - 1 if compiled.plan.keep_last else None
        return measured.with_inside(compiled.recomputed_shares, kept)

    def _watching(self) -> Monitor:
        if self.controller.monitor is None:
            raise ValueError("nothing is measured: call pipe.session.monitor() before the step")
        return self.controller.monitor

    # States

    def host_values(self, state: State, kind: ValueKind) -> list[Any] | None:
        """Copies the newest arrays of a kind to the host, in the order of their leaves.

        If there are several processes, all must call this. The first one gets the arrays,
        and the others get None.
        """
        self.check_whole(self.compiled, state)
        hosts, devices = self.settings.hosts, self.settings.devices
        newest = newest_of(self.compiled, state.stream_steps)
        names = sorted(name for name in newest if name[0] is kind)
        arrays = [state.arrays[newest[name]] for name in names]
        try:
            if hosts is None:
                return list(map(to_host, arrays))
            spots = names_of(self.compiled, state.stream_steps)
            own_place = next(place for place, device in enumerate(devices) if is_own(device))
            shapes = [self.compiled.lying(Value(kind, index), own_place) for _, index in names]
            processes = [devices[spots[newest[name]].place].process_index for name in names]
            return hosts.gather(processes, shapes, arrays)
        except Exception as error:
            raise self.controller.failure(error) from error

    def own_params(self, state: State) -> dict[str, Any]:
        """Returns the newest parameters that this process holds, by name, as numpy arrays."""
        arrays = self.compiled.placing.values(self.plain_arrays(self.compiled, state))
        by_name: dict[str, Any] = {}
        for i, parameter in enumerate(self.graph.parameters):
            array = arrays.get((ValueKind.PARAMETER, i))
            if array is not None:
                self.controller.arrive(array)
                by_name[parameter.array.name] = to_host(array)
        return by_name

    def plain_arrays(self, compiled: CompiledPlan, state: State) -> tuple[jax.Array, ...]:
        """Returns the arrays of a state, except the arrays of micro-batches in flight.

        If a state in flight has several versions of an array, only the newest one is returned.

        Raises:
            ValueError: the state lacks arrays, or belongs to another model.
        """
        self.check_whole(compiled, state)
        return plain_arrays(compiled, state)

    def check_whole(self, compiled: CompiledPlan, state: State) -> None:
        """Raises ValueError unless this is a state of the present model with all its arrays."""
        self.check_state(state)
        state.check(len(names_of(compiled, state.stream_steps)))

    def check_state(self, state: State) -> None:
        """Raises an error for a state of another model, or if this process is a fork."""
        check_not_forked()
        self.compiled_plans.check_traced()
        if not isinstance(state, State):
            raise ValueError(
                "the state must be the one that init, step or restore returned, not of "
                f"type {type(state).__name__}"
            )
        if state.model is not self.compiled_plans.model_id:
            raise ValueError(
                "this state belongs to another pipeline or model: use the one that init "
                "or restore of this pipeline gave; from one pipeline to another it goes "
                "by pipe.save and pipe.restore"
            )

    def check_losses(self, state: State, *, wait: bool = False, last: bool = True) -> None:
        """Warns about losses that are not finite.

        Args:
            state: the newest state.
            wait: whether to wait for losses that are not computed yet.
            last: whether to check the losses of the last step, too.

        Raises:
            ValueError: a loss is not finite, and a parameter is NaN.
        """
        self.loss_watch.check(lambda: self.own_params(state), wait=wait, last=last)

    # Beginning

    def begin(
        self,
        params: Tree,
        batch: Tree,
        rng: jax.Array | None,
        model_state: Tree,
        leaves_of: LeavesOf,
    ) -> State:
        """Begins a run: traces the loss, plans, compiles, and places the arrays on devices.

        Args:
            params: arrays or shapes.
            batch: a whole batch, or its shapes.
            rng: the key of the run.
            model_state: arrays.
            leaves_of: makes the parameters or puts them on devices, given their split into layers.
        """
        compiled_plans = self.compiled_plans.for_run(params, batch, rng, model_state, leaves_of)
        traced = compiled_plans.current.traced
        if self.settings.splits_unasked:
            warn_of_splitting(traced, self.settings.microbatches)
        states = given_leaves(with_sums(jax.tree.leaves(model_state), traced.graph.state))
        leaves = compiled_plans.take_leaves() | {
            ("state", i): leaf for i, leaf in enumerate(states)
        }
        words = None if rng is None else key_words(rng)
        return self.place(compiled_plans, compiled_plans.current, leaves, words)

    def place(
        self,
        compiled_plans: CompiledPlans,
        compiled: CompiledPlan,
        leaves: dict[Name, Leaf],
        words: np.ndarray | None,
        step: int = 0,
        updates: int = 0,
    ) -> State:
        """Begins a run: places its arrays on devices, with no micro-batch in flight.

        Args:
            compiled_plans: the compiled plans of the model.
            compiled: the compiled plan that places the arrays: one of `compiled_plans`, or
                one that `compiled_plans` adopts afterwards.
            leaves: by name, a leaf makes an array or puts it on a device. The optimizer makes the
                state for which there is no leaf.
            words: the words of the run's key.
            step: how many steps have been done.
            updates: how many updates the parameters have had.
        """
        constants = enumerate(given_leaves(compiled.traced.loss.constants))
        leaves = leaves | {("constant", i): leaf for i, leaf in constants}
        placing = compiled.placing
        placing.compile(leaves, self.store)
        self.reset(compiled, placing.peaks(leaves))
        self.follow(compiled_plans)
        with phase("making and placing the parameters"):
            arrays = placing.place(self.ledger, leaves, self.store)
        agree_on_rows(compiled)
        return State(arrays, words, step, updates=updates, model=compiled_plans.model_id)

    def reset(self, compiled: CompiledPlan, making: Sequence[Peak]) -> None:
        """Drops the earlier run if the new run, and the making of its arrays, keep the limits.

        Args:
            compiled: the compiled plan of the new run.
            making: the peak of each device, followed by the host's, while the new run's arrays are
                made.

        Raises:
            MemoryLimitExceeded: a limit cannot be kept; nothing has changed.
        """
        # The new run does not need the arrays that the earlier run has parked, so the check does
        # not count them. They are dropped after the check: a failed check must change nothing.
        limits, hosts = replace(self.limits, parked={}), self.settings.hosts

        def check() -> None:
            limits.check(compiled.peaks, self.settings.devices)
            limits.check(making, self.settings.devices, "while its arrays are made")

        together(hosts, "limits", check)
        told = told_peaks(hosts, compiled.peaks) if hosts else compiled.peaks
        self._begun_with = compiled.plan, told
        self.known_models.parked.clear()
        self.loss_watch.begin()
        self.controller.marks.clear()
        self.ledger.begin()

    def follow(self, compiled_plans: CompiledPlans) -> None:
        """Runs the model of these compiled plans from now on."""
        self.compiled_plans = compiled_plans

    # Running

    def readable(self, values: Sequence[jax.Array]) -> Sequence[Any]:
        """Returns values of metrics; reading a value raises an error if a process was lost."""
        if self.settings.hosts is None:
            return values
        return [Awaited(value, self.controller.arrive) for value in values]

    def metrics_of(self, compiled: CompiledPlan, values: Sequence[Any]) -> Metrics:
        """Returns the values of a step or an evaluation by the names of the metrics."""
        traced = compiled.traced
        end = 1 + len(traced.graph.aux_groups)
        metrics: Metrics = {"loss": values[0]}
        if self.settings.has_aux:
            metrics["aux"] = jax.tree.unflatten(traced.loss.aux_tree, values[1:end])
        if len(values) > end:
            metrics["grad_norm"] = values[end]
        return metrics

    def compiled_at(self, batch: Tree, updates: int) -> CompiledPlan:
        """Returns the compiled plan for a batch after some number of updates.

        An asynchronous run may begin with synchronous steps, which have another compiled plan.

        Args:
            batch: a whole batch.
            updates: how many updates the parameters have had.
        """
        warms_up = updates < self.settings.schedule.warmup_updates
        return self.compiled_plans.for_batch(batch, warms_up=warms_up)

    def feeds(
        self,
        batch: Tree,
        words: np.ndarray | None,
        step: int,
        rows: Bound | None = None,
        compiled: CompiledPlan | None = None,
    ) -> Feeds:
        """Returns the slices of a batch that micro-batches read from the host; see `feeds_of`.

        Args:
            batch: a whole batch.
            words: the words of the run's key, if it has one.
            step: the number of the step.
            rows: the rows of the step; each leaf that they read must be present.
            compiled: the compiled plan of the rows; None stands for the plan in use.

        Raises:
            ValueError: the rows read a leaf that is only a shape.
        """
        compiled = compiled or self.compiled
        feeds = feeds_of(batch, words, step, compiled.microbatches)
        if rows and (missing := sorted(set(rows.feeds) - set(feeds))):
            leaf = compiled.traced.graph.batch[missing[0][1]]
            raise ValueError(
                f"batch leaf '{leaf.name}' is a shape, and a stage of this process reads "
                "it: give an array; pipe.needs() names all that it reads"
            )
        return feeds

    def needs(self) -> list[str]:
        """Returns the names of the batch's leaves that layers of this process read."""
        graph, devices = self.graph, self.settings.devices
        leaves = set[int]()
        for stage in self.compiled.plan.stages:
            if any(is_own(devices[d]) for d in stage.devices):
                for layer in stage.layers:
                    leaves.update(graph.layers[layer].reading(ValueKind.BATCH))
        return [graph.batch[i].name for i in sorted(leaves)]

    def wait(self, state: State) -> State:
        """Waits until a state's arrays have been computed; raises errors of the steps so far."""
        if isinstance(state, State):  # the state may belong to an earlier run
            state.check(len(state.arrays))
        for array in jax.tree.leaves(state):
            if isinstance(array, jax.Array):
                self.controller.arrive(array)
        self.controller.settle()
        self.check_losses(state, wait=True)
        return state

    def replace_optimizer_state(self, state: State, leaves: Sequence[Any]) -> State:
        """Returns the state with a new optimizer state, given as leaves; consumes `state`."""
        self.check_whole(self.compiled, state)
        names = names_of(self.compiled, state.stream_steps)
        changed = dict(enumerate(leaves))
        if state.stream_steps:
            changed = {i: changed[i] for i in self._changed(state, leaves)}
        arrays = with_leaves(names, state.arrays, ValueKind.OPTIMIZER, changed, consume=True)
        return replace(state, arrays=arrays)

    def _changed(self, state: State, leaves: Sequence[Any]) -> list[int]:
        """Lists the leaves of an optimizer state that differ from those that `host_values` returns.

        In a stream, stages have made different numbers of updates, so a leaf such as a step count
        differs between stages. Only a leaf that the user changed gets the same value on all stages.
        """
        present = self.host_values(state, ValueKind.OPTIMIZER)
        changed, hosts = [], self.settings.hosts
        if present is not None:
            pairs = zip(present, leaves, strict=True)
            changed = [i for i, (a, b) in enumerate(pairs) if comparable(a) != comparable(b)]
        return changed if hosts is None else hosts.exchange_json("changed leaves", changed)[0]


def told_peaks(hosts: Hosts, here: Sequence[Peak]) -> list[Peak]:
    """Returns the peaks of all devices, then the host's, from the reports of all processes.

    Args:
        hosts: the processes.
        here: the peaks as this process knows them. Its numbers for other processes' devices
            are too small, so the largest report for each device counts.
    """
    sizes_by_process = hosts.exchange_json("peaks", [peak.bytes for peak in here])
    return [Peak(max(sizes), None, ()) for sizes in zip(*sizes_by_process, strict=True)]
