"""The page of options, which their definitions say: `python -m tests.docs.options_page` writes
docs/options.md.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from jvpipe.cli.command_options import TrainOptions
from jvpipe.cli.plan_command import PlanOptions
from jvpipe.session.options import PipelineOptions
from jvpipe.util.option import PIPELINE, PLAN_FOR, Group, PipelineOption, options_of

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
HOLDERS = {"train": TrainOptions, "plan": PlanOptions}
CALLS = {"Pipeline": PIPELINE, "plan_for": PLAN_FOR}
RESUMED = {
    "open": "may change",
    "fixed": "must stay the same",
    "plans": "a new value makes a new plan",
    "start": "holds for one start",
    "processes": "holds for one start",
    "own": "holds for one process",
}
HEAD = """# Options

Every option of `jvpipe.Pipeline`, `jvpipe.plan_for` and both commands, as `jvpipe/session/options.py` and
`jvpipe/cli/command_options.py` define them. Python writes their names without hyphens. Where a command takes text,
Python also takes sequences, plans and schedules. Files of `--config` may use either form of a name. The last column
says what happens if a run that is resumed (`--resume`) gets another value than before. This page is written by
`python -m tests.docs.options_page`.
"""


def takers(each: PipelineOption) -> list[str]:
    """Who takes an option, in the words of the page."""
    commands = [name for name, holder in HOLDERS.items() if each in options_of(holder).values()]
    whole = each in options_of(PipelineOptions).values()
    # `plan_for` takes several planners, so it checks them without the option's definition.
    all_takers = each.takers | PLAN_FOR if each.name == "planner" else each.takers
    calls = [name for name, call in CALLS.items() if whole and call in all_takers]
    return [*calls, *commands]


def rows(group: str) -> Iterator[str]:
    """The lines of a group's table."""
    every = [
        each
        for holder in (PipelineOptions, TrainOptions, PlanOptions)
        for each in options_of(holder).values()
    ]
    for each in dict.fromkeys(every):
        if each.group != group:
            continue
        who = takers(each)
        name = each.flag if {"train", "plan"} & {*who} else each.name
        default = "" if each.default in (None, (), False) else f"`{each.default}`"
        resumed = RESUMED[each.resumed] if "train" in who else ""
        help = each.help.replace("|", "\\|")
        yield f"| `{name}` | {help} | {each.unit} | {default} | {', '.join(who)} | {resumed} |"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for group in get_args(Group):
        title = f"## {group.capitalize()}"
        head = (
            "| option | what it says | of | default | taken by | resumed |",
            "|---|---|---|---|---|---|",
        )
        parts.append("\n".join([title, "", *head, *rows(group), ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
