"""States that grow layer by layer, against the definition of a stage's bytes."""

import numpy as np
import pytest

from jvpipe.planners.joint.dominance import EXTRA, SWAPPED, Growth, front
from jvpipe.planners.joint.look_ahead import to_come
from jvpipe.planners.joint.lot import Lot
from jvpipe.planners.joint.surrogate import pricing_of
from jvpipe.planners.model.stage_cost import stage_cost
from tests.planners.joint.enumeration import tiny


@pytest.mark.parametrize("seed", range(3))
def test_states_of_all_choices_take_what_a_stage_takes(seed: int) -> None:
    problem = tiny(seed, ("gpipe", "1f1b", "2bw")[seed], layers=3)
    pricing = pricing_of(problem)
    growth = Growth(pricing, Lot.of_stage(problem.in_flight[0], (0, 0, 3)))
    states, choices = growth.begin(), np.empty((1, 0), dtype=int)
    for at in range(3):
        states = growth.grown(states, at)
        possible = np.flatnonzero(np.isfinite(states[-1]))
        choices = growth.chosen(choices, possible, at)
        states = states[:, possible]
    fixed = float(pricing.segments.fixed_bytes(0, np.array([0]), np.array([3]))[0, 0])
    seen = set()
    taken = growth.least_bytes(states, 3)
    for at in np.flatnonzero(np.isfinite(taken)).tolist():
        chosen = tuple(choices[at].tolist())
        cost = stage_cost(problem, 0, 0, 3, chosen)
        assert fixed + taken[at] == cost.peak_bytes, chosen
        assert states[EXTRA, at] == pytest.approx(cost.recompute_s)
        assert cost.in_flight * states[SWAPPED, at] == cost.host_bytes
        seen.add(chosen)
    assert len(seen) > 4**3


def test_the_front_is_what_no_other_state_dominates() -> None:
    states = np.random.default_rng(0).integers(0, 4, (6, 300)).astype(float)
    kept = front(states)
    below: np.ndarray = np.all(states[:, None, :] <= states[:, :, None], axis=0)
    strictly = below & ~below.T
    assert set(kept.tolist()) <= set(np.flatnonzero(~strictly.any(1)).tolist())
    assert below[:, kept].any(1).all()
    assert len({tuple(states[:, at]) for at in kept}) == len(kept)


def test_what_is_to_come_is_summed_from_the_end() -> None:
    assert to_come(np.array([1.0, 2.0, 4.0])).tolist() == [7, 6, 4, 0]
