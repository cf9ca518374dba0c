"""Explains why a layer that contains a loop is not cut between the loop's iterations."""

from jvpipe.ir.values import ValueKind
from jvpipe.trace.graph import Traced


def loop_reasons(traced: Traced) -> list[str]:
    """Returns a line for each layer with a loop: why the loop is not cut, and what would help.

    Layers without parameters are left out, and so are layers whose loops run only once.
    """
    lines = []
    for layer, body in zip(traced.graph.layers, traced.bodies, strict=True):
        lengths = [eqn.params["length"] for eqn in body.eqns if eqn.primitive.name == "scan"]
        longest = max(lengths, default=0)
        # How often a while loop runs is not known.
        has_while = any(eqn.primitive.name == "while" for eqn in body.eqns)
        if (longest < 2 and not has_while) or not layer.reading(ValueKind.PARAMETER):
            continue
        times = "an unknown number of" if has_while else longest
        lines.append(
            f"layer {layer.name} has a loop of {times} iterations, which share their parameters: it "
            "is not cut between them. Written out, as a loop of Python or with "
            "unroll=True, each iteration can be a layer"
        )
    return lines
