"""The plan that a run of the command line follows: from a file, as it had it, or yet to be made."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jvpipe.cli import sealed
from jvpipe.ir.plan import Plan
from jvpipe.schedules import find_schedule
from jvpipe.schedules.planned import pipeline_length

DECIDES = (
    "stages",
    "replicas",
    "devices",
    "microbatches",
    "schedule",
    "planner",
    "memory_limit",
    "host_memory_limit",
    "checkpoint",
    "plan",
)
"""The options that a plan follows from: a run that is resumed with others is planned anew."""


def given_plan(options: Mapping[str, Any], before: Mapping[str, Any]) -> Plan | None:
    """The plan of --plan; None if there is none, or if it was given to a run before that is resumed.

    Args:
        options: of this run.
        before: those of the run that is resumed, else the defaults.

    Raises:
        ValueError: it is no plan, or --stages, --replicas or --schedule contradict it.
    """
    path = options["plan"]
    if path is None or path == before.get("plan"):
        return None
    plan = Plan.load(path)
    schedule = find_schedule(plan.schedule or options["schedule"])
    counts = [between.join(map(str, plan.replicas)) for between in ",:"]
    told = {
        "stages": [pipeline_length(plan, schedule)],
        "replicas": counts,
        "schedule": [plan.schedule],
    }
    for name, own in told.items():
        if options[name] not in (*own, before.get(name)):
            raise ValueError(
                f"--{name} {options[name]} contradicts --plan {path}: there it is {own[0]}"
            )
    return plan


def kept_plan(path: Path, options: Mapping[str, Any], before: Mapping[str, Any]) -> Plan | None:
    """Reads the plan that a resumed run left, if it is asked for nothing that the plan does not follow from.

    Args:
        path: of its plan.json.
        options: of this run.
        before: those of the run that is resumed.
    """
    if (
        options["remeasure"]
        or not path.exists()
        or any(options[name] != before.get(name) for name in DECIDES)
    ):
        return None
    sealed.read(path)  # whether it is what the run wrote
    plan = Plan.load(path)
    schedule = find_schedule(options["schedule"])
    same = plan.schedule == schedule.name and options["stages"] in (
        None,
        pipeline_length(plan, schedule),
    )
    return plan if same else None
