"""Plans of small stacks, and the outlines that they are for."""

from jvpipe.ir.outline import LayerOutline, Outline
from jvpipe.ir.plan import Fate, Plan
from jvpipe.schedules import find_schedule


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
