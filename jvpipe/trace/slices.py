"""Makes a model's layers for a slice of a micro-batch, the part for one replica of a stage.

First, `taken_apart` finds how each value of the loss depends on the examples. It raises an error if
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
from jvpipe.util.brief import first_line
from jvpipe.util.paths import path_name


@dataclass(frozen=True)
class Apart:
    """A loss whose slices can be computed independently, and how.

    Attributes:
        batching: how the edges between layers, aux, the loss and the model state depend on the
            examples.
        amended: how slices change equations, by the `id` of the equation on the micro-batch.
    """

    batching: Batching
    amended: Mapping[int, Beside]


def sliced(traced: Traced, examples: Examples, apart: Apart) -> Traced:
    """Returns the same layers for a slice of the examples.

    Args:
        traced: the layers on a whole micro-batch.
        examples: the slice of the micro-batch.
        apart: the result of `taken_apart` for the micro-batch.

    Raises:
        CoupledError: the loss has other layers at the size of the slice.
    """
    loss = replace(
        _resized(traced, examples.size),
        frozen=traced.loss.frozen,
        whole_layers=traced.loss.whole_layers,
    )
    smaller = build_graph(loss, traced.cuts, traced.splits)
    if _layers(smaller.graph) != _layers(traced.graph):
        raise CoupledError(
            f"the loss on {examples.size} examples does not have the same layers as on "
            f"{traced.graph.examples}: use larger micro-batches or fewer replicas, so that each "
            "replica has at least 2 examples"
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
        raise CoupledError(
            f"the loss does not take {examples} examples, the number that a replica has: "
            f"{type(error).__name__}: {first_line(error)}"
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
    """Finds how edges, aux, the loss and the model state depend on the examples of a micro-batch.

    Args:
        traced: the layers on a whole micro-batch.
        sizes: the sizes of slices; the loss is traced at each size, and compared with the loss on
            the whole micro-batch.

    Raises:
        CoupledError: slices cannot be computed independently, or their results do not determine
            the loss or aux of the micro-batch.
    """
    by_size = {size: _taken_apart(traced, size) for size in sorted(set(sizes))}
    least = min(by_size)
    for size, apart in by_size.items():
        if apart != by_size[least]:
            raise CoupledError(
                f"the loss depends on its examples in another way on {size} examples than on "
                f"{least}: use micro-batches that the replicas of each stage divide evenly"
            )
    return by_size[least]


def _taken_apart(traced: Traced, fewer: int) -> Apart:
    """Returns the result of `taken_apart` for slices of one size.

    Args:
        traced: the layers on a whole micro-batch.
        fewer: the size of the slices.
    """
    loss = traced.loss
    small = _resized(traced, fewer)
    if comparable(loss.constants) != comparable(small.constants):
        raise CoupledError(
            f"the loss closes over other arrays on {fewer} examples than on "
            f"{traced.graph.examples}: pass them in the batch, or make them with jax.numpy"
        )
    spreading = _spreading(traced, fewer)
    spreading.run(loss.eqns, small.eqns)
    both = zip(loss.outputs, small.outputs, strict=True)
    outputs = {ref: spreading.lies(atom, other) for (atom, ref), (other, _) in both}
    atoms = {ref: atom for atom, ref in loss.outputs}
    # The user's choice of a reduction counts only for outputs that the trace leaves unknown.
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
    """Returns the walk over a loss at two sizes; axis 0 of batch leaves is the examples' axis."""
    loss = traced.loss
    states = loss.outputs_of(ValueKind.STATE)
    # Single examples may read a reduction over several examples only if the model state depends on
    # the reduction, as it does on the statistics of a batch norm.
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
    """Returns how the edges between layers depend on the examples.

    Raises:
        CoupledError: a slice would not send its part of the micro-batch's value.
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
                "of examples, so a slice computes other values: multiply or divide by that number "
                "after a sum over examples"
            )
        all_lies.append(lies)
    return all_lies


def _spread(lies: Lies) -> Spread:
    return Spread(lies.over, lies.axis)


_LESS = " (if weights may add up to less than one, return their sum itself, not max(weight, 1))"


def _aux_path(traced: Traced, index: int) -> tuple[str, str]:
    """Returns the path of a leaf of aux in JAX's notation, and in the form that patterns match."""
    group = aux_group(traced.graph, index)
    aux = jax.tree.unflatten(traced.loss.aux_tree, range(len(traced.graph.aux_groups)))
    path = jax.tree_util.tree_leaves_with_path(aux)[group][0]
    return f"leaf {jax.tree_util.keystr(path)}", path_name(path)


def _check_outputs(traced: Traced, outputs: dict[Ref, Lies]) -> None:
    """Checks that slices' results determine the loss and aux of a micro-batch.

    The model state is checked by `Said`.

    Raises:
        CoupledError: the slices' results do not determine the loss or a leaf of aux.
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
    sums = f"a jvpipe.Weighted of two sums over examples{_LESS}"
    cure = sums if weighted else "a mean or a sum over its examples"
    raise CoupledError(
        f"the loss, which layer {traced.graph.label(traced.graph.layers[traced.graph.loss_layer])} "
        "computes, cannot be computed from the losses of slices, as replicas require: it must be "
        f"{cure}; for a mean over a varying number of items, return jvpipe.Weighted(total, "
        "weight). Otherwise use one device for each stage, or make each stage a mesh with a "
        "batch_axis"
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
    cure = "" if is_weighted else f"; or choose a reduction, as in aux_reduce={{'{path}': 'max'}}"
    raise CoupledError(
        f"{leaf} of aux cannot be computed from its values on slices, as replicas require: return "
        "a value for each example, a sum or mean over examples, or a jvpipe.Weighted(total, "
        f"weight) of two sums{cure}"
    )
