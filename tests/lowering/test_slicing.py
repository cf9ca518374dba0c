"""Operations of replicated stages, drawn: who works on which examples, and what is cut, sent,
joined and added up.
"""

from dataclasses import replace

import optax

from jvpipe.ir.examples import Batching, Examples, Over, Spread
from jvpipe.ir.kinds import Kind
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import Task
from jvpipe.lowering.expand import Expander
from jvpipe.lowering.layout import MicrobatchLayout, SliceLayout
from jvpipe.lowering.placement import Placement
from jvpipe.lowering.slicing import Slicing
from jvpipe.lowering.step import lower_step
from jvpipe.lowering.weight_rule import Weights
from jvpipe.programs.shares import updating
from jvpipe.schedules.gpipe import gpipe
from tests.lowering.toy import GRAPH, SIGNATURES, array, drawn, optimizer, row

SIX = replace(
    GRAPH,
    batch=(array("x", 6),),
    tensors=tuple(replace(tensor, array=array(tensor.array.name, 12)) for tensor in GRAPH.tensors),
)
ALONG = Batching((Spread(Over.ALONG, 0), Spread(Over.ALONG, 0)))


def layout(plan: Plan, left_bytes: int = 1) -> MicrobatchLayout:
    """A layout whose programs leave so many bytes for each example."""
    where, sliced = Placement(SIX, plan, optimizer()), {}
    for layer in range(3):
        for e in where.slices(layer):
            if e is not None:
                left = {
                    i: replace(s, residuals=(replace(s.residuals[0], bytes=left_bytes * e.size),))
                    for i, s in enumerate(SIGNATURES)
                }
                sliced[e] = SliceLayout(left, {})
    return replace(MicrobatchLayout.of(SIX, plan, SIGNATURES), sliced=sliced)


def lines(plan: Plan, batching: Batching = ALONG) -> list[str]:
    """The operations of one micro-batch."""
    how, expander = layout(plan), Expander(SIX, Weights(SIX), set())
    slicing = Slicing(Placement(SIX, plan, optimizer()), batching, {0: how})
    operations = [op for layer in SIX.layers for op in expander.forward(layer, 0, how)]
    operations += [
        op for layer in reversed(SIX.layers) for op in expander.backward(Kind.B, layer, 0, how)
    ]
    told = []
    for op in (part for one in operations for part in slicing(one)):
        goes = [
            f" => {', '.join(map(str, d.layers))} {d.examples[0] or 'all'}" for d in op.delivers
        ]
        told.append(
            (drawn(op) + "".join(goes)).replace(" micro-batch 0", "").replace(" version 0", "")
        )
    return told


def test_two_replicas_hand_one_their_parts_and_get_theirs_back() -> None:
    found = lines(Plan.from_cuts([1, 2], devices=[(0, 1), 2]))
    assert [line for line in found if line.startswith(("F0", "CONCAT", "F1"))] == [
        "F0: parameter 0, batch 0 examples 0:3 -> tensor 0 examples 0:3, residual 0 layer 0 "
        "examples 0:3 => 1 all",
        "F0: parameter 0, batch 0 examples 3:6 -> tensor 0 examples 3:6, residual 0 layer 0 "
        "examples 3:6 => 1 all",
        "CONCAT1: tensor 0 examples 0:3, tensor 0 examples 3:6 -> tensor 0",
        "F1: parameter 1, tensor 0 -> tensor 1, residual 0 layer 1",
    ]
    assert found[-6:] == [
        "SLICE1: cotangent 0 -> cotangent 0 examples 0:3 => 0 0:3",
        "SLICE1: cotangent 0 -> cotangent 0 examples 3:6 => 0 3:6",
        "ZERO0:  -> gradient 0 layer 0 examples 0:3",
        "ZERO0:  -> gradient 0 layer 0 examples 3:6",
        "B0: batch 0 examples 0:3, residual 0 layer 0 examples 0:3, cotangent 0 examples 0:3, "
        "gradient 0 layer 0 examples 0:3 -> gradient 0 layer 0 examples 0:3",
        "B0: batch 0 examples 3:6, residual 0 layer 0 examples 3:6, cotangent 0 examples 3:6, "
        "gradient 0 layer 0 examples 3:6 -> gradient 0 layer 0 examples 3:6",
    ]


def test_parts_are_cut_at_the_bounds_of_both_stages() -> None:
    found = lines(Plan.from_cuts([1, 2], devices=[(0, 1, 2), (3, 4)]))
    assert [line for line in found if line.startswith(("SLICE0", "CONCAT1"))] == [
        "SLICE0: tensor 0 examples 2:4 -> tensor 0 examples 2:3 => 1 0:3",
        "SLICE0: tensor 0 examples 2:4 -> tensor 0 examples 3:4 => 1 3:6",
        "CONCAT1: tensor 0 examples 0:2, tensor 0 examples 2:3 -> tensor 0 examples 0:3",
        "CONCAT1: tensor 0 examples 3:4, tensor 0 examples 4:6 -> tensor 0 examples 3:6",
    ]
    whole = [line for line in found if line.startswith("F0") and "=>" in line]
    assert [line.split("=>")[1].strip() for line in whole] == ["1 0:3", "1 3:6"], (
        "the middle one sends its two parts"
    )


def test_stages_as_wide_as_each_other_cut_and_join_nothing() -> None:
    found = lines(Plan.from_cuts([1, 2], devices=[(0, 1), (2, 3)]))
    assert not [line for line in found if line.startswith(("SLICE", "CONCAT"))]


def test_what_depends_on_no_example_is_whole_and_its_cotangents_are_added_up() -> None:
    none = Batching((Spread(Over.NONE), Spread(Over.ALONG, 0)))
    found = lines(Plan.from_cuts([1, 2], devices=[(0, 1, 2), (3, 4)]), none)
    made = [line for line in found if line.startswith("F0")]
    assert ["-> tensor 0," in line for line in made] == [True] * 3
    assert [line.partition("=>")[2].strip() for line in made] == ["1 0:3", "1 3:6", ""], (
        "one sends to each"
    )
    assert [line for line in found if line.startswith(("REDUCE", "ZERO0:  -> cotangent"))] == [
        "REDUCE0: cotangent 0 examples 0:3, cotangent 0 examples 3:6 -> cotangent 0 examples 0:2",
        "ZERO0:  -> cotangent 0 examples 2:4",
        "ZERO0:  -> cotangent 0 examples 4:6",
    ]


def test_sums_of_replicas_are_added_up_once_after_the_stages_last_backward() -> None:
    plan = Plan.from_cuts([1, 2], devices=[(0, 1), (2, 3)])
    lowered = lower_step(SIX, [layout(plan)] * 2, gpipe(2, 2), optimizer(2), ALONG)
    reduced = [i for i, r in enumerate(lowered.rows) if r.kind is Kind.REDUCE]
    told = [row(lowered.rows[i], lowered.buffers).replace(" version 0", "") for i in reduced]
    parts = (
        "gradient {0} examples 0:3 at {1}, gradient {0} examples 3:6 at {1} -> gradient {0} at {1}"
    )
    where = ("0 layer 2", 2), ("1 layer 1", 2), ("0 layer 0", 0)
    assert told == [f"REDUCE on {place}: {parts.format(name, place)}" for name, place in where]
    last = {
        s: max(i for i, r in enumerate(lowered.rows) if (r.kind, r.stage) == (Kind.B, s))
        for s in range(2)
    }
    assert [last[lowered.rows[i].stage] < i for i in reduced] == [True] * 3
    updates = [r.place for r in lowered.rows if r.kind is Kind.U]
    assert sorted(updates) == [0, 2], "where the gradients are added up"
    persistent = sorted((b.place, b.value.index) for b in lowered.buffers[: lowered.persistent])
    assert persistent == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)], (
        "a copy for each replica that reads one"
    )


def test_sums_are_added_up_beside_the_last_backwards_where_these_have_let_go_of_enough() -> None:
    plan = Plan.from_cuts([3], devices=[(0, 1)])

    def rows(left_bytes: int) -> str:
        lowered = lower_step(SIX, [layout(plan, left_bytes)], gpipe(1, 1), optimizer(1), ALONG)
        kinds = (Kind.B, Kind.REDUCE)
        told = [f"{r.kind}{r.layer} on {r.place}" for r in lowered.rows if r.kind in kinds]
        return ", ".join(told)

    late = (
        "B2 on 0, B2 on 1, B1 on 0, B1 on 1, B0 on 0, B0 on 1, REDUCE2 on {0}, REDUCE1 on {1}, "
        "REDUCE0 on {2}"
    )
    where = updating(SIX, plan, optimizer(1))
    assert rows(1) == late.format(where[2], where[1], where[0])
    early = (
        f"B1 on 1, REDUCE2 on {where[2]}, B0 on 0, B0 on 1, REDUCE1 on {where[1]}, REDUCE0 on "
        f"{where[0]}"
    )
    assert rows(100) == f"B2 on 0, B2 on 1, B1 on 0, {early}"


def test_each_replica_updates_its_share_and_sends_it_to_the_others() -> None:
    plan = Plan.from_cuts([2, 1], devices=[(0, 1), 2])
    cut = optimizer(1, optax.trace(0.9))
    assert updating(SIX, plan, cut) == {0: 1, 1: 0, 2: 0}, "the larger one first"
    lowered = lower_step(SIX, [layout(plan)], gpipe(2, 1), cut, ALONG)
    persistent = [
        str(b.spot) for b in lowered.buffers[: lowered.persistent] if b.value.kind == "optimizer"
    ]
    assert persistent == ["optimizer 0 layer 0 at 1", "optimizer 1 layer 1 at 0"]
    told = [row(r, lowered.buffers) for r in lowered.rows if r.stage == 0 and r.microbatch < 0]
    assert [line.partition(":")[0] for line in told if "REDUCE" in line] == [
        "REDUCE on 0",
        "REDUCE on 1",
    ]
    new = [line.partition(": ")[::2] for line in told if "version 1" in line]
    assert [(where, what.split("-> ")[1].split(",")[0]) for where, what in new] == [
        ("U on 1", "parameter 0 version 1 at 1"),
        ("SEND on 1", "parameter 0 version 1 at 0"),
        ("SEND on 1", "parameter 0 version 1 at 2"),
        ("U on 0", "parameter 1 version 1 at 0"),
        ("SEND on 0", "parameter 1 version 1 at 1"),
    ]


def test_bytes_are_those_of_slices() -> None:
    plan = Plan.from_cuts([1, 2], devices=[(0, 1, 2), (3, 4)])
    lowered = lower_step(
        SIX,
        [layout(plan)],
        ((Task(0, Kind.F, 0), Task(0, Kind.B, 0)), (Task(1, Kind.F, 0), Task(1, Kind.B, 0))),
        optimizer(1),
        ALONG,
    )
    sizes = {str(b.value): b.bytes for b in lowered.buffers if b.value.examples is not None}
    assert sizes["tensor 0 micro-batch 0 examples 2:3"] == 48 // 6
    assert sizes["tensor 0 micro-batch 0 examples 0:2"] == 48 // 6 * 2
    assert sizes["batch 0 micro-batch 0 examples 4:6"] == 24 // 6 * 2
    assert sizes["residual 0 layer 1 micro-batch 0 examples 3:6"] == Examples(3, 6).size
    assert sizes["gradient 0 layer 0 version 0 examples 0:2"] == 8
