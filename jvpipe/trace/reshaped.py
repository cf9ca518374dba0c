"""Cuts a loss that is traced at new batch shapes into the layers that it has at earlier shapes."""

from collections.abc import Sequence

from jvpipe._jax import JaxprEqn
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.loss import LossJaxpr
from jvpipe.trace.primitives import flops
from jvpipe.trace.sorted_equations import Sorted


class OtherLayersError(ValueError):
    """The loss does not have the same layers at other shapes."""


def reshaped(loss: LossJaxpr, present: Traced) -> Traced:
    """Cuts a loss at new shapes into the layers that it has at the first shapes.

    The loss may have other equations at other shapes, for example fewer for an axis of size one. In
    that case, the loss is cut from scratch. In either case, each layer must read the same
    parameters as at the first shapes, so that training can continue from the same state.

    Args:
        loss: the loss at the new shapes.
        present: the layers at the first shapes.

    Raises:
        OtherLayersError: the layers would not have the same parameters.
    """
    before, after = Sorted.of(present.loss).main, Sorted.of(loss).main
    if [eqn.primitive.name for eqn in before] == [eqn.primitive.name for eqn in after]:
        traced = build_graph(loss, present.cuts, present.splits)
    else:
        traced = build_graph(loss, None, _same_products(present.splits, before, after))
    if _readers(traced) != _readers(present):
        raise OtherLayersError(
            "its layers read other parameters: give batches of equal shapes, or use a pipeline for "
            "each shape"
        )
    return traced


def _same_products(
    splits: Sequence[int],
    before: Sequence[JaxprEqn],
    after: Sequence[JaxprEqn],
) -> list[int]:
    """Returns the positions of splits among the new equations, each before the same product.

    Args:
        splits: the positions at the first shapes, each right before a product.
        before: the main equations at the first shapes.
        after: the main equations at the new shapes.

    Raises:
        OtherLayersError: the numbers of products differ.
    """
    products = [at for at, eqn in enumerate(before) if flops(eqn)]
    others = [at for at, eqn in enumerate(after) if flops(eqn)]
    if splits and len(products) != len(others):
        raise OtherLayersError(
            f"it has {len(others)} products, not {len(products)}, but the plan splits layers at "
            "products: use a pipeline for each shape"
        )
    return [others[products.index(at)] for at in splits]


def _readers(traced: Traced) -> tuple[int, list[tuple[int, ...]]]:
    """Returns the number of layers, and for each parameter the layers that read it."""
    graph = traced.graph
    return len(graph.layers), [parameter.readers for parameter in graph.parameters]
