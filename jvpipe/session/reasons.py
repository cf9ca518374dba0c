"""Why the plan of a pipeline is as it is, as `explain` says it: what was planned with, and what cannot be cut."""

from collections.abc import Sequence

from jvpipe.ir.values import ValueKind
from jvpipe.session.session import Session
from jvpipe.trace.graph import Traced


def reasons_of(session: Session) -> tuple[Sequence[float] | None, list[str]]:
    """The seconds of the layers that the present plan was made with, if any were, and its reasons, a line each."""
    compiled, planned = session.compiled, session.planned
    layer_s, reasons = session.compiled_plans.layer_s, list[str]()
    if planned and planned.plan.cuts == compiled.plan.cuts:  # of another plan its reasons are none
        layer_s = layer_s and [layer.forward_s + layer.backward_s for layer in planned.placed]
        reasons = planned.reasons(compiled.optimizer.cross_layer)
    shape = session.compiled_plans.shape
    chosen = shape and shape.planned
    if shape and (chosen is None or chosen.plan.replicas == compiled.plan.replicas):
        reasons = [*shape.why, *reasons]
    return layer_s, [*reasons, *loop_reasons(compiled.traced)]


def loop_reasons(traced: Traced) -> list[str]:
    """A line for each layer that is a loop: it is not cut between the iterations, and what would cut it."""
    reasons = []
    for layer, body in zip(traced.graph.layers, traced.bodies, strict=True):
        loops = [eqn for eqn in body.eqns if eqn.primitive.name in ("scan", "while")]
        loops = loops if layer.reading(ValueKind.PARAMETER) else []
        counts = [eqn.params["length"] for eqn in loops if eqn.primitive.name == "scan"]
        if not loops or max(counts, default=2) < 2:
            continue
        times = f"{max(counts)} iterations" if counts else "an unknown number of iterations"
        reasons.append(
            f"layer {layer.name} has a loop of {times}, which share their parameters: it is not cut between them. "
            "Written out, as a loop of Python or with unroll=True, each iteration can be a layer"
        )
    return reasons
