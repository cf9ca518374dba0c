"""Prediction: the forward of any function of the parameters and a batch, each part where its parameters lie.

The function is traced and cut into layers as a loss is. A layer runs on the device that holds the parameters that it
reads, and no layer before one that it follows:

    training      device 0: embed, block 0    device 1: block 1, head, loss
    prediction    device 0: embed, block 0    device 1: block 1, head, and what the function does beside

The batch is one micro-batch: what the function gives need not have an entry for each example.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp

from jvpipe import _jax
from jvpipe.ir.buffers import Buffer
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan, Stage
from jvpipe.ir.reductions import AuxReduction, Reductions
from jvpipe.ir.values import ValueKind
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.hosts import Carried
from jvpipe.runtime.engine.phases import phase
from jvpipe.runtime.engine.training_state import State
from jvpipe.schedules import find_schedule
from jvpipe.session.evaluation import forwards, holding, newest_arrays
from jvpipe.session.session import Session
from jvpipe.session.trees import micro_batch_shapes, shapes_of
from jvpipe.trace.model import trace_model

Tree = Any
Function = Callable[..., Any]
_Spot = tuple[tuple[ValueKind, str | int], int]  # what an array is, and where
_ONE = Reductions(aux={"*": AuxReduction.LAST})  # of one micro-batch


def predict(session: Session, state: State, batch: Tree, function: Function) -> Tree:
    """Computes a function of the newest parameters and a batch; nothing changes.

    Args:
        session: what the state belongs to; it remembers what was compiled for the function, that very object.
        state: its newest arrays are read.
        batch: of any size.
        function: of parameters and batch; of a pipeline with model state, of parameters, model state and batch.

    Raises:
        ValueError: the function reads no parameter, or gives no arrays.
        MemoryLimitExceeded: it does not keep the limit beside what the state holds.
        StageError: it failed; the state is whole.
    """
    session.check_state(state)
    current, known = session.compiled, session.predictions
    key = function, current, shapes_of(batch)
    if key not in known:
        known.clear()  # other functions, plans and shapes may never come back
        known[key] = _compiled(session, batch, function)
    compiled = known[key]
    arrays, put = _arrays(session, compiled, newest_arrays(session, current, state))
    live = session.ledger.live[: len(compiled.devices)]
    own = _bytes(compiled.persistent, len(live))
    beside = [held + more - mine for held, more, mine in zip(live, put, own, strict=True)]
    with holding(session, compiled, "the rest of the state", beside, put):
        values = session.readable(forwards(session, compiled, state, arrays, batch, words=None))
    groups = len(compiled.traced.graph.aux_groups)
    return jax.tree.unflatten(compiled.traced.loss.aux_tree, values[1 : 1 + groups])


def _compiled(session: Session, batch: Tree, function: Function) -> CompiledPlan:
    """A function's forward, ready to run."""
    settings, trees, current = session.settings, session.trees, session.compiled

    def loss(params: Tree, *rest: Any) -> Any:
        """The function's values as what a loss gives beside its number, which is a sum of them."""
        *given, batch, _ = rest
        values = function(params, *given, batch)
        total = sum(
            (jnp.sum(jnp.real(x).astype(jnp.float32)) for x in jax.tree.leaves(values)), 0.0
        )
        return (total, *given, values) if settings.has_state else (total, values)

    micro = micro_batch_shapes(batch, 1)
    with phase("tracing and cutting the function"):
        model = trace_model(
            loss,
            trees.params,
            micro,
            None,
            trees.model_state,
            stacks=trees.stacks,
            has_aux=True,
            has_state=settings.has_state,
            sharding=settings.sharding,
            reductions=_ONE,
        )
    return CompiledPlan(
        model.traced,
        _along(current, model.traced.graph),
        find_schedule("gpipe"),
        OptimizerCut((), (), (), jax.tree.structure(None), ()),
        1,
        settings.devices,
        session.store,
        hosts=settings.hosts,
    )


def _along(current: CompiledPlan, graph: LayerGraph) -> Plan:
    """The plan of a function's layers: each where its parameters lie, and none before one that it follows."""
    home = {
        current.traced.graph.parameters[p].array.name: s
        for s, stage in enumerate(current.plan.stages)
        for layer in stage.layers
        for p in current.traced.graph.owned(layer)
    }
    of_layer, at = [], 0
    for layer in range(len(graph.layers)):
        at = max([at, *(home[graph.parameters[p].array.name] for p in graph.owned(layer))])
        of_layer.append(at)
    stages = [
        Stage(tuple(layers), current.plan.stages[s].devices[:1])
        for s, layers in groupby(range(len(of_layer)), of_layer.__getitem__)
    ]
    return Plan(tuple(stages))


def _arrays(
    session: Session, compiled: CompiledPlan, trained: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[int]]:
    """What lies on the devices for a function, from what does for the training; and the bytes that had to be put there.

    Each device takes its own part of what several hold; the arrays that the function closes over are none of
    the training.
    """
    current, graph = session.compiled, compiled.traced.graph
    there = {
        (_name(current.traced.graph, buffer), buffer.place): array
        for buffer, array in zip(current.persistent, trained, strict=True)
    }
    carried = _carried(session, compiled, there)
    anywhere = {name: array for (name, _), array in there.items() if array is not None}
    arrays, put = list[Any](), [0] * len(compiled.devices)
    for buffer in compiled.persistent:
        name, constant = _name(graph, buffer), buffer.value.kind is ValueKind.CONSTANT
        array = None if constant else there.get((name, buffer.place))
        if array is None and _jax.is_own(compiled.devices[buffer.place]):
            constants = compiled.traced.loss.constants
            array = carried.get((name, buffer.place))
            if array is None:
                value = constants[buffer.value.index] if constant else anywhere[name]
                array = compiled.placing.put(value, buffer)
            put[buffer.place] += buffer.bytes
        arrays.append(array)
    return arrays, put


def _carried(
    session: Session, compiled: CompiledPlan, there: Mapping[_Spot, jax.Array | None]
) -> dict[_Spot, jax.Array | None]:
    """Copies what a layer reads of other processes, where the function reads in another order than the loss.

    Args:
        session: of the training.
        compiled: the function.
        there: what the training has, by name and place, in whatever process; None in others than this one.
    """
    hosts = session.settings.hosts
    if hosts is None:
        return {}
    process = [device.process_index for device in session.settings.devices]
    holders = defaultdict[tuple[ValueKind, str | int], list[int]](list)  # places, by name
    for name, place in there:
        holders[name].append(place)
    copies, spots, arrays = list[Carried](), list[_Spot](), list[jax.Array | None]()
    for buffer in compiled.persistent:
        name = _name(compiled.traced.graph, buffer)
        places = holders.get(name, ())
        if places and process[buffer.place] not in {process[place] for place in places}:
            copies.append(compiled.carried(buffer, process[places[0]]))
            spots.append((name, buffer.place))
            arrays.append(there[name, places[0]])
    return dict(zip(spots, hosts.carry(copies, arrays), strict=True)) if copies else {}


def _name(graph: LayerGraph, buffer: Buffer) -> tuple[ValueKind, str | int]:
    """What an array is, in any graph of the same parameters and model state."""
    kind, index = buffer.value.kind, buffer.value.index
    return kind, graph.parameters[index].array.name if kind is ValueKind.PARAMETER else index


def _bytes(buffers: Sequence[Buffer], devices: int) -> list[int]:
    """The bytes of buffers on each device."""
    return [sum(buffer.bytes for buffer in buffers if buffer.memory == d) for d in range(devices)]
