"""Each format with each schedule and workload: `python -m experiments.export.table`, a table on
stdout.
"""

from collections import Counter

from jvpipe import models, plan_for
from jvpipe.exports.format import losses, outline_for
from jvpipe.exports.formats import FORMATS
from jvpipe.ir.plan import Plan
from jvpipe.schedules import SCHEDULES
from jvpipe.session.forecast import Forecast

STAGES, MICROBATCHES = 2, 4
WORDS = {
    "the model is not an embedding": "no stack",
    "blocks of the model are not alike": "unlike",
    "blocks are too few": "few blocks",
    "nothing near": "chunks",
    "be updates before": "updates",
    "be cuts": "cuts",
    "be devices": "devices",
    "be the order": "order",
    "be fates": "fates",
    "be which backwards": "halves",
    "in another order elsewhere": "rounds",
}
"""What is refused: the first thing that a message names, in a word."""


def plan_of(name: str, schedule: str) -> Plan | str:
    """Our plan, or why there is none."""
    work = models.load(name, "mini")
    try:
        found = plan_for(
            **work.to_plan(),
            stages=STAGES,
            hardware="h100",
            microbatches=MICROBATCHES,
            schedule=schedule,
        )
    except ValueError as refused:
        return str(refused)
    assert isinstance(found, Forecast)
    return found.plan


def outcome(plan: Plan, name: str) -> str:
    """What became of an export: `=` if it reads back equal, or what is lost, or why there is
    nothing near.
    """
    format, outline = FORMATS[name], outline_for(plan)
    try:
        text = plan.export(name)
    except ValueError as refused:
        return next(word for begins, word in WORDS.items() if begins in str(refused))
    back = format.load(text, outline)
    assert not list(losses(plan, back, format.has_cuts)), (name, plan)
    return "="


def main() -> None:
    """Prints the table, a line for each workload and format, and what became of all."""
    print("| workload | format |", " | ".join(SCHEDULES), "|")
    print("|---|---|" + "---|" * len(SCHEDULES))
    every = Counter[str]()
    for workload in models.NAMES:
        plans = {schedule: plan_of(workload, schedule) for schedule in SCHEDULES}
        for name in FORMATS:
            cells = [
                "no plan" if isinstance(plan, str) else outcome(plan, name)
                for plan in plans.values()
            ]
            every.update(cells)
            print(f"| {workload} | {name} | {' | '.join(cells)} |", flush=True)
    print("\n" + "\n".join(f"- {count} {cell}" for cell, count in every.most_common()))


if __name__ == "__main__":
    main()
