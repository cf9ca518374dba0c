"""Explains why a layer that contains a loop is not cut between the loop's iterations."""

from jvpipe.ir.values import ValueKind
from jvpipe.trace.graph import Traced


def loop_reasons(traced: Traced) -> list[str]:
    """Returns a line for each layer with a loop: why the loop is not cut, and what would help.

    Layers without parameters are left out, and so are layers whose loops run only once.
    """
    lines = []
    for layer, body in zip(traced.graph.layers, traced.bodies, strict=True):
        loops = [eqn for eqn in body.eqns if eqn.primitive.name in ("scan", "while")]
        # How often a while loop runs is not known: it has no parameter `length`.
        counts = [eqn.params.get("length") for eqn in loops]
        if set(counts) <= {0, 1} or not layer.reading(ValueKind.PARAMETER):
            continue
        times = "an unknown number of" if None in counts else max(counts)
        lines.append(
            f"layer {layer.name} has a loop of {times} iterations, which share their parameters: it "
            "is not cut between them. Written out, as a loop of Python or with "
            "unroll=True, each iteration can be a layer"
        )
    return lines
