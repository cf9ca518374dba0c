"""Simulated steps with the optimizer's state on the host: less is held, and no byte crosses for
free.
"""

import optax
import pytest

from experiments.planners.questions import question_of
from experiments.state_on_host.run import CLUSTER, simulated
from jvpipe.models import load


@pytest.mark.thorough
def test_state_on_the_host_costs_the_link_alone() -> None:
    question = question_of(load("llama", "tiny"), 4, 4, 2, optax.adamw(1e-4))
    kept, away = (simulated(question, CLUSTER, fates) for fates in ({}, {"*": "swap"}))
    assert away.device_bytes < kept.device_bytes
    assert kept.host_bytes == 0 < away.host_bytes
    assert kept.step_s < away.both_ways_s <= away.step_s
