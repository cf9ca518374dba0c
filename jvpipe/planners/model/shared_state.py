"""The optimizer's state that the replicas of a stage share out: what each of them is spared."""

from collections.abc import Sequence

from jvpipe.cost.costs import LayerCost
from jvpipe.programs.shares import packed


def spared_bytes(layers: Sequence[LayerCost], replicas: int) -> int:
    """Counts the bytes that each replica of a stage of these layers is spared at least, as they are
    packed.

    >>> from jvpipe.cost.costs import Option
    >>> spared_bytes([LayerCost("block", 1.0, 2.0, (Option(0),), state_bytes=size) for size in (10, 30, 10)], 2)
    20
    """
    if replicas == 1:
        return 0
    sizes = [layer.state_bytes for layer in layers if layer.state_bytes]
    shares = packed([(size, 0) for size in sizes], replicas)
    loads = [
        sum(size for size, share in zip(sizes, shares, strict=True) if share == q)
        for q in range(replicas)
    ]
    return sum(sizes) - max(loads, default=0)
