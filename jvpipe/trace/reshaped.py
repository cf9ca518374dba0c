"""A loss traced at the shapes of another batch, cut into the layers that it has at those of the first."""

from collections.abc import Sequence

from jvpipe._jax import JaxprEqn
from jvpipe.trace.graph import Sorted, Traced, build_graph
from jvpipe.trace.loss import LossJaxpr
from jvpipe.trace.primitives import flops


class OtherLayersError(ValueError):
    """At other shapes the loss is not made of the same layers."""


def reshaped(loss: LossJaxpr, present: Traced) -> Traced:
    """Cuts a loss where it is cut at present, though its equations may be others: an axis of size one needs fewer.

    Args:
        loss: at other shapes.
        present: at the first.

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
            "its layers have other parameters: give batches alike, or each shape its own pipeline"
        )
    return traced


def _same_products(
    splits: Sequence[int], before: Sequence[JaxprEqn], after: Sequence[JaxprEqn]
) -> list[int]:
    """The positions of the products that layers are split before."""
    products, others = (
        [at for at, eqn in enumerate(eqns) if flops(eqn)] for eqns in (before, after)
    )
    if splits and len(products) != len(others):
        raise OtherLayersError(
            f"it has {len(others)} products, not {len(products)}, and layers are split before some"
        )
    return [others[products.index(at)] for at in splits]


def _readers(traced: Traced) -> tuple[int, list[tuple[int, ...]]]:
    """The number of layers, and those that read each parameter."""
    return len(traced.graph.layers), [parameter.readers for parameter in traced.graph.parameters]
