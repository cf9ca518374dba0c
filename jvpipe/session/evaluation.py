"""Evaluates a loss, or any function of the parameters; layers run on their parameters' devices.

An evaluation runs only the forwards of the plan in use. A prediction runs a user's function, which
is traced and cut into layers like a loss. Each layer of the function runs on the device that holds
its parameters, but never on an earlier stage than the layer before it. For example, a model and a
function of its parameters may run on two devices like this:

    training      device 0: embed, block 0    device 1: block 1, head, loss
    prediction    device 0: embed, block 0    device 1: block 1, head, further work of the function

The batch of a prediction is one micro-batch. The values that the function returns need not have an
entry for each example, so the values of several micro-batches could not be joined.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe._jax import Var
from jvpipe.ir.buffers import HOST, Buffer
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan, Stage
from jvpipe.ir.reductions import AuxReduction, Reductions
from jvpipe.ir.values import Owner, ValueKind
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.controller import Moment
from jvpipe.runtime.engine.hosts import Carried, together
from jvpipe.runtime.engine.phases import phase
from jvpipe.runtime.engine.training_state import State
from jvpipe.runtime.state.checkpoints.flight import brought_arrays, names_of, with_leaves
from jvpipe.schedules import find_schedule
from jvpipe.session.engine import Engine, Metrics
from jvpipe.trace.batches import micro_batch_shapes, shapes_of
from jvpipe.trace.flat_loss import check_returned
from jvpipe.trace.loss import LossJaxpr
from jvpipe.trace.model import trace_model
from jvpipe.util.brief import brief
from jvpipe.util.devices import is_own

Tree = Any
Function = Callable[..., Any]
_Name = tuple[ValueKind, str | int]
"""An array's name: its kind, and the path of a parameter or the index of another array.

Except for constants, an array has the same name in the graphs of the loss and of a function.
"""
_Copies = Mapping[_Name, Mapping[int, jax.Array | None]]
"""The copies of the training's arrays, by name and place; None for one of another process."""
_LAST = Reductions(aux={"*": AuxReduction.LAST})
"""A prediction has one micro-batch, so the value of its last micro-batch is its only value."""


def evaluate(session: Engine, state: State, batch: Tree, params: Sequence[Any] = ()) -> Metrics:
    """Runs a batch's forward, without changes to the state or to the measurements of steps.

    Args:
        session: the session to which the state belongs.
        state: its newest arrays are used.
        batch: a batch whose size is a multiple of the number of micro-batches.
        params: leaves to use in place of the state's parameters; empty to use the state's.
            During the evaluation, the given leaves and the state's are both in memory.

    Raises:
        MemoryLimitExceeded: an evaluation exceeds the limit.
        StageError: the evaluation failed; the state is unchanged.
    """
    return weighed(session, state, batch, params)[0]


def weighed(
    session: Engine, state: State, batch: Tree, params: Sequence[Any] = ()
) -> tuple[Metrics, Any]:
    """Evaluates a batch like `evaluate`, and returns how much its loss counts among others.

    This is the sum of its weights if the loss is `Weighted`, otherwise the number of its examples.
    The arguments and errors are those of `evaluate`.

    Args:
        session: the session of the training.
        state: the state to evaluate.
        batch: the batch.
        params: parameters that are evaluated in place of those of the state.
    """
    compiled = session.compiled_plans.for_batch(batch)
    arrays = _newest_arrays(session, compiled, state)
    replaced = [x for x in compiled.persistent if params and x.owner is Owner.PARAMETER]
    more = _bytes(replaced, len(compiled.devices))
    with _holding(session, compiled, "given parameters", more, more):
        if params:
            names = names_of(compiled, 0)
            arrays = with_leaves(
                names, arrays, ValueKind.PARAMETER, dict(enumerate(params)), consume=False
            )
        values = _forward(session, compiled, state, arrays, batch, state.words)
    metrics = session.readable(values)
    if not compiled.graph.weighted:
        return session.metrics_of(compiled, metrics), jax.tree.leaves(batch)[0].shape[0]
    *metrics, weight = metrics
    return session.metrics_of(compiled, metrics), weight


def predict(session: Engine, state: State, batch: Tree, function: Function) -> Tree:
    """Computes a function of the newest parameters and a batch; the state does not change.

    Args:
        session: the session to which the state belongs. It keeps the last compiled function; the
            same function object with the same plan and shapes is not compiled again.
        state: its newest arrays are read.
        batch: a batch of any size.
        function: a function of (parameters, batch), or of (parameters, model state, batch)
            if the pipeline has a model state.

    Raises:
        ValueError: the function reads no parameter, or returns no arrays.
        MemoryLimitExceeded: the arrays of the state and of the function exceed the limit.
        StageError: the function failed; the state is unchanged.
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
    # The peak of a forward includes the arrays that the forward reads. `live` or `copied`
    # count these arrays too, so their bytes are subtracted once.
    beside = [
        x + more - counted_bytes
        for x, more, counted_bytes in zip(live, copied, counted, strict=True)
    ]
    with _holding(session, compiled, "the rest of the state", beside, copied):
        values = session.readable(_forward(session, compiled, state, arrays, batch, words=None))
    traced = compiled.traced
    return jax.tree.unflatten(traced.loss.aux_tree, values[1 : 1 + len(traced.graph.aux_groups)])


def _newest_arrays(session: Engine, compiled: CompiledPlan, state: State) -> tuple[jax.Array, ...]:
    """Returns the newest versions of a state's arrays, each on the device of the plan."""
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
    """Checks that a forward and other arrays together keep the limits, and counts new arrays.

    If the check fails in one process, all processes raise its error. Otherwise the others would
    begin the forward and wait for that process.

    Args:
        session: has the limits and the ledger.
        compiled: the plan whose forward will run.
        what: the name of the other arrays, for the message.
        beside: the bytes of the other arrays on each device.
        new: the bytes of arrays that the ledger counts only inside the context.

    Raises:
        MemoryLimitExceeded: a device would hold more than its limit.
    """

    def check() -> None:
        peaks = compiled.evaluation_peaks
        larger = [peak.beside(what, size) for peak, size in zip(peaks, beside, strict=False)]
        session.limits.check((*larger, peaks[HOST]), session.settings.devices)

    together(session.settings.hosts, "limits", check)
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
    """Runs the forwards of a plan, without adding to the measurements of steps.

    Args:
        session: has the controller that runs the forwards.
        compiled: the plan.
        state: has the number of the step.
        arrays: the arrays that the forwards read, each on its device.
        batch: the batch; each micro-batch is a slice of it.
        words: the words of the random key; None if the forwards draw no random numbers.
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


# The functions below compile the user's function for the devices that hold the parameters.


def _compiled(session: Engine, batch: Tree, function: Function) -> CompiledPlan:
    """Traces a loss that returns the function's values as aux, and compiles its forward."""
    settings, trees = session.settings, session.trees

    def loss(params: Tree, *rest: Any) -> Any:
        """Returns the sum of the function's values as the loss, and the values as aux.

        Tracing drops everything on which the loss does not depend. The sum depends on all values.
        It has no gradient, so the function may have loops that cannot be differentiated.
        """
        *model_state, batch, _ = rest
        values = function(params, *model_state, batch)
        check_returned(values, "leaf of the prediction")
        if not jax.tree.leaves(values):
            raise ValueError(f"the function returns no arrays, it returns {brief(values)}")
        leaves = jax.tree.leaves(values)
        total = sum((jnp.sum(jnp.real(leaf).astype(jnp.float32)) for leaf in leaves), 0.0)
        return jax.lax.stop_gradient(total), *model_state, values

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
            is_trained=False,
        )
    _check_reads(model.traced.loss)
    # Only forwards of one micro-batch run, so any schedule will do, and the optimizer is empty.
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


def _check_reads(loss: LossJaxpr) -> None:
    """Raises ValueError if a function reads no parameter."""
    read = {v for eqn in loss.eqns for v in eqn.invars if isinstance(v, Var)}
    parameters = loss.inputs_of(ValueKind.PARAMETER)
    if read.isdisjoint(parameters):
        raise ValueError(
            f"the function depends on no parameter, of {len(parameters)} arrays: call it without "
            "the pipeline"
        )


def _along(training: CompiledPlan, graph: LayerGraph) -> Plan:
    """Puts each layer of a function on the stage of its parameters, or on a later stage."""
    trained, stages = training.traced.graph, training.plan.stages
    stage_of: dict[str, int] = {}  # by the name of a parameter
    for s, stage in enumerate(stages):
        owned = [p for layer in stage.layers for p in trained.owned(layer)]
        stage_of |= {trained.parameters[p].array.name: s for p in owned}
    of_layer = list[int]()
    for layer in range(len(graph.layers)):
        # A stage has consecutive layers, so no layer goes back to a stage before the present one.
        owned = [stage_of[graph.parameters[p].array.name] for p in graph.owned(layer)]
        of_layer.append(max([0, *of_layer[-1:], *owned]))
    runs = groupby(range(len(of_layer)), of_layer.__getitem__)
    placed = [Stage(tuple(layers), stages[s].devices[:1]) for s, layers in runs]
    return Plan(tuple(placed))


def _arrays(
    session: Engine, compiled: CompiledPlan, trained: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[int]]:
    """Returns the arrays that a function reads, each on the device that reads it.

    An array of the training is used if it is on that device, and copied there otherwise. Arrays
    that the function closes over are not part of the training, so they are always copied.

    Returns:
        The arrays, with None for arrays that other processes read, and the bytes copied to each
        device.
    """
    training, constants = session.compiled, compiled.traced.loss.constants
    there = defaultdict[_Name, dict[int, jax.Array | None]](dict)
    for buffer, array in zip(training.persistent, trained, strict=True):
        # The loss and the function close over different constants.
        if buffer.value.kind is not ValueKind.CONSTANT:
            there[_name(training.traced.graph, buffer)][buffer.place] = array
    carried = _carried(session, compiled, there)
    arrays, copied = list[Any](), [0] * len(compiled.devices)
    for buffer in compiled.persistent:
        name, place = _name(compiled.traced.graph, buffer), buffer.place
        array = there[name].get(place)
        if array is None and is_own(compiled.devices[place]):
            array = carried.get((name, place))
            if array is None:
                # All copies of a value are equal, so any can be the source. Constants have none.
                sources = [copy for copy in there[name].values() if copy is not None]
                value = sources[0] if sources else constants[buffer.value.index]
                array = compiled.placing.put(value, buffer)
            copied[place] += buffer.bytes
        arrays.append(array)
    return arrays, copied


def _carried(
    session: Engine, compiled: CompiledPlan, there: _Copies
) -> dict[tuple[_Name, int], jax.Array | None]:
    """Copies arrays from other processes to those devices of this process that read them.

    A layer may run on another stage than the stage that holds its parameters, for instance if the
    function reads parameters in another order than the loss.

    Args:
        session: the session of the training.
        compiled: the function.
        there: all arrays of the training.

    Returns:
        The arrays by name and place.
    """
    hosts = session.settings.hosts
    if hosts is None:
        return {}
    process = [device.process_index for device in session.settings.devices]
    copies = list[Carried]()
    spots = list[tuple[_Name, int]]()
    arrays = list[jax.Array | None]()
    for buffer in compiled.persistent:
        name = _name(compiled.traced.graph, buffer)
        places = list(there.get(name, ()))
        # Every process knows the places of all arrays, so all processes find the same copies.
        if places and process[buffer.place] not in {process[place] for place in places}:
            copies.append(compiled.carried(buffer, process[places[0]]))
            spots.append((name, buffer.place))
            arrays.append(there[name][places[0]])
    return dict(zip(spots, hosts.carry(copies, arrays), strict=True)) if copies else {}


def _name(graph: LayerGraph, buffer: Buffer) -> _Name:
    kind, index = buffer.value.kind, buffer.value.index
    return kind, graph.parameters[index].array.name if kind is ValueKind.PARAMETER else index


def _bytes(buffers: Sequence[Buffer], devices: int) -> list[int]:
    """Sums the bytes of buffers on each device."""
    sizes = [0] * devices
    for buffer in buffers:
        if buffer.memory != HOST:
            sizes[buffer.memory] += buffer.bytes
    return sizes
