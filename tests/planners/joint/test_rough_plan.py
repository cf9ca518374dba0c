"""Stages that are counted once for many shapes, beside the plain count of each shape."""

import random
from dataclasses import replace

from jvpipe.cost.hardware import Cluster, Link
from jvpipe.planners.joint.rough_plan import RoughStages, kept_or_again
from jvpipe.planners.model.problem import RECOMPUTE
from jvpipe.planners.model.stage_cost import evaluate_decision
from tests.planners.joint.shapes import GPU, chain, every_path, layer, shapes_of

TWO = Cluster("two", GPU, 2, 2, peer=Link(200.0), network=Link(20.0))


def test_stages_that_shapes_have_in_common_take_what_they_take_in_each() -> None:
    draw, choices = random.Random(7), set[int]()
    layers = [
        layer(draw.uniform(0.5, 2.0), draw.randint(0, 60), draw.randint(1, 9)) for _ in "four"
    ]
    shapes = shapes_of(chain(layers, [3, 9, 5]), TWO, 12, 250)
    stages = RoughStages()
    for shape, bounds in every_path(shapes):
        problem = shapes.problem(shape)
        decision, evaluation = stages.evaluate(problem, bounds)
        assert decision == kept_or_again(problem, bounds)
        plain = evaluate_decision(problem, decision)
        assert replace(evaluation, stages=()) == replace(plain, stages=())
        for once, again in zip(evaluation.stages, plain.stages, strict=True):
            assert replace(once, held=None) == replace(again, held=None)
        choices |= set(decision.choices)
    assert choices == {0, RECOMPUTE}
