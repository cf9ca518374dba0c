"""A loss traced at the shapes of another batch,
cut into the layers that it has at those of the first.
"""

from collections.abc import Sequence

from jvpipe._jax import JaxprEqn
from jvpipe.trace.graph import Sorted, Traced, build_graph
from jvpipe.trace.loss import LossJaxpr
from jvpipe.trace.primitives import flops


class OtherLayersError(ValueError):
    """At other shapes the loss is not made of the same layers."""


def reshaped(loss: LossJaxpr, present: Traced) -> Traced:
    """Cuts a loss into the layers that it has at present.

    Its equations need not be the same: an axis of size one needs fewer. Then it is cut again, and
    only its layers are compared.

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
    # Whose layers read the same parameters can go on from the same state.
    if _readers(traced) != _readers(present):
        raise OtherLayersError(
            "its layers have other parameters: give batches alike, or each shape its own pipeline"
        )
    return traced


def _same_products(
    splits: Sequence[int],
    before: Sequence[JaxprEqn],
    after: Sequence[JaxprEqn],
) -> list[int]:
    """Returns the positions of the products before which layers are split.

    Args:
        splits: their positions at the first shapes.
        before: the main equations at the first shapes.
        after: the main equations now.
    """
    products = [at for at, eqn in enumerate(before) if flops(eqn)]
    others = [at for at, eqn in enumerate(after) if flops(eqn)]
    if splits and len(products) != len(others):
        raise OtherLayersError(
            f"it has {len(others)} products, not {len(products)}, and layers are split before some"
        )
    return [others[products.index(at)] for at in splits]


def _readers(traced: Traced) -> tuple[int, list[tuple[int, ...]]]:
    """Returns the number of layers, and those that read each parameter."""
    graph = traced.graph
    return len(graph.layers), [parameter.readers for parameter in graph.parameters]
