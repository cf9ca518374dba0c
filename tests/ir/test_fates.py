"""A plan's fates, resolved by hand for three layers."""

from dataclasses import replace

import pytest

from jvpipe.ir.fates import Fates
from jvpipe.ir.plan import Fate
from tests.lowering.toy import GRAPH, layout

MADE = frozenset({"made"})


def fates(cuts: list[int], **of_first: str) -> Fates:
    return Fates.of(
        GRAPH,
        layout(cuts, fates={name.replace("_", "/"): fate for name, fate in of_first.items()}).plan,
    )


def test_what_is_not_named_is_kept() -> None:
    assert fates([3]) == Fates((MADE,) * 3, (frozenset(),) * 3, *(frozenset(),) * 3)
    assert fates([3], first_made="keep", t0="keep") == fates([3])


def test_a_swapped_residual_is_saved_and_a_recomputed_one_is_not() -> None:
    resolved = fates([3], first_made="swap", middle_made="recompute")
    assert resolved.kept == (MADE, frozenset(), MADE)
    assert resolved.swapped == (MADE, frozenset(), frozenset())


def test_a_recomputed_edge_runs_its_maker_again_which_then_leaves_all() -> None:
    resolved = fates([3], t0="recompute", first_made="swap")
    assert resolved.recomputed == {0}
    assert resolved.dropped == {(0, 0)}
    assert (resolved.kept[0], resolved.swapped[0]) == (MADE, frozenset())


def test_an_edge_that_comes_from_elsewhere_can_be_swapped_and_not_recomputed() -> None:
    plan = layout([1, 2]).plan
    first, second = (replace(stage, fates={"t0": Fate.SWAP}) for stage in plan.stages)
    resolved = Fates.of(GRAPH, replace(plan, stages=(first, second)))
    assert resolved.away == {(0, 0), (1, 0)}
    second = replace(second, fates={"t0": Fate.RECOMPUTE})
    with pytest.raises(
        ValueError, match="stage 1 cannot recompute 't0', because layer 0 of another stage makes it"
    ):
        Fates.of(GRAPH, replace(plan, stages=(first, second)))


def test_names_and_fates_that_nobody_knows_are_refused() -> None:
    with pytest.raises(
        ValueError, match="unknown tensor of stage 0 'frist/made': did you mean 'first/made'"
    ):
        fates([3], frist_made="swap")
    with pytest.raises(ValueError, match="'dropped' is not a valid Fate"):
        fates([3], t0="dropped")
