"""Plans of a stack, an embedding, blocks that are alike, a head: the only models that most systems cut."""

from dataclasses import dataclass, replace
from itertools import pairwise

from jvpipe.exports.format import rule_named, rule_of
from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import Fate, Plan
from jvpipe.schedules.schedule import Schedule

_NORM = 0.1
"""The share of a block that a norm may be."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Where blocks begin: block k is layers `starts[k]` to `starts[k + 1]`, the head comes after the last one."""

    starts: tuple[int, ...]
    layers: int

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self.starts) - 1


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan of a stack: blocks per stage, and of how many of each stage, the first ones, all is computed again."""

    counts: tuple[int, ...]
    again: int
    schedule: str
    devices: int


def stack_of(outline: Outline, strict: bool = True) -> Stack:
    """Finds the blocks of a model.

    Args:
        outline: of its layers.
        strict: several stacks, such as an encoder and a decoder, are not taken for one.

    Raises:
        ValueError: it is no stack, with what it is instead.
    """
    names = list(dict.fromkeys(layer.block for layer in outline.layers if layer.block))
    families = list(dict.fromkeys(name for name, _ in names))
    found = [layer.block for layer in outline.layers]
    starts = [found.index(name) for name in names]
    if len(names) < 2 or (strict and len(families) > 1):
        has = ", ".join(families) or "no numbered modules"
        raise ValueError(f"the model is no embedding, one stack of blocks and a head: it has {has}")
    if strict and (numbers := [number for _, number in names]) != list(range(len(names))):
        raise ValueError(f"the blocks of the model are not in order: {numbers}")
    end = 1 + max(i for i, block in enumerate(found) if block)
    stack = Stack((*starts, end), len(found))
    if strict:
        _check_alike(outline, stack)
    return stack


def _check_alike(outline: Outline, stack: Stack) -> None:
    """Raises ValueError unless all blocks have as many values, and about as many bytes.

    The last one may have more, a norm or a gather before the head: a trace has these in the layer that ends the block.
    """
    blocks = [outline.layers[i:j] for i, j in pairwise(stack.starts)]
    values, sizes = (
        [[len(layer.values) for layer in block] for block in blocks],
        [sum(layer.parameter_bytes for layer in block) for block in blocks],
    )
    for k in range(1, len(blocks)):
        ends = k == len(blocks) - 1 and len(values[k]) == len(values[0])
        alike = values[k] == values[0] or (ends and values[k][:-1] == values[0][:-1])
        if not alike or abs(sizes[k] - sizes[0]) > _NORM * sizes[0]:
            raise ValueError(f"the blocks of the model are not alike: block {k} is not as block 0")


def layout_of(plan: Plan, outline: Outline, names: tuple[str, ...], equal: bool = False) -> Layout:
    """The layout that is nearest to a plan.

    Args:
        plan: of any cuts and fates.
        outline: of its model.
        names: of the schedules that can be said.
        equal: whether all stages have the same number of blocks.

    Raises:
        ValueError: the model is no stack, or has fewer blocks than stages.
    """
    stack, stages = stack_of(outline), len(plan.stages)
    rule, at = rule_of(plan, outline.microbatches, names), list[int]()
    first = 0
    for stage in plan.stages[:-1]:
        first += len(stage.layers)
        at.append(min(range(len(stack.starts)), key=lambda k: abs(stack.starts[k] - first)))
    counts = [b - a for a, b in pairwise([0, *at, stack.blocks])]
    if equal:
        share, rest = divmod(stack.blocks, stages)
        if rest:
            raise ValueError(f"{stack.blocks} blocks cannot be shared by {stages} equal stages")
        counts = [share] * stages
    if 0 in counts[1:-1]:
        raise ValueError(f"{stack.blocks} blocks are too few for {stages} stages")
    dropped = {
        name for stage in plan.stages for name, fate in stage.fates.items() if fate != "keep"
    }
    again, k = 0, 0
    for count in counts:
        touched = [
            any(dropped & set(_values(outline, stack, block))) for block in range(k, k + count)
        ]
        again, k = max(again, sum(touched)), k + count
    return Layout(tuple(counts), max(counts) if equal and again else again, rule, plan.device_count)


def plan_of(layout: Layout, outline: Outline, strict: bool = True) -> Plan:
    """The plan of a layout.

    Args:
        layout: blocks per stage, and the rest.
        outline: of the model.
        strict: see `stack_of`.

    Raises:
        ValueError: the layout does not cover the blocks.
    """
    stack, stages = stack_of(outline, strict), len(layout.counts)
    if (total := sum(layout.counts)) != stack.blocks:
        raise ValueError(f"the layout covers {total} blocks, the model has {stack.blocks}")
    ends = [0]
    for count in layout.counts:
        ends.append(ends[-1] + count)
    bounds = [0, *(stack.starts[k] for k in ends[1:-1]), stack.layers]
    rule = rule_named(layout.schedule)
    _check_rounds(rule, layout.devices, outline.microbatches)
    where = [rule.device_of(s, layout.devices) for s in range(stages)]
    plan = Plan.from_cuts(
        [j - i for i, j in pairwise(bounds)], where, schedule=rule.name, outline=outline
    )
    told = []
    for stage, (a, b) in zip(plan.stages, pairwise(ends), strict=True):
        names = [x for k in range(a, min(b, a + layout.again)) for x in _values(outline, stack, k)]
        told.append(replace(stage, fates=dict.fromkeys(names, Fate.RECOMPUTE)))
    return replace(plan, stages=tuple(told))


def _check_rounds(rule: Schedule, devices: int, microbatches: int) -> None:
    """Raises ValueError where others make other rounds of micro-batches than jvpipe, which makes them even."""
    if rule.chunks > 1 and microbatches % devices:
        raise ValueError(
            f"{microbatches} micro-batches pass {rule.chunks} chunks on {devices} devices in another order "
            f"elsewhere: use --microbatches {-(-microbatches // devices) * devices}, a multiple of {devices}"
        )


def _values(outline: Outline, stack: Stack, block: int) -> list[str]:
    """All that a block may compute again from its input."""
    layers = outline.layers[stack.starts[block] : stack.starts[block + 1]]
    return [name for layer in layers for name in (*layer.values, *layer.inner)]
