"""Checks that seconds and bytes are small enough for the planners' sums to stay accurate."""

from jvpipe.cost.slowness import work_s
from jvpipe.planners.model.problem import Problem
from jvpipe.util.sizes import MOST_BYTES, MOST_S


def check_sums(problem: Problem) -> None:
    """Raises ValueError if seconds or bytes are so large that the planners' sums lose accuracy."""
    layers, m, in_flight = problem.costs.layers, problem.microbatches, max(problem.in_flight)
    crossing = [edge.bytes for edge in problem.costs.edges]
    kept = [layer.options[0].kept_bytes for layer in layers]
    sums = {
        "the layers compute": m * sum(work_s(layers)),
        "links between stages are busy": 2 * m * sum(map(problem.peer.seconds, crossing)),
        "links to the host are busy": 2 * m * sum(map(problem.host.seconds, kept)),
    }
    for what, seconds in sums.items():
        # `not <=` also refuses NaN, for which every comparison is false.
        if not seconds <= MOST_S:
            raise ValueError(
                f"{what} for {seconds:.3g} s in {m} micro-batches, at most {MOST_S:.0g} s "
                "can be planned: correct the times of the layers, or what the links carry "
                "and how fast"
            )
    stages = problem.stages
    versions = max(problem.schedule.versions(s, stages) for s in range(stages))
    once = sum(x.gradient_bytes + x.optimizer_bytes + x.temporary_bytes for x in layers)
    weights = versions * sum(layer.parameter_bytes for layer in layers)
    per_microbatch = sum(layer.input_bytes for layer in layers) + sum(kept) + sum(crossing)
    # No plan is likely to hold more on a device than all layers with every value kept.
    held_bytes = weights + once + in_flight * per_microbatch
    if held_bytes > MOST_BYTES:
        raise ValueError(
            f"the model takes {held_bytes} bytes with {in_flight} micro-batches in flight, "
            f"at most {MOST_BYTES} can be planned: correct the sizes, or use smaller "
            "micro-batches"
        )
