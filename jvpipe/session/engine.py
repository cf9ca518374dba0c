"""What a run is made of: the parts that compute it, how it begins, and what can be read of its states."""

import json
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Device, Tracer, is_plain
from jvpipe.ir.buffers import Peak
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.lazy_array import LazyArray
from jvpipe.ir.plan import Plan
from jvpipe.ir.span import Picture
from jvpipe.ir.values import Value, ValueKind
from jvpipe.programs.store import shared_store
from jvpipe.runtime.engine.awaited import Awaited
from jvpipe.runtime.engine.binding import Bound
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.controller import Controller, Feeds
from jvpipe.runtime.engine.forks import check_not_forked
from jvpipe.runtime.engine.freed_memory import keep_freed_memory
from jvpipe.runtime.engine.hosts import Hosts, together
from jvpipe.runtime.engine.losses import LossWatch
from jvpipe.runtime.engine.monitor import Measured, Monitor
from jvpipe.runtime.engine.phases import phase
from jvpipe.runtime.engine.picture import picture
from jvpipe.runtime.engine.tensors import Ledger, Limits
from jvpipe.runtime.engine.training_state import Leaf, Name, State, given_leaves
from jvpipe.runtime.engine.transport import to_host
from jvpipe.runtime.state.checkpoints.flight import names_of, newest_of, plain_arrays, with_leaves
from jvpipe.session.compiled_plans import CompiledPlans, KnownModels, LeavesOf, agree_on_rows
from jvpipe.session.planning import Planned
from jvpipe.session.settings import Parts, Settings, Trees, option_parts, with_sums
from jvpipe.trace.coupling import warn_of_splitting
from jvpipe.trace.digests import array_digest, leaf_lines, made_lines, shape_lines
from jvpipe.trace.leaves import abstract, canonical, is_initialiser
from jvpipe.trace.loss import key_words

Tree = Any
Metrics = dict[str, Any]


class Engine:
    """What steps, evaluations and checkpoints of a pipeline share: compiled plans, a controller, a ledger and limits.

    Args:
        settings: the pipeline's options, checked.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store = shared_store()
        self.compiled_plans = CompiledPlans(settings, self.store)
        self.known_models = KnownModels(self.store)
        # What no model needs now lies on the host, and counts there.
        parked = self.known_models.parked
        self.limits = Limits(settings.limits or None, settings.host_limit_bytes, parked=parked)
        if any(device.platform == "cpu" for device in settings.devices):
            keep_freed_memory()
        self.ledger = Ledger(settings.devices)
        self.controller = Controller(
            self.ledger, settings.microbatches, settings.host_limit_bytes is not None
        )
        if settings.hosts is not None:
            settings.hosts.agree("the options of the pipelines", option_parts(settings))
            settings.hosts.connect()
            self.controller.hosts = settings.hosts
        self.loss_watch = LossWatch(self.controller, settings.microbatches)
        # The compiled function that was asked for last.
        self.predictions: dict[Hashable, CompiledPlan] = {}
        # The plan that a run began with, and its peaks as all processes tell them.
        self._begun_with: tuple[Plan, Sequence[Peak]] = Plan(()), ()

    # Looking

    @property
    def compiled(self) -> CompiledPlan:
        """The compiled plan in use, at the batch shape that the model was first traced at."""
        return self.compiled_plans.current

    @property
    def graph(self) -> LayerGraph:
        """The layers of the model."""
        return self.compiled.traced.graph

    @property
    def trees(self) -> Trees:
        """The caller's pytrees."""
        return self.compiled_plans.trees

    @property
    def planned(self) -> Planned | None:
        """The numbers that the first plan was decided on; None if it was given."""
        return self.compiled_plans.planned

    @property
    def peaks(self) -> list[Peak | None]:
        """The most bytes on each device in a step of the present plan; None if another process has not told them."""
        plan, peaks = self._begun_with
        here, known = self.compiled.peaks, plan == self.compiled.plan
        return [
            here[i] if _jax.is_own(device) else peaks[i] if known else None
            for i, device in enumerate(self.settings.devices)
        ]

    @property
    def programs(self) -> dict[Device, int]:
        """The number of compiled programs that steps use, per device."""
        used = set().union(*(compiled.executables for compiled in self.compiled_plans))
        return {device: sum(d == device for _, d in used) for device in self.settings.devices}

    def monitor(self, on: bool = True, kept: int = 2) -> None:
        """Switches on the measuring of every task, or off; what is known of the last `kept` steps can be asked for."""
        seconds = self.compiled_plans.layer_s if self.compiled_plans else None
        self.controller.monitor = (
            Monitor(self.settings.devices, kept, seconds or ()) if on else None
        )

    def pictures(self, steps: int = 1) -> list[Picture]:
        """Draws up what each device did in the last steps; waits for their end."""
        monitor = self._watching()
        labels = [self.graph.label(layer) for layer in self.graph.layers]
        return [picture(monitor, record, labels) for record in monitor.last(steps)]

    def measured(self, *, before: bool = False) -> Measured:
        """Tells what ran when in the last step, or the one `before`, and what was swapped.

        Waits for its end.
        """
        return self._watching().measured(before=before)

    def _watching(self) -> Monitor:
        if self.controller.monitor is None:
            raise ValueError("nothing is measured: call pipe.session.monitor() before the step")
        return self.controller.monitor

    # States

    def host_values(self, state: State, kind: ValueKind) -> list[Any] | None:
        """Copies the newest arrays of a kind to the host, in the order of their leaves.

        All of several processes must ask, and the first one alone gets them.
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
            home = next(place for place, device in enumerate(devices) if _jax.is_own(device))
            shapes = [self.compiled.lying(Value(kind, index), home) for _, index in names]
            processes = [devices[spots[newest[name]].place].process_index for name in names]
            return hosts.gather(processes, shapes, arrays)
        except Exception as error:
            raise self.controller.failure(error) from error

    def own_params(self, state: State) -> dict[str, Any]:
        """Returns the newest parameters of this process by their names, as numpy arrays."""
        arrays = self.compiled.placing.values(self.plain_arrays(self.compiled, state))
        return {
            parameter.array.name: to_host(array)
            for i, parameter in enumerate(self.graph.parameters)
            if (array := arrays.get((ValueKind.PARAMETER, i))) is not None
        }

    def plain_arrays(self, compiled: CompiledPlan, state: State) -> tuple[jax.Array, ...]:
        """Returns the newest of all that outlives a step; ValueError if the state is not whole, or another model's."""
        self.check_whole(compiled, state)
        return plain_arrays(compiled, state)

    def check_whole(self, compiled: CompiledPlan, state: State) -> None:
        """Raises ValueError for anything but a state of this pipeline's present model, or was consumed."""
        self.check_state(state)
        state.check(len(names_of(compiled, state.stream_steps)))

    def check_state(self, state: State) -> None:
        """Raises ValueError for anything but a state of this pipeline's present model, or in a forked process."""
        check_not_forked()
        self.compiled_plans.check_traced()
        if not isinstance(state, State):
            raise ValueError(
                f"the state must be the one that init, step or restore returned, not of type {type(state).__name__}"
            )
        if state.model is not self.compiled_plans.model_id:
            raise ValueError(
                "this state belongs to another pipeline or model: use the one that init or restore of this pipeline "
                "gave; from one pipeline to another it goes by pipe.save and pipe.restore"
            )

    def check_losses(self, state: State, *, wait: bool = False, last: bool = True) -> None:
        """Warns of losses that are not finite.

        Args:
            state: the newest.
            wait: for losses that are not there yet.
            last: look at those of the last step too.

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
        """Begins a run: traces, plans, compiles and places.

        Args:
            params: arrays or shapes.
            batch: a whole one, or its shapes.
            rng: the key of the run.
            model_state: arrays.
            leaves_of: puts or makes the parameters, given how they are split into layers.
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
        """Begins a run whose arrays are placed now, with nothing in flight.

        Args:
            compiled_plans: those of the model.
            compiled: of these, or one that will take their place.
            leaves: put or make the arrays by name; optimizer state without leaves is made.
            words: those of the run's key.
            step: the steps that are done.
            updates: how often parameters were updated.
        """
        constants = given_leaves(compiled.traced.loss.constants)
        leaves = leaves | {("constant", i): leaf for i, leaf in enumerate(constants)}
        placing = compiled.placing
        placing.compile(leaves, self.store)
        self.reset(compiled, placing.peaks(leaves))
        self.follow(compiled_plans)
        with phase("making and placing the parameters"):
            arrays = placing.place(self.ledger, leaves, self.store)
        agree_on_rows(compiled)
        return State(arrays, words, step, updates=updates, model=compiled_plans.model_id)

    def reset(self, compiled: CompiledPlan, making: Sequence[Peak]) -> None:
        """Forgets the run before, if the one to come and the making of its arrays keep the limits.

        Args:
            compiled: what is to run.
            making: what is held at most on each device, and last on the host, while its arrays are
                made.

        Raises:
            MemoryLimitExceeded: a limit cannot be kept; nothing has changed.
        """
        # A new run begins with nothing parked, but forgets what is only once it is sure to begin.
        limits, hosts = replace(self.limits, parked={}), self.settings.hosts

        def check() -> None:
            limits.check(compiled.peaks, self.settings.devices)
            limits.check(making, self.settings.devices, "while its arrays are made")

        together(hosts, "limits", check)
        peaks = told_peaks(hosts, compiled.peaks) if hosts else compiled.peaks
        self._begun_with = compiled.plan, peaks
        self.known_models.parked.clear()
        self.loss_watch.begin()
        self.controller.marks.clear()
        self.ledger.begin()

    def follow(self, compiled_plans: CompiledPlans) -> None:
        """Runs another model from here on."""
        self.compiled_plans = compiled_plans

    # Running

    def readable(self, values: Sequence[jax.Array]) -> Sequence[Any]:
        """Metrics that say, where they are read, what went wrong on their way: of several processes, who is lost."""
        if self.settings.hosts is None:
            return values
        return [Awaited(value, self.controller.arrive) for value in values]

    def metrics_of(self, compiled: CompiledPlan, values: Sequence[Any]) -> Metrics:
        """Returns names what a step or an evaluation yielded."""
        groups = len(compiled.traced.graph.aux_groups)
        metrics: Metrics = {"loss": values[0]}
        if self.settings.has_aux:
            metrics["aux"] = jax.tree.unflatten(
                compiled.traced.loss.aux_tree, values[1 : 1 + groups]
            )
        if len(values) > 1 + groups:
            metrics["grad_norm"] = values[1 + groups]
        return metrics

    def compiled_at(self, batch: Tree, updates: int) -> CompiledPlan:
        """Finds what runs a batch after so many updates: an asynchronous schedule may begin with synchronous steps."""
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
        """Slices what the micro-batches of a step read from the host; see `feeds_of`.

        Args:
            batch: a whole one.
            words: those of the run's key, if it has one.
            step: the number of the step.
            rows: that read it, if they are to find all of it.
            compiled: the plan that they are of; the one in use unless given.

        Raises:
            ValueError: a leaf that they read is a shape alone.
        """
        compiled = compiled or self.compiled
        feeds = feeds_of(batch, words, step, compiled.microbatches)
        if rows and (missing := sorted(set(rows.feeds) - set(feeds))):
            leaf = compiled.traced.graph.batch[missing[0][1]]
            raise ValueError(
                f"batch leaf '{leaf.name}' is a shape, and a stage of this process reads it: give an array; "
                "pipe.needs() names all that it reads"
            )
        return feeds

    def needs(self) -> list[str]:
        """Returns the leaves of the batch that layers of this process read."""
        graph, devices = self.graph, self.settings.devices
        stages = self.compiled.plan.stages
        here = [
            layer
            for stage in stages
            if any(_jax.is_own(devices[d]) for d in stage.devices)
            for layer in stage.layers
        ]
        leaves = {i for layer in here for i in graph.layers[layer].reading(ValueKind.BATCH)}
        return [graph.batch[i].name for i in sorted(leaves)]

    def wait(self, state: State) -> State:
        """Waits until a state is there; raises what went wrong on the way to it."""
        if isinstance(state, State):  # that of an earlier run too
            state.check(len(state.arrays))
        for array in jax.tree.leaves(state):
            if isinstance(array, jax.Array):
                self.controller.arrive(array)
        self.controller.settle()
        self.check_losses(state, wait=True)
        return state

    def replace_optimizer_state(self, state: State, leaves: Sequence[Any]) -> State:
        """Puts other values into the optimizer's state; consumes `state`."""
        self.check_whole(self.compiled, state)
        names = names_of(self.compiled, state.stream_steps)
        arrays = with_leaves(names, state.arrays, ValueKind.OPTIMIZER, leaves, consume=True)
        return replace(state, arrays=arrays)


# What processes must agree on, and what micro-batches read.


def agree_on_given(
    hosts: Hosts, params: Tree, batch: Tree, rng: jax.Array | None, model_state: Tree
) -> None:
    """Makes sure that all processes begin a run with the same.

    Every byte of parameters and model state is compared; for parameters that a function makes, how
    it makes each; for the batch the shapes, and the bytes of the leaves that every process gives as
    arrays. Batches of later steps are not: to read them all would take longer than some steps.

    Args:
        hosts: the processes.
        params: arrays, or a function that makes them.
        batch: a batch, or its shapes.
        rng: the key of the run.
        model_state: arrays.

    Raises:
        Disagreement: something differs.
    """
    if is_initialiser(params):
        assert rng is not None
        parameters = made_lines(params, rng)
    else:
        parameters = leaf_lines(params)
    shapes = shape_lines(batch, "batch leaf")
    parts: Parts = [
        ("the key", "None" if rng is None else f"{rng.dtype} {array_digest(rng)}"),
        ("the batch", "\n".join(shapes)),
        ("parameters", "\n".join(parameters)),
        ("model state", "\n".join(leaf_lines(model_state, "leaf of the model state"))),
    ]
    hosts.agree("what init is given", parts)
    mine = leaf_lines(jax.tree.map(_unread, batch), "batch leaf")
    all_lines = [json.loads(word) for word in hosts.exchange("batch", json.dumps(mine).encode())]
    # A leaf that some process gives as a shape has no values to be compared.
    by_all = [i for i, shape in enumerate(shapes) if all(lines[i] != shape for lines in all_lines)]
    hosts.agree(
        "what init is given", [("the values of the batch", "\n".join(mine[i] for i in by_all))]
    )


def _unread(leaf: Any) -> Any:
    """Returns a leaf, or the shape of one that is read lazily: whoever needs nothing of it shall not read it."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, LazyArray) else leaf


def told_peaks(hosts: Hosts, here: Sequence[Peak]) -> list[Peak]:
    """Returns the most bytes on each device, and last on the host, as the processes that have them tell.

    Args:
        hosts: the processes.
        here: what this one knows; nothing of the others' devices.
    """
    sizes_by_process = [
        json.loads(word)
        for word in hosts.exchange("peaks", json.dumps([peak.bytes for peak in here]).encode())
    ]
    return [Peak(max(sizes), None, ()) for sizes in zip(*sizes_by_process, strict=True)]


def feeds_of(
    batch: Tree, words: np.ndarray | None, step: int, microbatches: int
) -> dict[tuple[str, int], Sequence[np.ndarray | jax.Array]]:
    """Slices what the micro-batches of a step read from the host, by (kind, index); of shapes there is nothing to read.

    Args:
        batch: a whole one.
        words: those of the run's key, if it has one.
        step: the number of the step.
        microbatches: how many the batch is split into.
    """
    feeds: dict[tuple[str, int], Sequence[np.ndarray | jax.Array]] = {}
    for i, leaf in enumerate(jax.tree.leaves(batch)):
        if isinstance(leaf, jax.ShapeDtypeStruct) and not isinstance(leaf, LazyArray):
            continue
        if isinstance(leaf, Tracer):
            abstract(batch, "batch leaf")  # raises, and names the leaf that is being traced
        # In the type of the device, so that no copy converts it there.
        leaf = _feedable(leaf)
        size = leaf.shape[0] // microbatches
        feeds["batch", i] = [leaf[m * size : (m + 1) * size] for m in range(microbatches)]
    if words is not None:
        feeds["seed", 0] = [
            np.array([*words.ravel(), step, m], np.uint32) for m in range(microbatches)
        ]
    return feeds


def _feedable(leaf: Any) -> Any:
    """Returns a leaf of the batch as an array of the type that it has on a device.

    The host knows no keys; of types smaller than a byte, whoever compiles ahead takes no array but
    JAX's own.
    """
    if isinstance(leaf, LazyArray):
        return leaf.astype(canonical(leaf.dtype))
    if not is_plain(leaf.dtype):
        return jax.numpy.asarray(leaf)
    return np.asarray(leaf).astype(canonical(leaf.dtype), copy=False)
