"""Why cuts lie where they lie."""

import pytest

from jvpipe.cost.costs import LayerCost, Option
from jvpipe.planners.cut_reasons import cut_reasons
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision
from tests.planners.small import chain, limited

MIB = 2**20


@pytest.mark.parametrize(
    ("schedule", "devices"), [("interleaved", (0, 1, 0)), ("zb-v", (0, None, 1))]
)
def test_all_stages_of_a_device_share_its_limit(
    schedule: str, devices: tuple[int | None, ...]
) -> None:
    """In a vee device 1 has stages 1 and 2, and keeps a layer that moves between them."""
    layers = [LayerCost("block", 1.0, 2.0, (Option(0),), parameter_bytes=MIB)] * 8
    problem = limited(chain(layers, 4, 4, schedule), 4 * MIB)
    reasons = cut_reasons(problem, Decision.keeping_all((0, 2, 4, 6, 8)))
    full = "device {} would hold 5.00 MiB with it, the limit is 4.00 MiB"
    for device, reason in zip(devices, reasons, strict=True):
        assert reason.endswith(full.format(device)) == (device is not None), reason


def test_layers_that_run_again_together_may_be_separated() -> None:
    layers = [LayerCost("block", 1.0, 2.0, (Option(4), Option(0, extra_s=1.0)))] * 6
    problem = limited(chain(layers, 4, 4, "zb-v"), 10**6)
    choices = (0, 0, RECOMPUTE, RECOMPUTE_CHAIN, RECOMPUTE_CHAIN, 0)
    assert len(cut_reasons(problem, Decision((0, 1, 2, 5, 6), choices))) == 3


def test_a_cut_that_no_stage_explains_is_told_as_the_planners_choice() -> None:
    """Nothing is simulated, so nothing is said of the step."""
    problem = chain([LayerCost("block", 1.0, 2.0, (Option(0),))] * 6, 2)
    (reason,) = cut_reasons(problem, Decision.keeping_all((0, 2, 6)))
    assert reason == (
        "layer 2 (block) goes to stage 1 because the planner chose so: stage 0 could hold it, and "
        "would take 9000.00 ms"
    )


def test_where_devices_have_several_stages_the_seconds_are_those_of_devices() -> None:
    """Stages 0 and 2 are on device 0, stages 1 and 3 on device 1."""
    problem = chain([LayerCost("block", 1e-3, 2e-3, (Option(0),))] * 8, 4, 4, "interleaved")
    first, second, third = cut_reasons(problem, Decision.keeping_all((0, 1, 3, 5, 8)))
    chosen = "the planner chose so: device 0 could hold it, and would take 12.00 ms"
    assert first.endswith(chosen)
    assert second.endswith(
        "device 1 would take 18.00 ms with it, more than the slowest device's 15.00 ms"
    )
    assert third.endswith(chosen)


def test_a_layer_that_makes_a_stage_slower_than_its_neighbor_stays() -> None:
    problem = chain([LayerCost("block", 1e-3, 2e-3, (Option(0),))] * 8, 3)
    first, _ = cut_reasons(problem, Decision.keeping_all((0, 2, 4, 8)))
    assert first.endswith(
        "because the slower of stage 0 and stage 1 would take 9.00 ms, now 6.00 ms"
    )
