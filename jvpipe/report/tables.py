"""What planners answer, as tables."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from jvpipe.ir.sizes import format_bytes
from jvpipe.report.answers import AnsweredPlan, AnsweredStage
from jvpipe.report.console import in_runs


def stage_table(plan: AnsweredPlan) -> Table:
    """Makes a row for each stage of a plan."""
    shared = any(len(stage.devices) > 1 for stage in plan.stages)
    names = ["stage", "layers", "F ms", "B ms", "again ms", "swap ms", "comm ms"]
    names += ["reduce ms"] if shared else []
    table = Table(*names, "in flight", "peak", "host")
    for s, stage in enumerate(plan.stages):
        layers = stage.layers
        seconds = [stage.forward_s, stage.backward_s, stage.recompute_s, stage.swap_s, stage.comm_s]
        seconds += [stage.reduce_s] if shared else []
        table.add_row(
            _place(s, stage, shared),
            f"{layers[0]} to {layers[-1]} ({len(layers)})",
            *(f"{1e3 * x:.2f}" for x in seconds),
            str(stage.in_flight),
            format_bytes(stage.peak_bytes),
            format_bytes(stage.host_bytes),
        )
    return table


def _place(s: int, stage: AnsweredStage, shared: bool) -> str:
    """Names a stage, and its devices where some stage has several or they are unlike."""
    if shared:
        return f"{s}, on {len(stage.devices)}: {in_runs(stage.devices)}"
    return f"{s}, {stage.name}" if stage.name else str(s)


def comparison(answers: Sequence[AnsweredPlan]) -> Table:
    """Makes a row for each planner."""
    table = Table(
        "planner", "layers per stage", "slowest stage ms", "step ms", "idle", "peak", "planned in s"
    )
    for answer in answers:
        planning = f"{answer.planning_s:.2f}"
        if not answer.stages:
            table.add_row(answer.planner, "no plan fits", "", "", "", "", planning)
            continue
        over = "" if answer.feasible else " (over the limit)"
        table.add_row(
            answer.planner,
            " ".join(str(len(stage.layers)) for stage in answer.stages),
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
