"""The optimizer's state that the replicas of a stage share out: what each of them is spared."""

from collections.abc import Sequence

from jvpipe.cost.costs import LayerCost
from jvpipe.programs.shares import packed


def spared_bytes(layers: Sequence[LayerCost], replicas: int) -> int:
    """Bounds the bytes that each replica of a stage of these layers is spared, as they are packed.

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
