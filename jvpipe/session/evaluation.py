"""Forward passes alone: the metrics of a batch, or any function of the parameters, each part where its parameters lie.

An evaluation runs the forwards of the plan in use. A function of the user's is traced and cut into
layers as a loss is. Each of its layers runs on the device that holds the parameters that it reads,
and never on an earlier stage than a layer before it:

    training      device 0: embed, block 0    device 1: block 1, head, loss
    prediction    device 0: embed, block 0    device 1: block 1, head, and what the function does beside

Its batch is one micro-batch, because what the function returns need not have an entry for each
example.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe.ir.buffers import HOST, Buffer
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan, Stage
from jvpipe.ir.reductions import AuxReduction, Reductions
from jvpipe.ir.values import Owner, ValueKind
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.controller import Moment
from jvpipe.runtime.engine.hosts import Carried
from jvpipe.runtime.engine.phases import phase
from jvpipe.runtime.engine.training_state import State
from jvpipe.runtime.state.checkpoints.flight import brought_arrays, names_of, with_leaves
from jvpipe.schedules import find_schedule
from jvpipe.session.arguments import micro_batch_shapes, shapes_of
from jvpipe.session.engine import Engine, Metrics
from jvpipe.trace.model import trace_model

Tree = Any
Function = Callable[..., Any]
_Name = tuple[ValueKind, str | int]
"""What an array is, in any graph of the same parameters and model state."""
_Spot = tuple[_Name, int]
"""An array's name, and the place where it lies."""
_LAST = Reductions(aux={"*": AuxReduction.LAST})
"""There is one micro-batch, so the last value is the only one."""


def evaluate(session: Engine, state: State, batch: Tree, params: Sequence[Any] = ()) -> Metrics:
    """Runs the forward of a batch; nothing changes, and what is measured of steps stays.

    Args:
        session: what the state belongs to.
        state: its newest arrays are evaluated.
        batch: of any size that the micro-batches divide.
        params: leaves in the parameters' place, which lie beside these meanwhile; none for the
            state's own.

    Raises:
        MemoryLimitExceeded: an evaluation does not keep the limit.
        StageError: it failed; the state is whole.
    """
    compiled = session.compiled_plans.for_batch(batch)
    arrays = _newest_arrays(session, compiled, state)
    replaced = [x for x in compiled.persistent if params and x.owner is Owner.PARAMETER]
    more = _bytes(replaced, len(compiled.devices))
    with _holding(session, compiled, "given parameters", more, more):
        if params:
            names = names_of(compiled, 0)
            arrays = with_leaves(names, arrays, ValueKind.PARAMETER, params, consume=False)
        values = _forward(session, compiled, state, arrays, batch, state.words)
    return session.metrics_of(compiled, session.readable(values))


def predict(session: Engine, state: State, batch: Tree, function: Function) -> Tree:
    """Computes a function of the newest parameters and a batch; nothing changes.

    Args:
        session: what the state belongs to; it remembers what was compiled for the function, that
            very object.
        state: its newest arrays are read.
        batch: of any size.
        function: of parameters and batch; of a pipeline with model state, of parameters, model
            state and batch.

    Raises:
        ValueError: the function reads no parameter, or gives no arrays.
        MemoryLimitExceeded: it does not keep the limit beside what the state holds.
        StageError: it failed; the state is whole.
    """
    session.check_state(state)
    training, compiled_for = session.compiled, session.predictions
    key = function, training, shapes_of(batch)
    if key not in compiled_for:
        compiled_for.clear()  # other functions, plans and shapes may never come back
        compiled_for[key] = _compiled(session, batch, function)
    compiled = compiled_for[key]
    trained = _newest_arrays(session, training, state)
    arrays, copied = _arrays(session, compiled, trained)
    live = session.ledger.live[: len(compiled.devices)]
    counted = _bytes(compiled.persistent, len(live))
    # The peak of a forward counts its own arrays, which the ledger counts as well.
    beside = [
        x + more - counted_bytes
        for x, more, counted_bytes in zip(live, copied, counted, strict=True)
    ]
    with _holding(session, compiled, "the rest of the state", beside, copied):
        values = session.readable(_forward(session, compiled, state, arrays, batch, words=None))
    groups = len(compiled.traced.graph.aux_groups)
    return jax.tree.unflatten(compiled.traced.loss.aux_tree, values[1 : 1 + groups])


def _newest_arrays(session: Engine, compiled: CompiledPlan, state: State) -> tuple[jax.Array, ...]:
    """Returns the newest of what a state has, each array where the plan has it."""
    arrays = session.plain_arrays(compiled, state)
    if session.settings.hosts is None:
        return arrays
    try:
        return brought_arrays(compiled, state, arrays)
    except Exception as error:
        raise session.controller.failure(error) from error


@contextmanager
def _holding(
    session: Engine, compiled: CompiledPlan, what: str, beside: Sequence[int], new: Sequence[int]
) -> Iterator[None]:
    """Checks that devices may hold more than a forward takes, and counts what is new of it meanwhile.

    Args:
        session: has the limits and the ledger.
        compiled: the plan whose forward is to run.
        what: lies beside, for the message.
        beside: its bytes on each device.
        new: those that the ledger does not know of.

    Raises:
        MemoryLimitExceeded: they do not keep the limit.
    """
    peaks = compiled.evaluation_peaks
    larger = [peak.beside(what, size) for peak, size in zip(peaks, beside, strict=False)]
    session.limits.check((*larger, peaks[HOST]), session.settings.devices)
    for device, size in enumerate(new):
        session.ledger.hold(device, size)
    try:
        yield
    finally:
        for device, size in enumerate(new):
            session.ledger.drop(device, size)


def _forward(
    session: Engine,
    compiled: CompiledPlan,
    state: State,
    arrays: Sequence[jax.Array],
    batch: Tree,
    words: np.ndarray | None,
) -> Sequence[jax.Array]:
    """Runs the forwards of a plan; what is measured of steps stays.

    Args:
        session: whose controller runs them.
        compiled: the plan.
        state: at whose step it is.
        arrays: what lies on the devices.
        batch: what the micro-batches are slices of.
        words: those of the key that they draw from, if from any.
    """
    controller, rows = session.controller, compiled.evaluation
    monitor, controller.monitor = controller.monitor, None
    try:
        feeds = session.feeds(batch, words, state.step, rows, compiled)
        _, values = controller.run(rows, arrays, feeds, Moment(state.step))
        controller.settle()
        return values
    finally:
        controller.monitor = monitor


# A function of the user's, made ready to run where the parameters lie.


def _compiled(session: Engine, batch: Tree, function: Function) -> CompiledPlan:
    """Traces a function as the aux of a loss, and compiles its forward."""
    settings, trees = session.settings, session.trees

    def loss(params: Tree, *rest: Any) -> Any:
        """Returns the function's values as aux, beside a number: their sum, so that none is dropped."""
        *model_state, batch, _ = rest
        values = function(params, *model_state, batch)
        leaves = jax.tree.leaves(values)
        total = sum((jnp.sum(jnp.real(x).astype(jnp.float32)) for x in leaves), 0.0)
        return (total, *model_state, values) if settings.has_state else (total, values)

    with phase("tracing and cutting the function"):
        model = trace_model(
            loss,
            trees.params,
            micro_batch_shapes(batch, 1),
            None,
            trees.model_state,
            stacks=trees.stacks,
            has_aux=True,
            has_state=settings.has_state,
            sharding=settings.sharding,
            reductions=_LAST,
        )
    # Forwards alone, of one micro-batch: no schedule matters, and no optimizer.
    return CompiledPlan(
        model.traced,
        _along(session.compiled, model.traced.graph),
        find_schedule("gpipe"),
        OptimizerCut((), (), (), jax.tree.structure(None), ()),
        1,
        settings.devices,
        session.store,
        hosts=settings.hosts,
    )


def _along(training: CompiledPlan, graph: LayerGraph) -> Plan:
    """Plans a function's layers: each where its parameters lie, and none before one that it follows."""
    trained, stages = training.traced.graph, training.plan.stages
    home = {
        trained.parameters[p].array.name: s
        for s, stage in enumerate(stages)
        for layer in stage.layers
        for p in trained.owned(layer)
    }
    of_layer, at = [], 0
    for layer in range(len(graph.layers)):
        # A layer may read what an earlier one made, so places never go back.
        at = max([at, *(home[graph.parameters[p].array.name] for p in graph.owned(layer))])
        of_layer.append(at)
    runs = groupby(range(len(of_layer)), of_layer.__getitem__)
    return Plan(tuple(Stage(tuple(layers), stages[s].devices[:1]) for s, layers in runs))


def _arrays(
    session: Engine, compiled: CompiledPlan, trained: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[int]]:
    """Finds a function's arrays among those of the training, and copies the others to where it reads them.

    If several devices hold a value, each takes its own copy. The training has none of the arrays
    that the function closes over.

    Returns:
        The arrays of this process, and the bytes that had to be copied to each device.
    """
    training, constants = session.compiled, compiled.traced.loss.constants
    there = {
        (_name(training.traced.graph, buffer), buffer.place): array
        for buffer, array in zip(training.persistent, trained, strict=True)
    }
    carried = _carried(session, compiled, there)
    # Any copy will do: all copies of a value are equal.
    anywhere = {name: array for (name, _), array in there.items() if array is not None}
    arrays, copied = list[Any](), [0] * len(compiled.devices)
    for buffer in compiled.persistent:
        spot = _name(compiled.traced.graph, buffer), buffer.place
        is_constant = buffer.value.kind is ValueKind.CONSTANT
        array = None if is_constant else there.get(spot)
        if array is None and _jax.is_own(compiled.devices[buffer.place]):
            array = carried.get(spot)
            if array is None:
                value = constants[buffer.value.index] if is_constant else anywhere[spot[0]]
                array = compiled.placing.put(value, buffer)
            copied[buffer.place] += buffer.bytes
        arrays.append(array)
    return arrays, copied


def _carried(
    session: Engine, compiled: CompiledPlan, there: Mapping[_Spot, jax.Array | None]
) -> dict[_Spot, jax.Array | None]:
    """Copies what a layer reads of other processes, where the function reads in another order than the loss.

    Args:
        session: of the training.
        compiled: the function.
        there: what the training has, in whatever process; None in others than this one.
    """
    hosts = session.settings.hosts
    if hosts is None:
        return {}
    process = [device.process_index for device in session.settings.devices]
    holders = defaultdict[_Name, list[int]](list)  # places, by name
    for name, place in there:
        holders[name].append(place)
    copies, spots, arrays = list[Carried](), list[_Spot](), list[jax.Array | None]()
    for buffer in compiled.persistent:
        name = _name(compiled.traced.graph, buffer)
        places = holders.get(name, ())
        # Every process finds the same copies, for all know where everything lies.
        if places and process[buffer.place] not in {process[place] for place in places}:
            copies.append(compiled.carried(buffer, process[places[0]]))
            spots.append((name, buffer.place))
            arrays.append(there[name, places[0]])
    return dict(zip(spots, hosts.carry(copies, arrays), strict=True)) if copies else {}


def _name(graph: LayerGraph, buffer: Buffer) -> _Name:
    kind, index = buffer.value.kind, buffer.value.index
    return kind, graph.parameters[index].array.name if kind is ValueKind.PARAMETER else index


def _bytes(buffers: Sequence[Buffer], devices: int) -> list[int]:
    """Sums the bytes of buffers on each device."""
    return [sum(buffer.bytes for buffer in buffers if buffer.memory == d) for d in range(devices)]
