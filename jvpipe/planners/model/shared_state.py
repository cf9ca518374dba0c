"""The bytes that each replica of a stage is spared because replicas share the optimizer's state."""

from collections.abc import Sequence

from jvpipe.cost.costs import LayerCost
from jvpipe.programs.shares import packed


def spared_bytes(layers: Sequence[LayerCost], replicas: int) -> int:
    """Counts the bytes that the fullest replica of a stage is spared, as `packed` packs the layers.

    >>> from jvpipe.cost.costs import Option
    >>> small = LayerCost("block", 1.0, 2.0, (Option(0),), state_bytes=10)
    >>> large = LayerCost("block", 1.0, 2.0, (Option(0),), state_bytes=30)
    >>> spared_bytes([small, large, small], 2)
    20
    """
    if replicas == 1:
        return 0
    sizes = [layer.state_bytes for layer in layers if layer.state_bytes]
    shares = packed([(size, 0) for size in sizes], replicas)
    loads = [0] * replicas
    for size, share in zip(sizes, shares, strict=True):
        loads[share] += size
    return sum(sizes) - max(loads)
