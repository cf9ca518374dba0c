"""Lowers a synchronous step, a move between two steps, or an evaluation, by passes in this order.

    order        one list of tasks for all stages                     (order.py)
    expand       a task becomes the operations of its layers          (expand.py)
    slice        an operation becomes one for each replica            (slicing.py, with replicas)
    place        operations become rows at places, with copies        (place.py)
    swap         swapped values leave the device and come back        (swap.py)
    prefetch     copies of optimizer state overlap with work          (prefetch.py)
    liveness     each buffer is freed at its last row                 (liveness.py)

A row is one program or one copy at one place (a device). Tasks pass through expand, slice and place
one at a time, because a task reads values that earlier tasks have made and placed. Swap, prefetch
and liveness take the whole step, because they look at later rows.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, pairwise

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
from jvpipe.lowering.weight_rule import Weights
from jvpipe.programs.optimizer_pieces import OptimizerCut


def lower_step(
    graph: LayerGraph,
    layouts: Sequence[MicrobatchLayout],
    lists: TaskLists,
    optimizer: OptimizerCut,
    batching: Batching | None = None,
) -> Lowered:
    """Lowers one synchronous step: forwards, backwards and the update.

    The plan may change between two micro-batches. The values of the layers that move are then moved
    too. Weights do not change within a step, so they are copied one micro-batch ahead. Sums of
    gradients and model state do change, so they are copied when the new place first reads them.

    Args:
        graph: the layers.
        layouts: the layout of each micro-batch; the step ends under the plan of the last one.
        lists: the tasks of each device.
        optimizer: the update.
        batching: how the values that replicas exchange depend on the examples; None if no stage has
            replicas. If it is given, all micro-batches must have one plan.
    """
    plans = [layout.plan for layout in layouts]
    expander = Expander(graph, Weights(graph), set())
    placer = Placer(graph, plans[0], optimizer)
    slicing = None
    if batching:
        by_number = {layout.number: layout for layout in layouts}
        slicing = Slicing(placer.where, batching, by_number)
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

    Returns, for each forward, the first layer of its stage and the buffers to swap after it.

    Args:
        expander: makes operations of the tasks.
        placer: makes rows of the operations.
        layouts: the layout of each micro-batch.
        lists: the tasks of each device.
        slicing: divides operations among replicas; None if no stage has replicas.
    """
    plans = [layout.plan for layout in layouts]
    batch = range(len(layouts))
    # If a new plan begins at micro-batch m, weights are moved during m - 1, so that they arrive in
    # time.
    ahead: dict[int, Plan] = {}  # by micro-batch: the plan that begins after it
    for m, (before, after) in enumerate(pairwise(plans)):
        if after is not before:
            ahead[m] = after
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
    """Places the last backward task of a stage, and the sums of its replicas' gradients.

    REDUCE adds up the gradients that the replicas have of one layer:

        B(layer 4)  B(layer 3)  REDUCE(layer 4)  B(layer 2)  REDUCE(layer 3)  REDUCE(layer 2)

    A layer's REDUCE comes after the backward of an earlier layer, so that the replicas send their
    gradients while that backward runs. It also waits until this task's backwards have freed as many
    bytes as it needs. So adding up all gradients at the end would not lower the peak of memory.

    Args:
        placer: makes rows of the operations.
        operations: those of the task, from the stage's last layer to its first.
        slicing: divides operations among the replicas.
        layers: the layers of the stage.
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
    """Lowers a move between two steps, from one plan to another.

    Args:
        graph: the layers.
        old: the plan before the move.
        new: the plan after it.
        optimizer: the update; its state moves too.
        by_host: whether everything that moves goes to the host before anything arrives. No device
            then holds old and new buffers at once.
    """
    placer = Placer(graph, old, optimizer, by_host=by_host)
    placer.begin()
    placer.relocate(new)
    placer.enter(new)
    placer.bring_state()
    placer.commit()
    return _lowered(placer, placer.blocks[0].rows, ())


def divided_move(move: Lowered) -> tuple[Lowered, Lowered]:
    """Divides a move between two steps into its copies and the freeing of the old buffers.

        move      MOVE a a'   FREE a   DROP b             a moves to a'; b is no longer needed
        copies    MOVE a a'                               afterwards a, a' and b exist
        drops                          DROP b   DROP a    afterwards only a' exists

    Args:
        move: a move that does not go through the host.
    """
    rows = [replace(row, frees=()) for row in move.rows]  # `live` finds the ends again
    copies = [row for row in rows if KINDS[row.kind].link]
    drops = [row for row in rows if KINDS[row.kind].runs is Runs.NOTHING]
    everything = range(len(move.buffers))
    final = set(move.final)
    dropped = {b for row in drops for b in row.reads}
    assert dropped.isdisjoint(final), "a buffer that stays is not dropped"
    assert dropped | final >= set(range(move.persistent)), "a buffer that does not stay is dropped"
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
    """Lowers an evaluation: forwards without residuals, which leave the model state as it is.

    It yields the metrics, then the sum of the weights if the loss has any.

    Args:
        graph: the layers.
        plan: the plan that says where the layers run.
        optimizer: the update, whose state stays in memory during the evaluation.
        microbatches: the number of micro-batches of the batch.
        batching: how the values that replicas exchange depend on the examples. None if replicas do
            not divide micro-batches, but take turns with whole ones.

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
    expander = Expander(graph, Weights(graph), set())
    placer = Placer(graph, plan, optimizer)
    slicing = Slicing(placer.where, batching) if batching else None
    # Without slices the replicas of a stage take turns: each runs whole micro-batches.
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
    weights = [_weight(graph)] if graph.weighted else []
    return _lowered(placer, rows, [*metrics_of(graph), *weights])


def _perform(
    placer: Placer,
    operations: Iterable[Operation],
    slicing: Slicing | None = None,
) -> None:
    """Places operations one after another, each divided among the replicas of its stage.

    Args:
        placer: makes rows of the operations.
        operations: the operations; an iterator may make each one when all before it are placed.
        slicing: divides operations among replicas; None if no stage has replicas.
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
    """Returns the first layer of a forward's stage, and the buffers to swap after the forward.

    Args:
        placer: the placer that has placed the task.
        layout: the layout of the task's micro-batch.
        task: a forward.
        slicing: divides operations among replicas; None if no stage has replicas.
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
    """Yields the operations of a task, layer by layer.

    Args:
        expander: makes the operations.
        task: the task.
        layout: the layout of its micro-batch.
        batch: the micro-batches of the step.
    """
    layers = layout.layers(task.stage)
    m = task.microbatch
    match task.kind:
        case Kind.F:
            for layer in layers:
                yield from expander.forward(layer, m, layout)
                yield from _losses(expander, layer, batch)
        case Kind.B | Kind.I | Kind.W:
            for layer in reversed(layers):
                yield from expander.backward(task.kind, layer, m, layout)
        case _:
            raise AssertionError(f"a synchronous step has no {task}")


def _losses(expander: Expander, layer: Layer, batch: range) -> Iterable[Operation]:
    """Yields the operation that reduces losses and aux, once a forward has made the last of them.

    Args:
        expander: makes the operation.
        layer: the layer whose forward has just run.
        batch: the micro-batches of the step.
    """
    return expander.losses(layer, batch, _weight(expander.graph))


def _weight(graph: LayerGraph) -> Value:
    """Names the sum of the losses' weights."""
    return Value(ValueKind.WEIGHT, 0, graph.loss_layer, version=0)


def _lowered(placer: Placer, rows: Sequence[Row], metrics: Sequence[Value]) -> Lowered:
    """Makes a step of placed rows that yields the given metrics, which rows must have made.

    Args:
        placer: has the table of buffers.
        rows: the rows of the step.
        metrics: the values that the step yields.
    """
    buffers = [b for b in map(placer.metric, metrics) if b is not None]
    assert len(buffers) == len(metrics), "a step makes all of its metrics"
    final = [b for _, b in placer.lasting()]
    return live(rows, placer.buffers, placer.persistent, final, buffers)
