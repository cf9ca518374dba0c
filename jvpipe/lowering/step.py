"""A synchronous step lowered, a move between two steps, and an evaluation:
the passes one after another.

    order        one list of tasks for all stages                     (order.py)
    expand       a task becomes the operations of its layers          (expand.py)
    slice        an operation becomes one for each replica            (slicing.py; where stages are replicated)
    place        operations become rows and copies on places          (place.py)
    swap         what is swapped leaves and comes back                (swap.py)
    prefetch     optimizer state on the host comes and goes in time   (prefetch.py)
    liveness     each buffer is freed at its last row                 (liveness.py)

Tasks go through the first four one at a time, for what one makes the next one reads; the others
take whole steps.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from jvpipe.ir.buffers import Lowered
from jvpipe.ir.examples import Batching
from jvpipe.ir.kinds import KINDS, Kind, Runs
from jvpipe.ir.layers import Layer, LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.ir.rows import Row
from jvpipe.ir.task import Task, TaskLists
from jvpipe.ir.values import NONE, Value, ValueKind
from jvpipe.lowering.expand import Expander, gradient_norm, metrics_of
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.liveness import live
from jvpipe.lowering.operation import Operation
from jvpipe.lowering.order import Waits, order, sums_from
from jvpipe.lowering.place import Placer
from jvpipe.lowering.prefetch import prefetched
from jvpipe.lowering.slicing import Slicing
from jvpipe.lowering.swap import swap
from jvpipe.lowering.update import Slots, update_step
from jvpipe.lowering.weight_rule import OneVersion
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.shares import updating


def lower_step(
    graph: LayerGraph,
    layouts: Sequence[MicrobatchLayout],
    lists: TaskLists,
    optimizer: OptimizerCut,
    batching: Batching | None = None,
) -> Lowered:
    """Lowers one synchronous step: forwards, backwards and the update.

    Where a micro-batch runs under another plan than the one before, what belongs to the layers that
    move follows: their weights one micro-batch ahead, their sums of gradients and model state
    between two tasks.

    Args:
        graph: the layers.
        layouts: of each micro-batch; the last one's plan is that of the step's end.
        lists: the tasks of each device.
        optimizer: the update.
        batching: where stages are replicated, how what they exchange lies over the examples; layers
            stay then.
    """
    plans = [layout.plan for layout in layouts]
    expander = Expander(graph, OneVersion(graph), set())
    placer = Placer(graph, plans[0], optimizer)
    slicing = None
    if batching:
        by_number = {layout.number: layout for layout in layouts}
        replicas = updating(graph, plans[0], optimizer)
        slicing = Slicing(placer.where, batching, by_number, replicas)
    left = _place_tasks(expander, placer, layouts, lists, slicing)
    # The update runs under the last plan, once everything has moved there.
    placer.begin()
    placer.enter(plans[-1])
    placer.bring_state()
    if plans[-1] is not plans[0]:
        placer.commit()
    _perform(placer, update_step(expander, Slots(graph, optimizer)), slicing)
    swapped = list(
        swap(
            placer.blocks,
            placer.buffers,
            lists,
            left.__getitem__,
        )
    )
    rows = list(chain(*prefetched(swapped, placer.buffers)))
    metrics = (*metrics_of(graph), gradient_norm(graph))
    return _lowered(placer, rows, [value for value in metrics if value in expander.existing])


def _place_tasks(
    expander: Expander,
    placer: Placer,
    layouts: Sequence[MicrobatchLayout],
    lists: TaskLists,
    slicing: Slicing | None,
) -> dict[Task, tuple[int, list[int]]]:
    """Expands and places the forwards and backwards of a step.

    Returns what each forward leaves to be swapped.

    Args:
        expander: that expands them.
        placer: that places them.
        layouts: of each micro-batch.
        lists: the tasks of each device.
        slicing: where stages are replicated.
    """
    plans = [layout.plan for layout in layouts]
    batch = range(len(layouts))
    # A change of plan at m is prepared with m - 1: weights take a micro-batch's time to arrive.
    ahead = {m - 1: plans[m] for m in batch[1:] if plans[m] is not plans[m - 1]}
    tasks = list(chain(*lists))
    to_accumulate = Counter(task.stage for task in tasks if KINDS[task.kind].accumulates)
    split = {(task.stage, task.microbatch) for task in tasks if task.kind is Kind.I}
    waits = Waits(expander.graph, plans, split)
    left: dict[Task, tuple[int, list[int]]] = {}
    for task in order(waits, lists, waits_too=lambda task: sums_from(plans, task)):
        layout = layouts[task.microbatch]
        if task.microbatch in ahead:
            placer.begin()
            placer.relocate(ahead.pop(task.microbatch))
        placer.enter(layout.plan)
        placer.begin(task)
        operations = _expanded(expander, task, layout, batch)
        if accumulates := KINDS[task.kind].accumulates:
            to_accumulate[task.stage] -= 1
        if slicing and accumulates and not to_accumulate[task.stage]:
            _perform_last(
                placer,
                operations,
                slicing,
                layout.plan.stages[task.stage].layers,
            )
        else:
            _perform(placer, operations, slicing)
        if task.kind == Kind.F:
            left[task] = swapped_by(placer, layout, task, slicing)
    return left


def _perform_last(
    placer: Placer,
    operations: Iterable[Operation],
    slicing: Slicing,
    layers: Sequence[int],
) -> None:
    """Places the last backwards of a stage, and what adds up the gradients of its replicas.

        B(layer 4)  B(layer 3)  REDUCE(layer 4)  B(layer 2)  REDUCE(layer 3)  REDUCE(layer 2)

    The replicas send what they have of a layer while the next backward runs, and add it up behind
    that. It waits until backwards have let go of as many bytes as it takes, so that a step holds
    no more than if all were added up in the end.

    Args:
        placer: that places them.
        operations: of the task, the last layer's first.
        slicing: what replicas make of them.
        layers: of the stage.
    """
    due, freed_bytes = list(layers), 0
    for operation in operations:
        _perform(placer, [operation], slicing)
        if not KINDS[operation.kind].accumulates:
            continue
        freed_bytes += slicing.left_bytes(operation)
        while due and due[-1] > operation.layer:
            if slicing.reducing_bytes(due[-1]) > freed_bytes:
                break
            _perform(placer, slicing.reduced([due.pop()]))
    _perform(placer, slicing.reduced(due))


def lower_move(
    graph: LayerGraph,
    old: Plan,
    new: Plan,
    optimizer: OptimizerCut,
    *,
    by_host: bool = False,
) -> Lowered:
    """Lowers a move between two steps.

    Args:
        graph: the layers.
        old: where everything is.
        new: where it will be.
        optimizer: whose state moves too.
        by_host: all that moves leaves its place before anything arrives.
    """
    placer = Placer(graph, old, optimizer, by_host=by_host)
    placer.begin()
    placer.relocate(new)
    placer.enter(new)
    placer.bring_state()
    placer.commit()
    return _lowered(placer, placer.blocks[0].rows, ())


def divided_move(move: Lowered) -> tuple[Lowered, Lowered]:
    """Divides a move between two steps: its copies, then the end of what they were made of.

        move      MOVE a a'   FREE a   DROP b              a moves, b is elsewhere or older
        copies    MOVE a a'                                afterwards a, a' and b are all there
        drops                          DROP b   DROP a     afterwards a' alone is

    Args:
        move: from place to place.
    """
    rows = [replace(row, frees=()) for row in move.rows]  # ends are found again
    copies = [row for row in rows if KINDS[row.kind].link]
    drops = [row for row in rows if KINDS[row.kind].runs is Runs.NOTHING]
    everything = range(len(move.buffers))
    final = set(move.final)
    dropped = {b for row in drops for b in row.reads}
    assert dropped.isdisjoint(final), "what stays is not dropped"
    assert dropped | final >= set(range(move.persistent)), "what does not stay is"
    transient: dict[int, list[int]] = {}  # by place: buffers on the way to another one
    for b in everything:
        if b not in dropped and b not in final:
            transient.setdefault(move.buffers[b].place, []).append(b)
    for place, ids in transient.items():
        drops.append(
            Row(
                Kind.DROP,
                place,
                NONE,
                NONE,
                NONE,
                tuple(ids),
                (),
            )
        )
    return (
        live(copies, move.buffers, move.persistent, everything, ()),
        live(drops, move.buffers, len(everything), move.final, ()),
    )


def lower_evaluation(
    graph: LayerGraph,
    plan: Plan,
    optimizer: OptimizerCut,
    microbatches: int,
    batching: Batching | None = None,
) -> Lowered:
    """Lowers forwards alone, without residuals; the model state stays as it is.

    Args:
        graph: the layers.
        plan: where they run.
        optimizer: whose state is there meanwhile.
        microbatches: of the batch.
        batching: where stages are replicated, how what they exchange lies over the examples.

    >>> import jax
    >>> from jvpipe.ir.layers import Array, Ref, Tensor
    >>> edge, loss = Ref(ValueKind.TENSOR, 0), Ref(ValueKind.LOSS, 0)
    >>> layers = Layer(0, "a", (), (edge,)), Layer(1, "b", (edge,), (loss,))
    >>> graph = LayerGraph(layers, (Tensor(Array("t", (), "float32", 4), 0, (1,), True),), ())
    >>> optimizer = OptimizerCut((), (), (), jax.tree.structure(None), ())
    >>> [str(row) for row in lower_evaluation(graph, Plan.from_cuts([1, 1]), optimizer, 1).rows]
    ['0E0[layer 0]', '0SEND0[layer 0]', '1E0[layer 1]', '1LOSS[layer 1]']
    """
    batch = range(microbatches)
    stages = range(len(plan.stages))
    lists = tuple(tuple(Task(s, Kind.F, m) for m in batch) for s in stages)
    expander = Expander(graph, OneVersion(graph), set())
    placer = Placer(graph, plan, optimizer)
    slicing = Slicing(placer.where, batching) if batching else None
    # Without slices the devices of a stage take turns with the micro-batches.
    plans = [plan if slicing else plan.turn(m) for m in batch]
    for task in order(Waits(graph, plans), lists):
        placer.begin()
        for i in plan.stages[task.stage].layers:
            layer = graph.layers[i]
            placer.enter(plans[task.microbatch])
            _perform(placer, expander.evaluate(layer, task.microbatch), slicing)
            placer.enter(plan)
            _perform(placer, _losses(expander, layer, batch), slicing)
    rows = [row for block in placer.blocks for row in block.rows]
    return _lowered(placer, rows, metrics_of(graph))


def _perform(
    placer: Placer,
    operations: Iterable[Operation],
    slicing: Slicing | None = None,
) -> None:
    """Places operations one after another, those of replicas if there are any.

    Args:
        placer: that places them.
        operations: each made only when those before it are placed.
        slicing: where stages are replicated.
    """
    for operation in operations:
        for part in slicing(operation) if slicing else (operation,):
            placer.perform(part)


def swapped_by(
    placer: Placer,
    layout: MicrobatchLayout,
    task: Task,
    slicing: Slicing | None = None,
) -> tuple[int, list[int]]:
    """Returns the first layer of a task's stage, and the buffers that its forward leaves to be
    swapped.

    Args:
        placer: that has placed the task.
        layout: of the micro-batch.
        task: a forward.
        slicing: where stages are replicated.
    """
    first = layout.layers(task.stage)[0].id
    place = layout.plan.stages[task.stage].devices[0]
    buffers = []
    for value in layout.swapped(task.stage, task.microbatch):
        spots = slicing.spots(first, value) if slicing else [(value, place)]
        buffers += [placer.current[spot] for spot in spots]
    return first, buffers


def _expanded(
    expander: Expander,
    task: Task,
    layout: MicrobatchLayout,
    batch: range,
) -> Iterable[Operation]:
    """Yields the operations of a task, layer by layer."""
    layers = layout.layers(task.stage)
    m = task.microbatch
    match task.kind:
        case Kind.F:
            for layer in layers:
                yield from expander.forward(layer, m, layout)
                yield from _losses(expander, layer, batch)
        case Kind.B:
            for layer in reversed(layers):
                yield from expander.backward(layer, m, layout)
        case Kind.I:
            for layer in reversed(layers):
                yield from expander.input_half(layer, m, layout)
        case Kind.W:
            for layer in reversed(layers):
                yield from expander.weight_half(layer, m, layout)
        case _:
            raise AssertionError(f"a synchronous step has no {task}")


def _losses(expander: Expander, layer: Layer, batch: range) -> Iterable[Operation]:
    weight = Value(
        ValueKind.WEIGHT,
        0,
        expander.graph.loss_layer,
        version=0,
    )
    return expander.losses(layer, batch, weight)


def _lowered(placer: Placer, rows: Sequence[Row], metrics: Sequence[Value]) -> Lowered:
    """Makes a step of placed rows that yields metrics, each of which some row must have made."""
    buffers = [b for b in map(placer.metric, metrics) if b is not None]
    assert len(buffers) == len(metrics), "a step makes all of its metrics"
    final = [b for _, b in placer.lasting()]
    return live(rows, placer.buffers, placer.persistent, final, buffers)
