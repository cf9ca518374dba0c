"""Compares the rows that the processes have lowered, before any row runs.

A process that asks for an array waits forever if no process sends the array. The rows may differ,
for example because the processes have different library versions, so they are compared first.
"""

from collections.abc import Iterable

from jvpipe.ir.rows import Row
from jvpipe.runtime.engine.binding import Bound
from jvpipe.runtime.engine.compiled_plan import CompiledPlan


def agree_on_rows(
    compiled: CompiledPlan,
    name: str = "the rows that processes run",
    changes: Iterable[Bound] = (),
) -> None:
    """Makes sure that all processes have lowered a plan to the same rows (programs and copies).

    The rows of evaluations are not compared. A comparison needs all processes at the same time, but
    each process binds these rows again when it starts to run layers in groups, at a different time.

    Args:
        compiled: the plan.
        name: what the error message calls the compared rows.
        changes: the rows of the change to this plan, if there is one.

    Raises:
        Disagreement: some rows differ.
    """
    if compiled.hosts is None:
        return
    parts: list[tuple[str, str]] = []
    for i, bound in enumerate((*compiled.bounds, *changes)):
        text = "\n".join(map(_in_words, bound.whole))
        parts.append((f"rows {i}", text))
    compiled.hosts.agree(name, parts)


def _in_words(row: Row) -> str:
    """Returns a text of a row, its place and its buffers, which the processes compare."""
    return f"{row} {row.place} {row.reads} {row.writes} {row.frees}"
