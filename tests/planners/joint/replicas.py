"""Small problems of replicated stages, and the best there is for them, by trying everything."""

from collections.abc import Iterator
from itertools import combinations, product

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.hardware import Accelerator, Cluster, Link
from jvpipe.planners.model.replicas_costs import LocalCosts
from jvpipe.planners.model.replicas_plan import ReplicaPlan, placed
from jvpipe.planners.model.replicas_problem import ReplicaProblem
from jvpipe.planners.model.replicas_stage import Tables
from jvpipe.planners.model.replicas_step import simulated_s

GPU = Accelerator("small", 10**9, 1e9, {"float32": 1e12})


def flat(machines: int, bytes_per_s: float) -> Cluster:
    """Machines of one device."""
    return Cluster("flat", GPU, 1, machines, network=Link(bytes_per_s))


def layer(forward_s: float, parameters: int = 0, kept: int = 0) -> LayerCost:
    """A layer whose backward takes twice as long."""
    return LayerCost("layer", forward_s, 2 * forward_s, (Option(kept),), parameters, parameters)


def chain(layers: list[LayerCost], sizes: list[int], batch: int = 1) -> LocalCosts:
    """Layers in a chain, in proportion to the batch; `sizes` are bytes between them."""
    edges = tuple(Edge(i, (i + 1,), size) for i, size in enumerate(sizes))
    return LocalCosts((batch,), (Costs(tuple(layers), edges),))


def every_plan(problem: ReplicaProblem) -> Iterator[ReplicaPlan]:
    """Yields all plans along the orders, no device left out between stages."""
    for size, stages in product(problem.sizes, range(1, min(problem.layers, problem.devices) + 1)):
        for inner in combinations(range(1, problem.layers), stages - 1):
            for replicas in product(range(1, min(size, problem.devices) + 1), repeat=stages):
                if sum(replicas) <= problem.devices:
                    starts = [sum(replicas[:s]) for s in range(stages)]
                    for order in problem.orders:
                        bounds = (0, *inner, problem.layers)
                        yield ReplicaPlan(bounds, placed(order, starts, list(replicas)), size)


def best_s(problem: ReplicaProblem) -> float:
    """The least simulated step of all of them that keep the limit."""
    tables = Tables(problem)
    counted = ((plan, tables.stages(plan)) for plan in every_plan(problem))
    return min(
        simulated_s(problem, plan, stages) for plan, stages in counted if tables.fits(stages)
    )
