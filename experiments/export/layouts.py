"""Default layouts of others beside our plans: `python -m experiments.export.layouts`, a table on
stdout.
"""

from typing import Any

from jvpipe import models, plan_for
from jvpipe.exports.beside import judged
from jvpipe.exports.stack import Layout, stack_of, stacked_plan
from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import Plan
from jvpipe.session.forecast import Forecast

STAGES, MICROBATCHES, BATCH_SIZE = 4, 8, 8
WORKLOADS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama 8b": ("llama", "8b", {}),
    "GPT-2 1.5b": ("gpt2", "770m", {"blocks": 48, "width": 1600, "heads": 25}),
    "T5 780m": ("t5", "780m", {}),
}


def megatron(blocks: int) -> Layout:
    """Uniform: as many blocks on each rank."""
    return Layout((blocks // STAGES,) * STAGES, 0, "1f1b", STAGES)


def torchtitan(blocks: int) -> Layout:
    """The embedding and the head count as a layer each, and earlier stages get what is left
    over.
    """
    share, more = divmod(blocks + 2, STAGES)
    counts = [share + (s < more) for s in range(STAGES)]
    counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
    return Layout(tuple(counts), 0, "1f1b", STAGES)


def maxtext(blocks: int) -> Layout:
    """Equal stages, all forwards first, everything computed again."""
    return Layout((blocks // STAGES,) * STAGES, blocks // STAGES, "gpipe", STAGES)


def forecast_of(name: str, size: str, fields: dict[str, Any], schedule: str) -> Forecast:
    """Our plan of a workload."""
    work = models.load(name, size, **fields)
    found = plan_for(
        **work.to_plan(BATCH_SIZE),
        stages=STAGES,
        hardware="h100",
        microbatches=MICROBATCHES,
        schedule=schedule,
    )
    assert isinstance(found, Forecast)
    return found


def their_plan(layout: Any, outline: Outline) -> Plan:
    """The plan of a default layout."""
    return stacked_plan(layout(stack_of(outline, strict=False).blocks), outline)


def main() -> None:
    """Prints the table."""
    print("| workload | layout | theirs: s | GiB | jvpipe, 1f1b: s | GiB | gain: s | GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for title, workload in WORKLOADS.items():
        forecast = forecast_of(*workload, "1f1b")
        outline = forecast.problem.costs.outline
        assert outline is not None
        ours = judged(forecast.problem, forecast.plan)
        for layout in (megatron, torchtitan, maxtext):
            theirs = judged(forecast.problem, their_plan(layout, outline))
            sizes = [each.peak_bytes / 2**30 for each in (theirs, ours)]
            gain = f"{theirs.step_s - ours.step_s:.3f} | {sizes[0] - sizes[1]:.2f}"
            print(
                f"| {title} | {layout.__name__} | {theirs.step_s:.3f} | {sizes[0]:.2f} | "
                f"{ours.step_s:.3f} | {sizes[1]:.2f} | {gain} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
