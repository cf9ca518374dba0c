"""The tables for kept residuals agree with `stage_cost`, segment by segment."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from jvpipe.cost.costs import LayerCost, Option
from jvpipe.papers.kept_stages import KeptStages
from jvpipe.papers.limits import no_cuts_fit
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import stage_cost
from tests.planners.small import chain, problems


@settings(max_examples=15, deadline=None)
@given(problems(most_layers=6, tight=False))
def test_every_segment_takes_what_stage_cost_says(problem: Problem) -> None:
    kept, choices = KeptStages(problem), [0] * len(problem.costs.layers)
    for a, i in enumerate(kept.cuts):
        for b, j in enumerate(kept.cuts):
            if j <= i:
                assert np.isinf(
                    [kept.seconds(0)[a, b], kept.comm_s(0)[a, b], kept.peak_bytes(0)[a, b]]
                ).all()
                continue
            for s in range(problem.stages):
                cost = stage_cost(problem, s, int(i), int(j), choices)
                assert kept.forward_s(s)[a, b] == pytest.approx(cost.forward_s)
                assert kept.compute_s(s)[a, b] == pytest.approx(cost.compute_s)
                assert kept.seconds(s)[a, b] == pytest.approx(cost.seconds)
                assert kept.comm_s(s)[a, b] == pytest.approx(cost.comm_s)
                assert kept.peak_bytes(s)[a, b] == cost.peak_bytes


def test_the_error_says_what_would_do() -> None:
    layers = [LayerCost("layer", 1.0, 2.0, (Option(kept),)) for kept in (20, 31, 22)]
    problem = chain(layers, 3, 4, "gpipe", memory_limit_bytes=100)
    costs = replace(problem.costs, edges=())
    error = no_cuts_fit("dapple", KeptStages(replace(problem, costs=costs)))
    assert error.smallest_limit_bytes == 124
    assert (
        "stage 1 of the smallest plan takes 24 bytes more. The smallest limit that would do is 124"
        in str(error)
    )
