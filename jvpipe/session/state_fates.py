"""Where the optimizer's state lies between updates, where the planner decides it: on the host, as far as it has to."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jvpipe.cost.hardware import Link
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Fate, Plan
from jvpipe.programs.optimizer import OptimizerCut

ALL_AWAY = {"*": Fate.SWAP.value}


def state_bytes(graph: LayerGraph, optimizer: OptimizerCut) -> dict[str, int]:
    """The bytes of the optimizer's state of each parameter that has some, by the parameter's path.

    Args:
        graph: the model's layers.
        optimizer: cut for these layers.
    """
    sizes: dict[str, int] = {}
    for leaf in optimizer.state:
        if leaf.parameter is not None and leaf.owner is not None:
            name = graph.parameters[leaf.parameter].array.name
            sizes[name] = sizes.get(name, 0) + leaf.array.bytes
    return sizes


def away_s(plan: Plan, sizes: Mapping[str, int], host: Link) -> float:
    """The seconds that the state of the fullest device is on its way to the host or back, once, both ways at a time.

    Args:
        plan: whose state fates count.
        sizes: of each parameter's state.
        host: the link of each device to its host.
    """
    held: dict[int, int] = {}
    for stage in plan.stages:
        away = sum(sizes.get(name, 0) for name, fate in stage.state_fates.items() if fate == "swap")
        for device in stage.devices:
            held[device] = held.get(device, 0) + away
    return max(map(host.seconds, held.values()))


def brought_back(plan: Plan, sizes: Mapping[str, int], room: Mapping[int, int]) -> Plan:
    """Keeps on the devices what state they have room for, the largest first.

    Args:
        plan: some of whose state is away.
        sizes: of each parameter's state.
        room: the bytes that each device has left.

    >>> from jvpipe.ir.plan import Stage
    >>> away = dict.fromkeys("abc", Fate.SWAP)
    >>> plan = brought_back(Plan((Stage((0,), (0,), state_fates=away),)), {"a": 4, "b": 9, "c": 6}, {0: 11})
    >>> sorted(plan.stages[0].state_fates)
    ['a', 'c']
    """
    left, stages = dict(room), []
    for stage in plan.stages:
        fates = dict(stage.state_fates)
        for name in sorted(fates, key=lambda name: (-sizes.get(name, 0), name)):
            size = sizes.get(name, 0)
            if all(size <= left[device] for device in stage.devices):
                del fates[name]
                left |= {device: left[device] - size for device in stage.devices}
        stages.append(replace(stage, state_fates=fates))
    return replace(plan, stages=tuple(stages))


def room_left(plan: Plan, held: Sequence[int], limits: Sequence[int]) -> dict[int, int]:
    """The bytes that each device of a plan has left.

    Args:
        plan: whose devices they are.
        held: what the fullest device of each stage holds.
        limits: of each device.
    """
    room: dict[int, int] = {}
    for stage, size in zip(plan.stages, held, strict=True):
        for device in stage.devices:
            room[device] = min(room.get(device, limits[device]), limits[device] - size)
    return room
