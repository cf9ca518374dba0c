"""Converts plans of stacks to layouts and back; a stack is an embedding, equal blocks and a head.

Most other systems can cut only stacks, and only between blocks. A `Layout` has the parts of a plan
that these systems can express: how many blocks each stage has, and how many it recomputes. The
formats in this folder write a plan as the nearest layout (`layout_of`), and read a layout as a plan
(`stacked_plan`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from jvpipe.exports.format import lists_for, not_kept, rule_named, rule_of
from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import Fate, Plan
from jvpipe.schedules.schedule import Schedule

_NORM = 0.1
"""The share by which the bytes of two blocks may differ, since a block may have an extra norm."""


@dataclass(frozen=True, slots=True)
class BlockStack:
    """The blocks of a model with `layers` layers.

    Block k has the layers from `starts[k]` to `starts[k + 1] - 1`. In this example, two
    blocks, b and B, lie between an embedding e and a head h, and `starts` is (2, 5, 8):

    layer     0 1 2 3 4 5 6 7 8
    part      e e b b b B B B h
    """

    starts: tuple[int, ...]
    layers: int

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.starts) - 1


@dataclass(frozen=True, slots=True)
class Layout:
    """The part of a plan that systems for equal blocks can express.

    Attributes:
        counts: the number of blocks of each stage.
        again: how many blocks each stage recomputes, counted from its first block.
        schedule: the name of the schedule.
        devices: the number of devices; a device may have several stages.
    """

    counts: tuple[int, ...]
    again: int
    schedule: str
    devices: int


def stack_of(outline: Outline, strict: bool = True) -> BlockStack:
    """Finds the blocks of a model.

    Args:
        outline: the outline of the model's layers.
        strict: whether to refuse a model with several stacks, such as an encoder and a decoder, or
            with blocks of different sizes.

    Raises:
        ValueError: the model is not a stack; the message describes the difference.
    """
    block_of = [layer.block for layer in outline.layers]
    names = list(dict.fromkeys(filter(None, block_of)))
    families = list(dict.fromkeys(name for name, _ in names))
    if len(names) < 2 or (strict and len(families) > 1):
        has = ", ".join(families) or "no numbered modules"
        raise ValueError(
            f"the model is not an embedding, one stack of blocks and a head: it has {has}"
        )
    numbers = [number for _, number in names]
    if strict and numbers != list(range(len(names))):
        raise ValueError(f"the blocks of the model are not in order: {numbers}")
    # Layers before the first block are the embedding, layers after the last block the head.
    starts = map(block_of.index, names)
    end = 1 + max(i for i, block in enumerate(block_of) if block)
    stack = BlockStack((*starts, end), len(block_of))
    if strict:
        _check_alike(outline, stack)
    return stack


def _check_alike(outline: Outline, stack: BlockStack) -> None:
    """Checks that blocks have the same number of values and about the same number of bytes.

    Only the last layer of the last block may have another number of values, because a norm or a
    gather before the head is traced into this layer.

    Raises:
        ValueError: a block differs from the first one.
    """
    blocks = [outline.layers[i:j] for i, j in pairwise(stack.starts)]
    values = [[len(layer.values) for layer in block] for block in blocks]
    sizes = [sum(layer.parameter_bytes for layer in block) for block in blocks]
    # The last layer of the last block is not compared.
    if len(values[-1]) == len(values[0]):
        values[-1][-1] = values[0][-1]
    for k, size in enumerate(sizes):
        is_near = abs(size - sizes[0]) <= _NORM * sizes[0]
        if values[k] != values[0] or not is_near:
            raise ValueError(f"the blocks of the model are not alike: block {k} is not as block 0")


def layout_of(
    plan: Plan,
    outline: Outline,
    names: tuple[str, ...],
    equal: bool = False,
) -> Layout:
    """Returns the layout that is nearest to a plan.

    Each cut moves to the nearest start of a block. A block counts as recomputed if any of its
    values is not kept. A layout recomputes the same number of blocks in each stage. This is the
    largest number that the plan recomputes in any stage.

    Args:
        plan: a plan with any cuts and fates.
        outline: the outline of the plan's model.
        names: the names of the schedules that the format knows.
        equal: whether the format requires the same number of blocks in all stages.

    Raises:
        ValueError: the model is not a stack, has too few blocks for the stages, or cannot have
            equal stages although the format needs them.
    """
    stack = stack_of(outline)
    stages = len(plan.stages)
    lists = lists_for(plan, outline.microbatches)
    rule = rule_of(plan, lists, names)
    cuts = [0]
    for layer in accumulate(plan.cuts[:-1]):  # the first layer of the next stage
        distances = [abs(start - layer) for start in stack.starts]
        cuts.append(distances.index(min(distances)))
    counts = [b - a for a, b in pairwise([*cuts, stack.blocks])]
    if equal:
        share, rest = divmod(stack.blocks, stages)
        if rest:
            raise ValueError(f"{stack.blocks} blocks cannot be shared by {stages} equal stages")
        counts = [share] * stages
    if 0 in counts[1:-1]:
        raise ValueError(f"{stack.blocks} blocks are too few for {stages} stages")
    again = _most_recomputed(plan, outline, stack, counts)
    # A format with equal stages recomputes either all blocks or no blocks.
    if equal and again:
        again = max(counts)
    return Layout(tuple(counts), again, rule, len(lists))


def _most_recomputed(
    plan: Plan,
    outline: Outline,
    stack: BlockStack,
    counts: Sequence[int],
) -> int:
    """Returns the largest number of blocks that any stage recomputes.

    Args:
        plan: the plan, whose fates decide.
        outline: the outline of the plan's model.
        stack: the blocks of the model.
        counts: the number of blocks of each stage.
    """
    dropped: set[str] = set()
    for stage in plan.stages:
        dropped.update(not_kept(stage.fates))
    recomputed = []
    for first, end in pairwise(accumulate(counts, initial=0)):
        blocks = (_values(outline, stack, k) for k in range(first, end))
        recomputed.append(sum(not dropped.isdisjoint(names) for names in blocks))
    return max(recomputed)


def stacked_plan(layout: Layout, outline: Outline) -> Plan:
    """Returns the plan of a layout for a model, whose blocks may differ.

    Args:
        layout: the stages, in numbers of blocks.
        outline: the outline of the model.

    Raises:
        ValueError: the layout has more or fewer blocks than the model, or jvpipe would run its
            tasks in another order than the other system.
    """
    stack = stack_of(outline, strict=False)
    total = sum(layout.counts)
    if total != stack.blocks:
        raise ValueError(f"the layout covers {total} blocks, the model has {stack.blocks}")
    ends = tuple(accumulate(layout.counts, initial=0))
    # The embedding goes with the first stage, and the head with the last one.
    inner = [stack.starts[k] for k in ends[1:-1]]
    bounds = [0, *inner, stack.layers]
    counts = [end - first for first, end in pairwise(bounds)]
    rule = rule_named(layout.schedule)
    _check_rounds(rule, layout.devices, outline.microbatches)
    where = [rule.device_of(s, layout.devices) for s in range(len(counts))]
    plan = Plan.from_cuts(
        counts,
        where,
        schedule=rule.name,
        outline=outline,
    )
    with_fates = []
    for stage, (first, end) in zip(plan.stages, pairwise(ends), strict=True):
        # A layout recomputes the first blocks of each stage, as the other systems do.
        recomputed = range(first, min(end, first + layout.again))
        names = [name for block in recomputed for name in _values(outline, stack, block)]
        with_fates.append(replace(stage, fates=dict.fromkeys(names, Fate.RECOMPUTE)))
    return replace(plan, stages=tuple(with_fates))


def _check_rounds(
    rule: Schedule,
    devices: int,
    microbatches: int,
) -> None:
    """Checks that the micro-batches fill all rounds if a device has several stages.

    A full round has one micro-batch per device. If the last round is smaller, jvpipe and the other
    systems order its tasks differently.

    Raises:
        ValueError: the last round is smaller.
    """
    if rule.chunks > 1 and microbatches % devices:
        rounds = microbatches // devices + 1
        raise ValueError(
            f"{microbatches} micro-batches pass {rule.chunks} chunks on {devices} devices in "
            f"another order elsewhere: use --microbatches {rounds * devices}, a multiple of "
            f"{devices}"
        )


def _values(
    outline: Outline,
    stack: BlockStack,
    block: int,
) -> list[str]:
    """Returns the names of all values that a block can recompute."""
    first, end = stack.starts[block : block + 2]
    layers = outline.layers[first:end]
    return [name for layer in layers for name in (*layer.values, *layer.inner)]
