"""A loss on slices of a micro-batch, as the replicas of a stage compute it, in the layers of the whole.

It is traced at the size of each slice. A mean counts as much as its share of the examples. Random numbers and positions
are those of the whole micro-batch, of which each slice takes its own: dropout draws the same masks for any number of
replicas (and every replica draws them all).
"""

from collections.abc import Sequence
from dataclasses import replace

import jax

from jvpipe import _jax
from jvpipe._jax import JaxprEqn
from jvpipe.ir.examples import Batching, Examples, Over, Spread
from jvpipe.ir.layers import LayerGraph, Ref
from jvpipe.ir.values import ValueKind
from jvpipe.trace.graph import Body, Traced, build_graph
from jvpipe.trace.loss import LossJaxpr
from jvpipe.trace.spread import GENERATORS, NONE, CoupledError, Lies, Spreading, reaching


def sliced(traced: Traced, examples: Examples) -> Traced:
    """The same layers on some of the examples.

    Args:
        traced: the layers on a whole micro-batch.
        examples: of it.

    Raises:
        CoupledError: the loss is another one at that size.
    """
    made = build_graph(_resized(traced.loss, examples.size), traced.cuts, traced.splits)
    if _layers(made.graph) != _layers(traced.graph):
        raise CoupledError(
            f"the loss on {examples.size} examples is not made of the layers that it has on {traced.graph.examples}: "
            "use larger micro-batches or fewer replicas, so that each has at least 2 examples"
        )
    share = 1.0 if traced.loss.weighted else examples.size / traced.graph.examples
    both = zip(traced.bodies, made.bodies, strict=True)
    bodies = tuple(_body(whole, part, examples, traced.graph.examples, share) for whole, part in both)
    return replace(made, bodies=bodies)


def _resized(loss: LossJaxpr, examples: int) -> LossJaxpr:
    assert loss.of_size is not None, "a loss that was not traced from a function"
    try:
        return loss.of_size(examples)
    except Exception as error:
        raise CoupledError(
            f"the loss does not take {examples} examples, which is what a replica has: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}"
        ) from error


def _layers(graph: LayerGraph) -> object:
    """What must be alike for layers to be the same but for their sizes."""
    layers = [(layer.reads, layer.writes, [c.name for c in layer.candidates]) for layer in graph.layers]
    tensors = [(tensor.producer, tensor.readers, tensor.differentiable) for tensor in graph.tensors]
    return layers, tensors, [parameter.readers for parameter in graph.parameters]


def _body(whole: Body, part: Body, examples: Examples, all_examples: int, share: float) -> Body:
    """A layer on a slice: what it draws is cut out of what the whole layer draws."""
    eqns: list[JaxprEqn] = []
    for eqn, own in zip(whole.eqns, part.eqns, strict=True):
        eqns += _generated(eqn, own, examples, all_examples) if eqn.primitive.name in GENERATORS else [own]
    return replace(part, eqns=tuple(eqns), share=share if Ref(ValueKind.LOSS, 0) in part.writes else 1.0)


def _generated(whole: JaxprEqn, own: JaxprEqn, examples: Examples, all_examples: int) -> Sequence[JaxprEqn]:
    """Numbers by their position: those of the whole micro-batch, then the part that is wanted."""
    aval, wanted = _jax.aval(whole.outvars[0]), _jax.aval(own.outvars[0])
    inputs = [_jax.aval(a).shape == _jax.aval(b).shape for a, b in zip(whole.invars, own.invars, strict=True)]
    axes = [i for i, (a, b) in enumerate(zip(aval.shape, wanted.shape, strict=True)) if a != b]
    if not axes or not all(inputs):
        return [own]
    (axis,) = axes
    rows = aval.shape[axis] // all_examples
    start, stop = examples.start * rows, examples.stop * rows
    drawn = _jax.new_variable(aval)
    like = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    (cut,) = jax.make_jaxpr(lambda x: jax.lax.slice_in_dim(x, start, stop, axis=axis))(like).jaxpr.eqns
    return [
        whole.replace(invars=own.invars, outvars=[drawn]),
        cut.replace(invars=[drawn], outvars=own.outvars),
    ]


def batching(traced: Traced, fewer: int) -> Batching:
    """Finds how edges and aux lie over the examples of a micro-batch.

    Args:
        traced: the layers on a whole one.
        fewer: a smaller number of examples, to compare with.

    Raises:
        CoupledError: its examples cannot be computed apart, or its loss or aux not be made of those of slices.
    """
    loss, small = traced.loss, _resized(traced.loss, fewer)
    states = [atom for atom, ref in loss.outputs if ref.kind is ValueKind.STATE]
    layer_of = {
        id(eqn): layer for layer, body in zip(traced.graph.layers, traced.bodies, strict=True) for eqn in body.eqns
    }

    def place_of(eqn: JaxprEqn) -> str:
        layer = layer_of.get(id(eqn))
        return "the loss" if layer is None else f"layer {traced.graph.label(layer)}"

    spreading = Spreading(traced.graph.examples, fewer, reaching(loss.eqns, states), place_of)
    spreading.known = {v: Lies(Over.ALONG, 0) for v, ref in loss.inputs.items() if ref.kind is ValueKind.BATCH}
    spreading.run(loss.eqns, small.eqns)
    outputs = {
        ref: spreading.lies(atom, other) for (atom, ref), (other, _) in zip(loss.outputs, small.outputs, strict=True)
    }
    _check_outputs(traced, outputs)
    variables = {ref: v for body in traced.bodies for v, ref in zip(body.outputs, body.writes, strict=True)}
    tensors = [variables[Ref(ValueKind.TENSOR, i)] for i in range(len(traced.graph.tensors))]
    known = [spreading.known.get(v, NONE) if isinstance(v, _jax.Var) else NONE for v in tensors]
    aux = [outputs[Ref(ValueKind.AUX, i)] for i in range(len(traced.graph.aux))]
    return Batching(tuple(map(_spread, known)), tuple(map(_spread, aux)))


def _spread(lies: Lies) -> Spread:
    return Spread(lies.over, lies.axis)


def _check_outputs(traced: Traced, outputs: dict[Ref, Lies]) -> None:
    """Raises unless the loss, the aux and the model state of a micro-batch can be made of those of its slices."""
    weighted = traced.loss.weighted
    wanted, cure = (Over.SUM, "sums over its items") if weighted else (Over.MEAN, "a mean over its examples")
    pairs = {i for group in traced.graph.aux_groups if len(group) > 1 for i in group}
    for ref, lies in outputs.items():
        match ref.kind:
            case ValueKind.LOSS:
                if lies.over is not wanted:
                    raise CoupledError(
                        f"the loss cannot be made of those of slices, as replicas need it: it must be {cure}; a mean "
                        "over a number of items that differs returns jvpipe.Weighted(total, weight)"
                    )
            case ValueKind.AUX:
                if lies.over is Over.MIXED or (ref.index in pairs and lies.over is not Over.SUM):
                    raise CoupledError(
                        f"leaf {ref.index} of aux cannot be made of those of slices, as replicas need it: return "
                        "values of each example, sums or means over them, or jvpipe.Weighted(total, weight)"
                    )
            case ValueKind.STATE:
                if lies.over is Over.ALONG:
                    name = traced.graph.state[ref.index].name
                    raise CoupledError(f"model state '{name}' has a part for each example: replicas cannot share it")
            case _:
                raise AssertionError(f"the loss does not yield {ref}")
