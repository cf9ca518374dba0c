"""Tables of plans: a row for each stage of a plan, or a row for each of several planners."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jvpipe.report.console import in_runs
from jvpipe.util.sizes import format_bytes


def stage_table(stages: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    """Makes a table with a row for each stage of a plan.

    Args:
        stages: the seconds and bytes of each stage, with the keys of `jvpipe plan --json`.
        names: the name of each stage's device; empty if all devices are equal.
    """
    # Columns about replicas are left out if each stage has one device.
    shared = any(stage["replicas"] > 1 for stage in stages)
    # The title of each column of seconds, and the stem of its key in a stage.
    seconds = {
        "F": "forward",
        "B": "backward",
        "again": "recompute",
        "swap": "swap",
        "comm": "comm",
    }
    if shared:
        seconds["reduce"] = "reduce"
    if any(stage["update_s"] for stage in stages):
        seconds["update"] = "update"
    table = Table(
        "stage", "layers", *(f"{name} ms" for name in seconds), "in flight", "peak", "host"
    )
    for s, stage in enumerate(stages):
        place, layers = str(s), stage["layers"]
        if shared:
            place += f", on {stage['replicas']}: {in_runs(stage['devices'])}"
        elif names:
            place += f", {names[s]}"
        table.add_row(
            Text(place),  # a name is printed as it is
            f"{layers[0]} to {layers[-1]} ({len(layers)})",
            *(f"{1e3 * stage[f'{name}_s']:.2f}" for name in seconds.values()),
            str(stage["in_flight"]),
            format_bytes(stage["peak_bytes"]),
            format_bytes(stage["host_bytes"]),
        )
    return table


def comparison(rows: Iterable[Sequence[str]]) -> Table:
    """Makes a table that compares plans, with a row for each planner."""
    table = Table(
        "planner", "layers per stage", "slowest stage ms", "step ms", "idle", "peak", "planned in s"
    )
    for row in rows:
        table.add_row(*row)
    return table


def printed(show: Callable[[Console], None]) -> str:
    """Returns what `show` prints, as text without colors."""
    # Without `force_jupyter`, rich would show the text in a notebook instead of returning it.
    console = Console(width=160, color_system=None, force_jupyter=False)
    with console.capture() as captured:
        show(console)
    return captured.get()
