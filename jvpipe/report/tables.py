"""What planners answer, as tables."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from jvpipe.report.answers import AnsweredPlan
from jvpipe.report.console import in_runs
from jvpipe.util.sizes import format_bytes


def stage_table(answer: AnsweredPlan) -> Table:
    """Makes a row for each stage of a plan."""
    assert answer.plan is not None
    stages = answer.plan.stages
    shared = any(len(stage.devices) > 1 for stage in stages)
    seconds = {
        "F": "forward",
        "B": "backward",
        "again": "recompute",
        "swap": "swap",
        "comm": "comm",
    }
    seconds |= {"reduce": "reduce"} if shared else {}
    seconds |= {"update": "update"} if any(costs["update_s"] for costs in answer.costs) else {}
    table = Table(
        "stage", "layers", *(f"{name} ms" for name in seconds), "in flight", "peak", "host"
    )
    for s, (stage, costs) in enumerate(zip(stages, answer.costs, strict=True)):
        place = str(s)
        if shared:
            place += f", on {len(stage.devices)}: {in_runs(stage.devices)}"
        elif answer.names:
            place += f", {answer.names[s]}"
        table.add_row(
            place,
            f"{stage.layers[0]} to {stage.layers[-1]} ({len(stage.layers)})",
            *(f"{1e3 * costs[f'{name}_s']:.2f}" for name in seconds.values()),
            str(costs["in_flight"]),
            format_bytes(int(costs["peak_bytes"])),
            format_bytes(int(costs["host_bytes"])),
        )
    return table


def comparison(answers: Sequence[AnsweredPlan]) -> Table:
    """Makes a row for each planner."""
    table = Table(
        "planner", "layers per stage", "slowest stage ms", "step ms", "idle", "peak", "planned in s"
    )
    for answer in answers:
        planning = f"{answer.planning_s:.2f}"
        if answer.plan is None:
            table.add_row(answer.planner, "no plan fits", "", "", "", "", planning)
            continue
        over = "" if answer.feasible else " (over the limit)"
        table.add_row(
            answer.planner,
            " ".join(map(str, answer.plan.cuts)),
            f"{1e3 * answer.bottleneck_s:.2f}",
            f"{1e3 * answer.step_s:.2f}",
            f"{answer.bubble_fraction:.1%}",
            format_bytes(answer.peak_bytes) + over,
            planning,
        )
    return table


def printed(show: Callable[[Console], None]) -> str:
    """Returns what `show` prints, as text without colours."""
    console = Console(
        width=160, color_system=None, force_jupyter=False
    )  # it would show a cell of its own
    with console.capture() as captured:
        show(console)
    return captured.get()
