"""Counts bytes and seconds of optimizer state on the host; brings back what devices can hold."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Fate, Plan
from jvpipe.planners.model.problem import Problem
from jvpipe.programs.optimizer_pieces import OptimizerCut

ALL_AWAY = {"*": Fate.SWAP.value}
"""The fates of the optimizer's state if all of it lies on the host between updates."""


def state_bytes(graph: LayerGraph, optimizer: OptimizerCut) -> dict[str, int]:
    """Counts the bytes of optimizer state of each parameter that has any, by the parameter's path.

    Args:
        graph: the model's layers.
        optimizer: the optimizer, cut for these layers.
    """
    sizes = Counter[str]()
    for leaf in optimizer.state:
        if leaf.parameter is not None and leaf.owner is not None:
            name = graph.parameters[leaf.parameter].array.name
            sizes[name] += leaf.array.bytes
    return sizes


def away_s(plan: Plan, sizes: Mapping[str, int], problem: Problem) -> float:
    """Returns the seconds that a step spends on copies of optimizer state from the host and back.

    Devices copy at the same time, so the device with the most state on the host counts.
    Copies in the two directions are assumed to overlap fully, so only one direction counts.

    Args:
        plan: says which state lies on the host.
        sizes: the bytes of each parameter's state.
        problem: the problem to which the plan is an answer; it has the link to the host.
    """
    held_bytes = Counter[int]()
    for stage in plan.stages:
        swapped = (name for name, fate in stage.state_fates.items() if fate == "swap")
        away = sum(sizes.get(name, 0) for name in swapped)
        for device in stage.devices:
            held_bytes[device] += away
    # Each update copies the state.
    return problem.updates * max(map(problem.host.seconds, held_bytes.values()))


def brought_back(plan: Plan, sizes: Mapping[str, int], room: Mapping[int, int]) -> Plan:
    """Brings state back from the host to devices with room, each stage's largest state first.

    Args:
        plan: a plan with optimizer state on the host.
        sizes: the bytes of each parameter's state.
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
        # Equal sizes are sorted by name, so that every process brings back the same state.
        for name in sorted(fates, key=lambda name: (-sizes.get(name, 0), name)):
            size = sizes.get(name, 0)
            if all(size <= left[device] for device in stage.devices):
                del fates[name]
                left |= {device: left[device] - size for device in stage.devices}
        stages.append(replace(stage, state_fates=fates))
    return replace(plan, stages=tuple(stages))


def room_left(
    plan: Plan, held_bytes: Sequence[int], limits: Mapping[int, int] | Sequence[int]
) -> dict[int, int]:
    """Counts the bytes that each device of a plan has left under its limit.

    Args:
        plan: says which devices each stage has.
        held_bytes: for each stage, the bytes that its fullest device holds.
        limits: the limit of each device, by its number in the plan.
    """
    room: dict[int, int] = {}
    for stage, size in zip(plan.stages, held_bytes, strict=True):
        for device in stage.devices:
            # If a device has several stages, the one that leaves the least room counts.
            left = limits[device] - size
            room[device] = min(room.get(device, left), left)
    return room
