"""A format of another system: what of a plan it speaks of, and the one function that refuses what it cannot say."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import TaskLists
from jvpipe.schedules import find_schedule
from jvpipe.schedules.auto import lines_of
from jvpipe.schedules.interleaved import Interleaved
from jvpipe.schedules.planned import lists_of
from jvpipe.schedules.schedule import Schedule
from jvpipe.schedules.vee import VSchedule

VERSION = 1
"""Of what is written: a file of another version is refused."""


class Part(StrEnum):
    """The parts of a plan."""

    CUTS = "cuts"
    PLACES = "places"
    ORDER = "order"
    FATES = "fates"


@dataclass(frozen=True, slots=True)
class Format:
    """A format: how a plan is written in it, as near as it can be, and read.

    `silent` are the parts that files of it are not about: they are told by another file, and nobody takes them to be
    in this one. `comment` begins a line that readers pass over; without one there can be no such line.
    """

    name: str
    write: Callable[[Plan, Outline], str]
    read: Callable[[str, Outline], Plan]
    silent: frozenset[Part] = frozenset()
    comment: str = "# "

    def export(self, plan: Plan, lossy: bool = False) -> str:
        """Writes a plan.

        Raises:
            ValueError: the format cannot say all of it, and it is not to be `lossy`; or nothing near it.
        """
        outline = outline_for(plan)
        text = self.write(plan, outline)
        lost = list(losses(plan, self.read(text, outline), self.silent))
        if lost and not lossy:
            raise ValueError(
                f"{self.name} cannot say all of this plan; lost would be {'; '.join(lost)}. "
                "lossy=True (--lossy) writes the nearest"
            )
        if not self.comment:
            return text
        head = [f"jvpipe {self.name} {VERSION}", *(f"nearest; lost: {each}" for each in lost)]
        return "".join(f"{self.comment}{line}\n" for line in head) + text

    def load(self, text: str, outline: Outline) -> Plan:
        """Reads a plan; ValueError in one line for what is none, or does not fit the model."""
        first = text.partition("\n")[0].removeprefix(self.comment).split() if self.comment else []
        if first[:1] == ["jvpipe"] and first[1:] != [self.name, str(VERSION)]:
            raise ValueError(
                f"this is '{' '.join(first)}', and 'jvpipe {self.name} {VERSION}' can be read: export again"
            )
        return self.read(text, outline)


def outline_for(plan: Plan) -> Outline:
    """What a plan knows of its model; ValueError if nothing."""
    if plan.outline is None:
        raise ValueError(
            "this plan does not know its model's layers: export pipe.plan, or the plan of jvpipe.plan_for"
        )
    return plan.outline


def lists_for(plan: Plan, microbatches: int) -> TaskLists:
    """The lists of a plan's step; those of 1F1B where it is for any schedule, or has updates within a step."""
    schedule = rule_named(plan.schedule or "1f1b")
    if not schedule.synchronous:
        plan, schedule = plan.with_schedule("1f1b"), find_schedule("1f1b")
    return lists_of(plan, schedule, microbatches)


def rule_named(name: str) -> Schedule:
    """The schedule of a name, also where that says how many chunks there are.

    >>> rule_named("interleaved-3").chunks, rule_named("v-min").name
    (3, 'v-min')
    """
    if match := re.fullmatch(r"interleaved-(\d{1,6})", name):
        return Interleaved(chunks=int(match[1]))
    return VSchedule(memory="least") if name == "v-min" else find_schedule(name)


def rules_with(names: Sequence[str], chunks: int) -> list[Schedule]:
    """The schedules of some names that run so many stages per device; "interleaved" is any number from two on."""
    families = {Interleaved().name: Interleaved(chunks=max(2, chunks))}
    rules = [families.get(name) or find_schedule(name) for name in names]
    return [rule for rule in rules if rule.chunks == chunks]


def by_device(plan: Plan, lists: TaskLists) -> TaskLists:
    """Lists in the order of their devices, where others look for them; plans have that of the first stages."""
    return tuple(sorted(lists, key=lambda tasks: plan.stages[tasks[0].stage].devices))


def ranks_of(lists: TaskLists) -> dict[int, int]:
    """The list of each stage; ValueError if a stage has none, or several."""
    rank: dict[int, int] = {}
    for r, tasks in enumerate(lists):
        for task in tasks:
            if rank.setdefault(task.stage, r) != r:
                raise ValueError(
                    f"stage {task.stage} is on rank {rank[task.stage]} and on rank {r}"
                )
    if missing := set(range(len(rank))) - set(rank):
        raise ValueError(f"there are stages {sorted(rank)}, and no stage {min(missing)}")
    return rank


def rule_of(plan: Plan, microbatches: int, names: tuple[str, ...]) -> str:
    """The rule, of some, whose lists a plan has; else the nearest: the first with as many chunks.

    Args:
        plan: whose lists are compared.
        microbatches: of a step.
        names: of the rules.
    """
    devices = plan.device_count
    chunks = max(1, len(plan.stages) // devices)
    fitting = [rule for rule in rules_with(names, chunks) if not rule.vee]
    if not fitting:
        raise ValueError(
            f"there is nothing near {chunks} stages per device: the orders are {', '.join(names)}"
        )
    lists = lists_for(plan, microbatches)
    same = (rule for rule in fitting if rule.tasks(devices, microbatches) == lists)
    return next(same, fitting[0]).name


def losses(plan: Plan, back: Plan, silent: frozenset[Part]) -> Iterator[str]:
    """Names what of a plan is another in the plan that its file is read back as.

    Args:
        plan: as it was.
        back: as it was read.
        silent: what the file is not about.
    """
    microbatches = outline_for(plan).microbatches
    if plan.replicated:
        yield f"devices of replicated stages: {list(plan.replicas)}"
        plan = plan.turn(0)
    if plan.keep_last:
        yield "that the last micro-batch keeps everything"
    if Part.CUTS not in silent and plan.cuts != back.cuts:
        yield f"cuts: {_cuts(plan)} layers per stage, the nearest is {_cuts(back)}"
    places, there = ([stage.devices for stage in each.stages] for each in (plan, back))
    if Part.PLACES not in silent and places != there:
        yield f"devices of the stages: {[d for (d,) in places]}"
    if not rule_named(plan.schedule or "1f1b").synchronous:
        yield f"updates before the step ends: schedule {plan.schedule}"
    elif Part.ORDER not in silent and lists_for(plan, microbatches) != _same(back, microbatches):
        yield f"the order of tasks of schedule {plan.schedule}, the nearest is {back.schedule}"
    if plan.unsplit != back.unsplit:
        yield f"which backwards of a split stage stay whole: those of layers {list(plan.unsplit)}"
    fates, told = ([dict(stage.fates) for stage in each.stages] for each in (plan, back))
    if Part.FATES not in silent and fates != told:
        count = sum(map(len, fates))
        how = sorted({str(fate) for each in fates for fate in each.values()})
        yield f"fates of {count} values ({', '.join(how) or 'all are kept'})"
    if count := sum(len(stage.state_fates) for stage in plan.stages):
        yield f"fates of the optimizer's state of {count} parameters"


def _same(back: Plan, microbatches: int) -> TaskLists | None:
    try:
        return lists_for(back, microbatches)
    except ValueError:
        return None


def _cuts(plan: Plan) -> str:
    return ":".join(map(str, plan.cuts))


def with_lists(plan: Plan, lists: TaskLists, names: tuple[str, ...]) -> Plan:
    """A plan under some lists: the rule that gives them, if one does, else as its own.

    Args:
        plan: whose stages are those of the lists.
        lists: of each device, in any order.
        names: of the rules.

    Raises:
        ValueError: a stage, a micro-batch or a task is missing, or there too often.
    """
    ranks_of(lists)
    there = {task.microbatch for tasks in lists for task in tasks}
    if missing := set(range(len(there))) - there:
        raise ValueError(f"there are tasks of micro-batch {max(there)}, and none of {min(missing)}")
    lists = tuple(sorted(lists, key=lambda tasks: min(task.stage for task in tasks)))
    for rule in rules_with(names, len(plan.stages) // len(lists)):
        if rule.tasks(len(lists), len(there)) == lists:
            return replace(plan, schedule=rule.name)
    own = replace(plan, schedule="auto", tasks=lines_of(lists))
    lists_for(own, len(there))  # refuses what is no step
    return own
