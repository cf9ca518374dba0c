"""From a schedule's task lists to the rows that the controller dispatches, and the table of their buffers."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from jvpipe.ir.buffers import Lowered
from jvpipe.ir.fates import Fates
from jvpipe.ir.layers import Layer, LayerGraph, Ref, Signature
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import Task, TaskLists
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.schedules.emit import GLOBAL, Emitter, Key, home, persistent_buffers, state_places
from jvpipe.schedules.order import Waits, order, sums_from
from jvpipe.schedules.swaps import Swaps
from jvpipe.schedules.update import lower_update


class Form(NamedTuple):
    """How a micro-batch runs: where, the fates of what it leaves, and with them the programs of each layer.

    `program` tells the forms of one step apart.
    """

    program: int
    plan: Plan
    fates: Fates
    signatures: Sequence[Signature]

    @staticmethod
    def of(graph: LayerGraph, plan: Plan, signatures: Sequence[Signature], program: int = 0) -> "Form":
        """The form of a plan's fates and of the programs that were made for them."""
        return Form(program, plan, Fates.of(graph, plan), signatures)


def lower_step(
    graph: LayerGraph,
    forms: Sequence[Form],
    lists: TaskLists,
    optimizer: OptimizerCut,
    layer_s: Sequence[float] | None = None,
) -> Lowered:
    """Lowers one synchronous step: forwards, backwards and the update.

    Where a micro-batch runs under another plan than the one before, what belongs to the layers that move follows:
    their weights one micro-batch ahead, their sums of gradients and model state between two tasks.

    Args:
        graph: the layers.
        forms: of each micro-batch; the last one's plan is that of the step's end.
        lists: the tasks of each stage.
        optimizer: the update.
        layer_s: the layers' seconds, if known: they order the dispatch between devices.
    """
    pen = Emitter(graph, forms[0].plan, optimizer)
    micro = len(forms)
    ahead = {m - 1: forms[m].plan for m in range(1, micro) if forms[m].plan is not forms[m - 1].plan}
    swaps = Swaps(pen, lists, lambda task: swapped(pen, forms[task.microbatch], task))
    plans = [form.plan for form in forms]
    for task in order(Waits(graph, plans, layer_s), lists, waits_too=lambda task: sums_from(plans, task)):
        m, form = task.microbatch, forms[task.microbatch]
        if m in ahead:
            resettle(pen, ahead.pop(m))
        pen.enter(form.plan)
        layers = [graph.layers[i] for i in form.plan.stages[task.stage].layers]
        swaps.before(task)
        if task.kind == "F":
            for layer in layers:
                forward(pen, layer, m, form)
                losses(pen, layer, range(micro))
        else:
            for layer in reversed(layers):
                backward(pen, layer, m, form)
        swaps.after(task)
    pen.enter(forms[-1].plan)
    for k in range(len(graph.state)):
        for d in state_places(graph, pen.device, k):
            left = pen.find(("state", k, micro - 1, d)) or ("state", k, -1, d)
            pen.ids["state", k, -1, d] = pen.bring((*left[:3], d), GLOBAL)
    if forms[-1].plan is not forms[0].plan:
        pen.commit()
    metrics = metric_keys(graph)
    if lower_update(pen):
        metrics.append(("metric", "grad_norm"))
    return pen.lowered(metrics)


def resettle(pen: Emitter, plan: Plan) -> None:
    """Moves what lies on the devices between steps to where a plan has it; the model state follows its micro-batch."""
    pen.enter(plan)
    for buffer in persistent_buffers(pen.graph, plan, pen.optimizer):
        kind, index, holder, *_ = buffer.key
        if kind == "optimizer":
            pen.bring_optimizer(int(str(index)), int(str(holder)), buffer.device)
        elif kind != "state":
            pen.bring(buffer.key, GLOBAL)


def lower_move(graph: LayerGraph, old: Plan, new: Plan, optimizer: OptimizerCut, *, by_host: bool = False) -> Lowered:
    """Between two steps: from where one plan has everything to where another one does.

    With `by_host` all that moves leaves its device before anything arrives.
    """
    pen = Emitter(graph, old, optimizer)
    pen.by_host = by_host
    resettle(pen, new)
    for k in range(len(graph.state)):
        for d in state_places(graph, pen.device, k):
            pen.bring(("state", k, -1, d), GLOBAL)
    pen.commit()
    return pen.lowered(())


def lower_evaluation(graph: LayerGraph, plan: Plan, optimizer: OptimizerCut, microbatches: int) -> Lowered:
    """Lowers forwards alone, without residuals; the model state stays as it is."""
    lists = tuple(tuple(Task(s, "F", m) for m in range(microbatches)) for s in range(len(plan.stages)))
    pen = Emitter(graph, plan, optimizer)
    for task in order(Waits(graph, [plan] * microbatches), lists):
        for layer in plan.stages[task.stage].layers:
            forward(pen, graph.layers[layer], task.microbatch, None)
            losses(pen, graph.layers[layer], range(microbatches))
    return pen.lowered(metric_keys(graph))


def _key(pen: Emitter, layer: Layer, ref: Ref, m: int, *, back: bool = False) -> Key:
    """The name of what a layer reads, or writes, for a micro-batch."""
    d = pen.device[layer.id]
    match ref.kind:
        case "parameter":
            return pen.parameter(ref.index, layer.id, m, back=back)
        case "constant":
            return (ref.kind, ref.index, d)
        case _:
            return (ref.kind, ref.index, m, d)


def _read(pen: Emitter, layer: Layer, ref: Ref, m: int, *, back: bool = False) -> int:
    """The buffer that a layer reads; what comes from the host is fed first."""
    key = _key(pen, layer, ref, m, back=back)
    if ref.kind == "state":  # as the previous micro-batch left it
        before = (ref.kind, ref.index, m - 1, pen.device[layer.id])
        return pen.bring(before if pen.find(before) else (ref.kind, ref.index, -1, pen.device[layer.id]), layer.id, m)
    if ref.kind in ("batch", "seed") and key not in pen.ids:
        size = pen.graph.batch[ref.index].bytes if ref.kind == "batch" else pen.graph.seed_bytes
        pen.emit("FEED", layer.id, m, [], [pen.new(key, "batch", size, pen.device[layer.id])])
    return pen.bring(key, layer.id, m) if ref.kind in ("parameter", "constant") else pen.ids[key]


def _write(pen: Emitter, layer: Layer, ref: Ref, m: int) -> int:
    d, key = pen.device[layer.id], _key(pen, layer, ref, m)
    match ref.kind:
        case "tensor":
            return pen.new(key, "edge", pen.graph.tensors[ref.index].array.bytes, d)
        case "state":
            return pen.new(key, "state", pen.graph.state[ref.index].bytes, d)
        case "aux":
            return pen.new(key, "metric", pen.graph.aux[ref.index].bytes, d)
        case _:
            return pen.new(key, "metric", pen.graph.loss_bytes, d)


def forward(pen: Emitter, layer: Layer, m: int, form: Form | None) -> None:
    """A layer's forward, and the copies of what it makes straight to the devices that read it.

    Without a form it leaves nothing for a backward; nor does one that will run again.
    """
    graph, d = pen.graph, pen.device[layer.id]
    reads = [_read(pen, layer, ref, m) for ref in layer.reads]
    if form is None:
        writes = [
            pen.new(("unused", ref.index, m, d), "state", graph.state[ref.index].bytes, d)
            if ref.kind == "state"
            else _write(pen, layer, ref, m)
            for ref in layer.writes
        ]
        pen.emit("E", layer.id, m, reads, writes)
    else:
        writes = [_write(pen, layer, ref, m) for ref in layer.writes]
        name = "unused" if layer.id in form.fates.rerun else "residual"
        residuals = form.signatures[layer.id].residuals
        writes += [pen.new((name, layer.id, i, m), "residual", array.bytes, d) for i, array in enumerate(residuals)]
        pen.emit("F", layer.id, m, reads, writes, program=form.program)
    for ref in layer.writes:
        match ref.kind:
            case "tensor":
                places = [pen.device[reader] for reader in graph.tensors[ref.index].readers]
            case "state" if form is not None:
                places = state_places(graph, pen.device, ref.index)
            case "aux":
                places = [home(graph, pen.device)]
            case _:
                places = []
        for place in places:
            pen.send(_key(pen, layer, ref, m), (ref.kind, ref.index, m, place), place, layer.id, m)


def swapped(pen: Emitter, form: Form, task: Task) -> list[Key]:
    """What goes to the host after a forward: swapped residuals, and swapped edges that a backward here reads."""
    (s, _, m), (_, _, fates, signatures) = task, form
    graph = pen.graph
    layers = [graph.layers[i] for i, stage in pen.stage.items() if stage == s]
    found: list[Key] = [
        ("residual", layer.id, i, m)
        for layer in layers
        for i, array in enumerate(signatures[layer.id].residuals)
        if array.name in fates.swapped[layer.id]
    ]
    wanted = {
        (layer.reads if kind == "input" else layer.writes)[i]
        for layer in layers
        for kind, i in signatures[layer.id].sources
        if kind != "residual"
    }
    edges = (t for (stage, t), fate in fates.edges.items() if stage == s and fate == "swap")
    return found + [("tensor", t, m, pen.device[layers[0].id]) for t in edges if Ref("tensor", t) in wanted]


def _rerun(pen: Emitter, form: Form, layer: Layer, m: int) -> None:
    """Forwards that run again, so that a layer's backward finds what it reads."""
    for kind, i in form.signatures[layer.id].sources:
        if kind == "input":
            _ensure(pen, form, layer, layer.reads[i], m)
    if layer.id in form.fates.rerun:
        _again(pen, form, layer, m)


def _ensure(pen: Emitter, form: Form, reader: Layer, ref: Ref, m: int) -> None:
    """Makes an edge again if its stage dropped it."""
    if _is_dropped(pen, form, reader, ref):
        _again(pen, form, pen.graph.layers[pen.graph.tensors[ref.index].producer], m)


def _is_dropped(pen: Emitter, form: Form, layer: Layer, ref: Ref) -> bool:
    return ref.kind == "tensor" and form.fates.edges.get((pen.stage[layer.id], ref.index)) == "recompute"


def _again(pen: Emitter, form: Form, layer: Layer, m: int) -> None:
    """A layer's forward once more, unless it has been; it leaves what backwards read."""
    if (layer.id, m) in pen.reruns:
        return
    pen.reruns.add((layer.id, m))
    for ref in layer.reads:
        _ensure(pen, form, layer, ref, m)
    d = pen.device[layer.id]
    reads = [_left(pen, layer, ref, m) for ref in layer.reads]
    writes = []
    for ref in layer.writes:
        key = _key(pen, layer, ref, m)
        source = pen.buffers[pen.ids[key]]
        if _is_dropped(pen, form, layer, ref):
            pen.moved[key] = ("again", *key)
        writes.append(pen.new(("again", *key), source.owner, source.bytes, d))
    writes += [
        pen.new(("residual", layer.id, i, m), "residual", array.bytes, d)
        for i, array in enumerate(form.signatures[layer.id].residuals)
    ]
    pen.emit("R", layer.id, m, reads, writes, program=form.program)


def _moved(pen: Emitter, key: Key) -> int:
    return pen.ids[pen.moved.get(key, key)]


def _left(pen: Emitter, layer: Layer, ref: Ref, m: int) -> int:
    """The buffer in which a backward finds what a forward read or wrote."""
    key = _key(pen, layer, ref, m, back=True)
    return _moved(pen, key) if key in pen.moved else _read(pen, layer, ref, m, back=True)


def _zeros(pen: Emitter, layer: Layer, m: int) -> None:
    """Fresh accumulators for a layer."""
    d = pen.device[layer.id]
    here = [(pen.gradient(p, layer.id, m), pen.graph.parameters[p].array.bytes) for p in layer.reading("parameter")]
    writes = [pen.new(key, "gradient", size, d) for key, size in here]
    pen.emit("ZERO", GLOBAL, -1, [], writes, device=d, program=layer.id)


def losses(pen: Emitter, layer: Layer, batch: range, *tag: Hashable) -> None:
    """Once every micro-batch of a batch has its loss and aux: their sums, in buffers that `tag` tells apart."""
    graph, d = pen.graph, home(pen.graph, pen.device)
    if not (layer.writing("loss") or layer.writing("aux")):
        return
    parts = [("loss", i) for i in range(1 + graph.weighted)] + [("aux", i) for i in range(len(graph.aux))]
    keys = [(kind, i, n, d) for kind, i in parts for n in batch]
    if all(map(pen.find, keys)) and ("metric", "loss", *tag) not in pen.ids:
        writes = [pen.new(("metric", "loss", *tag), "metric", graph.loss_bytes, d)]
        if graph.weighted:
            writes.append(pen.new(("weight", d, *tag), "metric", graph.loss_bytes, d))
        for group, found in enumerate(graph.aux_groups):
            size = sum(graph.aux[i].bytes for i in found[:1])
            stacked = 1 if graph.aux_reduced(group) else len(batch)
            writes.append(pen.new(("metric", f"aux{group}", *tag), "metric", size * stacked, d))
        pen.emit("LOSS", graph.loss_layer, -1, [pen.bring(key, GLOBAL) for key in keys], writes)


def metric_keys(graph: LayerGraph, *tag: Hashable) -> list[Key]:
    """What a step tells of itself."""
    return [("metric", name, *tag) for name in ("loss", *(f"aux{group}" for group in range(len(graph.aux_groups))))]


def backward(pen: Emitter, layer: Layer, m: int, form: Form) -> None:
    """A layer's backward, after the forwards that must run again for it, and the cotangents that it sends on: to the
    next earlier reader, last to the producer.
    """
    _rerun(pen, form, layer, m)
    graph, d, signature = pen.graph, pen.device[layer.id], form.signatures[layer.id]
    sums = [pen.gradient(layer.reads[i].index, layer.id, m) for i in signature.gradients]
    if pen.accumulates and sums and not pen.find(sums[0]):
        _zeros(pen, layer, m)
    sources = {
        "input": lambda i: _left(pen, layer, layer.reads[i], m),
        "output": lambda i: _moved(pen, _key(pen, layer, layer.writes[i], m)),
        "residual": lambda i: _moved(pen, ("residual", layer.id, i, m)),
    }
    reads = [sources[kind](i) for kind, i in signature.sources]
    reads += [pen.ids["cotangent", layer.writes[i].index, m, d] for i in signature.cotangents]
    reads += [pen.ids["cotangent", layer.reads[i].index, m, d] for i in signature.partial]
    reads += [pen.bring(key, layer.id, m) for key in sums if pen.accumulates]
    tensors = [layer.reads[i].index for i in signature.returned]
    writes = [pen.new(key, "gradient", graph.parameters[int(str(key[1]))].array.bytes, d) for key in sums]
    writes += [pen.new(("cotangent", t, m, d), "edge", graph.tensors[t].array.bytes, d) for t in tensors]
    pen.emit("B", layer.id, m, reads, writes, program=form.program)
    for t in tensors:
        earlier = [r for r in graph.tensors[t].readers if r < layer.id]
        there = pen.device[earlier[-1] if earlier else graph.tensors[t].producer]
        pen.send(("cotangent", t, m, d), ("cotangent", t, m, there), there, layer.id, m)
