"""Seconds and bytes of replicated stages, by hand."""

from dataclasses import replace

import pytest

from jvpipe.planners.model.replicas_plan import ReplicaPlan
from jvpipe.planners.model.replicas_problem import ReplicaProblem
from jvpipe.planners.model.replicas_stage import Tables
from tests.planners.joint.replicas import chain, flat, layer

LAYERS = [layer(1.0, 100, 10), layer(2.0, 400, 20), layer(3.0, 0, 30)]
PROBLEM = ReplicaProblem(chain(LAYERS, [8, 16], batch=2), flat(4, 4.0), 4, 24)


def test_a_stage_takes_its_largest_slice_and_its_all_reduce() -> None:
    first, last = Tables(PROBLEM).stages(ReplicaPlan((0, 2, 3), ((0, 1, 2), (3,)), 8))
    # slices of 3 examples at most; 2 (2/3) of 500 bytes at 4 a second; 64 bytes through one network, twice
    assert (first.forward_s, first.backward_s, first.comm_s) == (3 * 1.5, 3 * 3.0, 0)
    assert first.reduce_s == pytest.approx(2 * (2 / 3) * 500 / 4)
    assert (last.forward_s, last.backward_s, last.reduce_s) == (12, 24, 0)
    assert last.comm_s == pytest.approx(2 * 64 / 4)
    in_flight = 2 * 3 * 15
    assert in_flight < 2 * 400
    assert (
        first.peak_bytes == 2 * 500 + 3 * 8 + 2 * 400
    )  # a cotangent may wait; gradients of two are added up


def test_replicas_share_the_optimizers_state_out() -> None:
    layers = [replace(x, optimizer_bytes=70, state_bytes=60) for x in LAYERS]
    problem = replace(PROBLEM, costs=chain(layers, [8, 16], batch=2))
    for plan, held in (
        (ReplicaPlan((0, 3), ((0, 1),), 4), 30 + 120),
        (ReplicaPlan((0, 3), ((0,),), 4), 30 + 180),
    ):
        peaks = [Tables(p).stages(plan)[0].peak_bytes for p in (problem, PROBLEM)]
        assert peaks[0] - peaks[1] == held, (
            "one has two layers, the other one; the rest is everybody's"
        )


def test_what_the_last_backward_hides_of_an_all_reduce() -> None:
    whole = ReplicaPlan((0, 3), ((0, 1),), 4)
    after = Tables(PROBLEM).stages(whole)[0].reduce_s
    during = Tables(replace(PROBLEM, overlaps=True)).stages(whole)[0].reduce_s
    # backwards of 6, 4, 2 s, the last layer's first; reduces of 0, 100, 25 s
    assert after == pytest.approx(125)
    assert during == pytest.approx(125 - 2)


def test_running_again_takes_a_forward_more_and_keeps_less() -> None:
    plan = ReplicaPlan((0, 3), ((0,),), 2)
    kept, again = Tables(PROBLEM).stages(plan)[0], Tables(PROBLEM.recomputing()).stages(plan)[0]
    assert (again.forward_s, again.backward_s) == (kept.forward_s, kept.backward_s + 6)
    assert again.peak_bytes < kept.peak_bytes
    assert not Tables(replace(PROBLEM, memory_limit_bytes=kept.peak_bytes - 1)).fits((kept,))
    assert Tables(replace(PROBLEM, memory_limit_bytes=kept.peak_bytes)).fits((kept,))
