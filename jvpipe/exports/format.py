"""Defines what a format of another system is, and checks that an export loses nothing of a plan.

Most formats cannot express every plan of jvpipe. An export therefore writes the plan, reads the
text back, and compares the result with the plan (`losses`). Each difference is a loss, which the
error message names. So a format needs no list of the features that it cannot express: it writes the
nearest plan that it can express, and the comparison finds the differences.

A rule is a schedule that a format knows by name. The chunks of a device are its stages, if it has
several.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import Fate, Plan
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules import find_schedule
from jvpipe.schedules.auto import lines_of
from jvpipe.schedules.interleaved import Interleaved
from jvpipe.schedules.planned import lists_of
from jvpipe.schedules.schedule import Schedule
from jvpipe.schedules.vee import VSchedule
from jvpipe.util.brief import brief

VERSION = 1
"""The version of the files that this folder writes; files of other versions are refused.

Raise the version whenever the meaning of a file changes.
"""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of another system, with the functions that write and read it.

    Attributes:
        name: the name that users give, such as "megatron".
        write: writes a plan or, if the format cannot express it, the nearest plan that it can.
        read: reads a text as a plan for the model that the outline describes.
        has_cuts: whether files say how many layers each stage has; if not, that is not a loss.
        comment: the text that begins a comment line; empty if the format has no comments.
    """

    name: str
    write: Callable[[Plan, Outline], str]
    read: Callable[[str, Outline], Plan]
    has_cuts: bool = True
    comment: str = "# "

    def export(self, plan: Plan, lossy: bool = False) -> str:
        """Writes a plan as a text in this format.

        Args:
            plan: the plan, with the outline of its model.
            lossy: whether to write the nearest plan if the format cannot express all of the plan.

        Raises:
            ValueError: the format cannot express all of the plan and `lossy` is false, or it cannot
                even express a similar plan.
        """
        outline = outline_for(plan)
        text = self.write(plan, outline)
        lost = list(losses(plan, self.read(text, outline), self.has_cuts))
        if lost and not lossy:
            raise ValueError(
                f"{self.name} cannot say all of this plan; lost would be {'; '.join(lost)}. "
                "lossy=True (--lossy) writes the nearest"
            )
        if not self.comment:
            return text
        # The first line has the version for `load`. The other lines name the losses.
        head = [
            f"jvpipe {self.name} {VERSION}",
            *(f"nearest; lost: {loss}" for loss in lost),
        ]
        return "".join(f"{self.comment}{line}\n" for line in head) + text

    def load(self, text: str, outline: Outline) -> Plan:
        """Reads a plan from a text in this format.

        Args:
            text: the text, which jvpipe or another program has written.
            outline: the outline of the model that the plan is for.

        Raises:
            ValueError: the text has another format or version, or does not fit the model. The
                message is one line.
        """
        first_line = text.partition("\n")[0]
        words = first_line.removeprefix(self.comment).split() if self.comment else []
        # Only jvpipe writes a first line with a version. Files of other programs have no version.
        is_ours = words[:1] == ["jvpipe"]
        if is_ours and words[1:] != [self.name, str(VERSION)]:
            raise ValueError(
                f"this is '{' '.join(words)}', and 'jvpipe {self.name} {VERSION}' can be read: "
                "export again"
            )
        return self.read(text, outline)


def outline_for(plan: Plan) -> Outline:
    """Returns the outline of a plan's model; raises ValueError if the plan has none."""
    if plan.outline is None:
        raise ValueError(
            "this plan does not know its model's layers: export pipe.plan, or the plan of "
            "jvpipe.plan_for"
        )
    return plan.outline


def lists_for(plan: Plan, microbatches: int) -> TaskLists:
    """Returns the task lists of one step, in the form that exports of a plan use.

    Other systems update once per step. Asynchronous schedules update within a step, so their plans
    are exported as 1F1B, and `losses` reports this. A plan without a schedule is exported as 1F1B,
    too.
    """
    schedule = rule_named(plan.schedule or "1f1b")
    # Asynchronous schedules need several versions of weights, which these systems do not keep.
    if not schedule.synchronous:
        plan, schedule = plan.with_schedule("1f1b"), find_schedule("1f1b")
    return lists_of(plan, schedule, microbatches)


def rule_named(name: str) -> Schedule:
    """Finds a schedule by name; `interleaved-N` is the interleaved schedule with N chunks.

    >>> rule_named("interleaved-3").chunks, rule_named("v-min").name
    (3, 'v-min')
    """
    if match := re.fullmatch(r"interleaved-(\d{1,6})", name):
        return Interleaved(chunks=int(match[1]))
    return VSchedule(memory="least") if name == "v-min" else find_schedule(name)


def rules_with(names: Sequence[str], chunks: int) -> list[Schedule]:
    """Returns the schedules among `names` that run `chunks` stages per device."""
    # The name "interleaved" stands for one schedule per number of chunks, from two chunks on.
    families = {Interleaved().name: Interleaved(chunks=max(2, chunks))}
    rules = [families.get(name) or find_schedule(name) for name in names]
    return [rule for rule in rules if rule.chunks == chunks]


def lists_by_device(plan: Plan, microbatches: int) -> TaskLists:
    """Returns the lists of `lists_for`, sorted by device, as other systems expect."""

    def devices_of(tasks: Sequence[Task]) -> tuple[int, ...]:
        return plan.stages[tasks[0].stage].devices

    return tuple(sorted(lists_for(plan, microbatches), key=devices_of))


def ranks_of(lists: TaskLists) -> dict[int, int]:
    """Returns, for each stage, its rank: the number of the task list that runs the stage.

    Raises:
        ValueError: a stage is in several lists, or the stage numbers have gaps.
    """
    rank: dict[int, int] = {}
    for r, tasks in enumerate(lists):
        for task in tasks:
            # All tasks of a stage must be in one list, because one device holds its parameters.
            if rank.setdefault(task.stage, r) != r:
                raise ValueError(
                    f"stage {task.stage} is on rank {rank[task.stage]} and on rank {r}"
                )
    if missing := set(range(len(rank))) - set(rank):
        raise ValueError(f"there are stages {sorted(rank)}, and no stage {min(missing)}")
    return rank


def rule_of(
    plan: Plan,
    lists: TaskLists,
    names: tuple[str, ...],
) -> str:
    """Returns the name of the schedule that makes a plan's task lists, or of the nearest schedule.

    The nearest schedule is the first in `names` with the plan's number of chunks, which is the
    number of stages per task list.

    Args:
        plan: the plan.
        lists: its task lists, as `lists_for` returns them.
        names: the names of the schedules that the format knows.

    Raises:
        ValueError: no schedule in `names` has the plan's number of chunks.
    """
    # Lists are counted instead of devices, because replicas share a list.
    chunks = max(1, len(plan.stages) // len(lists))
    microbatches = outline_for(plan).microbatches
    # These formats assign stages to devices in a loop, 0 1 2 0 1 2. A vee schedule needs the order
    # 0 1 2 2 1 0.
    fitting = [rule for rule in rules_with(names, chunks) if not rule.vee]
    if not fitting:
        raise ValueError(
            f"there is nothing near {chunks} stages per device: the orders are {', '.join(names)}"
        )
    same = (rule for rule in fitting if rule.tasks(len(lists), microbatches) == lists)
    return next(same, fitting[0]).name


def losses(
    plan: Plan,
    back: Plan,
    has_cuts: bool,
) -> Iterator[str]:
    """Yields a description of each difference between a plan and the plan read from its export.

    Args:
        plan: the plan that was exported.
        back: the plan that was read from the export.
        has_cuts: whether the format says how many layers each stage has; else they may differ.
    """
    microbatches = outline_for(plan).microbatches
    if plan.replicated:
        # Replicas of a stage run the same tasks, so only the first replica is compared below.
        yield f"devices of replicated stages: {list(plan.replicas)}"
        plan = plan.turn(0)
    if plan.keep_last:
        yield "that the last micro-batch keeps everything"
    if has_cuts and plan.cuts != back.cuts:
        yield f"cuts: {_cuts(plan)} layers per stage, the nearest is {_cuts(back)}"
    places = [stage.devices for stage in plan.stages]
    if places != [stage.devices for stage in back.stages]:
        yield f"devices of the stages: {[d for (d,) in places]}"
    if not rule_named(plan.schedule or "1f1b").synchronous:
        yield f"updates before the step ends: schedule {plan.schedule}"
    elif lists_for(plan, microbatches) != _lists(back, microbatches):
        yield f"the order of tasks of schedule {plan.schedule}, the nearest is {back.schedule}"
    if plan.unsplit != back.unsplit:
        yield f"which backwards of a split stage stay whole: those of layers {list(plan.unsplit)}"
    fates = [not_kept(stage.fates) for stage in plan.stages]
    fates_back = [not_kept(stage.fates) for stage in back.stages]
    if fates != fates_back:
        count = sum(map(len, fates))
        kinds = sorted({str(fate) for of_stage in fates for fate in of_stage.values()})
        yield f"fates of {count} values ({', '.join(kinds) or 'all are kept'})"
    if count := sum(len(not_kept(stage.state_fates)) for stage in plan.stages):
        yield f"fates of the optimizer's state of {count} parameters"


def not_kept(fates: Mapping[str, Fate]) -> dict[str, Fate]:
    """Returns the fates other than KEEP. A value without a fate is also kept."""
    return {name: fate for name, fate in fates.items() if fate != Fate.KEEP}


def _lists(back: Plan, microbatches: int) -> TaskLists | None:
    """Returns the task lists of a plan; None if its schedule cannot run its stages."""
    try:
        return lists_for(back, microbatches)
    except ValueError:
        return None


def _cuts(plan: Plan) -> str:
    """Writes the numbers of layers of a plan's stages, such as 5:2:2."""
    return ":".join(map(str, plan.cuts))


def with_lists(
    plan: Plan,
    lists: TaskLists,
    names: tuple[str, ...],
) -> Plan:
    """Returns a copy of a plan whose schedule runs given task lists.

    If schedules in `names` make exactly these lists, the copy has the first of them. Otherwise, the
    copy contains the lists, and its schedule is "auto".

    Args:
        plan: a plan with the stages that the lists name.
        lists: the tasks of each device; the devices may be in any order.
        names: the names of the schedules that the format knows.

    Raises:
        ValueError: a stage, a micro-batch or a task is missing, or occurs more than once.
    """
    ranks_of(lists)
    microbatches = {task.microbatch for tasks in lists for task in tasks}
    count = len(microbatches)
    if missing := set(range(count)) - microbatches:
        raise ValueError(
            f"there are tasks of micro-batch {max(microbatches)}, and none of {min(missing)}"
        )
    lists = tuple(sorted(lists, key=lambda tasks: min(task.stage for task in tasks)))
    chunks = len(plan.stages) // len(lists)
    for rule in rules_with(names, chunks):
        if rule.tasks(len(lists), count) == lists:
            return replace(plan, schedule=rule.name)
    with_own_lists = replace(
        plan,
        schedule="auto",
        tasks=lines_of(lists),
    )
    lists_for(with_own_lists, count)  # raises ValueError unless the lists make a complete step
    return with_own_lists


def integer_field(
    fields: Mapping[str, str],
    name: str,
    default: int,
    *,
    signed: bool = True,
) -> int:
    """Returns a field as a whole number; raises ValueError if it is something else.

    Args:
        fields: the texts of fields, by name.
        name: the name of the field.
        default: the number if there is no such field.
        signed: whether the number may be negative.
    """
    value = fields.get(name, str(default))
    # Python refuses to convert texts of many digits.
    if not re.fullmatch(r"-?\d{1,9}" if signed else r"\d{1,9}", value):
        least = "" if signed else " of at least 0"
        raise ValueError(
            f"{name} must be a whole number{least}, such as {default}, not {brief(value)}"
        )
    return int(value)
