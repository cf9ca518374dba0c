"""A model's layers for a slice of a micro-batch, the part that one replica of a stage has.

First, `taken_apart` finds how each value of the loss lies over the examples. It raises an error if
the results of slices do not determine the results of the micro-batch. Then `sliced` makes the
layers of a slice: it traces the loss again at the size of the slice, cuts it into the same layers,
and rewrites their equations (`jvpipe.trace.slice_equations`). If the loss is a mean, a slice's loss
is multiplied by the slice's share (its fraction of the examples). So the losses of all slices add
up to the mean.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import jax

from jvpipe._jax import Atom, JaxprEqn, Var
from jvpipe.ir.examples import Batching, Examples, Over, Spread
from jvpipe.ir.layers import Layer, LayerGraph, Ref
from jvpipe.ir.values import ValueKind
from jvpipe.trace.coupled import CoupledError
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.loss import LossJaxpr, active
from jvpipe.trace.normalized import first_of_same
from jvpipe.trace.one_example import UnlikeError, on_one
from jvpipe.trace.slice_equations import SliceCut
from jvpipe.trace.slice_leaves import Said, aux_group
from jvpipe.trace.spread import Spreading, reaching
from jvpipe.trace.structure import comparable
from jvpipe.trace.sums_and_means import NONE, Beside, Lies
from jvpipe.util.paths import path_name


@dataclass(frozen=True)
class Apart:
    """What the trace says about a loss whose slices can be computed apart.

    Attributes:
        batching: how the edges between layers, aux, the loss and the model state lie over the
            examples.
        amended: the equations, by `id`, that slices change, and how.
    """

    batching: Batching
    amended: Mapping[int, Beside]


def sliced(traced: Traced, examples: Examples, apart: Apart) -> Traced:
    """Returns the same layers for a slice of the examples.

    Args:
        traced: the layers on a whole micro-batch.
        examples: the slice of the micro-batch.
        apart: how the examples come apart, from `taken_apart`.

    Raises:
        CoupledError: the loss has other layers at the size of the slice.
    """
    loss = replace(_resized(traced, examples.size), frozen=traced.loss.frozen)
    smaller = build_graph(loss, traced.cuts, traced.splits)
    if _layers(smaller.graph) != _layers(traced.graph):
        raise CoupledError(
            f"the loss on {examples.size} examples is not made of the layers that it has on "
            f"{traced.graph.examples}: use larger micro-batches or fewer replicas, so that each "
            "has at least 2 examples"
        )
    cut = SliceCut(
        examples,
        traced.graph.examples,
        apart.amended,
        is_mean=apart.batching.loss.over is Over.MEAN,
    )
    bodies = map(cut.body, traced.bodies, smaller.bodies)
    return replace(smaller, bodies=tuple(bodies))


def _resized(traced: Traced, examples: int) -> LossJaxpr:
    """Returns the loss on another number of examples."""
    loss = traced.loss
    assert loss.of_size is not None, "a loss that was not traced from a function"
    # JAX traces some functions differently at a size of one. So the equations of the whole
    # micro-batch are kept if possible.
    if examples == 1:
        try:
            return on_one(loss, traced.graph.examples)
        except UnlikeError:
            pass  # use the loss as JAX traces it at a size of one
    try:
        return loss.of_size(examples)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise CoupledError(
            f"the loss does not take {examples} examples, which is what a replica has: "
            f"{type(error).__name__}: {reason}"
        ) from error


def _layers(graph: LayerGraph) -> object:
    """Returns a value that is equal for two layer graphs if they differ only in sizes."""
    candidates = [[c.name for c in layer.candidates] for layer in graph.layers]
    layers = [(layer.reads, layer.writes) for layer in graph.layers]
    crossing = operator.attrgetter("producer", "readers", "differentiable")
    tensors = list(map(crossing, graph.tensors))
    readers = [parameter.readers for parameter in graph.parameters]
    return layers, candidates, tensors, readers


def taken_apart(traced: Traced, sizes: Iterable[int]) -> Apart:
    """Finds how edges, aux, the loss and the model state lie over the examples of a micro-batch.

    Args:
        traced: the layers on a whole micro-batch.
        sizes: the sizes of slices; the loss is traced at each and compared with the whole.

    Raises:
        CoupledError: the examples cannot be computed apart, or the loss or aux of the micro-batch
            cannot be made of the slices' results.
    """
    by_size = {size: _taken_apart(traced, size) for size in sorted(set(sizes))}
    least = min(by_size)
    for size, apart in by_size.items():
        if apart != by_size[least]:
            raise CoupledError(
                f"the loss depends on {size} examples in another way than on "
                f"{least}: use micro-batches that the replicas of each stage divide evenly"
            )
    return by_size[least]


def _taken_apart(traced: Traced, fewer: int) -> Apart:
    """Does what `taken_apart` does, for slices of one size.

    Args:
        traced: the layers on a whole micro-batch.
        fewer: the size of the slices.
    """
    loss = traced.loss
    small = _resized(traced, fewer)
    if comparable(loss.constants) != comparable(small.constants):
        raise CoupledError(
            f"the loss closes over arrays that differ between {fewer} and "
            f"{traced.graph.examples} examples: give them with the batch, or make them with jax.numpy"
        )
    spreading = _spreading(traced, fewer)
    spreading.run(loss.eqns, small.eqns)
    both = zip(loss.outputs, small.outputs, strict=True)
    outputs = {ref: spreading.lies(atom, other) for (atom, ref), (other, _) in both}
    atoms = {ref: atom for atom, ref in loss.outputs}
    # The user's choice of a reduction counts only if the trace cannot tell how an output is made.
    said = Said(traced.graph, outputs, atoms, spreading.normalizing)
    outputs = outputs | said.aux
    _check_outputs(traced, outputs)
    tensors = _tensors(traced, spreading)
    aux = [outputs[Ref(ValueKind.AUX, i)] for i in range(len(traced.graph.aux))]
    batching = Batching(
        tuple(map(_spread, tensors)),
        tuple(map(_spread, aux)),
        _spread(outputs[Ref(ValueKind.LOSS, 0)]),
        said.state,
    )
    return Apart(batching, said.plain(loss, spreading.amended))


def _spreading(traced: Traced, fewer: int) -> Spreading:
    """Returns the walk over a loss at two sizes; axis 0 of each batch leaf holds the examples."""
    loss = traced.loss
    states = loss.outputs_of(ValueKind.STATE)
    # Single examples may read a reduction over several examples only if the model state keeps it,
    # as it keeps the statistics of a batch norm.
    same = first_of_same(loss.eqns)
    remembered = reaching(loss.eqns, states)
    remembered |= {same.get(v, v) for v in remembered}
    batch = loss.inputs_of(ValueKind.BATCH)
    return Spreading(
        traced.graph.examples,
        fewer,
        remembered,
        layer_namer(traced),
        lies_of=dict.fromkeys(batch, Lies(Over.ALONG, 0)),
        same=same,
        flows=active(loss),
    )


def layer_namer(traced: Traced) -> Callable[[JaxprEqn], str]:
    """Returns a function that names the layer of an equation of the loss, for messages."""
    layer_of: dict[int, Layer] = {}
    for layer, body in zip(traced.graph.layers, traced.bodies, strict=True):
        layer_of |= dict.fromkeys(map(id, body.eqns), layer)

    def place_of(eqn: JaxprEqn) -> str:
        layer = layer_of.get(id(eqn))
        return "the loss" if layer is None else f"layer {traced.graph.label(layer)}"

    return place_of


def _tensors(traced: Traced, spreading: Spreading) -> list[Lies]:
    """Returns how the edges between layers lie.

    Raises:
        CoupledError: slices would not send the same values as the whole micro-batch.
    """
    variables: dict[Ref, Atom] = {}
    for body in traced.bodies:
        variables |= zip(body.writes, body.outputs, strict=True)
    all_lies = []
    for i, tensor in enumerate(traced.graph.tensors):
        v = variables[Ref(ValueKind.TENSOR, i)]
        lies = spreading.lies_of.get(v, NONE) if isinstance(v, Var) else NONE
        if lies.over is Over.ALONG and lies.power:
            raise CoupledError(
                f"tensor '{tensor.array.name}' has a part for each example, scaled by the number "
                "of examples, so a slice makes other values: multiply or divide by that number "
                "in the loss, after a sum over examples"
            )
        all_lies.append(lies)
    return all_lies


def _spread(lies: Lies) -> Spread:
    return Spread(lies.over, lies.axis)


_LESS = " (if weights may add up to less than one, return their sum and not max(weight, 1))"


def _aux_path(traced: Traced, index: int) -> tuple[str, str]:
    """Returns the path of a leaf of aux in two forms: JAX's notation, and as patterns name it."""
    group = aux_group(traced.graph, index)
    aux = jax.tree.unflatten(traced.loss.aux_tree, range(len(traced.graph.aux_groups)))
    path = jax.tree_util.tree_leaves_with_path(aux)[group][0]
    return f"leaf {jax.tree_util.keystr(path)}", path_name(path)


def _check_outputs(traced: Traced, outputs: dict[Ref, Lies]) -> None:
    """Checks that slices' results determine the loss and aux of a micro-batch.

    `Said` checks the model state.

    Raises:
        CoupledError: they do not determine the loss or a leaf of aux.
    """
    paired = [group for group in traced.graph.aux_groups if len(group) > 1]
    pairs = set(chain.from_iterable(paired))
    for ref, lies in outputs.items():
        match ref.kind:
            case ValueKind.LOSS:
                _check_loss(traced, lies)
            case ValueKind.AUX:
                _check_aux(
                    traced,
                    ref.index,
                    lies,
                    is_weighted=ref.index in pairs,
                )
            case ValueKind.STATE:
                pass
            case _:
                raise AssertionError(f"the loss does not yield {ref}")


def _check_loss(traced: Traced, lies: Lies) -> None:
    weighted = traced.loss.weighted
    fitting = {Over.SUM} if weighted else {Over.SUM, Over.MEAN}
    if lies.over in fitting and not lies.open:
        return
    sums = f"both parts sums over its examples{_LESS}"
    cure = sums if weighted else "a mean or a sum over its examples"
    raise CoupledError(
        f"the loss, which layer {traced.graph.label(traced.graph.layers[traced.graph.loss_layer])} "
        f"makes, cannot be made from those of slices, as replicas need it: it must be {cure}; a mean "
        "over a number of items that differs returns jvpipe.Weighted(total, weight). Else "
        "use one device for each stage, or make each stage a mesh with a batch_axis"
    )


def _check_aux(
    traced: Traced,
    index: int,
    lies: Lies,
    *,
    is_weighted: bool,
) -> None:
    is_known = lies.over is not Over.MIXED and not lies.open
    is_plain = lies.over is not Over.ALONG or not lies.power
    is_sum = lies.over is Over.SUM or not is_weighted
    if is_known and is_plain and is_sum:
        return
    leaf, path = _aux_path(traced, index)
    cure = "" if is_weighted else f"; or say how, as in aux_reduce={{'{path}': 'max'}}"
    raise CoupledError(
        f"{leaf} of aux cannot be made from those of slices, as replicas need it: return values of "
        f"each example, sums or means over them, or jvpipe.Weighted(total, weight){cure}"
    )
