"""Fates that a user gives."""

import logging
import re
from dataclasses import replace

import pytest

from jvpipe.ir.fates import Fates, states_away
from jvpipe.ir.layers import Array, Layer, LayerGraph, Parameter, Ref, Tensor
from jvpipe.ir.plan import Fate, Plan
from jvpipe.ir.values import ValueKind
from jvpipe.planners.user_fates import checkpointed, recut, with_fates, with_state_fates

A = Array("", (2,), "float32", 8)


def chain() -> LayerGraph:
    """Four layers, each with two candidates, each reading the one before; two of them share a
    name.
    """
    names = ["embed", "blocks/0/attention", "blocks/0/mlp", "blocks/0/mlp"]
    candidates = tuple(Array(name, (2,), "float32", 8) for name in ("dot_0", "dot_1"))
    layers = tuple(
        Layer(
            i,
            name,
            (Ref(ValueKind.TENSOR, i - 1),) if i else (Ref(ValueKind.BATCH, 0),),
            (Ref(ValueKind.TENSOR, i),) if i < 3 else (Ref(ValueKind.LOSS, 0),),
            candidates,
        )
        for i, name in enumerate(names)
    )
    tensors = tuple(
        Tensor(Array(f"{names[i]}:{i}", (2,), "float32", 8), i, (i + 1,), True) for i in range(3)
    )
    return LayerGraph(layers, tensors, (), (A,))


PLAN = Plan.from_cuts([2, 2])


def test_always_keeps_the_stages_inputs_alone() -> None:
    fates = Fates.of(chain(), checkpointed(chain(), PLAN, "always"))
    assert fates.dropped == {(0, 0), (0, 1), (1, 2)}  # edge 1 is kept as the second stage's input
    assert fates.recomputed == {0, 1, 2}
    # What is run again leaves everything, for one micro-batch; the last layer's backward does it.
    assert fates.kept == (*[frozenset({"dot_0", "dot_1"})] * 3, frozenset())


def test_the_other_modes_differ_in_the_last_micro_batch_or_keep_all() -> None:
    graph = chain()
    except_last = checkpointed(graph, PLAN, "except_last")
    assert except_last.keep_last
    assert except_last.stages == checkpointed(graph, PLAN, "always").stages
    assert checkpointed(graph, except_last, "never").stages == PLAN.stages
    with pytest.raises(ValueError, match="unknown checkpoint mode 'alway': did you mean 'always'"):
        checkpointed(graph, PLAN, "alway")


def test_patterns_match_names_and_the_later_wins() -> None:
    plan = with_fates(
        chain(), PLAN, {"*": "swap", "*/attention/*": "recompute", "*@3/dot_0": "keep"}
    )
    assert plan.stages[0].fates["blocks/0/attention/dot_1"] == "recompute"
    assert plan.stages[1].fates["blocks/0/mlp@2/dot_0"] == "swap"
    assert plan.stages[1].fates["blocks/0/mlp@3/dot_0"] == "keep"
    assert plan.stages[1].fates["blocks/0/attention:1"] == "swap"  # what the stage receives


def test_what_a_stage_receives_cannot_be_made_again() -> None:
    plan = with_fates(chain(), PLAN, {"*": "recompute"})
    assert "blocks/0/attention:1" not in plan.stages[1].fates
    wrong = Plan.from_cuts([2, 2])
    wrong = Plan(
        (
            wrong.stages[0],
            type(wrong.stages[1])((2, 3), (1,), {"blocks/0/attention:1": Fate.RECOMPUTE}),
        )
    )
    with pytest.raises(
        ValueError, match="stage 1 cannot recompute 'blocks/0/attention:1', because layer 1"
    ):
        Fates.of(chain(), wrong)


def test_a_value_that_is_no_candidate_takes_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jvpipe"):
        plan = with_fates(chain(), PLAN, {"blocks/*/attention/softmax": "recompute"})
    assert set(plan.stages[0].fates) == {"blocks/0/attention/dot_0", "blocks/0/attention/dot_1"}
    assert "'blocks/*/attention/softmax' is not a candidate: the nearest are taken" in caplog.text


@pytest.mark.parametrize(
    "pattern", ["*/atention/*", "*/softmax", "blocks/*/atention/dot_0", "?/atention/*"]
)
def test_a_misspelt_pattern_takes_nothing(pattern: str) -> None:
    told = rf"unknown tensor '{re.escape(pattern)}' in fates: no name matches, the nearest are .*blocks/0/"
    with pytest.raises(ValueError, match=told):
        with_fates(chain(), PLAN, {pattern: "swap"})


def test_mistakes_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"unknown fates \['swop'\]: there are keep, swap, recompute"
    ):
        with_fates(chain(), PLAN, {"*": "swop"})
    with pytest.raises(ValueError, match="unknown tensor 'decoder/"):
        with_fates(chain(), PLAN, {"decoder/*": "swap"})
    unknown = Plan((type(PLAN.stages[0])((0, 1, 2, 3), (0,), {"embed/dot_2": Fate.SWAP}),))
    with pytest.raises(
        ValueError, match="unknown tensor of stage 0 'embed/dot_2': did you mean 'embed/dot_1'"
    ):
        Fates.of(chain(), unknown)


def test_other_cuts_keep_the_fates_that_can_be() -> None:
    plan = with_fates(
        chain(), checkpointed(chain(), PLAN, "always"), {"*@3/dot_0": "swap", "*:1": "swap"}
    )
    other = recut(chain(), plan, (3, 1))
    assert (other.cuts, other.schedule, other.stages[1].devices) == ((3, 1), plan.schedule, (1,))
    assert {name for name, fate in other.stages[1].fates.items() if fate == "swap"} == {
        "blocks/0/mlp@3/dot_0"
    }
    assert (
        "blocks/0/mlp:2" not in other.stages[1].fates
    )  # made on the other stage now: it cannot be made again
    fates = Fates.of(chain(), other)
    assert (0, 0) in fates.dropped
    assert (0, 1) in fates.dropped, "as on the stage that made it"
    assert recut(chain(), plan, PLAN.cuts) == plan


def test_state_has_fates_by_the_paths_of_parameters_and_follows_them() -> None:
    graph = chain()
    parameters = tuple(
        Parameter(Array(f"{layer.name}/{i}", (2,), "float32", 8), (i,), frozen=i == 0)
        for i, layer in enumerate(graph.layers)
    )
    graph = replace(graph, parameters=parameters)
    plan = with_state_fates(graph, PLAN, {"*": "swap", "*/mlp/2": "keep"})
    assert [dict(stage.state_fates) for stage in plan.stages] == [
        {"blocks/0/attention/1": Fate.SWAP},  # nothing updates what is frozen
        {"blocks/0/mlp/2": Fate.KEEP, "blocks/0/mlp/3": Fate.SWAP},
    ]
    assert states_away(graph, plan) == {1, 3}
    assert states_away(graph, recut(graph, plan, (3, 1))) == {1, 3}
    assert recut(graph, recut(graph, plan, (1, 3)), PLAN.cuts) == plan
    wrong = replace(plan.stages[0], state_fates=plan.stages[1].state_fates)
    with pytest.raises(ValueError, match="unknown parameter of stage 0 'blocks/0/mlp/2'"):
        states_away(graph, replace(plan, stages=(wrong, plan.stages[1])))
