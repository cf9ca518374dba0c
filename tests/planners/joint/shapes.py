"""Small models whose stages may have several devices, and the best there is for them, by trying
everything.
"""

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.hardware import Accelerator, Cluster, Link
from jvpipe.cost.local_costs import LocalCosts
from jvpipe.planners.joint.rough_plan import kept_or_again
from jvpipe.planners.model.pins import UNPINNED, Pins
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.shapes import Path, Shape, Shapes
from jvpipe.planners.model.stage_cost import StageCost, evaluate_decision, keeps_limits
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B

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


def shapes_of(
    costs: LocalCosts,
    cluster: Cluster,
    batch: int,
    limit: int | None = None,
    pins: Pins = UNPINNED,
    **options: Any,
) -> Shapes:
    """The shapes of a model on all devices of a cluster."""
    model = Problem(costs.costs[-1], 1, ONE_F_ONE_B, 1, limit, peer_uses_host=False, **options)
    return Shapes(model, costs, cluster, cluster.devices, batch, pins)


def stages_of(shapes: Shapes, path: Path) -> tuple[StageCost, ...]:
    """What the stages of a shape take that keep everything, or compute all again."""
    problem = shapes.problem(path[0])
    return evaluate_decision(problem, kept_or_again(problem, path[1])).stages


def every_path(shapes: Shapes) -> Iterator[Path]:
    """Yields all shapes with their bounds along the orders, no device left out between stages."""
    layers, devices = shapes.layers, shapes.devices
    for size, stages in product(shapes.sizes, range(1, min(layers, devices) + 1)):
        for inner in combinations(range(1, layers), stages - 1):
            for replicas in product(range(1, min(size, devices) + 1), repeat=stages):
                if sum(replicas) <= devices:
                    starts = [sum(replicas[:s]) for s in range(stages)]
                    for order in shapes.orders:
                        yield Shape.along(order, starts, replicas, size), (0, *inner, layers)


def step_s(shapes: Shapes, path: Path) -> float:
    """The simulated step of a shape with its bounds; infinite if it does not keep the limit."""
    problem = shapes.problem(path[0])
    evaluation = evaluate_decision(problem, kept_or_again(problem, path[1]))
    fits = keeps_limits(problem, evaluation)
    return simulated_step_s(problem, evaluation.stages) if fits else float("inf")


def best_s(shapes: Shapes) -> float:
    """The least simulated step of all of them that keep the limit."""
    return min(step_s(shapes, path) for path in every_path(shapes))
