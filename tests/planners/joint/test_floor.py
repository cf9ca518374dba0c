"""The plan that holds the least, against all plans."""

from itertools import pairwise

import numpy as np
import pytest

from jvpipe.planners.joint.floor import floor
from jvpipe.planners.model.problem import Decision
from jvpipe.planners.model.stage_cost import evaluate_decision
from tests.planners.joint.enumeration import every_decision, tiny


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_holds_less_by_the_planners_own_count(seed: int) -> None:
    problem = tiny(seed, layers=3)

    def held(decision: Decision) -> list[int]:
        return [stage.peak_bytes for stage in evaluate_decision(problem, decision).stages]

    least = min(max(held(decision)) for decision in every_decision(problem))
    lowest = floor(problem, held, 0)
    assert lowest.bytes == least == max(held(lowest.decision))
    assert lowest.held_bytes[lowest.stage] == least
    keeping = floor(problem, held, 0, keeps=True)
    assert keeping.bytes == min(max(held(Decision.keeping_all((0, cut, 3)))) for cut in (1, 2))


@pytest.mark.parametrize("seed", [1, 2, 33])
def test_no_plan_holds_less_by_lists_that_hold_a_little_more_than_is_counted(seed: int) -> None:
    problem, draw = tiny(seed, layers=3), np.random.default_rng(seed)
    more = draw.integers(0, 2, (3, 6)).tolist()  # of each layer under each of its choices

    def held(decision: Decision) -> list[int]:
        stages = zip(
            pairwise(decision.bounds), evaluate_decision(problem, decision).stages, strict=True
        )
        return [
            x.peak_bytes + sum(more[n][decision.choices[n]] for n in range(i, j))
            for (i, j), x in stages
        ]

    assert floor(problem, held, 0).bytes == min(
        max(held(decision)) for decision in every_decision(problem)
    )


def test_the_first_plan_that_is_enough_is_taken() -> None:
    asked: list[Decision] = []

    def held(decision: Decision) -> list[int]:
        asked.append(decision)
        return [10, 20]

    assert floor(tiny(0), held, 20).bytes == 20
    assert len(asked) == 1


def test_another_count_may_lead_to_another_plan() -> None:
    """The lowered lists say that every layer recomputed holds a lot: then none is."""

    def held(decision: Decision) -> list[int]:
        return [
            sum(choice != 0 for choice in decision.choices[:2]),
            sum(choice != 0 for choice in decision.choices[2:]),
        ]

    assert floor(tiny(1), held, 0).bytes == 0
