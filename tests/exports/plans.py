"""Plans of workloads and of small stacks, the outlines that they are for, and what a file must say
of a plan.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

from jvpipe import Forecast, models, plan_for
from jvpipe.exports.format import outline_for
from jvpipe.ir.outline import LayerOutline, Outline
from jvpipe.ir.plan import Fate, Plan
from jvpipe.ir.task import Task
from jvpipe.schedules import find_schedule
from jvpipe.schedules.interleaved import Interleaved
from tests.exports.readers import Said, whole


def outline(blocks: int = 6, microbatches: int = 4) -> Outline:
    """An embedding, blocks of two layers, a head."""
    layers = [LayerOutline("tokens", None, ("tokens/gather",), (), 40)]
    for k in range(blocks):
        name = f"blocks/{k}"
        first = LayerOutline(f"{name}@1", ("blocks", k), (f"{name}/qk",), (f"{name}:mid",), 100)
        layers += [first, LayerOutline(f"{name}@2", ("blocks", k), (f"{name}/up",), (), 200)]
    return Outline((*layers, LayerOutline("head", None, ("head/out",), (), 40)), microbatches)


def again(k: int) -> dict[str, Fate]:
    """All of a block computed again."""
    return dict.fromkeys((f"blocks/{k}/qk", f"blocks/{k}/up", f"blocks/{k}:mid"), Fate.RECOMPUTE)


def plan(cuts: list[int], schedule: str = "1f1b", blocks: int = 6) -> Plan:
    """A plan of such a stack."""
    rule = find_schedule(schedule)
    devices = len(cuts) // rule.chunks
    where = [rule.device_of(s, devices) for s in range(len(cuts))]
    return Plan.from_cuts(cuts, where, schedule=schedule, outline=outline(blocks))


def sized(schedule: str, devices: int, microbatches: int) -> Plan:
    """A plan of a schedule on so many devices."""
    stages = find_schedule(schedule).stages_on(devices)
    given = plan([1] * (stages - 1) + [15 - stages], schedule)
    return replace(given, outline=outline(6, microbatches=microbatches))


def for_six(given: Plan) -> Plan:
    """The plan, for six micro-batches."""
    return replace(given, outline=outline(6, microbatches=6))


CASES: dict[str, tuple[Plan, Sequence[str]]] = {
    "even-1f1b": (plan([5, 4, 5]), ("megatron", "torchtitan", "torch-csv", "jaxpp")),
    "uneven-gpipe": (plan([3, 6, 5], "gpipe"), ("torchtitan", "torch-csv", "jaxpp")),
    "even-gpipe": (plan([5, 4, 5], "gpipe"), ("maxtext",)),
    "interleaved": (plan([3, 4, 2, 5], "interleaved"), ("megatron", "torchtitan", "torch-csv")),
    "three-chunks": (
        Plan.from_cuts(
            [3, 2, 2, 2, 2, 3], [0, 1, 0, 1, 0, 1], schedule="interleaved-3", outline=outline()
        ),
        ("megatron", "torchtitan", "torch-csv", "jaxpp"),
    ),
    "inside-zb-h1": (plan([4, 5, 5], "zb-h1"), ("torch-csv", "jaxpp")),
    "vee": (plan([3, 2, 2, 2, 2, 3], "zb-v"), ("torch-csv", "jaxpp")),
    "other-devices": (
        Plan.from_cuts([5, 4, 5], [2, 0, 1], schedule="1f1b", outline=outline()),
        ("torch-csv", "jaxpp"),
    ),
    "one-stage": (plan([14]), ("megatron", "torchtitan", "torch-csv")),
}
"""Plans of six blocks, and the formats that can say them."""


def order_of(given: Plan, microbatches: int) -> list[list[tuple[int, str, int]]]:
    """The order of a plan, device by device."""
    name = given.schedule or ""
    chunks = len(given.stages) // given.device_count
    rule = Interleaved(chunks=chunks) if name == f"interleaved-{chunks}" else find_schedule(name)
    lists = [[Task.parse(word) for word in line.split()] for line in given.tasks] or rule.tasks(
        given.device_count, microbatches
    )
    rows = {given.stages[row[0].stage].devices[0]: row for row in lists}
    return [[(t.stage, str(t.kind), t.microbatch) for t in rows[d]] for d in sorted(rows)]


def blocks_of(given: Plan, there: Outline) -> list[list[int]]:
    """The blocks of each stage, whose cuts must be between them; what has no number goes with what
    is beside it.
    """
    number = [layer.block[1] if layer.block else None for layer in there.layers]
    bounds = pairwise(accumulate(given.cuts, initial=0))
    stages = [sorted({k for k in number[a:b] if k is not None}) for a, b in bounds]
    assert sum(map(len, stages)) == len({k for k in number if k is not None}), "a block is cut"
    return stages


def check(given: Plan, said: Said) -> None:
    """Asserts that a file says a plan, in all that it is about."""
    there = outline_for(given)
    assert said.ranks == [stage.devices[0] for stage in given.stages]
    assert said.order is not None
    assert list(whole(said.order)) == list(whole(order_of(given, there.microbatches)))
    if said.blocks is not None:
        assert said.blocks == blocks_of(given, there)
    if said.marks is not None:
        names = [layer.name for layer in there.layers]
        assert said.marks == [names[end - 1] for end in accumulate(given.cuts)]
    dropped = {name for stage in given.stages for name, fate in stage.fates.items()}
    assert all(fate == Fate.RECOMPUTE for stage in given.stages for fate in stage.fates.values())
    told = {
        name
        for layer in there.layers
        if layer.block and layer.block[1] in (said.again or ())
        for name in (*layer.values, *layer.inner)
    }
    assert told == dropped


@cache
def planned(workload: str, schedule: str) -> Plan:
    """Our plan of a workload at its mini size on two devices."""
    work = models.load(workload, "mini")
    found = plan_for(**work.to_plan(), stages=2, hardware="h100", microbatches=4, schedule=schedule)
    assert isinstance(found, Forecast)
    return found.plan
