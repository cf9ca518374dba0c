"""The papers' plans, as plans of replicated stages."""

from jvpipe.planners.joint.replicas_rivals import rivals, straight_rivals
from jvpipe.planners.model.replicas_problem import ReplicaProblem, check
from jvpipe.planners.model.replicas_stage import Tables
from tests.planners.joint.replicas import chain, flat, layer


def test_pipedream_replicates_layers_without_parameters() -> None:
    layers = [layer(1.0), layer(1.0), layer(1.0), layer(0.5, 3000)]
    problem = ReplicaProblem(chain(layers, [1, 1, 1]), flat(4, 100.0), 4, 24)
    tables = Tables(problem)
    found = [*straight_rivals(tables, 12), *rivals(tables, 12)]
    for plan in found:
        check(problem, plan)
    assert [plan.replicas for plan in found] == [(1, 1, 1, 1), (1, 1, 1, 1), (3, 1), (1, 3)]
