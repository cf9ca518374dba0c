"""Where layers go: one file per strategy, and their registry."""

from collections.abc import Callable, Sequence

from jvpipe.cost.measure import LayerSeconds
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.names import did_you_mean
from jvpipe.ir.plan import Plan
from jvpipe.planners.even import even
from jvpipe.planners.torchgpipe import torchgpipe

PLANNERS = ("even", "torchgpipe", "torchgpipe-size")


def check_planner(name: str) -> None:
    """Raises ValueError for a planner that is not there."""
    if name not in PLANNERS:
        raise ValueError(did_you_mean("planner", name, PLANNERS))


def make_plan(
    planner: str,
    graph: LayerGraph,
    stages: int,
    schedule: str,
    devices: Sequence[int],
    measure: Callable[[], LayerSeconds],
) -> Plan:
    """The plan of a planner; `measure` is called only by those that need seconds.

    `torchgpipe` balances measured seconds of forward and backward, `torchgpipe-size` the bytes of parameters.
    """
    check_planner(planner)
    layers = len(graph.layers)
    if stages > layers:
        raise ValueError(f"{stages} stages need as many layers, the model has {layers}: use at most {layers} stages")
    match planner:
        case "even":
            cuts = even([1.0] * layers, stages)
        case "torchgpipe":
            cuts = torchgpipe(measure().total_s, stages)
        case _:
            sizes = [float(sum(graph.parameters[p].array.bytes for p in graph.owned(i))) for i in range(layers)]
            cuts = torchgpipe(sizes, stages)
    return Plan.from_cuts(cuts, devices, schedule=schedule, planner=planner)
