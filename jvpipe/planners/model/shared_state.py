"""Counts the bytes that a replica saves, because the replicas of a stage divide optimizer state.

Only one replica of a stage keeps the state of a layer. `packed` (programs/shares.py) chooses this
replica. In a run, `packed` also gets the bytes of parameters, by which it breaks ties. They are
left out here, because ties do not change how full the fullest replica is.
"""

from collections.abc import Sequence

from jvpipe.cost.costs import LayerCost
from jvpipe.programs.shares import packed


def spared_bytes(layers: Sequence[LayerCost], replicas: int) -> int:
    """Counts the bytes of optimizer state that the fullest replica of a stage does not keep.

    Without sharing, each replica would keep the state of all layers.

    Args:
        layers: the layers of the stage.
        replicas: how many replicas the stage has.

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
